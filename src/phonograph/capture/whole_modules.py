"""Modules that run live as a whole, between the segments of a recording.

Some operators give what no segment can hand on: a nested or a sparse tensor, one without memory. Often that does not leave the
module in which they are called: its `forward` takes tensors and gives tensors, and runs between the segments as a function does
that is marked `@pg.live`.

That holds where nobody wants gradients of it. Where they are wanted, the module goes its own way in the same call: so
`nn.TransformerEncoder` packs what a padding mask leaves in evaluation, and does not in training.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from .._torch.dynamic import Args, Kwargs
from ..call.live_function import Marked
from ..python.identity import identity
from ..python.introspection import own_dict
from ..python.read_gate import behind_gate, gates
from ..python.standing import fresh_in_children, standing
from ..values.pytree import flatten

__all__ = ["Whole", "in_place_of", "module_around"]

_FORWARD = "forward"


class Whole(Marked):
    """The forward of one module. It does not keep the module alive; a recording does."""

    def __init__(self, module: torch.nn.Module) -> None:
        Marked.any_made = True
        self._module = weakref.ref(module)
        self._name = f"{type(module).__qualname__}.{_FORWARD}"

    @property
    def function(self) -> Callable[..., object]:  # type: ignore[override]
        return getattr(self.keeps(), _FORWARD)  # type: ignore[no-any-return]

    def keeps(self) -> torch.nn.Module | None:
        return self._module()

    def name(self) -> str:
        return self._name


def module_around(frame: FrameType | None, besides: Iterable[Whole]) -> torch.nn.Module | None:
    """The innermost module whose forward runs in a frame, or calls it, but for these. No gradients of it are wanted."""
    known = {identity(whole.keeps()) for whole in besides}
    while frame is not None:
        code = frame.f_code
        if code.co_name == _FORWARD and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, torch.nn.Module) and identity(module) not in known and _is_of(code, module):
                return module if not _has_history(module, (), {}) else None
        frame = frame.f_back
    return None


def _is_of(code: object, module: torch.nn.Module) -> bool:
    """Whether this is the code of its forward, as its class has it."""
    own = behind_gate(vars(_has_forward(type(module)))[_FORWARD])
    plain = type(own) is FunctionType and own.__code__ is code
    return plain and _FORWARD not in (own_dict(module) or {})


def _has_forward(kind: type) -> type:
    """The class from which a module's has its forward."""
    return next(base for base in kind.__mro__ if _FORWARD in vars(base))


class _Asking(NamedTuple):
    """What a block wants of the forwards of these modules, by identity."""

    wholes: Mapping[int, Whole]
    instead: Callable[[Whole, Args, Kwargs], object]
    asks: Callable[[], bool]


_here = threading.local()  # the innermost block of the thread
_lock = fresh_in_children(threading.Lock())
_blocks = Counter[type]()
"""How many blocks there are now, of all threads, with modules that have their forward from this class."""


@contextmanager
def in_place_of(
    wholes: Iterable[Whole], instead: Callable[[Whole, Args, Kwargs], object], asks: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """In the block, this is called `instead` of these modules, on this thread, where no gradients of them are wanted and it
    `asks` for that."""
    known = {identity(module): whole for whole in wholes if (module := whole.keeps()) is not None}
    kinds = {_has_forward(type(whole.keeps())) for whole in known.values()}
    outer, opened = getattr(_here, "asking", None), list[type]()

    def undo() -> None:
        if threading.get_ident() == mine:
            _here.asking = outer
        while opened:
            _close(opened.pop())

    mine = threading.get_ident()
    with standing(undo):
        for kind in kinds:
            _open(kind)
            opened.append(kind)
        _here.asking = _Asking(known, instead, asks) if known else None
        yield


def _open(kind: Any) -> None:
    """Let a class have a forward that asks the innermost block. Its own stands behind that, as behind a gate."""
    with _lock:
        _blocks[kind] += 1
        if _blocks[kind] == 1:
            door = _asking(own := vars(kind)[_FORWARD])
            gates[door] = own
            type.__setattr__(kind, _FORWARD, door)


def _close(kind: Any) -> None:
    with _lock:
        _blocks[kind] -= 1
        if not _blocks[kind]:
            del _blocks[kind]
            door = vars(kind)[_FORWARD]
            type.__setattr__(kind, _FORWARD, gates.get(door, door))
            gates.pop(door, None)


def _asking(own: Callable[..., object]) -> Callable[..., object]:
    @wraps(own)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> object:
        asking: _Asking | None = None if torch.compiler.is_compiling() else getattr(_here, "asking", None)
        if asking is not None and identity(self) in asking.wholes and asking.asks() and not _has_history(self, args, kwargs):
            return asking.instead(asking.wholes[identity(self)], args, kwargs)
        return own(self, *args, **kwargs)

    return forward


def _has_history(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether gradients are wanted of what a module gives, as far as that can be foreseen."""
    if not torch.is_grad_enabled():
        return False
    leaves: list[object] = []
    flatten((args, kwargs), leaves)
    given = (x for x in leaves if isinstance(x, torch.Tensor))
    return any(t.requires_grad for t in (*module.parameters(), *given))
