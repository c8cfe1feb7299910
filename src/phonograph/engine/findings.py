"""What a check has found, for people and for programs."""

from __future__ import annotations

import json
import linecache
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap

from ..capture.looking import Place
from ..errors import Refusal
from ..reasons import code_of

__all__ = ["Findings", "Obstacle"]

PAGE = "docs/reasons.md"
_WIDTH = 100  # characters of a line of source


@dataclass(frozen=True)
class Obstacle:
    """Something for which a call runs live."""

    code: str
    """As `python -m phonograph reasons` lists it; "" where it has none."""
    reason: str
    remedy: str
    file: str = ""
    line: int = 0
    column: int = -1
    """Where it begins on that line, counted from 0; -1: not known."""
    end_column: int = -1
    source: str = ""
    """The line as it stands there."""
    argument: str = ""
    """The argument that it is about, with the path in it: ``batch['meta'][1]``."""
    detail: str = ""
    times: int = 1
    """How often in the call that was looked at."""

    @classmethod
    def of(cls, refusal: Refusal, place: Place | None = None, times: int = 1, detail: str = "") -> Obstacle:
        if place is None:
            found = re.match(r"(.+?):(\d+)(,|$)", refusal.where)
            place = Place(found[1], int(found[2])) if found else Place("", 0)
        source = linecache.getline(place.file, place.line).rstrip() if place.line else ""
        end = place.end if place.last in (0, place.line) else len(source.encode())
        argument = re.search(r" (?:of|as) `([^`]+)`(?: nearly each time)?$", refusal.reason)
        return cls(
            code_of(refusal.reason), refusal.reason, refusal.remedy, place.file, place.line,
            _characters(source, place.begin), _characters(source, end), source, argument[1] if argument else "", detail, times,
        )  # fmt: skip

    @property
    def at(self) -> tuple[str, int]:
        return self.file, self.line

    @property
    def link(self) -> str:
        """Where more is said of it."""
        return f"{PAGE}#{self.code.lower()}" if self.code else PAGE

    def lines(self) -> Iterator[str]:
        times = f" ({self.times} times in the call)" if self.times > 1 else ""
        yield f"{self.code or '     '}  {self.reason}{times}"
        if self.detail:
            yield f"    it was {self.detail}"
        if self.line:
            yield f"    {_short(self.file)}:{self.line}"
        if self.source:
            yield from (f"        {line}" for line in self._marked())
        yield from wrap(f"fix: {self.remedy or 'do it outside the recorded function'}", _WIDTH, initial_indent="    ",
                        subsequent_indent=" " * 9)  # fmt: skip
        if self.code:
            yield f"    see: phonograph reasons {self.code}"

    def _marked(self) -> Iterator[str]:
        indent = len(self.source) - len(self.source.lstrip())
        yield self.source[indent:][:_WIDTH]
        if self.column >= indent:
            yield " " * (self.column - indent) + "^" * max(1, min(self.end_column - self.column, _WIDTH))


@dataclass(frozen=True)
class Findings:
    """What a check has found out of one function. ``print`` shows it."""

    name: str
    device: str
    records: bool
    """Whether calls like those are recorded whole."""
    obstacles: tuple[Obstacle, ...]
    calls: int
    """How many calls of the function that took."""
    operators: int
    """How many operators a call has."""
    pieces: tuple[int, ...]
    """How many operators there are between the obstacles: what could be recorded if these ran live between recordings."""
    live_ms: float | None
    """How long a call takes."""
    host_ms: float | None
    """How long of that the host is busy."""
    replay_ms: float | None
    """How long a replay takes; None where nothing was recorded."""
    cut_ms: float | None = None
    """How long a call takes that is recorded with ``fallback="split"``, which is tried where something stands in the way; None
    where that records nothing either."""

    @property
    def status(self) -> int:
        """0: recorded whole; 1: something stands in the way."""
        return int(not self.records)

    @property
    def pays(self) -> bool:
        """Whether a replay, with cuts if need be, was measured faster than a live call. (Not so where none was measured.)"""
        took = self.replay_ms if self.records else self.cut_ms
        return took is not None and self.live_ms is not None and took < self.live_ms

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.as_dict())

    def as_dict(self) -> dict[str, object]:
        found: dict[str, object] = asdict(self)
        found["obstacles"] = [{**asdict(one), "link": one.link} for one in self.obstacles]
        return {**found, "pays": self.pays, "status": self.status}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.name}: {self._verdict()}"
        yield from (f"  {line}" for line in self._numbers())
        for number, obstacle in enumerate(self.obstacles, 1):
            first, *rest = obstacle.lines()
            yield ""
            yield f"{number:2}. {first}"
            yield from rest

    def _verdict(self) -> str:
        if self.records:
            return "is recorded whole, in one piece"
        n = len(self.obstacles)
        how = 'in segments (fallback="auto")' if self.pays else "live"
        return f"{n} obstacle{'s' * (n != 1)}: as it is, it runs {how}" if n else "was not recorded within these calls"

    def _numbers(self) -> Iterator[str]:
        if self.live_ms is None or self.host_ms is None:
            return
        each = f", {1e3 * self.host_ms / self.operators:.1f} µs each" if self.operators else ""
        yield (f"live: {self.live_ms:.2f} ms a call on {self.device}, of which the host is busy {self.host_ms:.2f} ms with "
               f"{self.operators} operators{each}")  # fmt: skip
        if self.replay_ms is not None:
            yield f"a replay: {self.replay_ms:.2f} ms, {self.live_ms / self.replay_ms:.2f} times as fast (measured)"
            if self.replay_ms > self.live_ms:
                gpu = "; on a GPU it may be otherwise" if self.device == "cpu" else ""
                yield f"that is slower: pg.record measures this as well, and lets such a recording go{gpu}"
        elif self.obstacles and self.pieces:
            n, most, total = len(self.pieces), max(self.pieces), sum(self.pieces)
            now = f". Now they cut it into {n} pieces; the longest has {most / total:.0%} of them" if n > 1 else ""
            yield f"with the obstacles out of the way: one recording of about {total} operators{now}"
            yield (f"expected then, not measured: a replay saves most of these {self.host_ms:.2f} ms (Python, autograd, "
                   "calling operators one by one); what they compute remains")  # fmt: skip
        if self.cut_ms is not None and not self.records:
            yield (f'with fallback="split", as it is: {self.cut_ms:.2f} ms, {self.live_ms / self.cut_ms:.2f} times as fast '
                   "(measured)")  # fmt: skip


def _characters(source: str, column: int) -> int:
    """A column in bytes, as code has it, in characters."""
    return column if column < 0 else len(source.encode()[:column].decode(errors="ignore"))


def _short(file: str) -> str:
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative
