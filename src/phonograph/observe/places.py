"""A tree of the modules that a recording's operators come from, and of what is each one's: operators, time on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..capture.origins import MODULE, Origin

__all__ = ["Place", "tree"]

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
