"""The stream of operators of a call, as a digest: what a recording was made of, to be compared with what the same Python code
calls now.

Each operator leaves eight bytes: of its name, its numbers, and who its tensors are. A tensor is named so that the same call
gives the same name each time: an argument by its place, what the call makes by how many things it had made before, and what
was there before by its address, which is in the recording as well. Values of tensors are none of it, but for those that are
made of Python's numbers: they are constants of the recording. A number that a recording follows (`Dials`) is named by its
formula, for it may be another each time.

Behind the operators come the kernels that were launched without one, by compiled code or an extension: their names, sizes and
parameters. A graph that was compiled anew meanwhile launches others (`Recompiled`).

Not seen: what an extension does without an operator on the CPU, and which memory of the pool such a kernel is given.
"""

from __future__ import annotations

import ctypes
import hashlib
import marshal
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._torch.dynamic import Args, Kwargs
from .._torch.tensors import has_memory, is_ordinary
from ..aten.operators import Meaning
from ..errors import Refusal
from ..guards.hyperparameters import Dials
from ..memory.pool import dense
from ..python.identity import identity
from ..values.counters import Followed
from ..values.formulas import Formula
from ..values.pytree_nodes import Node
from ..values.wording import operator, source_of

__all__ = ["Comparison", "Differs", "Digest", "NotNow", "Recompiled", "Same"]

_BYTES = 8
_AS_THEY_ARE = frozenset({type(None), bool, int, float, complex, str, bytes})
_KINDS: dict[torch.dtype, str] = {}
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Digest:
    """Of one call, while it is captured and afterwards."""

    compares = False
    """Whether nothing else will come of the capture."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.hashes = bytearray()
        self.graphs: list[weakref.ref[object]] = []  # which are compiled
        self.shape: Node | None = None
        self.result = b""
        self._name_of: Callable[[int], int | str | None] = _forgotten
        self._dials: Dials | None = None
        self._offsets: dict[int, int] = {}
        self._fixed: tuple[float, ...] = ()

    def begin(self, name_of: Callable[[int], int | str | None], dials: Dials, slots: list[torch.Tensor]) -> None:
        """The call is going to run, with these slots for its arguments. Of a storage it is known how many others the call had
        made before, or what it is called."""
        self._name_of, self._dials = name_of, dials
        self._offsets = {slot.untyped_storage()._cdata: int(slot.storage_offset()) for slot in slots}
        self._fixed = dials.alike()

    def note(self, m: Meaning, func: object, args: Args, kwargs: Kwargs) -> None:
        """This operator is going to run."""
        if self._dials is None:
            return  # what the capture itself does when the call is over
        self._add(
            m.name,
            (
                identity(func),
                [*map(self._said, args)],
                self._said(kwargs) if kwargs else None,
                self._constant(args[0]) if m.constant else None,
            ),
        )

    def note_graph(self, graph: object) -> None:
        """This compiled graph is going to run."""
        self.graphs.append(weakref.ref(graph))

    def end(self, shape: Node | None, leaves: list[object], kernels: Iterable[tuple[str, object]]) -> None:
        """The call has returned these leaves, and launched these kernels without an operator."""
        for name, given in kernels:
            self._add(name, given)
        self.shape, self.result = shape, _hashed([*map(self._leaf, leaves)])
        self.close()

    def close(self) -> None:
        """Keep nothing of the capture."""
        self._name_of, self._dials = _forgotten, None

    def _add(self, name: str, said: object) -> None:
        self.names.append(name)
        self.hashes += _hashed(said)

    def _constant(self, t: torch.Tensor) -> bytes:
        """The values of a tensor that is made of Python's numbers, where they are not followed."""
        if not (t.is_cpu and has_memory(t) and dense(t)) or (self._dials and self._dials.stands_in(t)):
            return b""
        return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size())

    def _said(self, v: Any) -> object:
        kind = type(v)
        if kind is torch.Tensor:
            return self._tensor(v)
        if kind is float:
            formula = self._dials.formulas.get(v) if self._dials else None
            return v if formula is None else self._followed(formula)
        if kind in _AS_THEY_ARE:
            return v
        if isinstance(v, (list, tuple)):
            return [*map(self._said, v)]
        if isinstance(v, torch.Tensor):
            return self._tensor(v)
        if isinstance(v, dict):
            return [(self._said(k), self._said(x)) for k, x in v.items()]
        return str(v) if isinstance(v, _NAMED) else kind.__qualname__

    def _leaf(self, v: object) -> object:
        if isinstance(v, Followed):
            return self._followed(v.formula)
        if isinstance(v, torch.Tensor):
            who = self._tensor(v)
            return who, type(who[0]) is int and v.requires_grad  # what the call has not made is the caller's
        return self._said(v)

    def _followed(self, formula: Formula) -> str:
        """What a formula gives for numbers that are the same each time."""
        try:
            return f"follows {formula(self._fixed)!r}"
        except (ArithmeticError, TypeError, ValueError) as e:
            return f"follows {type(e).__name__}"

    def _tensor(self, t: torch.Tensor) -> tuple[object, ...]:
        kind = _KINDS.get(t.dtype) or _KINDS.setdefault(t.dtype, str(t.dtype))
        try:
            storage = t.untyped_storage() if not t.is_nested and (is_ordinary(t) or has_memory(t)) else None
        except RuntimeError:  # it has none
            storage = None
        if storage is None:
            return type(t).__qualname__, kind, t.dim()
        key, offset = storage._cdata, t.storage_offset()
        who: object = self._name_of(key)
        if type(who) is str:
            inside = key in self._offsets
            who, offset = (who, offset - self._offsets[key]) if inside else ((storage.data_ptr(), storage.nbytes()), offset)
        lazy = (t.is_conj(), t.is_neg()) if t.dtype.is_complex or t.is_neg() else ()
        return who, offset, kind, *t.shape, *t.stride(), *lazy


