"""Numbers that a call reads of tensors (`loss.item()`) and only hands on: in its result, to an attribute, to a function that is
marked `@pg.live`.

In a capture nobody knows them. What stands there for such a number says that it is one, and nothing else: code that computes
with it, compares it or shows it is refused. What comes out at the end is read when a replay has run, as any result is.

A number by which the call goes on (``if found_inf.item():``) is *decisive*. It is known by its site in the code: a live call
tells what is read there, and what is captured is what comes after that number. Each replay looks whether it is still the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import islice
from types import FrameType
from typing import NoReturn

import torch

from .._torch.dynamic import Leaves
from .._torch.tensors import has_memory
from ..errors import Refusal
from ..python.identity import identity
from .pytree import containers, flatten, unflatten

__all__ = ["COMPARISONS", "LEFT_ALIGNED", "NUMBER_READERS", "READS_NUMBER", "Numeral", "Site", "listable", "readable",
           "reading", "site_of", "tensors_of", "without"]  # fmt: skip

_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "and", "or", "xor", "lshift", "rshift")
_OTHERS = (
    "bool", "float", "int", "index", "complex", "str", "repr", "format", "hash", "eq", "ne", "lt", "le", "gt", "ge", "neg",
    "pos", "abs", "round", "trunc", "floor", "ceil", "invert", "reduce_ex", "copy", "deepcopy", "getattr",
)  # fmt: skip
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


class Numeral:
    """Stands for the number in a tensor of one element."""

    __slots__ = ("__weakref__", "_kind", "_refuses", "tensor")

    def __init__(self, tensor: torch.Tensor, refuses: Callable[[], NoReturn]) -> None:
        self.tensor = tensor
        self._refuses = refuses
        dtype = tensor.dtype
        self._kind = complex if dtype.is_complex else float if dtype.is_floating_point else bool if dtype is torch.bool else int

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that it counts as such a number where that is asked for
        return self._kind

    def _asked(self, *_: object, **__: object) -> NoReturn:
        self._refuses()

    for _name in _ASKED:
        locals()[_name] = _asked
    del _name


def tensors_of(leaves: Sequence[object]) -> dict[int, torch.Tensor]:
    """Where numerals are among these, and their tensors."""
    return {i: x.tensor for i, x in enumerate(leaves) if type(x) is Numeral}


def without(result: object, given: Set[int]) -> tuple[object, list[torch.Tensor]]:
    """The same with their tensors in the place of numerals, and these tensors. `given` are containers that are not the call's
    own, by identity.

    Raises:
        Refusal: one of those is there as well as a numeral, or a container is there twice.
    """
    leaves: list[object] = []
    shape = flatten(result, leaves)
    found = tensors_of(leaves)
    if not found:
        return result, []
    once = [*map(identity, containers(result))]
    if len({*once}) < len(once) or not given.isdisjoint(once):
        refusal = Refusal("returns a container that outlives the call, or one twice", "return new containers")
        refusal.cutting = True
        raise refusal
    return unflatten(shape, iter([found.get(i, x) for i, x in enumerate(leaves)])), [*found.values()]


def readable(t: torch.Tensor, device: torch.device) -> bool:
    """Whether it is one whose number can be handed on."""
    return t.numel() == 1 and listable(t, device)


def listable(t: torch.Tensor, device: torch.device) -> bool:
    """The same of a list of its numbers."""
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and has_memory(t)
    return plain and t.device == device and t.numel() <= _MOST


def reading(numbers: Sequence[int], rebuild: Callable[[list[object]], object]) -> Callable[[Leaves], object]:
    """What makes the result of a call of its leaves, some of which are read."""

    def rebuilt(leaves: Leaves) -> object:
        leaves = [*leaves]
        for i in numbers:
            leaves[i] = leaves[i].item()
        return rebuild(leaves)

    return rebuilt
