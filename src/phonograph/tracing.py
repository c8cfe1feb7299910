"""What autograd keeps of a call whose backward runs outside, and what it does with that later.

While such a call is captured, every tensor that autograd saves goes through a hook of `Tracing`, and autograd keeps only its
number. So the graph that the capture leaves behind holds no memory: `Backward` runs it over whatever the numbers stand for
now, which are fixed places that each replay of the forward fills anew. It can run any number of times, live, and can be
recorded like any other function.

Arguments that require a gradient enter the graph through `_Source`, a node that holds nothing, and not as leaves: a leaf
would keep its memory, and have hooks.

What Python code keeps by itself (an attribute of `ctx`, a variable of a hook) would be a tensor of the capture for ever. So
when the capture is over, none of its memory may be held by anything.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from .effects import ANYONE, Effect, Starts
from .errors import Refusal
from .pool import Lease, extent, place_of, unowned
from .torch_private import alias, donates, use_count
from .watch import storage_id

__all__ = ["UNTRACED", "Backward", "Tracing"]

_RECOMPUTES = Effect("recomputes a part of it in its backward", "record the whole step", ANYONE)
_HOOKS = Effect("lets hooks decide what is saved for backward", "record the whole step", ANYONE)
UNTRACED: Starts = {
    "checkpoint": [(os.path.join("torch", "utils", "checkpoint.py"), lambda frame: True, _RECOMPUTES)],
    "__enter__": [(os.path.join("torch", "autograd", "graph.py"), lambda frame: True, _HOOKS)],
}
"""Functions that such a call may not use: what they keep for the backward would be that of the capture for ever."""


class _Source(torch.autograd.Function):
    """An argument as the captured function sees it: it has a history that ends here."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return alias(t)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


_SOURCE: Any = _Source._backward_cls  # the class of its nodes


