"""Numbers that a call advances, and by which it may go on: ``self.total_it += 1``, ``group["k"] = k + 1``.

What a call leaves where such a number was is worked out of what it has found there, and so is each decision that it takes by
it (``if self.total_it % self.policy_freq == 0:``). A capture puts a `Tally` in the place of a whole number: it has the real
value, and remembers the arithmetic that is done with it. Decisions are conditions of the recording, as those by a dial are
(`hyperparameters.py`): each kind of call has a recording of its own. A replay leaves there what the call would have left.

A tally is no `int`, so that no code in C takes it for one: whoever needs one gets the real value. Where that is a whole number
(an index, the end of a range) it is a decision as well, that the number is this one; else it is not followed then. A float that
is worked out of it (``beta ** step``) is a dial.

NumPy's scalars are tallies too, also those that are no whole numbers: what is worked out of them is of their kind.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._torch.dynamic import Args, Kwargs
from ..python.at_work import asked_container, is_spelled
from ..python.identity import identity
from .formulas import Formula, Worked
from .numbers import as_bytes, base_of, is_exact, is_small_array

__all__ = ["BY_C", "LARGEST", "Followed", "Tally", "Unread", "are_numbers", "are_plain", "are_rows", "said", "universal"]

LARGEST = 2**53  # beyond, a float is not exact


class Followed:
    """What stands for a number, and says by what `formula` that is worked out."""

    __slots__ = ()
    dials: Any
    formula: Formula

    @property
    def wide(self) -> bool:
        """Whether it may be anywhere in the user's code."""
        return True

    @property
    def said(self) -> Any:
        """By which arithmetic with it is the same."""
        raise NotImplementedError

    def as_plain(self, why: str) -> Any:
        """The number that it stands for, which is not followed then."""
        raise NotImplementedError


class Unread:
    """What stands for a number that is read when a replay has run (`host_scalars.py`), or for what is worked out of such."""

    __slots__ = ()


class Tally(Followed):
    """A whole number, or one of NumPy's: its `value` now, and the `formula` by which it is worked out."""

    __slots__ = ("__weakref__", "_key", "dials", "formula", "value")

    def __init__(self, dials: Any, key: object, formula: Formula, value: Any) -> None:
        self.dials, self._key, self.formula, self.value = dials, key, formula, value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @property
    def said(self) -> Any:
        return Tally, self._key

    def is_real(self) -> bool:
        """Whether it is no whole number, but one of NumPy's floats."""
        return base_of(type(self.value)) is float

    def as_plain(self, why: str) -> Any:
        """The number that it stands for, which is not followed then."""
        self.dials.stray(self.formula, why)
        return self.value

    def as_decided(self, why: str) -> Any:
        """The number that it stands for, by which the call goes on: one that is not whole is not followed then."""
        if self.is_real():
            return self.as_plain(why)
        self.dials.decide(("is", self.said), Worked(operator.eq, self.formula, self.value))
        return self.value

    def __bool__(self) -> bool:
        return bool(self.dials.decide((self.said, "__bool__"), self.formula))

    def __hash__(self) -> int:
        container = asked_container(sys._getframe(1)) if not self.is_real() else None
        if container is None:
            return hash(self.as_decided("is looked up"))
        self.dials.decide(("in", self.said, identity(container)), Worked(partial(_has, container), self.formula))
        return hash(self.value)

    def __copy__(self) -> Tally:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Tally:
        return self

    def __reduce_ex__(self, protocol: object) -> str | tuple[object, ...]:
        return type(self.value), (self.as_plain("is copied"),)

    def __array__(self, *args: object, **kwargs: object) -> object:
        return sys.modules["numpy"].asarray(self.as_plain(_TO_NUMPY), *args, **kwargs)

    def __array_ufunc__(self, function: Any, method: str, *args: object, **kwargs: object) -> object:
        return universal(self.dials, function, method, args, kwargs)

    def __array_function__(self, function: Any, types: object, args: Args, kwargs: Kwargs) -> object:
        return universal(self.dials, function, "__call__", args, kwargs)

    def as_float(self) -> Any:
        """What follows the same number as a float."""
        return _worked(self, "__float__", float)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        """Torch's functions get the real number. (Those that are watched get here only if nothing can be followed in them.)"""
        why = f"is given to {getattr(func, '__name__', func)}"
        return func(*_real(args, why), **_real(kwargs or {}, why))

    def __getattr__(self, name: str) -> object:
        if name == "item" and type(self.value) is not int:
            return lambda: _worked(self, name, operator.methodcaller(name))
        return getattr(self.as_plain("is taken apart"), name)

    def __divmod__(self, other: Any) -> object:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> object:
        return other // self, other % self

    def __round__(self, *digits: Any) -> object:
        return _worked(self, "__round__", round, *digits) if all(map(_plain, digits)) else round(self.value, *digits)


def _has(container: Any, number: object) -> bool:
    return number in container


def _real(value: Any, why: str) -> Any:
    """The same with real numbers in the place of tallies."""
    if type(value) is Tally:
        return value.as_decided(why)
    if type(value) in (list, tuple):
        return type(value)([_real(v, why) for v in value])
    return {k: _real(v, why) for k, v in value.items()} if type(value) is dict else value


def are_numbers(old: object, new: object) -> bool:
    """Whether a number has taken the place of one, or what stands for it."""
    return base_of(type(old)) is not None and (base_of(type(new)) is not None or isinstance(new, (Followed, Unread)))


def are_rows(old: Any, new: Any) -> bool:
    """The same of a tuple or list of as many numbers, where another was."""
    alike = type(old) is type(new) and type(old) in (tuple, list) and 0 < len(old) == len(new)
    return alike and all(map(are_numbers, old, new)) and not any(isinstance(x, Unread) for x in new)


