"""Places that hold values: a dictionary, an object's attributes, the cells of a closure. Each can be read again at C speed, and
be put back as it was. Reading one never runs the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._torch.dynamic import Reading, Table, Thing
from .._torch.native import Fact

__all__ = ["Contents", "Find", "Holder", "Part", "Spot", "kept", "key_label"]


class Spot(NamedTuple):
    """Where one value of a place lies: in which object (by identity), and under which key; how to read and replace it, and how
    it is called. Of an attribute, to which only its name leads: the class of the object. Of a number in a
    tensor: its memory, which the call may write by itself. Of one in a tuple or list: that `Row`."""

    at: tuple[int, object]
    get: Callable[[], Any]
    put: Callable[[Any], None]
    kind: type | None = None
    name: str = ""
    memory: torch.UntypedStorage | None = None
    row: Any = None


Find = Callable[[int, Reading], Spot]


class Part(NamedTuple):
    """A part of a place: how to read it now, how to take it out of what was read of the whole, how to name its values, and
    where each of them lies."""

    read: Callable[[], Reading]
    of: Callable[[Reading], Reading]
    named: Callable[[str, int, Reading], str]
    spot: Find | None = None


class Contents(NamedTuple):
    """Of a place that is all that a list, a dictionary or a set holds: which one it is `now`, and how to let it be another."""

    now: Callable[[], Any]
    move: Callable[[Any], None]


class Holder(NamedTuple):
    """One place outside the arguments that holds values.

    `read` gives the values it holds now; `restore` puts such values back. `watched` says that the witness hears of
    changes, so that it need not be read before each replay; `dial`, that it is this (group identity, key) of an optimizer.
    `named` names the i-th of the values read. A recording may rely on a `part` of the place only. It is all that the dictionary
    of `owner` holds, or the `contents` of a container; it has these `tables`, dictionaries that are no object's attributes. It
    lies `behind` a door (`doors.Room`), and need not be read while that is shut. `spot` finds where the i-th of the values read
    lies. All of it is `inside` these dictionaries, if it is known of any: while they have not changed, it has not. Nor has it
    while these `facts` are what they were. The values read are those of `variables`: a cell, or a dictionary
    of global variables, and a name.
    """

    path: str
    read: Callable[[], Reading]
    restore: Callable[[Reading], None]
    watched: bool = False
    named: Callable[[str, int, Reading], str] | None = None
    dial: tuple[int, str] | None = None
    part: Part | None = None
    owner: object = None
    contents: Contents | None = None
    tables: Callable[[], Iterable[Table]] = tuple
    behind: Thing = None
    spot: Find | None = None
    inside: Callable[[], Sequence[object]] | None = None
    facts: Callable[[], list[Fact]] | None = None
    variables: Sequence[tuple[Thing, str]] = ()

    def label(self, i: int, values: Reading) -> str:
        """A name for the i-th of the values read."""
        return f"{self.path}[{i}]" if self.named is None else self.named(self.path, i, values)


def kept(path: str, read: Callable[[], Reading], inside: Sequence[object] | None = None) -> Holder:
    """What a capture does not undo: code, classes, hooks of all modules."""
    return Holder(path, read, lambda _: None, inside=None if inside is None else lambda: inside)


def key_label(key: object) -> str:
    """A dictionary key in a name for people. (Never the repr of a tensor: it would read its values.)"""
    return repr(key)[:40] if isinstance(key, (int, float, tuple, bytes)) else type(key).__name__
