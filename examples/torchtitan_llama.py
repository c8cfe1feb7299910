"""Record torchtitan's steps of training: its Llama 3 debug model on real text, under FSDP2, tensor parallel, or both.

    pip install torchtitan==0.3.0
    torchrun --nproc-per-node 2 examples/torchtitan_llama.py      # FSDP2
    torchrun --nproc-per-node 2 examples/torchtitan_llama.py 2    # tensor parallel over 2 ranks
    torchrun --nproc-per-node 4 examples/torchtitan_llama.py 2    # both

`Recorded` is torchtitan's `Trainer` with what it does to its batches in a method of its own, which is recorded: all
micro-batches, their backwards, clipping and the optimizer are one graph on each GPU, in place of torchtitan's own graph of a
forward and a backward. Trained by torchtitan's `Trainer` as it is, and by this: every loss, every norm of the gradients and
every weight must be the same, bit for bit, on each rank. Needs GPUs, as torchtitan does.
"""

import os
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.observability import structured_logger
from torchtitan.trainer import Trainer

import phonograph as pg

STEPS, BATCH, LENGTH = 20, 4, 512
Batch = tuple[dict[str, Tensor], Tensor]


class Bytes(BaseTokenizer):
    """UTF-8, so that no file has to be there."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Manual(BaseDataLoader):
    """Python's reference manual, as `help()` shows it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: Bytes, seq_len: int, local_batch_size: int, **_
    ) -> None:
        self.tokens = torch.tensor(tokenizer.encode("\n".join(pydoc_data.topics.topics.values())))
        self.ranks, self.rank, self.batch, self.length = dp_world_size, dp_rank, local_batch_size, seq_len

    def __iter__(self) -> Iterator[Batch]:
        shape = self.batch, self.length
        positions = torch.arange(self.length).expand(shape).contiguous()
        for n in range(self.rank, sys.maxsize, self.ranks):
            text = self.tokens[n * self.batch * self.length :][: self.batch * self.length + 1]
            yield {"input": text[:-1].reshape(shape), "positions": positions}, text[1:].reshape(shape)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Recorded(Trainer):
    """Has what a step does once its batches are there in one place, and records that."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        self.update = pg.record(self.update)

    def update(self, batches: list[tuple[Any, ...]], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, and the norm of the gradients."""
        self.optimizers.zero_grad()
        total = torch.zeros((), device=self.device)
        for inputs, labels, more in batches:
            total += self.fwd_bwd_fn(inputs, labels, tokens, more).detach()
        parameters = [p for part in self.model_parts for p in part.parameters()]
        norm = dist_utils.clip_grad_norm_(parameters, self.config.training.max_norm, foreach=True)
        self.optimizers.step()
        return total, norm

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        batches, count = [], torch.tensor(0)
        for _ in range(self.gradient_accumulation_steps):
            inputs, labels = next(data_iterator)
            count += (labels != IGNORE_INDEX).sum()
            inputs = {name: value.to(self.device) for name, value in inputs.items()}
            batches.append(self.post_dataloading_process(inputs, labels.to(self.device)))
        tokens = count.to(self.device)
        if self.parallel_dims.dp_enabled:
            tokens = dist_utils.dist_sum_tensor(tokens, self.parallel_dims.get_mesh("batch"))
        rates = self.lr_schedulers.get_metrics()
        loss, norm = self.update(batches, tokens)
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            mean, most = loss, loss * tokens / count
            if self.parallel_dims.dp_cp_enabled:
                mesh = self.parallel_dims.get_optional_mesh("loss")
                mean, most = dist_utils.dist_sum(loss, mesh), dist_utils.dist_max(most, mesh)
            self.metrics_processor.log(self.step, float(mean), float(most), norm.item(), extra_metrics=rates)


def config(tensor_parallel: int) -> Trainer.Config:
    chosen = llama3_debugmodel()
    for layer in chosen.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    chosen.loss = chosen.loss.loss_fn
    chosen.tokenizer, chosen.dataloader = Bytes.Config(), Manual.Config()
    chosen.checkpoint, chosen.validator.enable = CheckpointManager.Config(enable=False), False
    chosen.activation_checkpoint, chosen.metrics.log_freq = None, 1
    chosen.debug.seed, chosen.debug.deterministic, chosen.debug.enable_structured_logging = 0, True, False
    chosen.training.steps, chosen.training.local_batch_size, chosen.training.seq_len = STEPS, BATCH, LENGTH
    chosen.training.disable_cuda_graphs = True  # those of torchtitan's own
    chosen.parallelism.tensor_parallel_degree = tensor_parallel
    chosen.parallelism.spmd_backend = "partial_dtensor"
    return chosen


def train(kind: type[Trainer], chosen: Trainer.Config) -> tuple[list[Any], list[float], Trainer]:
    """What is left of each step and the weights, the times of the steps, and the trainer."""
    trainer = kind(chosen)
    found: list[Any] = []
    at: list[float] = []

    def log(step: int, *numbers: float, **_: Any) -> None:
        found.append(numbers)
        at.append(time.perf_counter())

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in trainer.model_parts[0].parameters()]
    return [*found, *weights], [1e3 * (b - a) for a, b in pairwise(at)], trainer


def main(tensor_parallel: int) -> None:
    structured_logger.init_structured_logger(source="training", output_dir="", enable=False)
    live, live_times, _ = train(Trainer, config(tensor_parallel))
    found, times, trainer = train(Recorded, config(tensor_parallel))
    rank = dist.get_rank()
    if rank == 0:
        print(f"first loss {live[0][0]:.4f}, last loss {live[STEPS - 1][0]:.4f}")
        print(f"live {min(live_times):.1f} ms a step, recorded {min(times):.1f} ms")
        print(pg.explain(trainer.update).splitlines()[0])
    same = all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(live, found, strict=True))
    assert same, f"rank {rank}: losses, norms or weights differ"
    dist.barrier()
    if rank == 0:
        print("bitwise equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
