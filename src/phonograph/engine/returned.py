"""What a captured call has returned, taken apart: new containers and objects, and what in them was there before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves, Thing
from ..python.identity import identity
from ..values.container_edits import Edit
from ..values.pytree import Flattener, can_be_opened
from ..values.pytree_nodes import Node

__all__ = ["Given", "GivenText", "Returned"]


class Given(NamedTuple):
    """As a leaf of a result: the caller's own container of this number, or, where that is less than 0, a thing that outlives
    the call."""

    number: int
    thing: Thing = None


class GivenText(NamedTuple):
    """As a leaf of a result: the string that the caller has given at this place."""

    place: int


_NONE: Mapping[int, object] = MappingProxyType({})


class Returned(NamedTuple):
    """A result: its shape, its leaves, and the containers in it. With what the call has done to its arguments (`edits`) it is
    (the result, [the new values for each]), and with the gradients that arguments have `gained`, (that, [these])."""

    tree: object
    shape: Node | None
    leaves: Leaves
    containers: Leaves
    flattener: Flattener
    edits: tuple[Edit, ...] = ()
    gained: tuple[int, ...] = ()
    turned: tuple[int, ...] = ()
    """Arguments that require a gradient from then on."""
    written: tuple[int, ...] = ()
    """Of the caller's own containers, the tensors that it has written: their versions move on."""

    @classmethod
    def of(cls, tree: object, edits: Sequence[Edit], gained: Sequence[int], turned: tuple[int, ...], built: Sequence[object],
           outer: Set[int], filled: Set[int] = frozenset(), texts: Mapping[int, object] = _NONE) -> Returned:  # fmt: skip
        """Of a call that was given the containers `built`, could reach `outer`, and has put something into those `filled`. What
        stands for the strings that it was given is `texts`, by their places."""
        numbers = {identity(c): i for i, c in enumerate(built)}
        shut = numbers.keys() | filled
        flattener, leaves = Flattener(shut, outer, shares=True), list[object]()
        shape = flattener.flatten(tree, leaves)
        for i, leaf in enumerate(leaves):
            if (place := next((place for place, text in texts.items() if text is leaf), None)) is not None:
                leaves[i] = GivenText(place)
                continue
            number = numbers.get(identity(leaf), -1)
            if number >= 0 or (identity(leaf) in outer and can_be_opened(leaf)):
                leaves[i] = Given(number, None if number >= 0 else leaf)
        written = tuple([i for i, c in enumerate(built) if isinstance(c, torch.Tensor) and c._version])
        return cls(tree, shape, leaves, flattener.containers, Flattener(shut, outer, shares=True), tuple(edits), tuple(gained),
                   turned, written)  # fmt: skip

    def all_containers(self) -> Leaves:
        """Those that the call has made, and others."""
        return [*self.containers, *(leaf.thing for leaf in self.leaves if type(leaf) is Given and leaf.number < 0)]

    def again(self) -> Node | None:
        """Its shape, found once more."""
        return self.flattener.flatten(self.tree, [])
