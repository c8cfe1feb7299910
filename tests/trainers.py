"""Whole steps of training on two ranks, in code as people have it: each as a plain function, and as a method of a trainer that
has a file, a loader, a thread and more in its attributes, and uses them between the steps. See `ranks`, which starts both
processes. Run as one of them: `python -m tests.trainers RANK BACKEND FOLDER CASE...`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from tests import ranks
from tests.ranks import Case
from tests.sharded import Alone, halves

WIDTH, ROWS = 8, 6
BUCKET = 400 / 2**20  # MiB: some buckets for this network


class Block(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.again = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._grown, x, use_reentrant=False) if self.again else self._grown(x)  # type: ignore[no-any-return]

    def _grown(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def network(again: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(again), Block(again), nn.Linear(WIDTH, 3)).to(ranks._device())


# -- wrappers


def averaged(
    hook: Callable[[], tuple[Any, Any]] | None = None, again: bool = False, bucket: float = BUCKET, **options: Any
) -> Any:  # fmt: skip
    wrapped = DistributedDataParallel(network(again), bucket_cap_mb=bucket, **options)
    if hook is not None:
        wrapped.register_comm_hook(*hook())
    return wrapped


def compresses() -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return None, bf16_compress_hook


def low_rank() -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    return power.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=3), power.powerSGD_hook


def sharded(again: bool = False, **options: Any) -> Any:
    """On the CPU with what stands for the collectives of `fully_shard` (see `tests.sharded`)."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    net = network(again)
    for block in net[:2]:
        fully_shard(block, mesh=ranks._mesh(), **options)
    fully_shard(net, mesh=ranks._mesh(), **options)
    for module in net.modules():
        if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
            module.set_custom_all_gather(Alone())
            module.set_custom_reduce_scatter(Alone())
    return net


# -- a step


class Step:
    """One step of training: micro-batches, of which only the last is reduced, clipping, the optimizer."""

    def __init__(self, model: Any, micro: int = 1, clip: float | None = None, norm: bool = False) -> None:
        self.model, self.micro, self.clip = model, micro, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def __call__(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for i, part in enumerate(x.chunk(self.micro)):
            last = i == self.micro - 1
            if hasattr(self.model, "set_requires_gradient_sync"):
                self.model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync():
                loss = self.model(part).float().square().mean() / self.micro
                loss.backward()
            total += loss.detach()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return total

    def left(self) -> list[Any]:
        parameters = [*self.model.parameters()]
        kept = [value for p in parameters for _, value in sorted(self.optimizer.state.get(p, {}).items())]
        return [*parameters, *(p.grad for p in parameters), *(x.item() if x.dim() == 0 else x for x in kept)]


class CountedStep(Step):
    """Every other call is averaged, and steps the optimizer: it counts for itself."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.count = 0

    def update(self) -> None:
        self.optimizer.step()

    def __call__(self, x: torch.Tensor) -> Any:
        self.count += 1
        last = self.count % 2 == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = self.model(x).square().mean()
            loss.backward()
        if last:
            self.update()
            self.optimizer.zero_grad()
        return loss.detach()


class ScheduledStep(CountedStep):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, ranks.CALLS)

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()


def batch(n: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(10 * n + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=made).to(ranks._device())


# -- a trainer


class Writer:
    """As of events for a board: a file of its own, a queue, and a thread that writes."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "events").open("wb")
        self.queue: queue.Queue[tuple[str, float, int] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    def _write(self) -> None:
        while (event := self.queue.get()) is not None:
            self.file.write(repr(event).encode())

    def add_scalar(self, name: str, value: float, n: int) -> None:
        self.queue.put((name, value, n))

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()
        self.file.close()


class Timer:
    def __init__(self) -> None:
        self.began, self.laps = time.perf_counter(), list[float]()

    def lap(self) -> None:
        now = time.perf_counter()
        self.laps.append(now - self.began)
        self.began = now


class Checkpoints:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.model, self.optimizer, self.every, self.saved = model, optimizer, every, dict[int, Any]()

    def maybe_save(self, n: int) -> None:
        if n % self.every == self.every - 1:
            kept = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
            self.saved = {n: (kept, self.optimizer.state_dict())}


class Bar:
    """As one of progress: it counts, remembers when, and writes to a stream."""

    def __init__(self, total: int) -> None:
        self.n, self.total, self.start, self.fp, self.postfix = 0, total, time.time(), io.StringIO(), dict[str, float]()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n, self.total))

    def update(self, **postfix: float) -> None:
        self.n += 1
        self.postfix.update(postfix)
        self.fp.write(f"\r{self.n}/{self.total} [{time.time() - self.start:.1f} s]")


