"""Counts in buffers: one number in a tensor outside, which the call reads on the host and writes (``self.step += 1``).

What the call reads of such a count is worked out of what lies there when it begins, by the operators between (`recipes.py`): so
it is followed as other numbers are that change from call to call (`guards/followed_numbers.py`). A replay reads the count
before it runs.

Which tensors are counts, shows a capture that is refused because of one: the next follows it (`Refusal.counts`). If something
else writes it than operators on counts and on what holds the same in each replay, what is read later is not followed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch

from .._torch.dynamic import Args, Kwargs
from .._torch.modes import without_modes
from .._torch.operators import OpOverload
from .._torch.tensors import has_memory, is_ordinary, storage_id
from ..guards.hyperparameters import Dials
from ..guards.tensor_numbers import at_tensor, is_number, spot_in
from ..python.holders import Holder
from ..values.counters import Followed, Tally
from ..values.formulas import Worked
from ..values.host_scalars import READS_NUMBER, site_of
from .fixed_values import FixedValues
from .recipes import Count, Odd, Recipe, Recipes

__all__ = ["NumbersInTensors"]


class NumbersInTensors(FixedValues):
    """Follows those of one call."""

    device: torch.device
    reads_counts = False
    """Whether replays can read them before they run."""
    values_here = False
    """Whether tensors have their values while a call is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.may_follow: Callable[[tuple[int, object]], bool] = lambda at: False
        """Whether the next capture could follow the number there."""
        self._spots: dict[int, int] = {}  # by storages: the places of those that are followed
        self._recipes: Recipes | None = None
        self._read = 0

    def follow(self, dials: Dials) -> None:
        super().follow(dials)
        for i, spot in enumerate(dials.spots if self.reads_counts else ()):
            if spot.memory is not None and spot.memory.device == self.device:
                self._spots[spot.memory._cdata] = i
        self.moving = frozenset(self._spots)
        if self._spots:
            self._recipes = self._recipes or Recipes(self.device, nullcontext)
            dials.reading = self.read_as_followed

    # -- what is made of counts

    def may_count(self, key: int) -> bool:
        return self.reads_counts and key in self.outside and key not in self.slot_ids and self._count_at(key) is not None

    def _count_at(self, key: int) -> torch.Tensor | None:
        there = self._there(key) if self.known.get(key) else ()
        return next((t for t in there if t.device == self.device and is_number(t)), None)

    def writes(self, t: torch.Tensor, version: int | None = None) -> None:
        if (reader := self._readers.get(storage_id(t))) is not None:
            reader.counts = self.counted({storage_id(t)})
        super().writes(t, version)

    def makes(self, func: OpOverload, args: Args, kwargs: Kwargs, out: object, of: frozenset[int]) -> None:
        noted = self._recipes is None or self._recipes.note(func, args, kwargs, out, self.known_as)
        if noted or self.values_here or any(self._moves(key) for key in of):
            super().makes(func, args, kwargs, out, of)

    def _moves(self, key: int) -> bool:
        """Whether this storage outside holds another number in each replay, or at another time of the call."""
        return key in self.moving or not self._stays(key)

    def known_as(self, key: int) -> int | Count | torch.Tensor | None:
        """What lies on this storage, for a recipe (`Known`)."""
        if key in self._spots and (t := self._count_at(key)) is not None:
            return Count(self._spots[key], t.dtype)
        outside, name = self._there(key), self.name_of(key)
        if outside and key not in self.slot_ids:
            return outside[0]
        return name if isinstance(name, int) else None

    def held(self, name: str, tensors: Sequence[torch.Tensor], where: str) -> Holder:
        place, key = super().held(name, tensors, where), storage_id(tensors[0])
        if not self.may_count(key) or (t := self._count_at(key)) is None:
            return place
        spot = spot_in(name, t)
        return self.followed_later(place._replace(read=lambda: (spot.get(),), restore=lambda _: None), name, t)

    def followed_later(self, place: Holder, name: str, t: torch.Tensor) -> Holder:
        """This place, which once it has changed shows where the number lies that is followed then."""
        spot = spot_in(name, t)
        return place._replace(spot=lambda i, now: spot)

    # -- who reads it

    def counted(self, keys: Set[int]) -> tuple[tuple[tuple[int, object], str], ...]:
        """Where the numbers lie that a later capture could follow, of these storages; none if not all can be."""
        tensors = [self._count_at(key) if self.may_count(key) else None for key in keys]
        found = [(at_tensor(t), self.known[key]) for key, t in zip(keys, tensors, strict=True) if t is not None]
        return tuple(found) if len(found) == len(keys) and all(self.may_follow(at) for at, _ in found) else ()

    def read_as_followed(self, t: object, name: str, frame: FrameType) -> Any:
        """What stands for the number in this tensor, if it is made of counts, for who reads it in this frame by a function of
        this name; None if it is not followed.

        Raises:
            Refusal: it will be.
        """
        made_of = self._moving_in(t)
        if made_of is None or not isinstance(t, torch.Tensor) or (self.decisive and site_of(frame) in self.decisive):
            return None
        of, moving = made_of
        if unknown := moving - self.moving:
            if not (counts := self.counted(unknown)):
                return None
            refusal = self.told(READS_NUMBER.name(), frame)
            refusal.counts = counts
            raise refusal
        self.relies_on(of - moving, name, frame)
        self.touched |= moving
        return self._followed_number(t, name)

    def _moving_in(self, t: object) -> tuple[frozenset[int], frozenset[int]] | None:
        """What this tensor is made of, and which of that are counts; None if none is."""
        if not (self.reads_counts and isinstance(t, torch.Tensor) and is_ordinary(t) and t.numel() == 1 and has_memory(t)):
            return None
        of = self.fixed(t)
        if of is None or self.bodies or t.is_conj() or t.is_neg():
            return None
        moving = frozenset(filter(self._moves, of))
        return (of, moving) if moving else None

    def _followed_number(self, t: torch.Tensor, name: str) -> Any:
        dials = self.dials
        assert dials is not None
        assert self._recipes is not None
        try:
            recipe = self._recipes.recipe(READS_NUMBER, (t.detach(),), {}, self.known_as)
        except Odd:
            return None
        formula = Worked(partial(_worked_out, recipe), *[dials.spot(count.place).formula for count in recipe.counts])
        self._read += 1
        with without_modes():
            if self.values_here and not _same(formula(dials.values), READS_NUMBER(t)):
                dials.stray(formula, "is another in a tensor than what is worked out")
        return _CONVERTED.get(name, _as_it_is)(dials.stands(("read", self._read), formula))


def _worked_out(recipe: Recipe, *numbers: Any) -> Any:
    """What is made of these; what operators raise there, the call will raise."""
    try:
        return recipe(*numbers)
    except RuntimeError as e:
        raise ArithmeticError(str(e)) from e


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b)) and (type(a) is not float or _bits(a) == _bits(b))


def _bits(x: float) -> bytes:
    return struct.pack("d", x)


def _as_it_is(number: Any) -> Any:
    return number


def _float(number: Any) -> Any:
    """What `float` makes of a tensor is a plain number."""
    return float(number.as_plain("is converted (float)") if isinstance(number, Followed) else number)


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool, "__int__": int, "__index__": lambda number: number.__index__(), "__float__": _float,
    "as int": lambda number: number,
    "as float": lambda number: number.as_float() if type(number) is Tally else number if isinstance(number, Followed)
    else float(number),
}  # fmt: skip