def are_plain(old: object, new: object) -> bool:
    """Whether a call that leaves this there, where it has found that, has only set a plain value, or some."""
    return are_numbers(old, new) or are_rows(old, new) or {type(old), type(new)} <= _PLAIN


_PLAIN = frozenset({bool, str, type(None)})
_TO_NUMPY = "is given to NumPy"
BY_C = "is added up by what is written in C, like sum"


def said(x: object) -> Any:
    """A number, or for what it stands: by which arithmetic is the same."""
    if isinstance(x, Followed):
        return x.said
    return type(x), as_bytes(x) if is_small_array(x) else repr(x)


def _plain(x: object) -> bool:
    """Whether arithmetic of a tally with this is a formula."""
    return isinstance(x, Followed) or type(x) is bool or base_of(type(x)) is not None


def _formula(x: object) -> object:
    return x.formula if isinstance(x, Followed) else x


def _worked(tally: Tally, name: str, function: Callable[..., object], *others: object, swapped: bool = False) -> object:
    """The result of an operation, with the formula of it."""
    of = [tally, *others][:: -1 if swapped else 1]
    return tally.dials.stands((tally.said, name, swapped, *map(said, others)), Worked(function, *map(_formula, of)))


def _given(x: object) -> bool:
    """Likewise for what functions of NumPy's take: also lists and arrays of numbers (`numpy.interp`)."""
    if type(x) in (list, tuple):
        return all(base_of(type(y)) is not None for y in x)  # type: ignore[attr-defined]
    return _plain(x) or is_small_array(x)


def _kept(x: Any) -> object:
    """Such an argument as it is now: it may be changed later."""
    return x.copy() if type(x) is list or is_small_array(x) else _formula(x)


def universal(dials: Any, function: Any, method: str, args: Args, kwargs: Kwargs) -> object:
    """What a function of NumPy's makes of numbers, with the formula of it."""
    if method == "__call__" and not kwargs and all(map(_given, args)) and is_exact(function, args):
        return dials.stands((function, *map(said, args)), Worked(function, *map(_kept, args)))
    called = function if method == "__call__" else getattr(function, method)
    if not is_exact(function, args):  # perhaps it is another number: so this capture is not kept
        args = tuple([x.as_plain(_TO_NUMPY) if isinstance(x, Followed) else x for x in args])
    return called(*dials.reals(args, _TO_NUMPY), **dials.reals(kwargs, _TO_NUMPY))


def _arithmetic(name: str, function: Callable[[object, object], object], swapped: bool) -> Callable[[Tally, object], object]:
    def method(self: Tally, other: object) -> object:
        if isinstance(other, Unread):
            return NotImplemented
        if _plain(other):
            real = isinstance(other, float) or self.is_real()
            if real and function is operator.add and not is_spelled(sys._getframe(1)):
                mine, theirs = self.as_plain(BY_C), other.as_plain(BY_C) if isinstance(other, Followed) else other
                return function(theirs, mine) if swapped else function(mine, theirs)
            return _worked(self, name, function, other, swapped=swapped)
        if isinstance(other, torch.Tensor) and (self.is_real() or _is_the_same_as_a_float(function, other)):
            mine = self.as_float()
        else:
            mine = self.as_decided(f"is worked with ({name.strip('_')}), together with a {type(other).__name__}")
        return function(other, mine) if swapped else function(mine, other)

    return method


_WITH_TENSORS = (operator.add, operator.sub, operator.mul, operator.truediv)
"""Operations of which a tensor of floating-point numbers makes no other thing where a whole number is one of these."""


def _is_the_same_as_a_float(function: object, t: torch.Tensor) -> bool:
    """Whether this operation makes of a tensor and a whole number what it makes of it and the same as a float. A true division
    makes floating-point numbers first, of integers as well."""
    return function in _WITH_TENSORS and (t.is_floating_point() or (function is operator.truediv and not t.is_complex()))


def _comparison(name: str, function: Callable[[object, object], object]) -> Callable[[Tally, object], object]:
    def method(self: Tally, other: object) -> object:
        if other is None or isinstance(other, Unread):
            return NotImplemented
        if self.is_real() and isinstance(other, torch.Tensor):
            return function(self.as_float(), other)
        if not _plain(other):
            return function(self.as_plain(f"is compared with a {type(other).__name__}"), other)
        return _worked(self, name, function, other)

    return method


def _unary(name: str, function: Callable[[object], object]) -> Callable[[Tally], object]:
    return lambda self: _worked(self, name, function)


def _conversion(name: str, kind: Callable[..., object]) -> Callable[..., object]:
    return lambda self, *others: kind(self.as_plain(f"is converted ({name})"), *others)


def _to_whole(name: str, kind: Callable[..., object]) -> Callable[[Tally], object]:
    """What has to be a whole number of Python's is a decision, that it is this one."""
    return lambda self: self.dials.settled((self.said, name), Worked(kind, self.formula))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    _function, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(Tally, f"__{_name}__", _arithmetic(f"__{_name}__", _function, swapped=False))
    setattr(Tally, f"__r{_name}__", _arithmetic(f"__r{_name}__", _function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tally, f"__{_name}__", _comparison(f"__{_name}__", getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Tally, f"__{_name}__", _unary(f"__{_name}__", getattr(operator, _name)))
for _name, _kind in (("float", float), ("complex", complex), ("str", str), ("repr", repr), ("format", format)):
    setattr(Tally, f"__{_name}__", _conversion(_name, _kind))
_WHOLES: dict[str, Callable[..., object]] = {
    "int": int,
    "index": operator.index,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}
for _name, _to in _WHOLES.items():
    setattr(Tally, f"__{_name}__", _to_whole(_name, _to))
