"""Numbers that a call advances, and by which it may go on: ``self.total_it += 1``, ``group["k"] = k + 1``.

What a call leaves where such a number was is worked out of what it has found there, and so is each decision that it takes by
it (``if self.total_it % self.policy_freq == 0:``). A capture puts a `Tally` in the place of a whole number: it has the real
value, and remembers the arithmetic that is done with it. Decisions are conditions of the recording, as those by a dial are
(`dials`): each kind of call has a recording of its own. A replay leaves there what the call would have left.

A tally is no `int`, so that no code in C takes it for one: whoever needs one gets the real value, and then it is not followed.
A float that is worked out of it (``beta ** step``) is a dial.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

from .._torch.dynamic import Args, Kwargs
from .formulas import Formula, Worked

__all__ = ["LARGEST", "Followed", "Tally", "are_numbers", "are_plain", "said"]

LARGEST = 2**53  # beyond, a float is not exact


class Followed:
    """What stands for a number, and says by what `formula` that is worked out."""

    __slots__ = ()
    formula: Formula

    @property
    def said(self) -> Any:
        """By which arithmetic with it is the same."""
        raise NotImplementedError


class Tally(Followed):
    """A whole number: its `value` now, and the `formula` by which it is worked out."""

    __slots__ = ("__weakref__", "_key", "dials", "formula", "value")
    __array_ufunc__ = None  # NumPy's numbers leave arithmetic to this

    def __init__(self, dials: Any, key: object, formula: Formula, value: int) -> None:
        self.dials, self._key, self.formula, self.value = dials, key, formula, value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    @property
    def said(self) -> Any:
        return Tally, self._key

    def as_plain(self, why: str) -> int:
        """The number that it stands for, which is not followed then."""
        self.dials.stray(self.formula, why)
        return self.value

    def __bool__(self) -> bool:
        return bool(self.dials.decide((self.said, "__bool__"), self.formula))

    def __hash__(self) -> int:
        return hash(self.as_plain("is looked up"))

    def __copy__(self) -> Tally:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Tally:
        return self

    def __reduce_ex__(self, protocol: object) -> str | tuple[object, ...]:
        return int, (self.as_plain("is copied"),)

    def __array__(self, *args: object, **kwargs: object) -> object:
        return sys.modules["numpy"].asarray(self.as_plain("is given to NumPy"), *args, **kwargs)

    def as_float(self) -> Any:
        """What follows the same number as a float."""
        return _worked(self, "__float__", float)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        """Torch's functions get the real number. (Those that are watched get here only if nothing can be followed in them.)"""
        why = f"is given to {getattr(func, '__name__', func)}"
        return func(*_real(args, why), **_real(kwargs or {}, why))

    def __getattr__(self, name: str) -> object:
        return getattr(self.as_plain("is taken apart"), name)

    def __divmod__(self, other: Any) -> object:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> object:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> object:
        return self if digits is None else round(self.as_plain("is rounded"), digits)


def _real(value: Any, why: str) -> Any:
    """The same with real numbers in the place of tallies."""
    if type(value) is Tally:
        return value.as_plain(why)
    if type(value) in (list, tuple):
        return type(value)([_real(v, why) for v in value])
    return {k: _real(v, why) for k, v in value.items()} if type(value) is dict else value


def are_numbers(old: object, new: object) -> bool:
    """Whether a number has taken the place of one, or what stands for it."""
    return type(old) in _NUMBERS and (type(new) in _NUMBERS or isinstance(new, Followed))


def are_plain(old: object, new: object) -> bool:
    """Whether a call that leaves this there, where it has found that, has only set a plain value."""
    return are_numbers(old, new) or {type(old), type(new)} <= _PLAIN


_NUMBERS = (int, float)
_PLAIN = frozenset({bool, str, type(None)})


def said(x: object) -> Any:
    """A number, or for what it stands: by which arithmetic is the same."""
    return x.said if isinstance(x, Followed) else (type(x), repr(x))


def _plain(x: object) -> bool:
    """Whether arithmetic of a tally with this is a formula."""
    return isinstance(x, Followed) or type(x) in (int, float, bool)


def _formula(x: object) -> object:
    return x.formula if isinstance(x, Followed) else x


def _worked(tally: Tally, name: str, function: Callable[..., object], *others: object, swapped: bool = False) -> object:
    """The result of an operation, with the formula of it."""
    of = [tally, *others][:: -1 if swapped else 1]
    formula = Worked(function, *map(_formula, of))
    key = (tally.said, name, *map(said, others))
    tally.dials.may_fail(key, formula)
    value = formula(tally.dials.values)
    if type(value) is int:
        return Tally(tally.dials, key, formula, value)
    if type(value) is float:
        return tally.dials.derive_float(key, formula)
    tally.dials.stray(formula, "is made something else")
    return value


def _arithmetic(name: str, function: Callable[[object, object], object], swapped: bool) -> Callable[[Tally, object], object]:
    def method(self: Tally, other: object) -> object:
        if _plain(other):
            return _worked(self, name, function, other, swapped=swapped)
        if function in _WITH_TENSORS and isinstance(other, torch.Tensor) and other.is_floating_point():
            mine = self.as_float()
        else:
            mine = self.as_plain(f"is worked with ({name.strip('_')}), together with a {type(other).__name__}")
        return function(other, mine) if swapped else function(mine, other)

    return method


_WITH_TENSORS = (operator.add, operator.sub, operator.mul, operator.truediv)
"""Operations of which a tensor of floating-point numbers makes no other thing where a whole number is one of these."""


def _comparison(name: str, function: Callable[[object, object], object]) -> Callable[[Tally, object], object]:
    def method(self: Tally, other: object) -> object:
        if other is None:
            return NotImplemented
        if not _plain(other):
            return function(self.as_plain(f"is compared with a {type(other).__name__}"), other)
        return self.dials.decide((self.said, name, said(other)), Worked(function, self.formula, _formula(other)))

    return method


def _unary(name: str, function: Callable[[object], object]) -> Callable[[Tally], object]:
    return lambda self: _worked(self, name, function)


def _conversion(name: str, kind: Callable[..., object]) -> Callable[..., object]:
    return lambda self, *others: kind(self.as_plain(f"is converted ({name})"), *others)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    _function, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(Tally, f"__{_name}__", _arithmetic(f"__{_name}__", _function, swapped=False))
    setattr(Tally, f"__r{_name}__", _arithmetic(f"__r{_name}__", _function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tally, f"__{_name}__", _comparison(f"__{_name}__", getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Tally, f"__{_name}__", _unary(f"__{_name}__", getattr(operator, _name)))
for _name, _kind in (("int", int), ("index", int), ("float", float), ("complex", complex), ("str", str), ("repr", repr),
                     ("format", format), ("trunc", int), ("floor", int), ("ceil", int)):  # fmt: skip
    setattr(Tally, f"__{_name}__", _conversion(_name, _kind))
