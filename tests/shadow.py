"""A plugin for the tests: beside each guard of a recording, what a `ReadSet` of the live calls before says. It decides nothing.

    SHADOW=out.json pytest -p tests.shadow tests/contract/c09_python_values

Each warm-up call is noted. A recording that is made later is given what the last one has read, as it is by then, but for the
numbers that it follows. At each look at what it relies on, the two verdicts are compared; `SHADOW` is where the counts go, and
the tests in which they differ.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from phonograph.engine.live_run import LiveRun
from phonograph.guards.hyperparameters import Dials
from phonograph.reads.place import Read
from phonograph.reads.readset import ReadSet
from phonograph.slots.constants import Constants

AGREE, DIFFER = ("both hold", "both changed"), ("only the guards changed", "only the reads changed")


class Shadow:
    """What was compared so far."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.differing: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._reads: ReadSet | None = None
        self._of: dict[int, tuple[Constants, list[Read]]] = {}
        self.within = ""

    @contextmanager
    def standing(self) -> Iterator[Shadow]:
        """Compare while the block runs."""
        run, made, broken = LiveRun.run, Constants.__init__, Constants.broken
        shadow = self

        def noted_run(live, args, kwargs):
            return shadow._noted(live, run, args, kwargs)

        def noted_init(constants, reach, snapshot, dials, fixed, shared):
            made(constants, reach, snapshot, dials, fixed, shared)
            shadow._begin(constants, dials)

        def compared(constants):
            found = broken(constants)
            shadow._compare(constants, found)
            return found

        LiveRun.run, Constants.__init__, Constants.broken = noted_run, noted_init, compared
        try:
            yield self
        finally:
            LiveRun.run, Constants.__init__, Constants.broken = run, made, broken
            self.forget()

    def forget(self) -> None:
        """A test has ended: nothing of it is kept."""
        self._reads = None
        self._of.clear()

    def _noted(self, live, run, args, kwargs):
        function, reads = live._function, ReadSet()

        def noted(*args, **kwargs):
            with reads.noting(function):
                return function(*args, **kwargs)

        live._function = noted
        try:
            return run(live, args, kwargs)
        finally:
            live._function = function
            self._reads = reads
            self.counts["calls noted"] += 1
            self.counts["places noted"] += len(reads.reads)

    def _begin(self, constants: Constants, dials: Dials) -> None:
        if self._reads is None or not self._reads.certain:
            return
        marks = {id(mark) for mark in dials.marks}
        reads = [read for read in self._reads.reads.values() if read is not None and read.relied]
        now = [read._replace(value=read.place.get()) for read in reads]
        followed = [read for read in now if marks and any(id(value) in marks for value in read.value)]
        self._of[id(constants)] = constants, [read for read in now if read not in followed]

    def _compare(self, constants: Constants, found: str | None) -> None:
        _, reads = self._of.get(id(constants), (None, None))
        if reads is None:
            return
        changed = [read for read in reads if read.changed]
        kind = _kind(found, changed)
        self.counts[kind] += 1
        if kind in DIFFER:
            self.differing[kind][f"{self.within} | {found} | {[_named(read) for read in changed[:2]]}"] += 1
            self.counts[f"{kind}: {_what(changed)}"] += 1


def _kind(found: str | None, changed: list[Read]) -> str:
    if found is None:
        return DIFFER[1] if changed else AGREE[0]
    return AGREE[1] if changed else DIFFER[0]


def _named(read: Read) -> str:
    return f"{read.place.path} {read.place.name if str(read.place.name).startswith('<') else ''}".strip()


def _what(changed: list[Read]) -> str:
    """The kind of the first place that has changed, and whether it is a number that has."""
    if not changed:
        return "nothing"
    place, before, now = changed[0].place, changed[0].value, changed[0].place.get()
    others = [(a, b) for a, b in zip(before, now, strict=False) if a is not b]
    number = bool(others) and all(type(x) in (int, float) for pair in others for x in pair)
    name = str(place.name)
    kind = name if name.startswith("<") else f"attribute or variable of {type(place.of).__name__}"
    return f"{kind}, {'a number' if number else 'more or fewer' if len(before) != len(now) else 'another'}"


shadow = Shadow()
_standing = shadow.standing()


def pytest_configure() -> None:
    if os.environ.get("SHADOW"):
        _standing.__enter__()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    shadow.forget()
    shadow.within = item.nodeid.rpartition("/")[2]


def pytest_runtest_teardown() -> None:
    shadow.forget()
    if os.environ.get("SHADOW"):
        tell(os.environ["SHADOW"])


def tell(path: str) -> None:
    """Write down what is known so far: a run may be ended early."""
    with open(path, "w") as out:
        json.dump([shadow.counts, {kind: c.most_common() for kind, c in shadow.differing.items()}], out, indent=0)
