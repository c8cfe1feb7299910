"""Record the network of a LightningModule, which `lightning.Trainer` trains.

    python examples/lightning_trainer.py

`pg.record(network)` is the only line about recording: the network, and not the LightningModule around it, which refers to
its trainer, and that to everything else. Gradients are accumulated over two batches, each epoch is validated in its middle
and at its end, and saved. Trained live, trained recorded, and resumed from what was saved: every loss and every weight
must be the same, bit for bit.
"""

import os
import tempfile

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phonograph as pg

EPOCHS, BATCH, TRAINED = 3, 32, 1536
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network() -> nn.Module:
    """Reads a handwritten digit of 8×8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


class Digits(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, batch: list[Tensor], index: int) -> None:
        torch.manual_seed(1000 * self.current_epoch + index)  # lightning does not save the state of random generators

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss)
        self.log("unseen", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(net: nn.Module, folder: str, resume: bool = False) -> list[float]:
    """The loss of every batch, in training and validation; those after the first epoch, if that is in `folder`."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    seen = DataLoader(TensorDataset(*data[:TRAINED]), BATCH)
    kept = DataLoader(TensorDataset(*data[TRAINED : TRAINED + 256]), BATCH)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=2, val_check_interval=0.5, gradient_clip_val=1.0,
        accelerator=DEVICE, devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)],
    )  # fmt: skip
    model = Digits(net)
    trainer.fit(model, seen, kept, ckpt_path=f"{folder}/epoch=0.ckpt" if resume else None)
    return torch.stack(model.losses).tolist()


def main(folder: str) -> None:
    live = network()
    expected = train(live, f"{folder}/live")
    recorded = pg.record(network())
    losses = train(recorded, f"{folder}/recorded")
    print(f"last loss {losses[-1]:.4f}")
    print(pg.explain(recorded).splitlines()[0])

    resumed = pg.record(network())
    later = train(resumed, f"{folder}/recorded", resume=True)
    assert losses == expected, "the losses differ"
    assert later == expected[len(expected) // EPOCHS :], "the losses differ after resuming"
    for net in (recorded, resumed):
        assert all(map(torch.equal, live.parameters(), net.parameters())), "the weights differ"
    print("bitwise equal")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