class Trainer:
    """What a trainer has beside its model. The step uses none of it; what is around the steps does."""

    def __init__(self, model: Any, step: type[Step] = Step, **options: Any) -> None:
        self.step = step(model, **options)
        folder = Path(tempfile.mkdtemp(prefix="phonograph-trainer-"))
        self.log_file = (folder / "train.log").open("w")
        self.batches = iter(torch.utils.data.DataLoader([batch(n) for n in range(ranks.CALLS)], batch_size=None))
        self.logger = logging.getLogger(f"trainer.{dist.get_rank()}")
        self.writer = Writer(folder)
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.jobs: queue.Queue[int] = queue.Queue()
        self.timer = Timer()
        self.group = dist.group.WORLD
        self.mesh = ranks._mesh()
        self.checkpoints = Checkpoints(model, self.step.optimizer, every=7)
        self.metrics: dict[str, list[float]] = {"loss": []}
        self.bar = Bar(ranks.CALLS)
        self.random = random.Random(dist.get_rank())
        self.rank, self.world_size, self.epoch, self.global_step = dist.get_rank(), dist.get_world_size(), 0, 0
        self.done = threading.Event()
        self.watcher.start()

    def _watch(self) -> None:
        while not self.done.wait(0.02):
            self.jobs.qsize()

    def train_step(self, x: torch.Tensor) -> Any:
        return self.step(x)

    def next_batch(self) -> torch.Tensor:
        self.timer.lap()
        self.random.random()
        return next(self.batches)

    def after(self, loss: float) -> None:
        """What is between two steps."""
        self.global_step += 1
        self.metrics["loss"].append(loss)
        self.metrics.setdefault(f"loss/{self.global_step // 5}", []).append(loss)
        self.writer.add_scalar("loss", loss, self.global_step)
        self.logger.debug("step %d: %f", self.global_step, loss)
        self.log_file.write(f"{self.global_step} {loss}\n")
        self.jobs.put(self.global_step)
        self.checkpoints.maybe_save(self.global_step)
        self.bar.update(loss=loss)

    def close(self) -> None:
        self.done.set()
        self.writer.close()
        self.log_file.close()


class Decorated(Trainer):
    """Its step is recorded where its class is."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        if ranks._now[-1] is not None:
            self.train_step = pg.record(super().train_step, keep="always")  # type: ignore[method-assign]


class InOne(Trainer):
    """All that a step does stands in the method, beside a count of the trainer's."""

    def train_step(self, x: torch.Tensor) -> Any:
        self.epoch += 1
        return self.step(x)


def plain(make: Callable[[], Any], step: type[Step] = Step, **options: Any) -> Case:
    def made() -> Any:
        each = step(make(), **options)

        def train_step(x: torch.Tensor) -> Any:
            return each(x)

        return train_step, lambda n: [batch(n)], each.left

    return Case(made, keep="always")


def trainer(make: Callable[[], Any], kind: type[Trainer] = Trainer, **options: Any) -> Case:
    def made() -> Any:
        trainer = kind(make(), **options)
        step: Any = trainer.train_step
        if ranks._now[-1] is not None:
            step = step if kind is Decorated else pg.record(step, keep="always")
            ranks._inner[:] = [step]
        losses: list[torch.Tensor] = []

        def arguments(n: int) -> list[Any]:
            if losses:
                trainer.after(losses.pop().item())
            if n == ranks.CALLS - 1:
                trainer.close()
            return [trainer.next_batch()]

        def train_step(x: torch.Tensor) -> Any:
            losses[:] = [step(x)]
            return losses[0].clone()

        return train_step, arguments, trainer.step.left

    return Case(made, inner=True)


WRAPPED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "ddp": (averaged, {}),
    "ddp_clips": (averaged, {"clip": 0.1}),
    "ddp_accumulates": (averaged, {"micro": 3}),
    "ddp_static_graph": (lambda: averaged(static_graph=True), {}),
    "ddp_bucket_views": (lambda: averaged(gradient_as_bucket_view=True), {}),
    "ddp_bf16_hook": (lambda: averaged(compresses), {}),
    # One bucket, as this hook waits in a thread of gloo's, of which there are two.
    "ddp_power_sgd": (lambda: averaged(low_rank, bucket=25), {}),
    "ddp_counts": (averaged, {"step": CountedStep}),
    "ddp_counts_in_views": (lambda: averaged(gradient_as_bucket_view=True), {"step": CountedStep}),
    "ddp_recomputes": (lambda: averaged(again=True), {}),
    "fsdp2": (sharded, {}),
    "fsdp2_reshards": (lambda: sharded(reshard_after_forward=True), {}),
    "fsdp2_keeps": (lambda: sharded(reshard_after_forward=False), {}),
    "fsdp2_mixed": (lambda: sharded(mp_policy=halves()), {}),
    "fsdp2_clips": (sharded, {"clip": 0.1}),
    "fsdp2_accumulates": (sharded, {"micro": 3}),
    "fsdp2_recomputes": (lambda: sharded(again=True), {}),
}
FORMS: dict[str, Callable[..., Case]] = {
    "plain": plain,
    "trainer": trainer,
    "decorated": lambda make, **options: trainer(make, Decorated, **options),
    "counting": lambda make, **options: trainer(make, InOne, **options),
}
LIVE = {
    "ddp_static_graph": "contains DistributedDataParallel with static_graph",
    "ddp_power_sgd": "a communication hook that goes by what it keeps (a PowerSGDState)",
}
"""What is not recorded, and the reason."""
CASES = {f"{name}-{form}": of(make, **options) for form, of in FORMS.items() for name, (make, options) in WRAPPED.items()}
CASES["ddp_counts_with_schedule-plain"] = plain(averaged, step=ScheduledStep)

if __name__ == "__main__":
    ranks.main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*CASES], CASES)
