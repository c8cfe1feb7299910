"""Branches and loops by what a tensor holds, in one launch: a fixed-point loop of 50 small kernels a turn, and a branch.

    python benchmarks/control_flow.py

The loop ends when a turn changes little, which is something else each call: so it turns eight to fifty times. Turn by turn,
each turn is a recording, and the host reads whether another one follows. The branch has ten kernels on one side, and two on
the other; `torch.where` computes both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import harness
import phonograph as pg

CLAIM, LIMIT = "control_flow", 5.0
TARGET = f"a fixed-point loop of 50 kernels a turn at least {LIMIT:g} x as fast as live, with the same results"
KERNELS = 16  # times three, and three that say how much a turn has changed
ENOUGH = (1e-2, 1e-5, 1e-3, 1e-6, 1e-4)
RECORD = partial(pg.record, keep="always")

Turn = Callable[[Tensor], tuple[Tensor, Tensor]]
Function = Callable[..., object]


def turn(y: Tensor) -> tuple[Tensor, Tensor]:
    """The next place, and how far it is."""
    z = y
    for _ in range(KERNELS):
        z = torch.tanh(z * 0.9999 + 0.001)
    return z, (z - y).abs().max()


def fixed_point(x: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """Where it ends, and after how many turns."""

    def body(y: Tensor, _: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *turn(y), turns + 1

    first = x, torch.full((), torch.inf, device=x.device), torch.zeros((), dtype=torch.int64, device=x.device)
    y, _, turns = pg.while_loop(lambda y, far, turns: far > enough, body, first)
    return y, turns


def turn_by_turn(x: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    return _by_turns(_recorded_turn, x, enough)


def as_written(x: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """The same without phonograph."""
    return _by_turns(turn, x, enough)


def _by_turns(one: Turn, x: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    goes_on, turns = True, 0
    while goes_on:
        x, far = one(x)
        goes_on, turns = bool(far > enough), turns + 1
    return x, torch.tensor(turns, device=x.device)


_recorded_turn = RECORD(turn)


def heavy(x: Tensor) -> Tensor:
    for _ in range(10):
        x = torch.sin(x)
    return x


def branch(x: Tensor, _: Tensor) -> Tensor:
    return pg.cond(x.sum() > 0, heavy, lambda x: x * 2 + 1, x)


def both_sides(x: Tensor, _: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, heavy(x), x * 2 + 1)


METHODS: dict[str, Function] = {
    "live, loop": as_written,
    "pg.while_loop live, loop": fixed_point,
    "turn by turn, loop": turn_by_turn,
    "one launch, loop": RECORD(fixed_point),
    "live, branch": lambda x, _: heavy(x) if x.sum() > 0 else x * 2 + 1,
    "torch.where, branch": RECORD(both_sides),
    "one launch, branch": RECORD(branch),
}


def looping(function: Function, inputs: list[tuple[Tensor, Tensor]]) -> harness.Step:
    feed = itertools.cycle(inputs)
    return lambda: function(*next(feed))


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randn(64, 64, generator=draw).abs().mul(1 - 2 * (n % 2)) for n in range(len(ENOUGH))]  # of either sign
    inputs = [(x.to(arguments.device), torch.tensor(e, device=arguments.device)) for x, e in zip(drawn, ENOUGH, strict=True)]
    with torch.no_grad():
        steps = {name: looping(function, inputs) for name, function in METHODS.items()}
        harness.measure(report, steps, calls=15, reference="live")
        wanted = [as_written(*x) for x in inputs]
        report.figures["turns"] = [int(turns) for _, turns in wanted]
        found = {name: [METHODS[name](*x) for x in inputs] for name in ("turn by turn, loop", "one launch, loop")}
        found = {name: [*zip(wanted, each, strict=True)] for name, each in found.items()}
    equal = {name: all(torch.equal(a, b) for w, f in pairs for a, b in zip(w, f, strict=True)) for name, pairs in found.items()}
    for row in report.rows:
        if row.method in equal:
            row.notes["equal to live"] = equal[row.method]
    ratio = report.ratio("one launch, loop")
    report.figures["times as fast as live"] = 1 / ratio
    report.decide(ratio <= 1 / LIMIT and all(equal.values()), ratio)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
