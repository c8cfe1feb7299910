"""Trouble on one of two ranks while the other replays: each trial runs a program eager and recorded, with the same event in the
same call, and both ranks have to find the same bits, or an exception of the same kind, in the same call; and nobody waits
longer than the group's timeout and five seconds. See `ranks_faults_run`, which draws the trials.

What follows a call that raised goes on with a new process group, from the state that eager has there, for a few calls.
"""

from __future__ import annotations

import contextlib
import decimal
import faulthandler
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phonograph as pg
from tests.faults.injection import Functions, house

CALLS, AFTER = 10, 4
TIMEOUT, MORE = 4, 5  # seconds: of a process group, and those after which somebody hangs
SHAPE = (4, 6)


class Trial(NamedTuple):
    """This event on one rank in the `at`-th call of a program; `how` is a detail of it."""

    program: str
    event: str
    rank: int
    at: int
    how: int

    def __str__(self) -> str:
        return f"{self.program}: {self.event} ({self.how}) on rank {self.rank} in call {self.at}"


class OwnError(ArithmeticError):
    pass


# -- programs


class Program:
    """A step that communicates. `trouble` says where it raises, and what it does that no recording can have."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.raises: tuple[str, type[BaseException]] | None = None
        self.asks = False
        self.index, self.late = torch.tensor(1), torch.tensor(1)
        self.options: dict[str, Any] = {}
        self.prepare()

    def prepare(self) -> None:
        pass

    def regroup(self, group: Any) -> None:
        self.group = group

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        """What comes after the first collective: an operator that may raise then."""
        self.place("between")
        return y + y.flatten().index_select(0, self.late)

    def place(self, name: str) -> None:
        if self.raises is not None and self.raises[0] == name:
            raise self.raises[1]("of the program's own")

    def numbers(self, x: torch.Tensor) -> torch.Tensor:
        """What begins each step: an operator that may raise, what no recording can have, and what nobody sees."""
        self.place("before")
        x = x + x[0].index_select(0, self.index)
        if self.asks:
            x = x + x.nonzero().shape[0]
        if decimal.getcontext().prec > 28:
            x = x * 1.0
        return x

    def step(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def state(self) -> list[torch.Tensor]:
        return []


class Reduces(Program):
    def prepare(self) -> None:
        self.total = torch.zeros(6)

    def step(self, x: torch.Tensor) -> Any:
        y = self.numbers(x).sum(0)
        dist.all_reduce(y, group=self.group)
        y = self.middle(y)
        self.total += y
        z = self.total * 0.5
        dist.all_reduce(z, group=self.group)
        self.place("after")
        return y + z

    def state(self) -> list[torch.Tensor]:
        return [self.total]


class Functional(Program):
    def step(self, x: torch.Tensor) -> Any:
        import torch.distributed._functional_collectives as functional

        y = self.numbers(x).sum(0)
        whole = functional.all_gather_tensor(y, 0, self.group)
        whole = self.middle(whole)
        part = functional.reduce_scatter_tensor(whole * 0.5, "sum", 0, self.group)
        self.place("after")
        return part + y


class Sends(Program):
    def step(self, x: torch.Tensor) -> Any:
        y = self.numbers(x).sum(0)
        other, got = 1 - dist.get_rank(), torch.empty_like(y)
        sent, received = dist.isend(y, other, group=self.group), dist.irecv(got, other, group=self.group)
        received.wait()
        sent.wait()
        got = self.middle(got)
        dist.broadcast(got, src=1, group=self.group)
        self.place("after")
        return got + y


class Trains(Program):
    """Averages its gradients itself."""

    def prepare(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, fused=True)
        self.wrap()

    def wrap(self) -> None:
        self.model: Any = self.net

    def regroup(self, group: Any) -> None:
        self.group = group
        self.wrap()

    def average(self) -> None:
        works = [dist.all_reduce(p.grad, group=self.group, async_op=True) for p in self.net.parameters()]
        for work in works:
            work.wait()

    def step(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(self.numbers(x)).square().mean()
        loss.backward()
        self.average()
        first = next(self.net.parameters())
        first.grad = self.middle(first.grad)  # type: ignore[arg-type]
        self.optimizer.step()
        self.place("after")
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        kept = [value for p in self.net.parameters() for value in self.optimizer.state.get(p, {}).values()]
        return [*self.net.parameters(), *kept]


class Averaged(Trains):
    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=150 / 2**20, process_group=self.group)

    def average(self) -> None:
        pass


class Inside(Averaged):
    """The module is recorded, and the step is not."""


PROGRAMS: dict[str, type[Program]] = {kind.__name__: kind for kind in (Reduces, Functional, Sends, Trains, Averaged, Inside)}

# Those after which a rank may not come to a collective that the other waits for; each costs the timeout twice.
WAITS = {"raises before": 1, "exits between": 1, "interrupted before": 1, "interrupted by a signal": 2, "fault of ours": 3}
EVENTS = {"refused": 2, "evicted": 2, "reset": 2, "another shape": 2, "switched off": 2, "audited": 2, "slow": 1,
          "raises between": 2, "raises after": 2, "operator raises": 2, "operator raises late": 2, "exits after": 1,
          "interrupted after": 1, **WAITS}  # fmt: skip
PLACES = ("before", "between", "after")


def draw(chosen: random.Random) -> Trial:
    event = chosen.choices([*EVENTS], [*EVENTS.values()])[0]
    program, rank, at = chosen.choice([*PROGRAMS]), chosen.randrange(2), chosen.randrange(1, CALLS - 1)
    return Trial(program, event, rank, at, chosen.randrange(10_000))


# -- a side: eager, or recorded


class Seen(NamedTuple):
    raised: str
    values: list[torch.Tensor]
    seconds: float


class Side:
    def __init__(self, trial: Trial, group: Any, *, records: bool) -> None:
        self.trial, self.records = trial, records
        self.program = PROGRAMS[trial.program](group)
        self.mine = trial.rank == dist.get_rank()
        self.called, self.kept = self._recorded(), self.program.step
        self.seen: list[Seen] = []

    def _recorded(self) -> Any:
        if not self.records:
            return self.program.step
        options: dict[str, Any] = {"keep": "always", "audit": 1 if self.trial.event == "audited" and self.mine else 0}
        if self.trial.event == "evicted" and self.mine:
            options["max_recordings"] = 1
        if isinstance(self.program, Inside):
            pg.record(self.program.net, **options)
            return self.program.step
        return pg.record(self.program.step, **options)

    def what(self) -> Any:
        """What is recorded."""
        return self.program.net if isinstance(self.program, Inside) else self.called

    def reset(self) -> None:
        if self.records:
            pg.reset(self.what())

    def call(self, n: int, event: bool) -> Seen:
        """One call, with its event before it or in it."""
        rows = 3 if event and self.trial.event in ("another shape", "evicted") else SHAPE[0]
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 * n + dist.get_rank()))
        faulthandler.dump_traceback_later(4 * TIMEOUT + 30, exit=True)
        began, raised, values = time.monotonic(), "", list[torch.Tensor]()
        try:
            with self._during(event):
                values = [self.called(x).clone()]
        except BaseException as e:  # whatever it is, it is compared with eager's
            raised = type(e).__name__ if not isinstance(e, RuntimeError) else "RuntimeError"
            if os.environ.get("TOLD"):
                import traceback

                traceback.print_exc()
        seconds = time.monotonic() - began
        faulthandler.cancel_dump_traceback_later()
        return Seen(raised, values + [t.detach().clone() for t in self.program.state()], seconds)

    @contextlib.contextmanager
    def _during(self, event: bool) -> Iterator[None]:
        trial, program = self.trial, self.program
        kind, _, where = trial.event.partition(" ")
        if not event:
            yield
            return
        if kind == "raises":
            program.raises = where, OwnError
        elif kind == "exits":
            program.raises = where, SystemExit
        elif kind == "interrupted" and where in PLACES:
            program.raises = where, KeyboardInterrupt
        elif kind == "refused":
            program.asks = True
        elif trial.event == "operator raises":
            program.index.fill_(100)
        elif trial.event == "operator raises late":
            program.late.fill_(100)
        elif kind == "reset":
            self.reset()
            if self.records and isinstance(self.program, Inside):
                pg.record(self.program.net, keep="always")
        elif kind == "switched":
            os.environ["PHONOGRAPH"] = "off"
        elif kind == "slow":
            time.sleep(0.3)
        elif kind == "audited":
            decimal.getcontext().prec = 29
        try:
            if kind == "fault" and self.records:
                before = house()
                with Functions(1 + trial.how % (400 if trial.at < 3 else 20), (KeyboardInterrupt, MemoryError)[trial.how % 2]):
                    yield
                left = [name for name, value in house().items() if before[name] != value]
                assert not left, f"left behind {left}"
            elif trial.event == "interrupted by a signal":
                with _interrupted(trial.how % 40 / 4000):
                    yield
            else:
                yield
        finally:
            program.raises, program.asks = None, False
            program.index.fill_(1)
            program.late.fill_(1)
            os.environ.pop("PHONOGRAPH", None)
            if kind != "audited":
                decimal.getcontext().prec = 28

    def lasts(self, n: int) -> bool:
        """Whether the event is in this call: some stay for a while."""
        longer = {"refused": 3, "another shape": 2, "switched off": 3, "evicted": 1, "audited": 99}.get(self.trial.event, 1)
        return self.mine and self.trial.at <= n < self.trial.at + longer


@contextlib.contextmanager
def _interrupted(after: float) -> Iterator[None]:
    """Ctrl-C comes after so many seconds, if the block is not over by then."""
    over, main = threading.Event(), threading.main_thread().ident

    def interrupt() -> None:
        if not over.wait(after):
            signal.pthread_kill(main, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
        over.set()
        thread.join()
    finally:
        over.set()


LOOSE = ("interrupted by a signal", "interrupted before", "interrupted after", "fault of ours")
"""Events that are not in the same place eager and recorded: what interrupts a capture does so before it communicates."""


# -- a trial


class Ranks:
    """What both processes agree on beside the programs: numbered points at which each waits for the other, and groups."""

    def __init__(self, store: Any) -> None:
        self.store, self.passed = store, 0

    def meet(self, patience: float = 90.0) -> None:
        self.passed += 1
        self.store.set(f"met/{self.passed}/{dist.get_rank()}", "1")
        self.store.wait([f"met/{self.passed}/{1 - dist.get_rank()}"], timedelta(seconds=patience))

    def group(self) -> Any:
        self.meet()
        return dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))

    def tell(self, name: str, value: str) -> str:
        """What the other says under this name."""
        self.store.set(f"told/{self.passed}/{name}/{dist.get_rank()}", value)
        return str(self.store.get(f"told/{self.passed}/{name}/{1 - dist.get_rank()}").decode())


def run(trial: Trial, ranks: Ranks) -> dict[str, Any]:
    """What this rank has found."""
    sides = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for records in (False, True):
            side = Side(trial, ranks.group(), records=records)
            for n in range(CALLS):
                side.seen.append(side.call(n, side.lasts(n)))
                if _ends(side.seen[-1]):
                    break
            sides.append(side)
            decimal.getcontext().prec = 28
        wrong = _compared(trial, *sides, ranks)
        wrong += _afterwards(trial, *sides, ranks)
        stats = pg.stats(sides[1].what())
        sides[1].reset()
        wrong += [f"waited for {seen.seconds:.1f} s in call {n}" for side in sides for n, seen in enumerate(side.seen)
                  if seen.seconds > TIMEOUT + MORE]  # fmt: skip
    return {"wrong": wrong, "live": stats.live, "recorded": stats.recorded, "replayed": stats.replayed,
            "raised": [seen.raised for seen in sides[1].seen if seen.raised]}  # fmt: skip


def warm(ranks: Ranks) -> None:
    """What takes long once is done before anybody has to be in time."""
    ranks.meet()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=120))
    for name in PROGRAMS:
        for records in (False, True):
            side = Side(Trial(name, "", 0, 0, 0), group, records=records)
            for n in range(3):
                side.call(n, False)
            side.reset()


def _ends(seen: Seen) -> bool:
    """Whether the process group cannot be used after it: a collective has failed, or was broken off."""
    return seen.raised not in ("", "OwnError", "IndexError")


def _compared(trial: Trial, eager: Side, recorded: Side, ranks: Ranks) -> list[str]:
    ranks.meet()
    if trial.event in LOOSE:
        return _as_far_as_both(trial, eager, recorded)
    wrong = []
    if len(eager.seen) != len(recorded.seen):
        wrong.append(f"{len(recorded.seen)} calls, eager {len(eager.seen)}: {[s.raised for s in recorded.seen]}")
    for n, (a, b) in enumerate(zip(eager.seen, recorded.seen, strict=False)):
        if a.raised != b.raised:
            wrong.append(f"call {n} raises {b.raised or 'nothing'}, eager {a.raised or 'nothing'}")
        elif not _ends(a) and not _same(a.values, b.values):
            wrong.append(f"call {n} differs")
    return wrong


def _as_far_as_both(trial: Trial, eager: Side, recorded: Side) -> list[str]:
    """The calls before the event are eager's, and what raises afterwards is that or what a missing rank makes raise."""
    wrong = [f"call {n} differs" for n, (a, b) in enumerate(zip(eager.seen, recorded.seen, strict=False))
             if n < trial.at and (a.raised != b.raised or not _same(a.values, b.values))]  # fmt: skip
    known = ("", "KeyboardInterrupt", "MemoryError", "RuntimeError")
    own = trial.event.startswith("interrupted") and trial.event.split()[1] in PLACES and trial.rank == dist.get_rank()
    if own and recorded.seen[trial.at].raised != "KeyboardInterrupt":
        wrong.append(f"call {trial.at} is not interrupted")
    return wrong + [f"call {n} raises {s.raised}" for n, s in enumerate(recorded.seen) if s.raised not in known]


def _afterwards(trial: Trial, eager: Side, recorded: Side, ranks: Ranks) -> list[str]:
    """All go on with a new group each, in the state that eager has."""
    wrong = []
    with torch.no_grad():
        for mine, theirs in zip(recorded.program.state(), eager.program.state(), strict=False):
            mine.copy_(theirs)
    for side in (eager, recorded):
        side.program.regroup(ranks.group())
    for n in range(CALLS, CALLS + AFTER):
        found = []
        for side in (eager, recorded):
            ranks.meet()
            found.append(side.call(n, False))
            side.seen.append(found[-1])
        if found[0].raised or found[1].raised:
            wrong.append(f"afterwards, call {n} raises {found[1].raised or 'nothing'}, eager {found[0].raised or 'nothing'}")
            break
        if not _same(found[0].values, found[1].values):
            wrong.append(f"afterwards, call {n} differs")
    return wrong


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True))
