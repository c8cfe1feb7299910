"""One function's part of the page: why it ran live, with the lines of its source, and its recordings with their modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..engine.ledger import Ledger, Made
from ..errors import Refusal, Unpadded
from ..reasons import code_of
from .excerpts import excerpt
from .markup import Markup, tag, together
from .places import Place, tree
from .trace import Replays
from .wording import counted, seconds

__all__ = ["one_function"]


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
