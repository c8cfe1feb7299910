"""What autograd keeps of a call whose backward runs outside, and what it does with that later.

While such a call is captured, every tensor that autograd saves goes through `Tracing.pack`, and autograd keeps only its
number. So the graph that the capture leaves behind holds no memory: `Backward` runs it over whatever the numbers stand for
now, which are fixed places that each replay of the forward fills anew. It can run any number of times, live, and can be
recorded like any other function.

Arguments that require a gradient enter the graph through `_Source`, a node that holds nothing, and not as leaves: a leaf
would keep its memory, and have hooks.

Not kept track of: tensors that an autograd function of the user's keeps as attributes of its `ctx`. They are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from .effects import ANYONE, Effect, Starts
from .errors import Refusal
from .pool import Lease, unowned
from .torch_private import alias, donates, recomputes_through_backward
from .watch import storage_id

__all__ = ["KEEPS_STATE", "Backward", "Tracing"]

_STATE = Effect("keeps the state of a random generator for its backward",
                "recompute with preserve_rng_state=False, or record the whole step", ANYONE)  # fmt: skip
KEEPS_STATE: Starts = {"get_rng_state": [(os.path.join("torch", *path, "random.py"), lambda frame: True, _STATE)
                                         for path in ((), ("cuda",))]}  # fmt: skip
"""Functions that such a call may not use: what they return would be that of the capture for ever."""


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
    """Follows one capture: `with tracing:` around the function."""

    def __init__(self) -> None:
        self._root = torch.empty(0, requires_grad=True)
        self._accumulators: list[GradientEdge] = []
        self.begin([])

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Before the capture, on the user's stream: a parameter has one node that receives its gradient, which belongs to the
        stream that it was made on, and the user's backward has to wait for that stream if it is another."""
        self._accumulators = [get_gradient_edge(p) for p in parameters]

    def begin(self, arguments: Sequence[torch.Tensor]) -> None:
        """A capture begins, with these slots for arguments; parameters among them are state, and no input."""
        self._inputs = {storage_id(t) for t in arguments if not isinstance(t, torch.nn.Parameter)}
        self._sources: list[tuple[int, GradientEdge]] = []
        self._numbers: dict[Any, int] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.saved: list[torch.Tensor] = []

    def source(self, number: int, slot: torch.Tensor) -> torch.Tensor:
        """What the function gets as argument `number`, which requires a gradient."""
        t: torch.Tensor = _Source.apply(self._root, slot)  # type: ignore[no-untyped-call]
        self._sources.append((number, get_gradient_edge(t)))
        return t

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside the block is noted."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        if any(t._version != version for t, version in self._versions):
            raise Refusal("writes a tensor that autograd has saved for backward", final=False)
        self._versions.clear()

    def _pack(self, t: torch.Tensor) -> int:
        storage = storage_id(t)
        key = (storage, t.dtype, t.storage_offset(), t.size(), t.stride(), t.is_conj(), t.is_neg())
        if not t.is_inference():
            self._versions.append((t, t._version))
        if key not in self._numbers:
            self._numbers[key] = len(self.saved)
            # The place of an argument is filled anew by each replay: what backward needs of it is kept apart.
            self.saved.append(alias(t).clone() if storage in self._inputs else alias(t))
        return self._numbers[key]

    def _unpack(self, number: int) -> torch.Tensor:
        return self.saved[number]

    def backward(
        self, function: Any, results: Sequence[torch.Tensor], made: Mapping[int, Any], outside: Mapping[int, torch.Tensor],
        lease: Callable[[int], Lease], has_hooks: bool,
    ) -> Backward:  # fmt: skip
        """The backward of the captured call, as a function of the gradients of `results`.

        `function` was called, and its code may have set hooks (`has_hooks`). `made` are the places of memory that the call
        made, by storage; `lease` lends one. `outside` are the tensors that were there before.

        Raises:
            Refusal: it needs something that cannot be traced back.
        """
        ends = [get_gradient_edge(t) for t in results]
        parameters, python = _walk(ends)
        if any(storage_id(p) not in outside for p in parameters):
            raise Refusal("has results that depend on a tensor that requires a gradient and whose origin is not known",
                          "pass it as an argument, or keep it as an attribute, closure variable or global")  # fmt: skip
        used = dict.fromkeys(storage_id(t) for t in self.saved)
        exposed = [i for i, t in enumerate(results) if storage_id(t) in used]
        places = [self._place(t, made, outside, lease) for t in self.saved]
        memory = [lease(key) for key in used if key in made]
        constant = [outside[key] for key in used if key in outside]
        self.saved[:] = places
        self._accumulators = []
        return Backward(
            function if python or has_hooks else None, ends, self._sources, parameters, self.saved, memory, constant, exposed
        )

    @staticmethod
    def _place(t: torch.Tensor, made: Mapping[int, Any], outside: Mapping[int, torch.Tensor],
               lease: Callable[[int], Lease]) -> torch.Tensor:  # fmt: skip
        """Where a saved tensor will be found after each replay."""
        key = storage_id(t)
        if key in made:
            place = lease(key).template(t.dtype, t.size(), t.stride(), int(t.storage_offset()))
        elif key in outside:
            place = unowned(t)  # old weights must not be kept because of a recording that read them
        elif not t.untyped_storage().nbytes():
            return t
        else:
            raise Refusal("saves a tensor for backward that phonograph cannot trace back", "pass it as an argument")
        place = torch.conj(place) if t.is_conj() else place
        return torch._neg_view(place) if t.is_neg() else place


