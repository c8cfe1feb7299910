"""Numbers that a call reads of tensors (`loss.item()`) and only hands on: in its result, to an attribute, to a function that is
marked `@pg.live`.

In a capture nobody knows them. What stands there for such a number says that it is one, and by what formula another is worked
out of it (``self.total += loss.item() * len(x)``): code that compares it or shows it is refused. What comes out at the end is
read when a replay has run, as any result is, and worked out then. Only arithmetic that cannot raise is a formula; and what C
code makes of numbers, `sum` or NumPy, is none: of floats it may make another.

A number by which the call goes on (``if found_inf.item():``) is *decisive*. It is known by its site in the code: a live call
tells what is read there, and what is captured is what comes after that number. Each replay looks whether it is still the same.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from .._torch.dynamic import Leaves
from .._torch.tensors import has_memory
from ..errors import Refusal
from ..python.bytecode import is_spelled
from ..python.identity import identity
from .counters import Followed, Tally, Unread
from .formulas import Given, Values, Worked, said, written
from .numbers import base_of
from .pytree import containers, flatten, unflatten

__all__ = ["COMPARISONS", "LEFT_ALIGNED", "NUMBER_READERS", "READS_NUMBER", "Numeral", "Reckoned", "Site", "listable",
           "readable", "reading", "site_of", "tensors_of", "without"]  # fmt: skip

_OF_TWO = ("pow", "divmod", "and", "or", "xor", "lshift", "rshift")
_OTHERS = (
    "bool", "float", "int", "index", "complex", "str", "repr", "format", "hash", "eq", "ne", "lt", "le", "gt", "ge",
    "trunc", "floor", "ceil", "invert", "reduce_ex", "copy", "deepcopy", "getattr", "array",
)  # fmt: skip
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod")
_DIVIDE = _ARITHMETIC[3:]
_ASKED = (*(f"__{name}__" for name in (*_OF_TWO, *_OTHERS)), *(f"__r{name}__" for name in _OF_TWO))
_NOT_READERS = ("phonograph.", "torch.utils._python_dispatch", "torch._tensor", "torch._compile", "torch._dynamo.")
_MOST = 32  # numbers of one tensor: each is a result of its own


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
    numbers that are followed."""

    __slots__ = ("__weakref__", "_kind", "_made", "_refuses", "formula", "reads", "tensor")
    __array_ufunc__ = None  # NumPy's numbers leave it to this what is made of both

    def __init__(
        self, formula: Given | Worked, reads: Mapping[Given, torch.Tensor], kind: type, refuses: Callable[[], NoReturn],
        made: list[weakref.ref[Numeral]], tensor: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.formula, self.reads, self.tensor = formula, reads, tensor
        self._kind, self._refuses, self._made = kind, refuses, made
        made.append(weakref.ref(self))

    @classmethod
    def of(cls, tensor: torch.Tensor, refuses: Callable[[], NoReturn], made: list[weakref.ref[Numeral]]) -> Numeral:
        """For the number in a tensor; noted among those that were `made`."""
        dtype, formula = tensor.dtype, Given(-1, set())
        kind = complex if dtype.is_complex else float if dtype.is_floating_point else bool if dtype is torch.bool else int
        return cls(formula, {formula: tensor}, kind, refuses, made, tensor)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that it counts as such a number where that is asked for
        return self._kind

    def _asked(self, *_: object, **__: object) -> NoReturn:
        self._refuses()

    for _name in _ASKED:
        locals()[_name] = _asked
    del _name

    def __round__(self, *digits: object) -> object:
        return self._worked(round, self, *digits) if [*map(type, digits)] == [int] else self._asked()

    def _worked(self, function: Callable[..., Any], *of: Any) -> Numeral:
        kind = type(function(*map(_sample, of)))
        if kind is complex:
            self._asked()
        reads = {k: t for x in of if isinstance(x, Numeral) for k, t in x.reads.items()}
        formula = Worked(function, *[x.formula if isinstance(x, (Numeral, Followed)) else x for x in of])
        return Numeral(formula, reads, kind, self._refuses, self._made)


def _sample(x: Any) -> Any:
    """A number of the kind of this."""
    if isinstance(x, Numeral):
        return x._kind(1)
    return type(x.value)(1) if isinstance(x, Tally) else 1.0 if isinstance(x, Followed) else x


def _arithmetic(name: str, function: Callable[[Any, Any], object], swapped: bool) -> Callable[[Numeral, object], object]:
    def method(self: Numeral, other: Any) -> object:
        of = (other, self) if swapped else (self, other)
        may_raise = name in _DIVIDE and (isinstance(of[1], Numeral) or not of[1])
        if may_raise or not _may_meet(other) or (name == "add" and not is_spelled(sys._getframe(1))):
            self._refuses()
        return self._worked(function, *of)

    return method


def _unary(function: Callable[[Any], object]) -> Callable[[Numeral], object]:
    return lambda self: self._worked(function, self)


def _may_meet(x: Any) -> bool:
    """Whether arithmetic of a numeral with this is a formula."""
    if isinstance(x, Followed):
        return x.wide
    return isinstance(x, Numeral) or type(x) is bool or base_of(type(x)) is not None


for _name in _ARITHMETIC:
    setattr(Numeral, f"__{_name}__", _arithmetic(_name, getattr(operator, _name), swapped=False))
    setattr(Numeral, f"__r{_name}__", _arithmetic(_name, getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(Numeral, f"__{_name}__", _unary(getattr(operator, _name)))


def tensors_of(leaves: Sequence[object]) -> dict[int, torch.Tensor]:
    """Where numerals are among these, and their tensors. (One that is worked out is asked for.)"""
    return {i: x.tensor if x.tensor is not None else x._asked() for i, x in enumerate(leaves) if type(x) is Numeral}


class Later:
    """In the place of a number that is worked out when a replay has run."""

    __slots__ = ()


class Reckoned(NamedTuple):
    """How numbers are worked out that a call has made of those that it reads at its end."""

    work_out: Callable[[Values], Sequence[Any]]
    """All of them, of the numbers that are followed, and those in tensors after these, the first of them last."""
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
        Refusal: one of those is there as well as a numeral, or a container is there twice.
    """
    leaves: list[object] = []
    shape = flatten(result, leaves)
    found = {i: x for i, x in enumerate(leaves) if type(x) is Numeral}
    if found:
        _own([*map(identity, containers(result))], given)
    tensors = [x.tensor for x in found.values() if x.tensor is not None]
    worked = {i: x for i, x in found.items() if x.tensor is None}
    stands = {i: Later() if i in worked else x.tensor for i, x in found.items()}
    if found:
        result = unflatten(shape, iter([stands.get(i, x) for i, x in enumerate(leaves)]))
    numerals = [*worked.values(), *(x for _, x in apart)]
    if not numerals:
        return Handed(result, tensors, [], None)
    reads = {k: t for x in numerals for k, t in x.reads.items()}
    for i, number in enumerate(reads):
        number.place = -1 - i  # wherever those end that are followed
    formulas = [x.formula for x in numerals]
    reckoned = Reckoned(written(formulas), said(formulas), tuple([put for put, _ in apart]), len(reads))
    later = [x for x in stands.values() if isinstance(x, Later)]
    return Handed((result, [*reads.values()]), [*tensors, *reads.values()], later, reckoned)


def _own(found: Sequence[int], given: Set[int]) -> None:
    """Refuse containers with numbers that are not the call's own, or are there twice."""
    if len({*found}) < len(found) or not given.isdisjoint(found):
        refusal = Refusal("returns a container that outlives the call, or one twice", "return new containers")
        refusal.cutting = True
        raise refusal


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
