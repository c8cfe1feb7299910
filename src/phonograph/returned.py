"""What a captured call has returned, taken apart: new containers and objects, and what in them was there before."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from .identity import identity
from .trees import Edit, Node, Opening, can_be_opened

__all__ = ["Given", "Returned"]


class Given(NamedTuple):
    """As a leaf of a result: the caller's own container of this number, or, where that is less than 0, a thing that outlives
    the call."""

    number: int
    thing: Any = None


class Returned(NamedTuple):
    """A result: its shape, its leaves, and the containers in it. With what the call has done to its arguments (`edits`) it is
    (the result, [the new values for each])."""

    tree: Any
    shape: Node | None
    leaves: list[Any]
    containers: list[Any]
    opening: Opening
    edits: tuple[Edit, ...] = ()

    @classmethod
    def of(cls, tree: Any, edits: Sequence[Edit], built: Sequence[Any], outer: Set[int]) -> Returned:
        """Of a call that was given the containers `built`, and could reach `outer`."""
        numbers = {identity(c): i for i, c in enumerate(built)}
        opening, leaves = Opening(numbers, outer), list[Any]()
        shape = opening.flatten(tree, leaves)
        for i, leaf in enumerate(leaves):
            number = numbers.get(identity(leaf), -1)
            if number >= 0 or (identity(leaf) in outer and can_be_opened(leaf)):
                leaves[i] = Given(number, None if number >= 0 else leaf)
        return cls(tree, shape, leaves, opening.containers, Opening(numbers, outer), tuple(edits))

    def again(self) -> Node | None:
        """Its shape, found once more."""
        return self.opening.flatten(self.tree, [])
