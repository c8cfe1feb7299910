"""Signatures that do not come again: nearly every call has one of its own, and none is worth a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..call.differences import differing
from ..call.signature import Call, Key
from ..errors import Refusal
from ..guards.followed_numbers import Following
from ..python.origin import users_line
from ..values.numbers import base_of
from ..values.pytree_nodes import Node
from ..values.pytree_paths import parting, path_to
from ..values.wording import Naming

__all__ = ["Novelty", "difference", "ever_new", "values_that_differ"]


_UNREPEATED = 64  # signatures that never come again...
_NEARLY = 3  # ...among so many times as many calls
_KINDS = 64  # of calls that differ by more than numbers, of which the last ones are remembered


_OF_NUMPY = 3  # parts of the key of a number of NumPy's (see `plain_key`)


class Novelty:
    """Counts the new signatures of one function."""

    def __init__(self) -> None:
        self._unrepeated = 0
        self._counted_from = 0  # the function's calls then
        self._last_of: dict[object, Key] = {}  # of calls that differ from each other by numbers alone, the last one
        self._differs = ""  # how the last one differs from the one before

    def reset(self, calls: int) -> None:
        """Count anew; the function has had so many `calls`."""
        self._unrepeated, self._counted_from = 0, calls

    def note(self, call: Call, calls: int, naming: Naming, following: Following) -> Refusal | None:
        """Count one that comes for the first time; refuse it where nearly every call has one of its own. Numbers are to be
        followed that differ from call to call."""
        self._unrepeated += 1
        last = self._last_like(call)
        self._differs = difference(last, call, naming) if last is not None else ""
        following.want_arguments(values_that_differ(last, call))
        if calls - self._counted_from > _NEARLY * max(self._unrepeated, _UNREPEATED):
            self._unrepeated, self._counted_from = 1, calls
        if self._unrepeated <= _UNREPEATED or not self._differs:
            return None
        return ever_new(self._differs, users_line())

    def _last_like(self, call: Call) -> Key | None:
        """The last call of this kind; the last of all where there was none. Kinds may take turns, each with other numbers."""
        kind = _but_for_numbers(call.key)
        last: Key | None = self._last_of.pop(kind, None) or next(reversed(self._last_of.values()), None)
        self._last_of[kind] = call.key
        if len(self._last_of) > _KINDS:
            del self._last_of[next(iter(self._last_of))]
        return last

    def repeats(self) -> None:
        """One of them comes for the second time."""
        self._unrepeated = max(0, self._unrepeated - 1)

    def passed(self, calls: int) -> None:
        """So many calls were not looked at."""
        self._counted_from += calls

    def explain(self, calls: int) -> str | None:
        """A line for `explain`."""
        if self._unrepeated <= 2 or not self._differs:
            return None
        return (
            f"{self._unrepeated} of the last {calls - self._counted_from} calls had a signature of their own: {self._differs}"
        )


_AS_TENSOR = (
    "pass numbers as tensors, torch.tensor(n), and leave out what is only printed; or pass a bool, where it decides a branch"
)
_PAD = "pad it to a few shapes: pg.record(f, shapes={...})"
_ONLY = "pass only what the function reads of it"
_OUTSIDE = "read the string outside, and pass what the function makes of it"


def ever_new(differs: str, where: str = "") -> Refusal:
    """Why calls run live that each differ so from the one before."""
    value, shape, text = (differs.startswith(f"another {kind}") for kind in ("value", "shape", "string"))
    remedy = _AS_TENSOR if value else _PAD if shape else _OUTSIDE if text else _ONLY
    return Refusal(f"is called with {differs} nearly each time", remedy, where)


def difference(key: Key, call: Call, naming: Callable[[Sequence[Any]], str]) -> str:
    """The first difference between this call and one with that key."""
    for i in differing(key, call) or ():
        leaf = call.leaves[i]
        kind = "shape or kind" if isinstance(leaf, torch.Tensor) else "string" if type(leaf) is str else "value"
        return f"another {kind} of `{naming(path_to(call.shape, i))}`"
    way, *_ = parting(key[0], call.shape)
    return f"another length or structure of `{naming(way)}`" if len(way) > 1 else "arguments of another structure"


def values_that_differ(key: Key | None, call: Call) -> list[tuple[Node | None, int]]:
    """The places of numbers, and of strings, if a call differs from one with that key by these alone."""
    if key is None or key[0] != call.key[0] or key[2:] != call.key[2:]:
        return []
    differing = [(i, a, b) for i, (a, b) in enumerate(zip(key[1], call.key[1], strict=True)) if a != b]
    texts = _texts(call.key)
    followed = all(_is_number(x) or i in texts for i, *both in differing for x in both)
    return [(call.shape, i) for i, *_ in differing] if followed else []


def _is_number(leaf: object) -> bool:
    """Whether this stands in a key for a number that could be followed."""
    return type(leaf) is tuple and 1 < len(leaf) <= _OF_NUMPY and base_of(leaf[0]) is not None


def _texts(key: Key) -> set[int]:
    """The places of strings: perhaps nobody reads them."""
    return {i for i, leaf in enumerate(key[1]) if type(leaf) is tuple and leaf[0] is str}


def _but_for_numbers(key: Key) -> object:
    texts = _texts(key)
    shape, leaves, *rest = key
    return shape, tuple([leaf[:1] if _is_number(leaf) or i in texts else leaf for i, leaf in enumerate(leaves)]), *rest
