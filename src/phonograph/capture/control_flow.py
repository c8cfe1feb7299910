"""Branches and loops of a captured call, which a replay takes by what a tensor holds.

A capture runs each body once, dry: all branches, and a loop's condition and body. The device notes what each launches as a
body of its own, and a replay runs those that are taken. So a body leaves nothing but its results and what its operators write:
its Python code runs in captures only, and there whether the body is taken or not.

Two things would be silently wrong, and are refused. A body that changes an object from outside of it has an effect in each
replay, or in none. A loop's body runs once here and often in a replay: so what was there before the loop has to outlive it, for
its memory would be given to what the body makes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from .._torch.dynamic import Thing
from .._torch.operators import OpOverload
from .._torch.tensors import has_memory, storage_id
from ..aten import operators
from ..call.signature import attributes, modes
from ..errors import Overlooked, Refusal, Unseen
from ..guards.reachable import Reach
from ..guards.sameness import all_same
from ..guards.snapshot import changed
from ..guards.tensor_states import states_of
from ..memory.pool import unexpanded
from .call_memory import CallMemory
from .digest import Digest
from .python_events import pause_profiling
from .refusals import Refusals

__all__ = ["ControlFlow", "Roots", "apart"]

aten = torch.ops.aten

Profiler = Callable[..., object] | None
Roots = Sequence[tuple[str, object]]
"""What bodies can get at: the functions and their operands, with names."""

BODY = "a body of control flow"
_MARK = operators.meaning(aten.alias.default)._replace(name=BODY)


class ControlFlow(CallMemory, Refusals):
    """Captures branches and loops of one call. A device has `capture_branch` and `capture_loop`."""

    device: torch.device
    digest: Digest | None

    def __init__(self) -> None:
        self.bodies = 0
        """How many bodies the operators that run now are within."""
        self._loops: list[int] = []  # of the loops whose bodies run now: how many storages the call had made before
        self._lost = False  # one of those is gone

    # -- what a device does

    def capture_branch(self, index: torch.Tensor, bodies: Sequence[Callable[[], None]]) -> None:
        """Capture a branch: call each body once, in order, and note what it launches as that body's.

        A replay runs the body whose number is in `index`: a tensor on the device with one element, a bool, or an int32 that is
        a number of a body.
        """
        raise self.located(Refusal("branches by what a tensor holds, which the device cannot record", "use torch.where"))

    def capture_loop(self, condition: Callable[[], torch.Tensor], body: Callable[[], None]) -> None:
        """Capture a loop: call the condition and the body, in this order, and note what they launch as theirs.

        A replay runs the body for as long as the condition gives True: a bool tensor on the device with one element. It may be
        called twice, before the loop and at the body's end.
        """
        raise self.located(Refusal("loops by what a tensor holds, which the device cannot record", "use a fixed number"))

    # -- what is common

    def branch(
        self, index: torch.Tensor, bodies: Sequence[Callable[[], Sequence[torch.Tensor]]], roots: Roots
    ) -> list[torch.Tensor]:
        """Capture a branch whose bodies give new tensors: memory of their own, of the same kind in each.

        Returns:
            Those of the first body, into which the others copy theirs.
        """
        results: list[torch.Tensor] = []

        def run(body: Callable[[], Sequence[torch.Tensor]], first: bool) -> None:
            found = self._made_in_body(body, "a branch")
            if first:
                results.extend(found)
                return
            for target, t in zip(results, found, strict=True):
                self._alike(target, t, "a branch", "that of the first branch")
                self._copy(target, t)

        with self._unheard() as heard:
            around = self._around(roots)
            self._flush()
            self.capture_branch(self._number(index, len(bodies)), [
                partial(self._within, partial(run, body, i == 0), results, around, heard) for i, body in enumerate(bodies)
            ])  # fmt: skip
        return results

    def loop(
        self, condition: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        body: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]], state: Sequence[torch.Tensor], roots: Roots,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Capture a loop. Its condition and its body are given the state, and the body returns the next one.

        Returns:
            The state's tensors: new ones, into which each turn copies what the body gives.
        """
        buffers = [self.copied(t) for t in state]
        mine = {storage_id(b): b for b in buffers}

        def goes_on() -> torch.Tensor:
            found: list[torch.Tensor] = []
            self._within(lambda: found.append(self._truth(condition(buffers))), found, around, heard)
            return found[0]

        def turn() -> None:
            found = self._made_in_body(partial(body, buffers), "a loop's body", mine)
            moved = [(b, t) for b, t in zip(buffers, found, strict=True) if not _same_memory(b, t)]
            for b, t in moved:
                self._alike(b, t, "a loop's body", "the one that it is given")
            values = [self.copied(t) if storage_id(t) in mine else t for _, t in moved]
            for (b, _), value in zip(moved, values, strict=True):
                self._copy(b, value)

        with self._unheard() as heard:
            around = self._around(roots)
            self._flush()
            with self._looping():
                self.capture_loop(goes_on, partial(self._within, turn, buffers, around, heard))
        return buffers

    @staticmethod
    @contextmanager
    def _unheard() -> Iterator[Profiler]:
        """What runs in the block is no Python code of the call's. Yields who listens to that."""
        heard = pause_profiling()
        try:
            yield heard
        finally:
            if heard is not None:
                sys.setprofile(heard)

    @contextmanager
    def _looping(self) -> Iterator[None]:
        """What was there before the block has to be there at its end."""
        self._loops.append(self._made)
        self._lost, before = False, self._lost
        try:
            yield
        finally:
            self._loops.pop()
            lost, self._lost = self._lost, before or self._lost
        if lost:
            raise self.located(Refusal("lets go of a tensor in a loop's body that was there before the loop, and that each "
                                       "turn may need", "let it go before or after the loop"))  # fmt: skip

    def died(self, key: int) -> None:
        if self._loops and (birth := self._births.get(key)) is not None:
            self._lost = self._lost or birth.number < self._loops[-1]
        super().died(key)

    def _around(self, roots: Roots) -> _Around:
        reach = _Surroundings(roots)
        if reach.iterators or reach.host_rngs or reach.truncated:
            what = f"{reach.iterators[0]}, an iterator" if reach.iterators else "a random generator of Python's"
            raise self.located(Refusal(f"can get at {'too much' if reach.truncated else what} in a branch or loop",
                                       "let the functions name less, and pass what they need as operands"))  # fmt: skip
        return _Around(reach)

    def _within(self, run: Callable[[], None], kept: Sequence[torch.Tensor], around: _Around, heard: Profiler) -> None:
        """Run a body that leaves nothing but the tensors `kept`."""
        made, before = self._made, modes()
        self.bodies += 1
        try:
            if heard is not None:
                sys.setprofile(heard)
            run()
        except (Refusal, Overlooked):
            raise
        except Exception as e:
            said = f"raises {type(e).__name__} in a branch or loop, which a capture runs whether it is taken or not"
            raise self.located(Refusal(said, "let it raise outside, or not at all", failed=True)) from e
        finally:
            pause_profiling()
            self.bodies -= 1
        self._flush()
        if modes() != before:
            raise self.located(
                Refusal("changes a mode of torch's in a branch or loop", "use it as a context manager (with ...)")
            )
        if around.begins_steps():
            raise self.located(Unseen("steps an optimizer for the first time", "call it once before", final=False))
        if (place := around.changed()) is not None:
            raise self.located(Refusal(f"changes {place} in a branch or loop", "return it from the body, or write a tensor in "
                                       "place (gradients: zero_grad(set_to_none=False))"))  # fmt: skip
        if self._left_by(made, kept):
            lost = self._lost
            gc.collect()
            self._lost = lost  # garbage is nothing that a turn may need
        if self._left_by(made, kept):
            raise self.located(Refusal("keeps a tensor that it makes in a branch or loop",
                                       "return it from the body"))  # fmt: skip
        if self.digest is not None:
            self.digest.note(_MARK, _MARK.name, (), {})

    def _left_by(self, made: int, kept: Iterable[torch.Tensor]) -> bool:
        """Whether a storage is there that was made after so many, and is none of these."""
        mine = {*map(storage_id, kept)}
        return any(b.number >= made and b() is not None and key not in mine for key, b in [*self._births.items()])

    def _made_in_body(
        self, body: Callable[[], Sequence[torch.Tensor]], said: str, given: Container[int] = ()
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        """The results of a body, each of which has memory of its own, or lies in storages that the body was `given`."""
        made = self._made
        found = [*body()]
        for i, t in enumerate(found):
            if attributes(t):
                raise self.located(Refusal(f"returns a tensor from {said}, which has attributes", "return them beside it"))
            self._without_gradient(t, said)
            if has_memory(t) and storage_id(t) not in self.known:  # compiled code has made it, by no operator
                found[i] = t = self.copied(t)
            birth = self._births.get(storage_id(t)) if has_memory(t) else None
            if (birth is None or birth.number < made) and storage_id(t) not in given:
                raise self.located(Refusal(f"returns a tensor from {said}, which was there before",
                                           "pass it as an operand, or return a clone of it"))  # fmt: skip
        return found

    def _without_gradient(self, t: torch.Tensor, said: str) -> None:
        if t.requires_grad:
            raise self.located(
                Refusal(f"returns a tensor from {said}, which requires a gradient", "call it under torch.no_grad()")
            )

    def _alike(self, there: torch.Tensor, t: torch.Tensor, said: str, other: str) -> None:
        one, two = _kind(there), _kind(t)
        if one != two:
            differs = next(f"{a} and {b}" for a, b in zip(one, two, strict=True) if a != b)
            raise self.located(Refusal(f"returns a tensor from {said}, which is another than {other}: {differs}",
                                       "let shapes, types and strides be alike"))  # fmt: skip

    def _number(self, index: torch.Tensor, n: int) -> torch.Tensor:
        """Which of `n` bodies is meant."""
        self._one_here(index)
        if index.dtype is torch.bool and n == 2:
            return index
        found = self.applied(aten._to_copy.default, index, dtype=torch.int64)
        found = self.applied(aten.clamp.default, found, 0, n - 1)
        number: torch.Tensor = self.applied(aten._to_copy.default, found, dtype=torch.int32)
        return number

    def _truth(self, pred: torch.Tensor) -> torch.Tensor:
        self._one_here(pred)
        truth: torch.Tensor = self.applied(aten.ne.Scalar, pred, 0)
        return truth

    def _one_here(self, pred: torch.Tensor) -> None:
        if pred.numel() != 1 or pred.device != self.device or not has_memory(pred):
            raise self.located(Refusal(f"branches or loops by a tensor of shape {tuple(pred.shape)} on {pred.device}",
                                       f"give one element on {self.device}"))  # fmt: skip

    # -- operators of the capture's own

    def applied(self, func: OpOverload, *args: object, **kwargs: object) -> Thing:
        """Call an operator as one of the capture, without autograd."""
        raise NotImplementedError

    def copied(self, t: torch.Tensor) -> torch.Tensor:
        """Copy a tensor by an operator of the capture."""
        made: torch.Tensor = self.applied(aten.clone.default, t)
        return made

    def _copy(self, target: torch.Tensor, t: torch.Tensor) -> None:
        self.applied(aten.copy_.default, unexpanded(target), unexpanded(t))

    def _flush(self) -> None:
        """What autocast has cast in a body is for that body."""
        torch.clear_autocast_cache()


class _Surroundings(Reach):
    whole = True


class _Around:
    """What bodies can get at: what it was before them."""

    def __init__(self, reach: Reach) -> None:
        self._holders = [(h, h.read()) for h in reach.holders]
        self._tensors = reach.all_tensors
        self._states = self._read()
        self._states_of_optimizers = [o.state for o in reach.optimizers]
        self._sizes = [*map(len, self._states_of_optimizers)]

    def changed(self) -> str | None:
        """The name of something that is another now."""
        found = [*changed(self._holders)]
        for (name, t), old, new in zip(self._tensors, self._states, self._read(), strict=True):
            if old[0] != new[0] or not all_same(old[2:], new[2:]):
                found.append(name)
            elif old[1] is not new[1]:
                found.append(f"{name}.grad" if t.is_leaf else name)
        return next(iter(found), None)

    def begins_steps(self) -> bool:
        """Whether an optimizer has made its state since."""
        return [*map(len, self._states_of_optimizers)] != self._sizes

    def _read(self) -> list[tuple[object, ...]]:
        """What tensors are; the gradient of a leaf, or where autograd has another from; and the attributes that they have."""
        tensors = [t for _, t in self._tensors]
        states = states_of(tensors)
        return [(state, t.grad if t.is_leaf else t.grad_fn, *t.__dict__, *t.__dict__.values())
                for state, t in zip(states, tensors, strict=True)]  # fmt: skip


def apart(
    tensors: Iterable[torch.Tensor], operands: Iterable[torch.Tensor],
    copied: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> list[torch.Tensor]:  # fmt: skip
    """These with a copy of each that shares memory with an operand, or with one before it."""
    found, taken = list[torch.Tensor](), {storage_id(t) for t in operands if has_memory(t)}
    for t in tensors:
        found.append(copied(t) if has_memory(t) and storage_id(t) in taken else t)
        taken.update(storage_id(x) for x in found[-1:] if has_memory(x))
    return found


def _kind(t: torch.Tensor) -> tuple[object, ...]:
    strides = [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
    lie = tuple(strides) if t.numel() else (), t.is_conj(), t.is_neg()
    return tuple(t.shape), t.dtype, t.device, *lie, type(t), t.is_inference()


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_id(a) == storage_id(b) and (a.storage_offset(), *_kind(a)) == (b.storage_offset(), *_kind(b))
