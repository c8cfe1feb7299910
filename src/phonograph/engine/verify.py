"""`verify=N`: every N-th replay is compared with a live run on the same state.

The call is run live first, on everything that it can reach; what it left is noted and taken back; then the recording is
played, and both results, both states and both random generators are compared bit by bit. If they differ, the live run's
state is put in place, because that is the right one, and `Mismatch` is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves
from .._torch.tensors import has_memory, is_freed, storage_id
from ..call.signature import Call
from ..capture.recording import Recording
from ..errors import Mismatch
from ..guards.attribute_effects import APPENDED
from ..guards.reachable import Reach
from ..guards.sameness import same
from ..memory.loans import Borrowed
from ..memory.pool import row_of_bytes
from ..state.reentrancy import Nested
from ..state.rng import put
from ..values.pytree import Flattener, flatten
from ..values.pytree_nodes import Node
from ..values.tensor_subclasses import parts

__all__ = ["equal", "generators_in", "repeats", "verified"]


def repeats(recording: Recording) -> str | None:
    """The effect of a replay that a live run beside it would have once more; None if there is none."""
    left = recording.table.effects.left
    appended = [put.path for put in left.puts if put.name is APPENDED]
    if recording.live_parts:
        return "has operators that run live"
    if recording.communicates:
        return "communicates with other ranks"
    if recording.table.draws.drops_out:
        return "drops out between layers of cuDNN's"
    if recording.table.effects.edits:
        return "changes an argument's container"
    if recording.table.effects.turned:
        return "lets an argument require a gradient"
    if left.counts:
        return f"counts {left.paths[0]}"
    if recording.table.numbers.dials.advanced or recording.table.effects.settings:
        return "sets an attribute"
    return f"appends to {appended[0]}" if appended else None


class _State:
    """The contents of everything that a call can reach, copied."""

    def __init__(self, call: Call, reach: Reach, own: Sequence[torch.Generator]) -> None:
        named = [(f"argument {i}", t) for i, t in enumerate(call.tensors)]
        named += [(name, t) for name, t in reach.tensors.values()]
        leaves = [(name, t) for name, t in reach.all_tensors if t.is_leaf]
        named += [(f"{name}.grad", part) for name, t in leaves if t.grad is not None for part in parts(t.grad)]
        unique = {storage_id(t): (name, _bytes(t)) for name, t in named if has_memory(t)}
        self._contents = [(name, b, b.clone()) for name, b in unique.values()]
        self._grads = [(name, t, t.grad) for name, t in leaves]
        self._generators = [(g, g.get_state()) for g in (*generators_in(reach), *own)]

    def restore(self) -> None:
        for _, b, copy in self._contents:
            b.copy_(copy)
        for _, t, grad in self._grads:
            if t.grad is not grad:
                t.grad = grad
        for g, state in self._generators:
            put(g, state)

    def difference(self) -> str | None:
        """The name of something that is not now as it is noted here."""
        for name, b, copy in self._contents:
            if not torch.equal(b, copy):
                return name
        for name, t, grad in self._grads:
            if (t.grad is None) != (grad is None):
                return f"{name}.grad"
        moved = [g for g, state in self._generators if not torch.equal(g.get_state(), state)]
        return "the state of a random generator" if moved else None


def _bytes(t: torch.Tensor) -> torch.Tensor:
    storage = t.untyped_storage()
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage, 0, (storage.nbytes(),), (1,))


def generators_in(reach: Reach) -> list[torch.Generator]:
    ours = [torch.default_generator, *reach.generators]
    return ours + (list(torch.cuda.default_generators) if torch.cuda.is_initialized() else [])


def verified(
    name: str,
    call: Call,
    reach: Reach,
    function: Callable[..., object],
    play: Callable[[], object],
    own: Sequence[torch.Generator] = (),
) -> object:
    """The result of `play()`, which must be what the function gives on the same state. Both draw from the generators that
    compiled code has of its `own`.

    Raises:
        Mismatch: they differ; the state is then the live run's.
    """
    before, given = _State(call, reach, own), _tensors(call.like)
    expected = _noted(_live(function, call), given)
    after = _State(call, reach, own)
    grads = [(n, None if t.grad is None else _copied(t.grad), t) for n, t, _ in after._grads]
    before.restore()
    result = play()
    wrong = _differs(expected, _noted(result, given))
    for n, grad, t in grads:
        if wrong is None and grad is not _FREED and not equal(grad, t.grad):
            wrong = f"{n}.grad"
    wrong = wrong or after.difference()
    if wrong is not None:
        after.restore()
        raise Mismatch(f"a replay of {name} differs from a live run in {wrong}; see docs/limits.md for what cannot be "
                       "noticed, and call pg.reset after changing it")  # fmt: skip
    return result


def _live(function: Callable[..., object], call: Call) -> object:
    args, kwargs = call.like
    with Nested():
        return function(*args, **kwargs)


class _Noted(NamedTuple):
    shape: Node | None
    leaves: Leaves
    """Values; of tensors, copies."""
    made: Leaves
    """Of tensors what is no value: how they lie in memory, what history they have, and whose memory it is."""


def _memory(t: torch.Tensor) -> int | None:
    """Which storage a tensor has; None where it has no memory."""
    t = t.inner if type(t) is Borrowed else t
    return storage_id(t) if has_memory(t) and t.untyped_storage().nbytes() else None


def _tensors(tree: object) -> list[tuple[torch.Tensor, int | None]]:
    """The tensors in it, and their memory; that of borrowed ones a replay may take for its results."""
    leaves: list[object] = []
    flatten(tree, leaves, Flattener())
    return [(x, None if type(x) is Borrowed else _memory(x)) for x in leaves if isinstance(x, torch.Tensor)]


def _noted(result: object, given: list[tuple[torch.Tensor, int | None]]) -> _Noted:
    leaves: list[object] = []
    shape = flatten(result, leaves, Flattener())
    known, made = list(given), list[object]()
    for x in leaves:
        if isinstance(x, torch.Tensor):
            memory = _memory(x)
            same = next((i for i, (t, _) in enumerate(known) if t is x), None)
            there = None if memory is None else next((i for i, (_, m) in enumerate(known) if m == memory), None)
            made.append((x.stride() if x.layout is torch.strided else (), x.requires_grad, x.grad_fn is None, same, there))
            known.append((x, memory))
    return _Noted(shape, [_copied(x) if isinstance(x, torch.Tensor) else x for x in leaves], made)


_FREED = object()


def _copied(t: torch.Tensor) -> object:
    """A copy of its values; `_FREED` where there are none any more."""
    return _FREED if has_memory(t) and is_freed(t) else t.detach().clone()


def _differs(a: _Noted, b: _Noted) -> str | None:
    if a.shape != b.shape:
        return "the structure of the result"
    for i, (x, y) in enumerate(zip(a.leaves, b.leaves, strict=True)):
        if not equal(x, y):
            return f"result {i}"
    return None if a.made == b.made else "how its results lie in memory, or whether they have a history"


def equal(x: object, y: object) -> bool:
    """Whether two leaves of results are the same, tensors bit by bit."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            return False
        return x.numel() == 0 or torch.equal(row_of_bytes(x.detach()), row_of_bytes(y.detach()))
    return same(x, y)