def _forgotten(key: int) -> None:
    """Where the call is over."""


def _called(name: str) -> str:
    """An operator, which is called now, or a kernel, which was launched before."""
    return source_of(name) if "::" in name else f"the kernel `{name}`"


def _hashed(said: Any) -> bytes:
    # In this version the bytes depend on the values alone, and not on who else refers to them.
    return hashlib.blake2b(marshal.dumps(said, 2), digest_size=_BYTES).digest()


class Differs(Refusal):
    """The call does something else than what was recorded."""


class Recompiled(Refusal):
    """It runs compiled code that was compiled later: for other sizes as well, say."""

    def __init__(self) -> None:
        super().__init__("")


class Same(Refusal):
    """It does what was recorded: the capture is given up."""

    def __init__(self) -> None:
        super().__init__("")


class NotNow(Refusal):
    """This call cannot be compared."""

    def __init__(self) -> None:
        super().__init__("", this_call=True)


class Comparison(Digest):
    """Of a call that was recorded: it ends with `Differs` before the first operator that is another, or with `Same`."""

    compares = True

    def __init__(self, then: Digest) -> None:
        super().__init__()
        self._then = then

    def _add(self, name: str, said: object) -> None:
        at = len(self.names)
        super()._add(name, said)
        then = self._then.names[at] if at < len(self._then.names) else ""
        if name != then:
            was = operator(then) if then else "nothing more"
            raise Differs(f"calls {_called(name)}, and called {was} there when it was recorded")
        if self.hashes[-_BYTES:] != self._then.hashes[_BYTES * at : _BYTES * (at + 1)]:
            raise Differs(f"{_called(name)} is given other numbers or tensors than when it was recorded")

    def note_graph(self, graph: object) -> None:
        at = len(self.graphs)
        super().note_graph(graph)
        if at < len(self._then.graphs) and self._then.graphs[at]() is not graph:
            raise Recompiled

    def end(self, shape: Node | None, leaves: list[object], kernels: Iterable[tuple[str, object]]) -> None:
        super().end(shape, leaves, kernels)
        then = self._then
        if len(self.names) < len(then.names):
            raise Differs(f"ends where it called {operator(then.names[len(self.names)])} when it was recorded")
        if shape != then.shape or self.result != then.result:
            raise Differs("returns something else than when it was recorded")
        raise Same
