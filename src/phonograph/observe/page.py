"""The page: what all recorded functions of this process did, written as one HTML file that loads nothing and runs nothing.

There is no script in it, and its content security policy allows none. What comes from the program (names, reasons, source) goes
through `markup.py`, which escapes it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib.resources import files
from operator import or_
from statistics import median
from string import Template

import torch

from ..devices.base import Device
from ..engine.ledger import Ledger, Made
from ..engine.timeline import CAPTURED, LIVE, REPLAYED, Moment
from ..memory.spans import Spans
from ..version import __version__
from .functions import one_function
from .markup import Markup, tag, together
from .pictures import calls, memory
from .trace import Replays
from .wording import counted, mebibytes, seconds, times

__all__ = ["Page"]

_AT_ONCE = 20  # rows
_COMPARED = 3  # calls of each kind


@dataclass(frozen=True)
class Page:
    """Of these functions; `replays`: what a trace has shown, by the labels of recordings."""

    ledgers: Sequence[Ledger]
    replays: Mapping[str, Replays]

    def __str__(self) -> str:
        template = Template(files(__package__).joinpath("template.html").read_text(encoding="utf-8"))
        return template.substitute(title="phonograph: what was recorded", body=together(self._body()))

    @cached_property
    def _kept(self) -> list[Made]:
        """The recordings that are still there."""
        return [made for ledger in self.ledgers for made in ledger.recordings if made.player is not None]

    @cached_property
    def _moments(self) -> dict[Ledger, list[Moment]]:
        """The calls of those of which some were timed, the busiest first."""
        found = {ledger: moments for ledger in self.ledgers if (moments := ledger.moments)}
        return dict(sorted(found.items(), key=lambda entry: -sum(max(m.host, m.device) for m in entry[1])))

    @cached_property
    def _devices(self) -> list[Device]:
        return sorted({*(d for a in self.ledgers for d in a.devices)}, key=lambda device: str(device.torch_device))

    def _body(self) -> Iterator[Markup]:
        yield tag("h1", "What was recorded")
        yield tag("p", self._where(), class_="faint")
        if not self.ledgers:
            yield tag("p", "Nothing was recorded: no function or module of this process went through pg.record.")
            return
        yield tag("div", *self._tiles(), class_="tiles")
        yield from self._timeline()
        yield from self._side_by_side()
        yield from self._memory()
        yield tag("h2", "Functions")
        yield from (one_function(ledger, self.replays) for ledger in self.ledgers)

    def _where(self) -> str:
        found = [torch.cuda.get_device_name(d.torch_device) for d in self._devices if d.torch_device.type == "cuda"]
        hardware = ", ".join(dict.fromkeys(found)) or platform.machine()
        return (f"{time.strftime('%Y-%m-%d %H:%M')}, {hardware}, phonograph {__version__}, torch {torch.__version__}, "
                f"Python {platform.python_version()}")  # fmt: skip

    def _tiles(self) -> Iterator[Markup]:
        stats = [ledger.stats for ledger in self.ledgers]
        done, played = sum(s.calls for s in stats), sum(s.replayed for s in stats)
        capturing = [m.host for moments in self._moments.values() for m in moments if m.kind == CAPTURED]
        yield _tile(f"{done:,}", f"calls of {counted(len(stats), 'function')}")
        yield _tile(f"{played / done:.1%}" if done else "0%", f"replayed: {counted(played, 'call')}")
        yield _tile(f"{sum(s.live for s in stats):,}", "ran live")
        yield _tile(f"{len(self._kept):,}", f"recordings kept, of {sum(s.recorded for s in stats):,} made")
        if capturing:
            yield _tile(seconds(sum(capturing)), "for the calls that were recorded")
        yield _tile(mebibytes(sum(device.pool_bytes for device in self._devices)), "in the pool")

    def _timeline(self) -> Iterator[Markup]:
        if not self._moments:
            return
        ends = max(m.begun + max(m.host, m.device) for moments in self._moments.values() for m in moments)
        yield tag("h2", "Calls")
        keys = [part for kind in (LIVE, CAPTURED, REPLAYED) for part in (tag("span", class_=f"key {kind}"), kind)]
        yield tag("p", "Each function's calls over time, as far as they were timed:", *keys, class_="faint")
        axis = tag("div", tag("span", "0"), tag("span", seconds(ends / 2)), tag("span", seconds(ends)), class_="axis")
        rows = [_row(ledger.name, calls(moments, max(ends, 1e-9))) for ledger, moments in self._moments.items()]
        yield from _first(rows, lambda some: tag("div", *some, tag("div"), axis, class_="rows"))

    def _side_by_side(self) -> Iterator[Markup]:
        rows = [row for ledger, moments in self._moments.items() if (row := _compared(ledger.name, moments)) is not None]
        if not rows:
            return
        head = tag("tr", *(tag("th", x) for x in ("function", "live", "replayed", "faster")))
        yield tag("h2", "Live and replayed")
        yield tag("p", "Medians; the factor is that of the medians or of the best calls, whichever is less. What counts is for "
                  "how long a call keeps the program: host or device, whichever is longer.", class_="faint")  # fmt: skip
        yield from _first(rows, lambda some: tag("div", tag("table", head, *some), class_="wide"))

    def _memory(self) -> Iterator[Markup]:
        for device in self._devices:
            own = [made for made in self._kept if made.device == device.torch_device]
            own.sort(key=lambda made: -made.footprint.nbytes)
            if own:
                pool = reduce(or_, (made.footprint for made in own))
                apart = sum(made.footprint.nbytes for made in own)
                yield tag("h2", f"Memory on {device.torch_device}")
                yield tag("p", f"The pool has {mebibytes(device.pool_bytes)}, and recordings work in {mebibytes(pool.nbytes)}. "
                          f"If they did not share that, they would need {mebibytes(apart)}.", class_="faint")  # fmt: skip
                yield from _first([_in_pool(made, pool) for made in own], lambda some: tag("div", *some, class_="rows"))


def _first(rows: Sequence[Markup], around: Callable[..., Markup]) -> Iterator[Markup]:
    """As many as a reader looks at; the others where they are asked for."""
    yield around(rows[:_AT_ONCE])
    if len(rows) > _AT_ONCE:
        yield tag("details", tag("summary", f"{len(rows) - _AT_ONCE:,} more"), around(rows[_AT_ONCE:]))


def _tile(number: str, what: str) -> Markup:
    return tag("div", tag("b", number), tag("span", what, class_="faint"), class_="tile")


def _row(name: str, drawing: Markup, *more: Markup) -> Markup:
    return together([tag("div", tag("span", name, title=name), *more, class_="name"), tag("div", drawing, class_="right")])


def _in_pool(made: Made, pool: Spans) -> Markup:
    size = tag("div", mebibytes(made.footprint.nbytes), class_="faint")
    return _row(made.label, memory(made.footprint, pool), size)


def _compared(name: str, moments: Sequence[Moment]) -> Markup | None:
    """One function's row of the comparison."""
    live, played = (_taken(moments, kind) for kind in (LIVE, REPLAYED))
    if not live or not played:
        return None
    enough = min(len(live), len(played)) >= _COMPARED and min(played) > 0
    faster = times(min(median(live) / median(played), min(live) / min(played))) if enough else "too few calls"
    return tag("tr", tag("td", name), _median(live), _median(played), tag("td", faster))


def _median(taken: Sequence[float]) -> Markup:
    said = f"best {seconds(min(taken))}, {counted(len(taken), 'call')}"
    return tag("td", tag("div", seconds(median(taken))), tag("div", said, class_="faint"))


def _taken(moments: Sequence[Moment], kind: str) -> list[float]:
    return [max(m.host, m.device) for m in moments if m.kind == kind]
