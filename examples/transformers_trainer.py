"""Record a language model that `transformers.Trainer` trains.

    python examples/transformers_trainer.py

A small GPT-2 learns to write like Python's standard library, byte by byte. `pg.record(model)` is the only line about
recording; the trainer is as it comes. Gradients are accumulated over two batches, there are evaluations in the middle, and
the state is saved. Trained live, trained recorded, and resumed from what was saved: every loss and every weight must be
the same, bit for bit.
"""

import json.decoder
import os
import tempfile
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several GPUs, the trainer would use them all: DataParallel

import torch
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import phonograph as pg

STEPS, BATCH, LENGTH = 24, 8, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# transformers looks into the batch to see whether the attention needs a mask, and a recording cannot look. An attention
# under a name of its own gets none: it is causal, which is all that rows of equal length need.
AttentionInterface.register("causal", sdpa_attention_forward)


def network() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_embd": 48, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": 256}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, attn_implementation="causal"))


def text() -> list[dict[str, torch.Tensor]]:
    """Rows of LENGTH bytes of a module's source."""
    rows = torch.tensor(list(Path(json.decoder.__file__).read_bytes())).split(LENGTH)[:-1]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model: GPT2LMHeadModel, folder: str, resume: bool = False) -> list[float]:
    """The losses of every step, and of the evaluations between them; `resume` from the middle, which is in `folder`."""
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=STEPS // 4, save_steps=STEPS // 2, logging_steps=1,
        learning_rate=3e-3, use_cpu=DEVICE == "cpu", disable_tqdm=True, report_to="none",
    )  # fmt: skip
    rows = text()
    trainer = Trainer(model, arguments, train_dataset=rows[:256], eval_dataset=rows[256:288])
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    return [log[name] for log in trainer.state.log_history for name in ("loss", "eval_loss") if name in log]


def main(folder: str) -> None:
    live = network()
    expected = train(live, f"{folder}/live")
    recorded = pg.record(network())
    losses = train(recorded, f"{folder}/recorded")
    print(pg.explain(recorded).splitlines()[0])

    resumed = pg.record(network())
    assert losses == expected, "the losses differ"
    assert train(resumed, f"{folder}/recorded", resume=True) == expected, "the losses differ after resuming"
    for model in (recorded, resumed):
        assert all(map(torch.equal, live.parameters(), model.parameters())), "the weights differ"
    print("bitwise equal")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
