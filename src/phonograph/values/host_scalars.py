"""Numbers that a call reads of tensors (`loss.item()`) and only hands on: in its result, to an attribute, to a function that is
marked `@pg.live`.

In a capture nobody knows them. What stands there for such a number says that it is one, and by what formula another is worked
out of it (``self.total += loss.item() * len(x)``); code that does anything else with it is refused. What comes out at the end
is read when a replay has run, as any result is, and worked out then. What C code makes of numbers is no formula: of
floats it may make another (but see `guards/reductions.py`).

A number by which the call goes on (``if found_inf.item():``) is *decisive*. It is known by its site in the code: a live call
tells what is read there, and what is captured is what comes after that number. Each replay looks whether it is still the same;
of a float, whether what the call has decided by it is (``if loss.item() < best:``), or that arithmetic does not raise.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from .._torch.dynamic import Args, Kwargs, Leaves
from .._torch.tensors import has_memory
from ..errors import Refusal
from ..python.at_work import is_spelled
from ..python.identity import identity
from .counters import Followed, Tally, Unread
from .formulas import Formula, Given, Values, Worked, said, written
from .numbers import base_of, is_exact
from .pytree import Flattener, unflatten

__all__ = ["COMPARISONS", "LEFT_ALIGNED", "NUMBER_READERS", "READS_NUMBER", "Noted", "Numeral", "Reckoned", "Site", "listable",
           "may_meet", "readable", "reading", "site_of", "tensors_of", "without", "worked_out"]  # fmt: skip

_DIVIDE = ("truediv", "floordiv", "mod")
_ARITHMETIC = ("add", "sub", "mul", "pow", *_DIVIDE)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OF_TWO: dict[str, Callable[..., Any]] = {
    "divmod": divmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift,
}  # fmt: skip
_OTHERS: dict[str, Callable[..., Any]] = {
    "float": float, "int": int, "index": operator.index, "complex": complex, "str": str, "repr": repr, "format": format,
    "hash": hash, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "invert": operator.invert, "copy": copy.copy,
    "deepcopy": copy.deepcopy, "getattr": getattr, "reduce_ex": lambda number, protocol: number.__reduce_ex__(protocol),
    "array": lambda number, *args, **kwargs: sys.modules["numpy"].asarray(number, *args, **kwargs),
}  # fmt: skip
_NOT_READERS = ("phonograph.", "torch.utils._python_dispatch", "torch._tensor", "torch._compile", "torch._dynamo.")
_MOST = 32  # numbers of one tensor: each is a result of its own
_UNKNOWN: Any = object()


Site = tuple[object, object]  # a code object, and where in it the call is that reads
READS_NUMBER = torch.ops.aten._local_scalar_dense.default
NUMBER_READERS = (READS_NUMBER, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default)  # these in inference mode
LEFT_ALIGNED = "aten::_nested_tensor_from_mask_left_aligned"
COMPARISONS: dict[str, Callable[..., torch.Tensor]] = {
    "aten::equal": lambda a, b: (a == b).all(),
    "aten::allclose": lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    LEFT_ALIGNED: lambda t, mask, mask_check=True: (mask[:, 1:] <= mask[:, :-1]).all(),
}
"""Operators that answer with a truth value on the host, and what gives that as a tensor."""


def site_of(frame: FrameType) -> Site:
    """Where a number is read, as its reader's code has it."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_globals.get("__name__", "").startswith(_NOT_READERS):
        caller = caller.f_back
    caller = caller or frame
    code, at = caller.f_code, caller.f_lasti
    if hasattr(code, "co_positions"):  # an instruction of several, of which the last runs where Python code is called
        return code, next(islice(code.co_positions(), at // 2, None))
    return code, at


class Numeral(Unread):
    """Stands for the number in a `tensor` of one element, or for what a `formula` makes of such (`reads`: the tensors), and of
    numbers that are followed. Where it is known what it was in the live call before (`now`), code may go on by it."""

    __slots__ = ("__weakref__", "_kind", "_noted", "_now", "_settled", "formula", "reads", "tensor")

    def __init__(
        self, noted: Noted, formula: Given | Worked, reads: Mapping[Given, torch.Tensor], kind: type,
        tensor: torch.Tensor | None = None, now: Any = _UNKNOWN,
    ) -> None:  # fmt: skip
        self.formula, self.reads, self.tensor = formula, reads, tensor
        self._noted, self._kind, self._now, self._settled = noted, kind, now, False
        noted.made.append(weakref.ref(self))

    @classmethod
    def of(cls, tensor: torch.Tensor, noted: Noted, now: Any = _UNKNOWN) -> Numeral:
        """For the number in a tensor."""
        dtype, formula = tensor.dtype, Given(-1, set())
        kind = complex if dtype.is_complex else float if dtype.is_floating_point else bool if dtype is torch.bool else int
        return cls(noted, formula, {formula: tensor}, kind, tensor, now)

    def as_whole(self) -> Any:
        return self.carefully(int, self) if self._kind is float else self.worked(int, self)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that it counts as such a number where that is asked for
        return self._kind

    def real(self) -> Any:
        """The number itself, by which the call goes on.

        Raises:
            Refusal: it is not known.
        """
        if self._now is _UNKNOWN:
            self._noted.refuses()
        if not self._settled:
            self._noted.decides(self.formula, self.reads, self._now, self._noted.said, self._noted.where)
            self._settled = True
        return self._now

    def worked(self, function: Callable[..., Any], *of: Any) -> Any:
        """What a function makes of these."""
        numerals = [x for x in of if isinstance(x, Numeral)]
        unknown = next((x for x in numerals if x._now is _UNKNOWN), None)
        now = function(*map(_now, of)) if unknown is None else _UNKNOWN
        kind = type(now) if unknown is None else type(function(*map(_sample, of)))
        if kind is complex:
            return function(*map(_real, of))
        reads = {k: t for x in numerals for k, t in x.reads.items()}
        formula = Worked(function, *[x.formula if isinstance(x, (Numeral, Followed)) else x for x in of])
        return Numeral((self if unknown is None else unknown)._noted, formula, reads, kind, now=now)

    def carefully(self, function: Callable[..., Any], *of: Any) -> Any:
        """The same, where it may raise, or be complex: that it is not so is decided."""
        odd = self.decided(functools.partial(_is_odd, function), *of)
        return function(*map(_real, of)) if odd else self.worked(function, *of)

    def decided(self, function: Callable[..., Any], *of: Any) -> bool:
        """What is decided by these."""
        found = self.worked(function, *of)
        return bool(found.real() if isinstance(found, Numeral) else found)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        """Torch's functions get the number itself."""
        return func(*_real_in(args), **_real_in(kwargs or {}))

    def __bool__(self) -> bool:
        return self.decided(bool, self)

    def __round__(self, *digits: Any) -> Any:
        if not digits:
            return self.carefully(round, self)
        return self.worked(round, self, *digits) if [*map(type, digits)] == [int] else round(self.real(), *digits)

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        plain = method == "__call__" and not kwargs and function.__name__ in _NUMPYS and is_exact(function, args)
        if plain and all(map(may_meet, args)):
            return self.worked(function, *args)
        return (function if method == "__call__" else getattr(function, method))(*map(_real, args), **kwargs)


class Noted(NamedTuple):
    """What numerals of one site have in common."""

    made: list[weakref.ref[Numeral]]
    """All of the call."""
    refuses: Callable[[], NoReturn]
    """Says that the call goes on by one that is not known."""
    decides: Callable[[Formula, Mapping[Given, torch.Tensor], object, str, str], None]
    """Notes that it goes on by what a formula makes of such, which is this now; and how it is read, and where."""
    said: str
    where: str


_NUMPYS = frozenset({"add", "subtract", "multiply", "isfinite", "isnan", "isinf"})
"""Functions of NumPy's that neither raise nor warn."""


def _is_odd(function: Callable[..., object], *of: object) -> bool:
    try:
        return type(function(*of)) is complex
    except (ArithmeticError, ValueError):
        return True


def _sample(x: Any) -> Any:
    """A number of the kind of this."""
    if isinstance(x, Numeral):
        return x._kind(1)
    return type(x.value)(1) if isinstance(x, Tally) else 1.0 if isinstance(x, Followed) else x


def _real(x: Any) -> Any:
    return x.real() if isinstance(x, Numeral) else x


def _real_in(value: Any) -> Any:
    """The same with the numbers themselves in the place of numerals."""
    if type(value) in (list, tuple):
        return type(value)([_real_in(v) for v in value])
    return {k: _real_in(v) for k, v in value.items()} if type(value) is dict else _real(value)


def _now(x: Any) -> Any:
    """What this is in the call that is captured."""
    return x._now if isinstance(x, Numeral) else x.formula(x.dials.values) if isinstance(x, Followed) else x


def may_meet(x: Any) -> bool:
    """Whether arithmetic of a numeral with this is a formula."""
    if isinstance(x, Followed):
        return x.wide
    return isinstance(x, Numeral) or type(x) is bool or base_of(type(x)) is not None


def _arithmetic(name: str, function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Numeral, Any], Any]:
    def method(self: Numeral, other: Any, *modulus: Any) -> Any:
        of = (other, self) if swapped else (self, other)
        if modulus or not may_meet(other) or (name == "add" and not is_spelled(sys._getframe(1))):
            return function(*map(_real, (*of, *modulus)))
        may_raise = name == "pow" or (name in _DIVIDE and (isinstance(of[1], Numeral) or not of[1]))
        return self.carefully(function, *of) if may_raise else self.worked(function, *of)

    return method


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Numeral, Any], Any]:
    def method(self: Numeral, other: Any) -> Any:
        if other is None:
            return NotImplemented
        return self.decided(function, self, other) if may_meet(other) else function(self.real(), other)

    return method


