"""What code keeps for its backward where autograd cannot see it: variables of a function that is recomputed, attributes of
`ctx`, what `checkpoint` keeps by itself."""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import gt, is_
from types import CellType, FunctionType, MethodType, ModuleType

import torch
from torch.autograd.function import BackwardCFunction

from .._torch.process_groups import groups_of_ranks
from .._torch.tensors import has_memory, use_count
from ..errors import Refusal
from ..python.identity import identity

NODE: type[object] = BackwardCFunction
"""The class of the nodes of functions that are written in Python: it is their `ctx` as well."""

__all__ = ["NODE", "Contents", "Kept", "kept"]

_HANDS_ON = Refusal("hands on in its backward what its forward has kept (ctx, an attribute of it, a variable of a part that is "
                    "recomputed)", "hand on a clone of it")  # fmt: skip

_MANY = 100_000
_ENDS = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, ModuleType, type, str, bytes, int, float, *groups_of_ranks())


def kept(roots: Iterable[object], left_out: Callable[[object], bool] = lambda x: False) -> list[object]:
    """The objects that these refer to, directly or not. Modules, optimizers and globals are not looked into: what they have
    outlives the call; and what is `left_out` is not met."""
    found: dict[int, object] = {}
    work = deque(roots)
    while work and len(found) < _MANY:
        x = work.popleft()
        if identity(x) not in found and not left_out(x):
            found[identity(x)] = x
            work.extend(_within(x))
    return list(found.values())


class Contents:
    """The containers and objects that code keeps, to see whether a run changes what is in them, or gives them to somebody.
    torch's own are left out."""

    def __init__(self, roots: Iterable[object], held: Container[int] = ()) -> None:
        """`held` are the storages of the tensors that are kept so."""
        found = kept(roots, lambda x: type(x).__module__.startswith("torch.") and not isinstance(x, NODE))
        self._found = [x for x in found if not isinstance(x, (*_ENDS, torch.Tensor, FunctionType, MethodType, partial))]
        # Whoever has one of these has what is kept.
        self._holders = [x for x in found if not isinstance(x, (*_ENDS, torch.Tensor)) and _holds(x, held)]

    def owners(self) -> list[int]:
        """How many there are of each that leads to what is kept."""
        return [*map(sys.getrefcount, self._holders)]

    def now(self) -> list[list[object]]:
        return [list(_within(x)) for x in self._found]

    def changed(self, before: list[list[object]]) -> bool:
        """Since `now` was this."""
        return any(len(was) != len(now) or not all(map(is_, was, now)) for was, now in zip(before, self.now(), strict=True))


@dataclass(eq=False)
class Kept:
    """Tensors and objects that code keeps for its backward. Each forward writes them where they are."""

    contents: Contents
    """Containers and objects. Eager makes them anew in each forward, so a backward must not change them."""
    held: list[torch.Tensor]
    """Tensors, as aliases on memory of the recording."""
    keepsakes: list[torch.Tensor]
    """The same tensors, as code has them."""
    slots: dict[int, torch.Tensor]
    """Slots among them, by the arguments' numbers."""
    themselves: frozenset[int]
    """Numbers of arguments that are kept themselves, and not views of them."""
    at_rest: list[int] | None = None
    """The `owners` while no backward runs."""

    def owners(self) -> list[int]:
        """Counts of references to what is kept, and to what leads to it."""
        counts = [use_count(t.untyped_storage()._cdata) for t in self.held]
        return counts + [sys.getrefcount(x) for x in self.keepsakes] + self.contents.owners()

    def rest(self) -> None:
        """No backward runs now."""
        if self.at_rest is None:
            self.at_rest = self.owners()

    def _storages(self) -> list[int]:
        """Counts of references to the storages. Calls that wait for their backwards have some."""
        return [sys.getrefcount(t.untyped_storage()) for t in self.held]

    @contextmanager
    def staying(
        self, stop: Callable[[Refusal], object], doubt: Callable[[Callable[[], bool], Refusal], object]
    ) -> Iterator[None]:
        """Surrounds a backward, which must hand on nothing that is kept: the next forward writes that."""
        before = self.owners(), self._storages()
        try:
            yield
        except BaseException:
            if at_rest := self.at_rest:  # the exception has some of it, as long as it is there
                doubt(lambda: _stay_more(self.owners, at_rest), _HANDS_ON)
            raise
        if _more(self.owners, before[0]) or _more(self._storages, before[1]):
            stop(_HANDS_ON)


def _more(count: Callable[[], list[int]], before: list[int]) -> bool:
    """Whether there are more than before."""
    if any(map(gt, count(), before)):
        gc.collect()
        return any(map(gt, count(), before))
    return False


def _stay_more(count: Callable[[], list[int]], before: list[int]) -> bool:
    """Likewise, after an exception: a thread of autograd's may have that a moment longer than whoever has caught it."""
    for _ in range(10):
        if not any(map(gt, count(), before)):
            return False
        time.sleep(0.005)
    return _more(count, before)


def _holds(x: object, held: Container[int]) -> bool:
    """A `ctx` does anyway: there are also the tensors that were saved."""
    there = (t for t in kept([x]) if isinstance(t, torch.Tensor))
    return isinstance(x, NODE) or any(t.untyped_storage()._cdata in held for t in there if has_memory(t))


def _within(x: object) -> Iterable[object]:
    if isinstance(x, _ENDS) or x is None:
        return ()
    if isinstance(x, torch.Tensor):
        return (x.grad_fn,) if isinstance(x.grad_fn, NODE) else ()
    if isinstance(x, FunctionType):
        return (*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    if isinstance(x, CellType):
        return _contents(x)
    if isinstance(x, MethodType):
        return x.__func__, x.__self__
    if isinstance(x, partial):
        return x.func, *x.args, *x.keywords.values()
    inside = [*x, *x.values()] if isinstance(x, dict) else list(x) if isinstance(x, (list, tuple, set, deque)) else []
    own = getattr(x, "__dict__", {})
    return [*inside, *own, *own.values()]


def _contents(cell: CellType) -> tuple[object, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()
