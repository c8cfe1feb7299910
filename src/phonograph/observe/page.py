"""The page that `pg.report` writes: what all recorded functions of this process did, in one HTML file that loads nothing and
runs nothing.

There is no script in it, and its content security policy allows none. What comes from the program (names, reasons, source) goes
through `markup.py`, which escapes it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from importlib.resources import files
from itertools import accumulate, groupby
from operator import or_
from pathlib import Path
from statistics import median
from string import Template
from types import TracebackType
from typing import NamedTuple

import torch

from ..capture.origins import MODULE, Origin
from ..devices.base import Device
from ..engine.ledger import Ledger, Made, asking, ledgers
from ..engine.timeline import CAPTURED, LIVE, REPLAYED, Moment
from ..errors import Refusal, Unpadded
from ..memory.spans import Spans
from ..reasons import code_of
from ..version import __version__
from .markup import Markup, counted, excerpt, mebibytes, seconds, tag, times, together
from .trace import Replays, load, measured

__all__ = ["Page", "Place", "Report", "calls", "memory", "one_function", "tree"]


class Report:
    """One page, in a file. As a context manager it times the calls in its block, and writes the page again at its end."""

    def __init__(self, path: str | os.PathLike[str], trace: str | os.PathLike[str] | None = None) -> None:
        self._path, self._trace = Path(path), Path(trace) if trace is not None else None
        _check_folder(self._path)

    def write(self) -> None:
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # what is still on its way is not timed yet
        replays = measured(load(self._trace)) if self._trace is not None and self._trace.exists() else {}
        _replace(self._path, str(Page(ledgers(), replays)))

    def __enter__(self) -> Report:
        asking(self, True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.write()
        finally:
            asking(self, False)


def _check_folder(path: Path) -> None:
    """Raise unless a page can be written there. (What it replaces need not be writable: it is moved in its place.)"""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"pg.report({str(path)!r}): there is no folder {folder}; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"pg.report({str(path)!r}): that is a folder; give the name of a file in it")
    if not os.access(folder, os.W_OK | os.X_OK) and (path.is_file() or not path.exists()):
        raise PermissionError(f"pg.report({str(path)!r}): the folder {folder} is not writable, and the page is written in it "
                              "before it is moved into place")  # fmt: skip


def _replace(path: Path, text: str) -> None:
    """Write a file beside it, and move that in its place: where writing fails, as on a full disk, the old page stays."""
    if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


# -- the page


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


# -- one function: why it ran live, with the lines of its source, and its recordings with their modules


def one_function(ledger: Ledger, replays: Mapping[str, Replays]) -> Markup:
    """All of one function."""
    s = ledger.stats
    made = counted(s.recorded, "recording")
    said = f" {counted(s.calls, 'call')}: {s.live:,} live, {s.replayed:,} replayed; {made} made"
    parts = [tag("summary", ledger.name, tag("span", said, class_="faint"))]
    parts += [_reason(reason, n, ledger.reasons.get(reason)) for reason, n in s.refusals.items()]
    parts += [tag("p", f"Timed beside its recording: {counted(s.timed, 'live call')}.")] if s.timed else []
    parts += [tag("p", remark) for remark in ledger.remarks]
    parts += [_recording(made, replays.get(made.label)) for made in ledger.recordings]
    few = {"open": ""} if s.refusals else {}
    return tag("details", *parts, class_="function", **few)


def _reason(reason: str, n: int, refusal: Refusal | None) -> Markup:
    code = code_of(reason)
    what = "Not padded" if isinstance(refusal, Unpadded) else f"Ran live {counted(n, 'time')}"
    said = [tag("p", tag("b", what), f": {reason}{f' [{code}]' if code else ''}")]
    if refusal is not None and refusal.where:
        said += [tag("p", "at ", tag("code", refusal.where), class_="faint"), excerpt(refusal.where)]
    if refusal is not None and refusal.remedy:
        said += [tag("p", "What to do: ", refusal.remedy)]
    return tag("div", *said, class_="reason")


def _recording(made: Made, replays: Replays | None) -> Markup:
    player, lines = made.player, made.said.splitlines()
    played = f"played {player.played:,} ×" if player is not None else "gone by now"
    root = tree(made.origins, replays.seconds if replays is not None else {})
    timed = f"Time on the device is that of one replay, the mean of {replays.number:,} in the trace." if replays else ""
    return together([
        tag("h3", f"{made.label}: {counted(made.operators, 'operator')} on {made.device}, {played}"),
        tag("p", "; ".join(line.strip() for line in lines[1:]), class_="faint"),
        tag("p", timed, class_="faint") if timed else Markup(),
        tag("div", *_places(root, root.seconds), class_="places"),
    ])  # fmt: skip


def _places(of: Place, whole: float) -> Iterator[Markup]:
    for place in of.inner.values():
        counts = " and ".join(f"{n:,} {way}" for n, way in ((place.forward, "forward"), (place.backward, "backward")) if n)
        cells = [tag("span", place.name, class_="name"), tag("span", counts, class_="faint counts"), _share(place, whole)]
        if not place.inner:
            yield tag("div", *cells, class_="leaf")
            continue
        most = {"open": ""} if len(of.inner) == 1 or of.name == "" else {}
        yield tag("details", tag("summary", *cells), *_places(place, whole), **most)


def _share(place: Place, whole: float) -> Markup:
    if not whole:
        return tag("span", class_="share")
    bar = tag("meter", min="0", max="1", value=f"{place.seconds / whole:.4f}")
    return tag("span", seconds(place.seconds), bar, class_="share")


# -- the modules that a recording's operators come from, as a tree, and what is each one's: operators, time on the device


_UNKNOWN, _COMPILED = "outside of modules", "launched without an operator (compiled code)"


@dataclass
class Place:
    """A module with those in it, an optimizer's step, or a line."""

    name: str
    forward: int = 0
    backward: int = 0
    """Operators of its own and of what is in it."""
    seconds: float = 0.0
    """On the device, of one replay. Of its own, and of what is in it."""
    inner: dict[str, Place] = field(default_factory=dict)

    def add(self, path: Sequence[str], origin: Origin, operators: int, seconds: float) -> None:
        self.forward += operators * (not origin.backward)
        self.backward += operators * origin.backward
        self.seconds += seconds
        if path:
            self.inner.setdefault(path[0], Place(path[0])).add(path[1:], origin, operators, seconds)