def _unary(function: Callable[[Any], object]) -> Callable[[Numeral], Any]:
    return lambda self: self.worked(function, self)


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self.real(), *args, **kwargs)


def _asking_swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self.real())


for _name in _ARITHMETIC:
    setattr(Numeral, f"__{_name}__", _arithmetic(_name, getattr(operator, _name), swapped=False))
    setattr(Numeral, f"__r{_name}__", _arithmetic(_name, getattr(operator, _name), swapped=True))
for _name in _COMPARISONS:
    setattr(Numeral, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    setattr(Numeral, f"__{_name}__", _unary(getattr(operator, _name)))
for _name, _function in (*_OF_TWO.items(), *_OTHERS.items()):
    setattr(Numeral, f"__{_name}__", _asking(_function))
for _name, _function in _OF_TWO.items():
    setattr(Numeral, f"__r{_name}__", _asking_swapped(_function))


def tensors_of(leaves: Sequence[object]) -> dict[int, torch.Tensor]:
    """Where numerals are among these that stand for the number in a tensor, and the tensors."""
    return {i: x.tensor for i, x in enumerate(leaves) if type(x) is Numeral and x.tensor is not None}


def worked_out(formulas: Iterable[Formula], reads: Iterable[Given]) -> Callable[[Values], Sequence[Any]]:
    """What these formulas give, of the numbers that are followed, and then of those that are read, the first one last."""
    for i, number in enumerate(reads):
        number.place = -1 - i  # wherever those end that are followed
    return written(formulas)


class Later:
    """In the place of a number that is worked out when a replay has run."""

    __slots__ = ()


class Reckoned(NamedTuple):
    """How numbers are worked out that a call has made of those that it reads at its end."""

    work_out: Callable[[Values], Sequence[Any]]
    """All of them, as `worked_out` gives them."""
    text: str
    """By which it can be compared."""
    puts: tuple[Callable[[Any], None], ...]
    """Where the last of them belong."""
    tensors: int
    """How many are read for them; the last leaves of the result."""
    places: tuple[int, ...] = ()
    """The leaves of the result that are the first of them."""
    reads: tuple[int, ...] = ()
    """Those that are the numbers in tensors."""

    def of_leaves(self, leaves: Leaves, later: Sequence[Later]) -> Reckoned:
        """Of a result that has these leaves. `later`: what stands in their places."""
        at = {identity(x): i for i, x in enumerate(leaves)}
        places = tuple([at[identity(x)] for x in later])
        for i in places:
            leaves[i] = None
        return self._replace(places=places, reads=tuple(range(len(leaves) - self.tensors, len(leaves))))

    def found(self, leaves: Leaves, followed: Values) -> None:
        """Put them where they belong."""
        numbers = self.work_out((*followed, *[leaves[i] for i in reversed(self.reads)]))
        for i, number in zip(self.places, numbers, strict=False):
            leaves[i] = number
        for put, number in zip(self.puts, numbers[len(self.places) :], strict=True):
            put(number)


class Handed(NamedTuple):
    """A result that has tensors in the place of the numbers in them (`read`). Where others are worked out it is (the rest, the
    tensors for those), and has what stands there `later`."""

    result: object
    read: list[torch.Tensor]
    later: list[Later]
    reckoned: Reckoned | None


def without(result: object, given: Set[int], apart: Sequence[tuple[Callable[[Any], None], Numeral]]) -> Handed:
    """A result without numerals, and without those that are put somewhere `apart`. `given` are containers that are not the
    call's own, by identity.

    Raises:
        Refusal: one of those is there as well as a numeral.
    """
    flattener, leaves = Flattener(opens=False, shares=True), list[object]()
    shape = flattener.flatten(result, leaves)
    found = {i: x for i, x in enumerate(leaves) if type(x) is Numeral}
    if found and not given.isdisjoint(map(identity, flattener.containers)):
        refusal = Refusal("returns a container that outlives the call, or a set twice", "return new containers")
        refusal.cutting = True
        raise refusal
    tensors = [x.tensor for x in found.values() if x.tensor is not None]
    worked = {i: x for i, x in found.items() if x.tensor is None}
    stands = {i: Later() if i in worked else x.tensor for i, x in found.items()}
    if found:
        result = unflatten(shape, iter([stands.get(i, x) for i, x in enumerate(leaves)]))
    numerals = [*worked.values(), *(x for _, x in apart)]
    if not numerals:
        return Handed(result, tensors, [], None)
    reads = {k: t for x in numerals for k, t in x.reads.items()}
    formulas = [x.formula for x in numerals]
    reckoned = Reckoned(worked_out(formulas, reads), said(formulas), tuple([put for put, _ in apart]), len(reads))
    later = [x for x in stands.values() if isinstance(x, Later)]
    return Handed((result, [*reads.values()]), [*tensors, *reads.values()], later, reckoned)


def readable(t: torch.Tensor, device: torch.device) -> bool:
    """Whether it is one whose number can be handed on."""
    return t.numel() == 1 and listable(t, device)


def listable(t: torch.Tensor, device: torch.device) -> bool:
    """The same of a list of its numbers."""
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and has_memory(t)
    return plain and t.device == device and t.numel() <= _MOST


def reading(
    numbers: Sequence[int], rebuild: Callable[[list[object]], Any], reckoned: Reckoned | None, followed: Callable[[], Values]
) -> Callable[[Leaves], object]:
    """What makes the result of a call of its leaves, some of which are read, and others worked out of these and of the numbers
    that are `followed`."""

    def rebuilt(leaves: Leaves) -> object:
        leaves = [*leaves]
        for i in numbers:
            leaves[i] = leaves[i].item()
        if reckoned is None:
            return rebuild(leaves)
        reckoned.found(leaves, followed())
        return rebuild(leaves)[0]

    return rebuilt