class Backward:
    """What autograd does in the backward of a recorded call: gradients of its results in, gradients of what they depend on
    out. Reads what the last replay of the forward has saved, and leaves it there."""

    def __init__(
        self, function: Any, ends: list[GradientEdge], sources: list[tuple[int, GradientEdge]],
        parameters: list[torch.Tensor], saved: list[torch.Tensor], memory: list[Lease], constant: list[torch.Tensor],
        exposed: list[int],
    ) -> None:  # fmt: skip
        self._function = function  # the forward's, if some of its code runs in the backward: what it reads, that may read
        self._ends = ends
        self._starts = [edge for _, edge in sources]
        self._saved = saved
        self.arguments = [number for number, _ in sources]
        self.parameters = parameters
        self.memory = memory
        """What the forward leaves for the backward."""
        self.constant = constant
        """Tensors outside that the forward has saved: they must not be written before the backward."""
        self.exposed = exposed
        """Those of the results that lie on saved memory."""

    def reached(self) -> tuple[Any, ...]:
        """What it can reach. It never changes."""
        return self._function, *self._saved, *self.parameters

    def __call__(self, *grads: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The gradients of the `arguments`, and of the `parameters` after them; None for what the results do not depend on.
        A result whose gradient is None has none."""
        given = [(end, grad) for end, grad in zip(self._ends, grads, strict=True) if grad is not None]
        inputs = [*self._starts, *self.parameters]
        if not given:
            return [None] * len(inputs)
        with _hooks_set_aside(self.parameters):
            return list(torch.autograd.grad([end for end, _ in given], inputs, [grad for _, grad in given],  # type: ignore[arg-type]
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


def _walk(ends: Sequence[GradientEdge]) -> tuple[list[torch.Tensor], bool]:
    """The leaf tensors that gradients flow to, and whether Python code runs on their way."""
    found: list[torch.Tensor] = []
    python = False
    work = list(dict.fromkeys(end.node for end in ends))
    seen = set(work)
    while work:
        node = work.pop()
        if recomputes_through_backward(node):
            raise Refusal("recomputes with use_reentrant=True", "use_reentrant=False, or record the whole step")
        if donates(node):
            raise Refusal("calls a torch.compile'd function whose backward writes what its forward has saved",
                          "set torch._functorch.config.donated_buffer = False before it is compiled")  # fmt: skip
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
    return found, python
