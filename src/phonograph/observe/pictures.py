"""Drawings, as SVG without a script: a function's calls over time, and a recording's place in the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from ..engine.timeline import CAPTURED, LIVE, REPLAYED, Moment
from ..memory.spans import Spans
from .markup import Markup, tag
from .wording import counted, seconds

__all__ = ["calls", "memory"]

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
