"""Record a model that is trained with `accelerate`, in the loop that its documentation shows.

    python examples/accelerate_loop.py

`pg.record(model)` is the only line about recording. Gradients are accumulated over two batches, each epoch ends with an
evaluation, and everything is saved after the first. Trained live, trained recorded, and resumed from what was saved: every
loss and every weight must be the same, bit for bit.
"""

import os
import tempfile

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phonograph as pg

EPOCHS, BATCH, TRAINED = 3, 32, 1536
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network() -> nn.Module:
    """Reads a handwritten digit of 8×8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def train(model: nn.Module, folder: str, resume: bool = False) -> list[float]:
    """The mean loss of each epoch and of the evaluation after it; those after the first epoch, if that is in `folder`."""
    accelerator = Accelerator(cpu=DEVICE == "cpu", gradient_accumulation_steps=2)
    data = digits()
    seen = DataLoader(TensorDataset(*data[:TRAINED]), BATCH, shuffle=True)
    kept = DataLoader(TensorDataset(*data[TRAINED : TRAINED + 256]), BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, seen, kept = accelerator.prepare(model, optimizer, seen, kept)
    if resume:
        accelerator.load_state(folder)  # weights, the optimizer's state, the states of random generators

    losses = []
    for epoch in range(1 if resume else 0, EPOCHS):
        seen.set_epoch(epoch)
        trained, tested = [], []
        for x, y in seen:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            trained.append(loss.detach())
        model.eval()
        with torch.no_grad():
            for x, y in kept:
                tested.append(F.cross_entropy(model(x), y))
        model.train()
        if epoch == 0 and not resume:
            accelerator.save_state(folder)
        losses += [torch.stack(trained).mean().item(), torch.stack(tested).mean().item()]
    return losses


def main(folder: str) -> None:
    live = network()
    expected = train(live, f"{folder}/live")
    recorded = pg.record(network())
    losses = train(recorded, f"{folder}/recorded")
    print(f"last loss {losses[-2]:.4f}, of digits never seen {losses[-1]:.4f}")
    print(pg.explain(recorded).splitlines()[0])

    resumed = pg.record(network())
    later = train(resumed, f"{folder}/recorded", resume=True)
    assert losses == expected, "the losses differ"
    assert later == expected[2:], "the losses differ after resuming"
    for model in (recorded, resumed):
        assert all(map(torch.equal, live.parameters(), model.parameters())), "the weights differ"
    print("bitwise equal")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
