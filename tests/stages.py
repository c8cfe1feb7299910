"""Steps of training in stages of a pipeline, each run as it is and recorded. See `ranks`, which starts both processes. Run as
one of them: `python -m tests.stages RANK BACKEND FOLDER CASE...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests import ranks
from tests.ranks import Case
from tests.sharded import recomputed, states
from tests.spread import adam, whole

CALLS = int(os.environ.get("STAGES_CALLS", "6"))
WIDTH, ROWS, PARTS = 8, 16, 4
TURNS_BACK = frozenset({"ScheduleZBVZeroBubble", "ScheduleDualPipeV"})  # neighbouring stages may be on one rank


class Stages:
    """What one rank has of a pipeline of two ranks: two stages of it, if they are interleaved."""

    def __init__(
        self, device: torch.device, kind: str, inside: Callable[[nn.Module], nn.Module] = lambda m: m, drop: float = 0.0,
        interleaved: bool = False,
    ) -> None:  # fmt: skip
        import torch.distributed.pipelining as pipelining

        torch.manual_seed(dist.get_rank())
        self.nets = [nn.Sequential(inside(self._block(drop)), self._block(drop)).to(device)
                     for _ in range(2 if interleaved else 1)]  # fmt: skip
        count, rank = 2 * len(self.nets), dist.get_rank()
        self.turns_back = kind in TURNS_BACK
        numbers = (rank, 3 - rank) if self.turns_back else (rank, rank + 2)
        stages = [pipelining.PipelineStage(net, n, count, device)
                  for net, n in zip(self.nets, numbers, strict=False)]  # fmt: skip
        self.schedule = getattr(pipelining, kind)(stages if interleaved else stages[0], n_microbatches=PARTS,
                                                  loss_fn=nn.functional.mse_loss)  # fmt: skip
        self.losses: list[torch.Tensor] = []

    @staticmethod
    def _block(drop: float) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(drop))

    def step(self, x: torch.Tensor, losses: list[torch.Tensor] | None) -> Any:
        if self.turns_back:
            return self.schedule.step(x, target=x * 0.5, losses=losses) if dist.get_rank() == 0 else self.schedule.step()
        if dist.get_rank() == 0:
            return self.schedule.step(x)
        return self.schedule.step(target=x * 0.5, losses=losses)


Step = Callable[[Stages, torch.optim.Optimizer, torch.Tensor], Any]


def train(stages: Stages, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    losses: list[torch.Tensor] = []
    optimizer.zero_grad()
    stages.step(x, losses)
    optimizer.step()
    return [loss.detach() for loss in losses]


def clips(stages: Stages, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    losses: list[torch.Tensor] = []
    optimizer.zero_grad(set_to_none=False)
    stages.step(x, losses)
    norm = nn.utils.clip_grad_norm_([p for net in stages.nets for p in net.parameters()], 0.1)
    optimizer.step()
    return norm, torch.stack(losses).detach().mean() if losses else None


def keeps_losses(stages: Stages, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """In one list, which is filled anew in each step; and returns what the last stage gives."""
    optimizer.zero_grad()
    out = stages.step(x, stages.losses)
    optimizer.step()
    return None if out is None else out.detach()


def training(
    kind: str, step: Step = train, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    between: Callable[[Stages, torch.optim.Optimizer, int], None] = lambda *_: None, **options: Any,
) -> Case:  # fmt: skip
    def made() -> Any:
        stages = Stages(ranks._device(), kind, **options)
        parameters = nn.ModuleList(stages.nets)
        stepping = (optimizer or adam(fused=True))(parameters.parameters())

        def call(x: torch.Tensor) -> Any:
            return step(stages, stepping, x)

        def arguments(n: int) -> list[Any]:
            between(stages, stepping, n)
            torch.manual_seed(100 * n + dist.get_rank())
            return [whole(10 * n, ROWS, WIDTH)]

        state = states(parameters, stepping)
        return call, arguments, lambda: [*state(), *(loss.item() for loss in stages.losses)]

    return Case(made)


def evaluates(stages: Stages, optimizer: torch.optim.Optimizer, n: int) -> None:
    if n == 3:
        with torch.no_grad():
            x = whole(7, ROWS, WIDTH)
            stages.schedule.eval(*([x] if dist.get_rank() == 0 else []), target=x)


def slows_down(stages: Stages, optimizer: torch.optim.Optimizer, n: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + n)


CASES: dict[str, Case] = {
    "one_forward_one_backward": training("Schedule1F1B"),
    "all_forwards_first": training("ScheduleGPipe"),
    "clips": training("Schedule1F1B", clips),
    "keeps_losses": training("Schedule1F1B", keeps_losses),
    "recomputes_dropout": training("Schedule1F1B", inside=recomputed, drop=0.5),
    "foreach": training("Schedule1F1B", optimizer=adam(foreach=True)),
    "slows_down": training("ScheduleGPipe", between=slows_down),
    "evaluates": training("Schedule1F1B", between=evaluates),
    "interleaved": training("ScheduleInterleaved1F1B", interleaved=True),
    "interleaved_clips": training("ScheduleInterleaved1F1B", clips, inside=recomputed, interleaved=True),
    "breadth_first": training("ScheduleLoopedBFS", interleaved=True),
    "no_bubble": training("ScheduleInterleavedZeroBubble", interleaved=True),
    "turns_back": training("ScheduleZBVZeroBubble", interleaved=True),
}


if __name__ == "__main__":
    ranks.CALLS = CALLS
    ranks.main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*CASES], CASES)