class Tracing:
    """Follows one capture: `with tracing.saving():` around the function."""

    def __init__(self) -> None:
        self._root = torch.empty(0, requires_grad=True)
        self.begin([])

    def begin(self, arguments: Sequence[torch.Tensor]) -> None:
        """A capture begins, with these slots for arguments; parameters among them are state, and no input."""
        slots = [t for t in arguments if not isinstance(t, torch.nn.Parameter)]
        self._inputs = {storage_id(t) for t in slots}
        # Memory of the capture, which nothing may hold when it is over; slots nothing but the recording.
        self._slots = [(weakref.ref(t.untyped_storage()), storage_id(t), use_count(storage_id(t))) for t in slots]
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._sources: list[tuple[int, GradientEdge]] = []
        self._given: list[torch.Tensor] = []
        self._known: dict[Any, torch.Tensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.saved: list[torch.Tensor] = []
        """By number: the tensor of the capture. One that several nodes have saved has several numbers."""
        self._leaves: set[int] = set()  # numbers of tensors that were saved as they are, and not through a view
        self._places: Places | None = None

    def source(self, number: int, slot: torch.Tensor) -> torch.Tensor:
        """What the function gets as argument `number`, which requires a gradient."""
        t: torch.Tensor = _Source.apply(self._root, slot)  # type: ignore[no-untyped-call]
        self._sources.append((number, get_gradient_edge(t)))
        self._given.append(t)
        return t

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside the block is noted."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        if any(t._version != version for t, version in self._versions):
            raise Refusal("writes a tensor that autograd has saved for backward", final=False)
        if any(t.retains_grad for t in self._given):
            raise Refusal("asks for the gradient of an argument (retain_grad)", "ask for it outside")
        self._versions.clear()
        self._given.clear()

    def _pack(self, t: torch.Tensor) -> int:
        storage = storage_id(t)
        leaf = t.grad_fn is None
        key = (storage, t.dtype, t.storage_offset(), t.size(), t.stride(), t.is_conj(), t.is_neg(), leaf)
        if not t.is_inference():
            self._versions.append((t, t._version))
        if key not in self._known:
            # The place of an argument is filled anew by each replay: what backward needs of it is kept apart.
            self._known[key] = alias(t).clone() if storage in self._inputs else alias(t)
        number = len(self.saved)
        self.saved.append(self._known[key])
        if leaf:
            self._leaves.add(number)
        return number

    def _unpack(self, number: int) -> torch.Tensor:
        return self.saved[number] if self._places is None else self._places.get(number)

    def held(self) -> bool:
        """After the capture, when all that it has made is gone: whether something still holds memory of it, which would have
        the values of the capture for ever. (An attribute of `ctx`, a variable of a hook, an argument of `checkpoint`.)"""
        if self._some_held():
            gc.collect()
        return self._some_held()

    def _some_held(self) -> bool:
        if any(ref() is not None for ref in self._made):
            return True
        return any(ref() is not None and use_count(key) > count for ref, key, count in self._slots)

    def backward(
        self, function: Any, results: Mapping[int, torch.Tensor], attached: list[int], made: Mapping[int, Any],
        outside: Mapping[int, list[torch.Tensor]], lease: Callable[[int], Lease], has_hooks: bool,
    ) -> Backward:  # fmt: skip
        """The backward of the captured call, as a function of the gradients of those of its `results` that are `attached`.

        `function` was called, and its code may have set hooks (`has_hooks`). `made` are the places of memory that the call
        made, by storage; `lease` lends one. `outside` are the tensors that were there before, by storage.

        Raises:
            Refusal: it needs something that cannot be traced back.
        """
        ends = [get_gradient_edge(results[i]) for i in attached]
        parameters, python, seeded = _walk(ends)
        if any(storage_id(p) not in outside for p in parameters):
            raise Refusal("has results that depend on a tensor that requires a gradient and whose origin is not known",
                          "pass it as an argument, or keep it as an attribute, closure variable or global")  # fmt: skip
        numbers = {number: storage_id(t) for number, t in enumerate(self.saved)}
        on = {storage_id(t): i for i, t in results.items()}
        constant = {n: _meant(self.saved[n], outside[key]) for n, key in numbers.items() if key in outside}
        leaves = {n: t for n, t in constant.items() if n in self._leaves and place_of(t) == place_of(self.saved[n])}
        places = {id(t): self._place(t, made, outside, lease) for t in self._known.values()}
        self._places = Places([places[id(t)] for t in self.saved], leaves)
        ours = {storage_id(t): t for t in (*self.saved, *results.values())}
        self._made = [weakref.ref(t.untyped_storage()) for key, t in ours.items() if key in made and made[key].nbytes]
        self.saved.clear()
        self._known.clear()
        return Backward(
            function if python or has_hooks else None, ends, self._sources, parameters, self._places,
            [lease(key) for key in dict.fromkeys(numbers.values()) if key in made], constant,
            {n: on[key] for n, key in numbers.items() if key in on and key in made}, attached,
            frozenset(n for n, key in numbers.items() if key in made), seeded and results[attached[0]].is_cuda,
        )  # fmt: skip

    @staticmethod
    def _place(t: torch.Tensor, made: Mapping[int, Any], outside: Mapping[int, list[torch.Tensor]],
               lease: Callable[[int], Lease]) -> torch.Tensor:  # fmt: skip
        """Where a saved tensor will be found after each replay."""
        key = storage_id(t)
        if key in made:
            return lease(key).template(t.dtype, t.size(), t.stride(), int(t.storage_offset()), t.is_conj(), t.is_neg())
        if key in outside:  # old weights must not be kept because of a recording that read them
            place = torch.conj(unowned(t)) if t.is_conj() else unowned(t)
            return torch._neg_view(place) if t.is_neg() else place
        if not t.untyped_storage().nbytes():
            return t
        raise Refusal("saves a tensor for backward that phonograph cannot trace back", "pass it as an argument")


def _meant(t: torch.Tensor, candidates: list[torch.Tensor]) -> torch.Tensor:
    """Which of several tensors on one memory a saved one belongs to: the one that it lies on."""
    at, nbytes = t.data_ptr(), extent(t) * t.element_size()
    around = [c for c in candidates if c.data_ptr() <= at and at + nbytes <= c.data_ptr() + extent(c) * c.element_size()]
    return min(around or candidates, key=lambda c: c.numel())


class Places:
    """What the numbers of saved tensors stand for, once the capture is over."""

    def __init__(self, places: list[torch.Tensor], leaves: dict[int, torch.Tensor]) -> None:
        self.places = places
        self.leaves = leaves
        """Weights that were saved themselves: if one is given other memory before the backward, eager reads that."""
        self._read: set[int] | None = None

    def get(self, number: int) -> torch.Tensor:
        if self._read is not None:
            self._read.add(number)
        leaf = self.leaves.get(number)
        return self.places[number] if leaf is None else alias(leaf)

    @contextmanager
    def noting(self) -> Iterator[set[int]]:
        """The numbers that are asked for inside the block."""
        outer, self._read = self._read, set()
        try:
            yield self._read
        finally:
            self._read = outer


class Backward:
    """What autograd does in the backward of a recorded call: gradients of its results in, gradients of what they depend on
    out. Reads what the last replay of the forward has saved, and leaves it there."""

    def __init__(
        self, function: Any, ends: list[GradientEdge], sources: list[tuple[int, GradientEdge]],
        parameters: list[torch.Tensor], places: Places, memory: list[Lease], constant: dict[int, torch.Tensor],
        exposed: dict[int, int], attached: list[int], kept: frozenset[int], only_captured: bool,
    ) -> None:  # fmt: skip
        self._function = function  # the forward's, if some of its code runs in the backward: what it reads, that may read
        self._ends = ends
        self._starts = [*(edge for _, edge in sources), *map(get_gradient_edge, parameters)]
        self._places = places
        self.arguments = [number for number, _ in sources]
        self.parameters = parameters
        self.memory = memory
        """What the forward leaves for the backward."""
        self.constant = constant
        """By the numbers of what is saved: tensors outside."""
        self.exposed = exposed
        """By the numbers of what is saved: results, which their owner may write."""
        self.attached = attached
        """Which results have gradients."""
        self.kept = kept
        """The numbers of what lies on `memory`."""
        self.takes_turns = False  # made while another forward of the function waited for its backward
        self.only_captured = only_captured
        """Whether it can be captured and played, and not run: attention with dropout has left its seed on the device, and
        outside of a capture its backward would read it on the host."""

    def reached(self) -> tuple[Any, ...]:
        """What it can reach. It never changes."""
        return self._function, *self._places.places, *self._places.leaves.values(), *self.parameters

    def noting(self) -> Any:
        """A context that collects the numbers of the saved tensors which are read in it: not by a replay, but by a run."""
        return self._places.noting()

    def __call__(self, *grads: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The gradients of the `arguments`, and of the `parameters` after them; None for what the results do not depend on.
        A result whose gradient is None has none."""
        given = [(end, grad) for end, grad in zip(self._ends, grads, strict=True) if grad is not None]
        if not given:
            return [None] * len(self._starts)
        if self.only_captured and not torch.cuda.is_current_stream_capturing():
            raise RuntimeError("phonograph: the backward of attention with dropout could not be recorded, and cannot run live "
                               "after a recorded forward. Set dropout to 0, or record the whole step.")  # fmt: skip
        with _hooks_set_aside(self.parameters):
            return list(torch.autograd.grad([end for end, _ in given], self._starts, [grad for _, grad in given],
                                            retain_graph=True, allow_unused=True))  # fmt: skip


@contextmanager
def _hooks_set_aside(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Hooks of a parameter run where its gradient arrives, which is in the user's own backward."""
    hooks = [(h, dict(h)) for t in tensors if (h := t._backward_hooks)]
    for h, _ in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, saved in hooks:
            h.update(saved)


def _walk(ends: Sequence[GradientEdge]) -> tuple[list[torch.Tensor], bool, bool]:
    """The leaf tensors that gradients flow to; whether Python code runs on their way, and whether a seed is read."""
    found: list[torch.Tensor] = []
    python = seeded = False
    work = list(dict.fromkeys(end.node for end in ends))
    seen = set(work)
    while work:
        node = work.pop()
        if donates(node):
            raise Refusal("calls a torch.compile'd function whose backward writes what its forward has saved",
                          "set torch._functorch.config.donated_buffer = False before it is compiled")  # fmt: skip
        seeded = seeded or getattr(node, "_saved_dropout_p", 0.0) > 0
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        if isinstance(node, _SOURCE):
            continue
        python = python or isinstance(node, BackwardCFunction)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                work.append(following)
    return found, python, seeded
