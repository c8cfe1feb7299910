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
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from .._torch.dynamic import Thing
from .._torch.operators import OpOverload
from .._torch.tensors import alias, has_memory, storage_id
from ..aten import operators
from ..call.signature import attributes, modes
from ..errors import Overlooked, Refusal, Unseen
from ..guards.reachable import Reach
from ..guards.sameness import all_same
from ..guards.snapshot import changed
from ..guards.tensor_states import states_of
from ..memory.pool import unexpanded
from ..python.origin import users_line
from ..values.wording import first_line
from .call_memory import CallMemory
from .digest import Digest
from .effects import ANYONE, Effect, Starts
from .notes import Note
from .python_events import pause_profiling
from .refusals import Refusals

__all__ = ["ControlFlow", "Graph", "Roots", "apart", "strides_of"]

aten = torch.ops.aten

Profiler = Callable[..., object] | None
Roots = Sequence[tuple[str, object]]
"""What bodies can get at: the functions and their operands, with names."""

BODY = "a body of control flow"
_ELSEWHERE = "uses a tensor elsewhere than in the branch that has made it", "return it from the body"
_LOOP = -1, 0
_HOOK = Effect("sets a hook on a tensor in a branch or loop", "set it outside, or change the gradient in an "
               "autograd.Function", ANYONE)  # fmt: skip
_SET_HOOKS = {
    "register_hook": os.path.join("torch", "_tensor.py"),
    "setup_input_hook": os.path.join("torch", "utils", "hooks.py"),
    "register_post_accumulate_grad_hook": os.path.join("torch", "_tensor.py"),
}
_MARK = operators.meaning(aten.alias.default)._replace(name=BODY)


class Graph:
    """What autograd notes of one body. What it saves is used again where the backward of this body runs, and nowhere else: it
    is there where the body was taken."""

    keeps = False
    """Whether it keeps what was made in the body."""

    def met(self, operands: Sequence[torch.Tensor], made: object) -> None:
        """The body has called an operator with these, which has given that."""


