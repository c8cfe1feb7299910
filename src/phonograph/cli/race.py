"""Two runs of one training job from the same seed, live and recorded, taking turns.

They take turns, some steps each, because a machine's clock drifts: whatever slows one down slows the other. The first
block of each is not timed (it holds the warm-up and the recording); on a GPU the clock is read with its work done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import phonograph as pg

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
    """A training job, freshly made from its seed."""

    name: str
    step: Callable[..., Tensor]  # (*batch) -> the loss; updates the weights
    batches: Callable[[int, int], Sequence[Batch]]  # the batches of steps [start, stop)
    after_block: Callable[[], None]  # what a training loop does now and then: the scheduler's step
    weights: Callable[[], list[Tensor]]


@dataclass
class Side:
    """One of the two runs."""

    job: Job
    step: Callable[..., Tensor]
    losses: Tensor  # (steps,) on the job's device, of those that were run
    random_state: Tensor
    seconds: float = 0.0
    timed_steps: int = 0

    @property
    def steps_per_second(self) -> float:
        return self.timed_steps / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Outcome:
    """What the race showed."""

    live: Side
    recorded: Side
    device: torch.device
    stats: pg.Stats  # of the recorded step

    @property
    def losses_equal(self) -> bool:
        return torch.equal(self.live.losses, self.recorded.losses)

    @property
    def weights_equal(self) -> bool:
        pairs = zip(self.live.job.weights(), self.recorded.job.weights(), strict=True)
        return all(torch.equal(live, recorded) for live, recorded in pairs)


def race(
    make_job: Callable[[], Job],
    steps: int,
    device: torch.device,
    *,
    block: int,
    advance: Callable[[int], None],
    seconds: float = float("inf"),
) -> Outcome:
    """Run ``make_job()`` twice for ``steps`` steps, or for as many as both have done after so many seconds (a block is ended);
    ``advance(n)`` is told of every ``n`` steps done."""
    live_job, recorded_job = make_job(), make_job()
    recorded_step = pg.record(recorded_job.step, name=recorded_job.name)
    live = _side(live_job, live_job.step, steps, device)
    recorded = _side(recorded_job, recorded_step, steps, device)
    until = time.perf_counter() + seconds
    for index, start in enumerate(range(0, steps, block)):
        stop = min(start + block, steps)
        for side in (live, recorded) if index % 2 else (recorded, live):
            _run_block(side, start, stop, device, timed=index > 0)
            advance(stop - start)
        if time.perf_counter() > until:
            live.losses, recorded.losses = live.losses[:stop], recorded.losses[:stop]
            break
    return Outcome(live, recorded, device, pg.stats(recorded_step))


def _side(job: Job, step: Callable[..., Tensor], steps: int, device: torch.device) -> Side:
    return Side(job, step, torch.zeros(steps, device=device), _random_state(device))


def _run_block(side: Side, start: int, stop: int, device: torch.device, *, timed: bool) -> None:
    batches = side.job.batches(start, stop)
    with _random_numbers_of(side, device):
        _wait_for(device)
        begin = time.perf_counter()
        for index, batch in enumerate(batches, start):
            side.losses[index].copy_(side.step(*batch))
        _wait_for(device)
        elapsed = time.perf_counter() - begin
    side.job.after_block()
    if timed:
        side.seconds += elapsed
        side.timed_steps += stop - start


@contextmanager
def _random_numbers_of(side: Side, device: torch.device) -> Iterator[None]:
    """Both runs draw from the default generator (dropout does): each continues where it stopped itself."""
    _set_random_state(device, side.random_state)
    yield
    side.random_state = _random_state(device)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