def tree(segments: Iterable[Sequence[tuple[int, Origin]]], seconds: Mapping[Origin, float]) -> Place:
    """Of all places of one recording."""
    root = Place("")
    for segment in segments:
        done = 0
        for end, origin in segment:
            root.add(_path(origin), origin, end - done, 0.0)
            done = end
    for origin, took in seconds.items():
        root.add(_path(origin), origin, 0, took)
    return root


def _path(origin: Origin) -> list[str]:
    if origin.kind == MODULE:
        return origin.place.split(".")
    return [origin.place or (_UNKNOWN if origin.operator else _COMPILED)]


# -- drawings, as SVG without a script: calls over time, and a recording's place in the pool


_WIDTH = 1000.0
_LEAST = 2.5  # so that the shortest call is seen
_ORDER = (REPLAYED, LIVE, CAPTURED)  # what is rare is drawn over what is not


class _Stretch(NamedTuple):
    """Calls of one kind, between which there is nothing to be seen."""

    begins: float
    ends: float
    moments: list[Moment]


def calls(moments: Iterable[Moment], whole: float) -> Markup:
    """The calls of one function, on an axis of so many seconds."""
    by_kind = groupby(sorted(moments, key=lambda m: (_ORDER.index(m.kind), m.begun)), lambda m: m.kind)
    drawn = [_drawn(kind, one) for kind, some in by_kind for one in _stretches(some, _WIDTH / whole)]
    return tag("svg", *drawn, view_box=f"0 0 {_WIDTH:.0f} 20", aspect="none", class_="calls", role="img")


def _stretches(moments: Iterable[Moment], scale: float) -> list[_Stretch]:
    found: list[_Stretch] = []
    for m in moments:
        begins, ends = m.begun * scale, (m.begun + max(m.host, m.device)) * scale
        if found and begins <= found[-1].ends + _LEAST:
            found[-1].moments.append(m)
            found[-1] = found[-1]._replace(ends=max(ends, found[-1].ends))
        else:
            found.append(_Stretch(begins, ends, [m]))
    return found


def _drawn(kind: str, one: _Stretch) -> Markup:
    first, last = one.moments[0], one.moments[-1]
    took = max(last.host, last.device)
    span = f"from {seconds(first.begun)} to {seconds(last.begun + took)}"
    said = f"{counted(len(one.moments), 'call')} {kind}, {span}"
    width = max(_LEAST, one.ends - one.begins)
    x = min(one.begins, _WIDTH - width)
    return tag("rect", tag("title", said), x=f"{x:.1f}", y=0, width=f"{width:.1f}", height=20, class_=kind)


def memory(footprint: Spans, pool: Spans) -> Markup:
    """The bytes of the pool that playing a recording overwrites. What nobody uses between is left out."""
    pieces = [*pool]
    starts = dict(zip([start for start, _ in pieces], accumulate([n for _, n in pieces], initial=0), strict=False))
    scale = _WIDTH / max(1, pool.nbytes)
    drawn = [_bar(*row) for row in _merged(_placed(footprint, pieces, starts), scale)]
    return tag("svg", *drawn, view_box=f"0 0 {_WIDTH:.0f} 20", aspect="none", class_="memory", role="img")


def _placed(footprint: Spans, pieces: Sequence[tuple[int, int]], starts: dict[int, int]) -> Iterable[tuple[int, int]]:
    left = iter(pieces)
    at, nbytes = next(left, (0, 0))
    for start, length in footprint:
        while start >= at + nbytes:
            at, nbytes = next(left)
        yield starts[at] + start - at, length


def _merged(places: Iterable[tuple[int, int]], scale: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, length in places:
        begins, ends = start * scale, (start + length) * scale
        if found and begins <= found[-1][1] + 1:
            found[-1] = found[-1][0], ends
        else:
            found.append((begins, ends))
    return found


def _bar(begins: float, ends: float) -> Markup:
    return tag("rect", x=f"{begins:.1f}", y=0, width=f"{max(1.0, ends - begins):.1f}", height=20)