class ControlFlow(CallMemory, Refusals):
    """Captures branches and loops of one call. A device has `capture_branch` and `capture_loop`."""

    device: torch.device
    digest: Digest | None

    def __init__(self) -> None:
        self.bodies = 0
        """How many bodies the operators that run now are within."""
        self.saved: dict[int, Graph] = {}
        """The storages that were made in a body and are kept for its backward."""
        self._place: list[tuple[int, int]] = []  # of the bodies that run now: which branch or loop, and which body of that
        self._flows = 0  # branches and loops so far
        self._cast_at: dict[tuple[int, int], tuple[list[tuple[int, int]], int]] = {}
        self.cast_again: Refusal | None = None
        """Why no gradients may come through branches any more."""
        self.graphs: list[Graph] = []
        """Those of the bodies that run now, forwards or backwards, the innermost last."""
        self._loops: list[int] = []  # of the loops whose bodies run now: how many storages the call had made before
        self._lost = False  # one of those is gone

    @property
    def made(self) -> int:
        """How many storages the call has made so far."""
        return self._made

    def made_since(self, t: torch.Tensor, made: int) -> bool:
        """Whether a tensor lies in memory that the call made after so many storages."""
        birth = self._births.get(storage_id(t)) if has_memory(t) else None
        return birth is not None and birth.number >= made

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
        self, index: torch.Tensor, bodies: Sequence[Callable[[], Sequence[torch.Tensor]]], roots: Roots,
        graphs: Sequence[Graph | None] = (),
    ) -> list[torch.Tensor]:  # fmt: skip
        """Capture a branch whose bodies give new tensors: memory of their own, of the same kind in each.

        Those with `graphs` make one of autograd, or run its backward.

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

        with self.unheard() as heard:
            around = self._around(roots)
            self._flush()
            flow = self._flows
            self.capture_branch(self._number(index, len(bodies)), [
                partial(self._within, partial(run, body, i == 0), results, around, heard, graph, (flow, i))
                for i, (body, graph) in enumerate(zip(bodies, graphs or [None] * len(bodies), strict=True))
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

        with self.unheard() as heard:
            around = self._around(roots)
            self._flush()
            with self._looping():
                self.capture_loop(goes_on, partial(self._within, turn, buffers, around, heard))
        return buffers

    @staticmethod
    @contextmanager
    def unheard() -> Iterator[Profiler]:
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
        self.saved.pop(key, None)
        super().died(key)

    def _around(self, roots: Roots) -> _Around:
        reach = _Surroundings(roots)
        if reach.iterators or reach.host_rngs or reach.truncated:
            what = f"{reach.iterators[0]}, an iterator" if reach.iterators else "a random generator of Python's"
            raise self.located(Refusal(f"can get at {'too much' if reach.truncated else what} in a branch or loop",
                                       "let the functions name less, and pass what they need as operands"))  # fmt: skip
        return _Around(reach)

    def hooks(self) -> Starts:
        """Functions that set hooks, which are refused in bodies: a backward calls them in captures only, whether the body is
        taken or not."""
        return {name: [(file, lambda frame: bool(self.bodies), _HOOK)] for name, file in _SET_HOOKS.items()}

    def check_saved(self, key: int) -> None:
        """Refuse a storage that is kept for the backward of a body that may not have been taken."""
        if self.saved[key] not in self.graphs:
            raise Refusal(*_ELSEWHERE)

    def check_left(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse tensors of that kind that the call leaves."""
        if any(has_memory(t) and storage_id(t) in self.saved for t in tensors):
            raise Refusal(*_ELSEWHERE)

    def _within(
        self, run: Callable[[], None], kept: Sequence[torch.Tensor], around: _Around, heard: Profiler,
        graph: Graph | None = None, body: tuple[int, int] = _LOOP,
    ) -> None:  # fmt: skip
        """Run a body that leaves nothing but the tensors `kept`, and what its graph saves."""
        made, before = self._made, modes()
        self.bodies += 1
        self._place.append(body)
        if graph is not None:
            self.graphs.append(graph)
        try:
            if heard is not None:
                sys.setprofile(heard)
            run()
        except (Refusal, Overlooked):
            raise
        except Exception as e:
            said = f"raises {type(e).__name__} in a branch or loop, which a capture runs whether it is taken or not"
            remedy = "let it raise outside, or not at all"
            raise self.located(Refusal(f"{said}: {first_line(e)}", remedy, failed=True)) from e
        finally:
            pause_profiling()
            self.bodies -= 1
            self._place.pop()
            if graph is not None:
                self.graphs.pop()
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
        left = self._left_by(made, kept)
        if graph is not None and graph.keeps:
            self.saved.update((key, graph) for key in left if key not in self.saved)
        elif left:
            lost = self._lost
            gc.collect()
            self._lost = lost  # garbage is nothing that a turn may need
            if self._left_by(made, kept):
                raise self.located(Refusal("keeps a tensor that it makes in a branch or loop", "return it from the body"))
        if self.digest is not None:
            self.digest.note(_MARK, _MARK.name, Note((), {}, self.known))

    def _left_by(self, made: int, kept: Iterable[torch.Tensor]) -> list[int]:
        """The storages that are there, were made after so many, and are none of these."""
        mine = {*map(storage_id, kept)}
        return [key for key, b in [*self._births.items()] if b.number >= made and b() is not None and key not in mine]

    def _made_in_body(
        self, body: Callable[[], Sequence[torch.Tensor]], said: str, given: Container[int] = ()
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        """The results of a body, each of which has memory of its own, or lies in storages that the body was `given`."""
        made = self.made
        found = [*body()]
        for i, t in enumerate(found):
            if attributes(t):
                raise self.located(Refusal(f"returns a tensor from {said}, which has attributes", "return them beside it"))
            self._without_gradient(t, said)
            if has_memory(t) and storage_id(t) not in self.known:  # compiled code has made it, by no operator
                found[i] = t = self.copied(t)
            if not self.made_since(t, made) and storage_id(t) not in given:
                raise self.located(Refusal(f"returns a tensor from {said}, which was there before",
                                           "pass it as an operand, or return a clone of it"))  # fmt: skip
        return found

    def _without_gradient(self, t: torch.Tensor, said: str) -> None:
        if t.requires_grad:
            remedy = "record the backward in the same call, and give a loop max_iterations; or call it under torch.no_grad()"
            raise self.located(Refusal(f"returns a tensor from {said}, which requires a gradient", remedy))

    def _alike(self, there: torch.Tensor, t: torch.Tensor, said: str, other: str) -> None:
        one, two = _kind(there), _kind(t)
        if one != two:
            differs = next(f"{name} {a} and {b}" for name, a, b in zip(_KIND, one, two, strict=True) if a != b)
            raise self.located(Refusal(f"returns a tensor from {said}, which is another than {other}: {differs}",
                                       "let shapes, types and strides be alike: to(), contiguous()"))  # fmt: skip

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
        """(Autograd may have saved the target, for a body that is not taken then.)"""
        self.applied(aten.copy_.default, unexpanded(alias(target)), unexpanded(t))

    def _flush(self) -> None:
        """What autocast has cast in a body is for that body."""
        torch.clear_autocast_cache()
        self._flows += 1

    def casts_weight(self, t: torch.Tensor, ended: int) -> None:
        """Autocast casts a weight after so many of its contexts. In eager it may be there from before, by which bodies are
        taken: gradients are then added up in the type to which it was cast."""
        there, flows = self._cast_at.get((storage_id(t), ended), ([], self._flows))
        apart = next((a[0] == b[0] for a, b in zip(self._place, there, strict=False) if a != b), False)
        if flows != self._flows and not apart:
            self.cast_again = Refusal("casts a weight in a branch and elsewhere, for which autocast does it once in eager",
                                      "turn off autocast's cache (cache_enabled=False)", users_line())  # fmt: skip
        self._cast_at[storage_id(t), ended] = [*self._place], self._flows


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
        return [(state, t.grad if t.is_leaf else t.grad_fn, t.retains_grad, *t.__dict__, *t.__dict__.values())
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


def strides_of(t: torch.Tensor) -> tuple[int, ...]:
    """The strides that tell where its elements lie."""
    return tuple(stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1) if t.numel() else ()


_KIND = "shape", "dtype", "device", "strides", "is_conj()", "is_neg()", "class", "is_inference()"


def _kind(t: torch.Tensor) -> tuple[object, ...]:
    return tuple(t.shape), t.dtype, t.device, strides_of(t), t.is_conj(), t.is_neg(), type(t), t.is_inference()


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_id(a) == storage_id(b) and (a.storage_offset(), *_kind(a)) == (b.storage_offset(), *_kind(b))
