"""What autograd keeps of a call whose backward runs outside, and what it does with that later.

While such a call is captured, every tensor that autograd saves goes through a hook of `Tracing`, and autograd keeps only its
number. So the graph that the capture leaves behind holds no memory: `Backward` runs it over whatever the numbers stand for
now, which are fixed places that each replay of the forward fills anew, and parts of the arguments that the call got. It can run
any number of times, live, and can be recorded like any other function.

Arguments that require a gradient enter the graph through `Source`. So do parameters of a graph that gets them as arguments:
where autograd adds up their gradients would otherwise be decided by whoever used them first in that step, and need not be a
stream that can be captured.

What code keeps by itself (an attribute of `ctx`, a variable of a part that is recomputed) is looked for where the function ends
(`kept_by_code.py`). It stays where it is: each replay of the forward writes it there. All else would be a tensor of the capture
for ever; so when the capture is over, nothing may hold any of its memory besides.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .._torch.autograd import (
    code_of,
    lend_code,
    lend_module,
    original_views,
    recomputed_part,
    share_version,
    unseen_by_checkpoint,
    waits_for_all,
)
from .._torch.dynamic import Leaves, Private
from .._torch.process_groups import once_there
from .._torch.tensors import alias, has_memory, is_ordinary, is_valueless, neg_view, storage_id, use_count
from ..capture.effects import ANYONE, Effect, Starts
from ..capture.recording import Made
from ..errors import Refusal
from ..memory.pool import Lease, copy_of, place_of, unowned
from ..python.identity import identity
from ..state.rng import CudaState, Rewind, States
from ..values.tensor_subclasses import Description, consists_of_parts, storages
from .backward import Backward, Recompute
from .graph import REENTRANT, SOURCE, Found, Graph, Source, Start, calls_that_draw, names_of_saved, walk
from .kept_by_code import NODE, Contents, Kept, kept
from .saved import PartOf, Places, Saved

__all__ = ["Tracing"]

_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")
_HOOKS = Effect("lets hooks decide what is saved for backward", "record the whole step", ANYONE)

_HELD = -1  # the number that stands for what code keeps by itself


class Tracing:
    """Follows one capture on a device: `with tracing.saving():` around the function."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._root = torch.empty(0, requires_grad=True)
        self.begin([], States())

    def begin(
        self,
        arguments: Sequence[torch.Tensor],
        states: States,
        outside: Mapping[int, Sequence[torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        """A capture begins, with these slots for arguments; parameters among them are state, and no input. It notes the
        random states that it reads. `outside` are the tensors that were there before, by storage."""
        self._states = states
        self.outside = dict(outside)
        self._owned: set[int] = set()
        self._drawn = 0
        self.recomputes = False
        self._hooks: list[Private] = []  # with which `checkpoint` keeps tensors from being saved
        self._module_hooks: list[Private] = []  # what calls backward hooks of modules
        self.held: dict[int, torch.Tensor] = {}
        """By storage: memory of the capture that code keeps by itself, slots among it."""
        self._contents, self._keepsakes = Contents([]), list[torch.Tensor]()
        self._parts: list[Private] = []  # what `checkpoint` knows of each part that is recomputed
        self._selections: list[Private] = []  # where selective recompute keeps what it does not recompute
        slots = [(i, t) for i, t in enumerate(arguments) if not isinstance(t, torch.nn.Parameter)]
        self._inputs = {storage_id(t): i for i, t in slots}
        self._slot_of = dict(slots)
        self._parts_of_arguments: dict[int, PartOf] = {}  # by number: what was saved of arguments
        # Memory of the capture, which nothing may hold when it is over; slots nothing but the recording.
        self._slots = [(weakref.ref(t.untyped_storage()), storage_id(t), use_count(storage_id(t))) for _, t in slots]
        self._made: list[weakref.ref[object]] = []
        self._seen: list[tuple[int, weakref.ref[object]]] = []  # the tensors that stood for slots
        self._stand_in: dict[int, weakref.ref[torch.Tensor]] = {}  # by storage: what the function has got as an argument
        self._views_held: set[int] = set()  # storages of arguments of which code keeps something else than what it has got
        self._sources: list[Start] = []
        self._given: list[torch.Tensor] = []
        self._stands: dict[object, tuple[torch.Tensor, Start]] = {}  # by their nodes
        self._known: dict[object, torch.Tensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.saved: list[torch.Tensor] = []
        """By number: the tensor of the capture. One that several nodes have saved has several numbers."""
        self._themselves: set[int] = set()  # numbers of tensors outside that were saved themselves, and no view of them
        self._meant: dict[
            int, torch.Tensor
        ] = {}  # by number: the tensor outside that was saved, or of which that was a view...
        self._apart: set[int] = set()  # ...or on the memory of which it lay, but of which autograd does not know (`x.data`)
        self._places: Places | None = None
        self._unpacked = 0
        self._inputs_held: Set[int] = frozenset()

    def argument(self, slot: torch.Tensor) -> torch.Tensor:
        """A slot as the function sees it."""
        t = alias(slot)
        self._seen.append((storage_id(slot), weakref.ref(t)))
        self._stand_in[storage_id(slot)] = weakref.ref(t)
        return t

    def source(self, number: int, slot: torch.Tensor) -> torch.Tensor:
        """What the function gets as argument `number`, which requires a gradient."""
        arrived: list[torch.Tensor | None] = []
        t: torch.Tensor = Source.apply(self._root, slot, arrived)
        self._sources.append(Start(number, get_gradient_edge(t), arrived))
        self._given.append(t)
        self._stand_in[storage_id(slot)] = weakref.ref(t)
        return t

    def _is_argument(self, t: torch.Tensor) -> bool:
        """Whether this is an argument itself, as the function has got it, and no view of one. (torch gives to hooks on what is
        saved the very tensor that was.)"""
        stand_in = self._stand_in.get(storage_id(t))
        return stand_in is not None and stand_in() is t

    def parameter(self, p: torch.Tensor) -> torch.Tensor:
        """A parameter as a graph sees it that gets it as an argument."""
        if not (p.requires_grad and p.is_leaf and p.device == self._device):
            return p
        arrived: list[torch.Tensor | None] = []
        # Not of the parameter itself, or its AccumulateGrad node would be one of the graph, and stay as long as that.
        t: torch.Tensor = Source.apply(self._root, p.detach(), arrived)
        edge = get_gradient_edge(t)
        self._stands[edge.node] = p, Start(len(self._stands), edge, arrived)
        self._given.append(t)
        return t

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside the block is noted."""
        with saved_tensors_hooks(unseen_by_checkpoint(self._pack), self._unpack), original_views():
            yield
        if any(t._version != version for t, version in self._versions):
            raise Refusal("writes a tensor that autograd has saved for backward",
                          "return results that have no backward detached (y.detach())", final=False)  # fmt: skip
        if any(t.retains_grad for t in self._given):
            raise Refusal("asks for the gradient of an argument (retain_grad)", "call retain_grad() before the call")
        self._versions.clear()
        self._given.clear()
        if self._device.type == "cuda" and self._states.held():
            self._drawn = CudaState.of(torch.cuda.get_rng_state(self._device)).offset

    def refused(self) -> Starts:
        """Functions that such a call may not use: what they keep for the backward cannot be followed."""
        return {"__enter__": [(os.path.join("torch", "autograd", "graph.py"), self._are_others, _HOOKS)],
                "setup_input_hook": [(os.path.join("torch", "utils", "hooks.py"), self._of_module, _HOOKS)]}  # fmt: skip

    def _are_others(self, frame: FrameType) -> bool:
        """Whether hooks on what is saved, which are about to be set, are not those of `checkpoint`."""
        hooks = frame.f_locals.get("self")
        self._hooks.append(hooks)
        return type(hooks).__module__ != checkpoint.__module__

    def _of_module(self, frame: FrameType) -> bool:
        """Never: these are backward hooks of a module."""
        self._module_hooks.append(frame.f_locals["self"])
        return False

    def ended(self, result: Leaves, ran: Iterable[CodeType], outside: Set[int], names: Set[str]) -> None:
        """The function has ended with these leaves as its result. This code ran in it; it names these."""
        self.recomputes = any(code.co_filename.endswith(_CHECKPOINT) for code in ran)
        nodes = walk([get_gradient_edge(t) for t in result if isinstance(t, torch.Tensor) and t.grad_fn is not None]).python
        inner = (
            nodes
            if not names.isdisjoint({"autograd", "backward", "grad"})
            else [node for node in nodes if isinstance(node, REENTRANT)]
        )
        if any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in kept(inner)):
            raise Refusal("has a part with a backward of its own that reaches a tensor outside of it, which has a history",
                          "pass it as an argument of the part, or use checkpoint(use_reentrant=False)")  # fmt: skip
        for x in kept([*self._hooks, *nodes]):
            if isinstance(x, torch.Tensor):
                if has_memory(x) and x.device == self._device and storage_id(x) not in outside and x.untyped_storage().nbytes():
                    self.held[storage_id(x)] = alias(x)
                    self._keepsakes.append(x)
                    if not self._is_argument(x):
                        self._views_held.add(storage_id(x))
            elif type(x).__module__ == checkpoint.__module__ and hasattr(x, "storage"):
                self._selections.append(x.storage)
            elif recomputed_part(x):
                self._parts.append(x)
        own = [node for node in nodes if not isinstance(node, (SOURCE, REENTRANT))]
        code = [*map(code_of, self._parts), *(code_of(n) for n in nodes if isinstance(n, REENTRANT))]
        self._contents = Contents([*own, *code], self.held)
        self._hooks.clear()

    def met_outside(self, t: torch.Tensor) -> None:
        """This tensor was there before, and others may let go of it."""
        self.outside.setdefault(storage_id(t), [t])
        self._owned.add(storage_id(t))

    def kept(self) -> list[torch.Tensor]:
        """What the backward needs of the capture, besides what is `held`."""
        return [t for t in self.saved if has_memory(t) and storage_id(t) not in self.held]

    def _pack(self, t: torch.Tensor) -> Private:
        t = once_there(t)
        if not is_ordinary(t) and consists_of_parts(t):
            of, first = Description.of(t), len(self.saved)
            if not t.is_inference():
                self._versions.append((t, t._version))
            packed = of, [self._pack(getattr(t, name)) for name in of.names]
            for number in range(first, len(self.saved)):  # its version is what autograd would look at, and not theirs
                if number in self._meant:
                    self._meant[number] = t
                    self._themselves.discard(number)
                    self._apart.discard(number)
            return packed
        itself = self._is_argument(t)
        if t.grad_fn in self._stands:
            t = self._stands[t.grad_fn][0]  # the parameter itself: backward reads what is there then
        storage = storage_id(t)
        key = (storage, t.dtype, t.storage_offset(), t.size(), t.stride(), t.is_conj(), t.is_neg(), t.grad_fn is None)
        if not t.is_inference():
            self._versions.append((t, t._version))
        slot = self._slot_of[self._inputs[storage]] if storage in self._inputs else None
        whose = slot is not None and t.dtype is slot.dtype and not (t.is_conj() or t.is_neg())
        if key not in self._known:
            # The place of an argument is filled anew by each replay: the backward is given the argument, or it is kept apart.
            self._known[key] = alias(t) if slot is None or whose else copy_of(alias(t))
        number = len(self.saved)
        self.saved.append(self._known[key])
        if slot is not None and whose:
            after = int(t.storage_offset()) - int(slot.storage_offset())
            self._parts_of_arguments[number] = PartOf(self._inputs[storage], t.size(), t.stride(), after, itself)
        if storage in self.outside and storage not in self._owned:
            self._note_outside(number, t, self.outside[storage])
        return number

    def _note_outside(self, number: int, t: torch.Tensor, candidates: Sequence[torch.Tensor]) -> None:
        """Several tensors may lie on one memory, each with a version of its own: weights that are tied by `a.data = b.data`."""
        meant = next((c for c in candidates if c is t), None)
        if meant is not None:
            self._themselves.add(number)
        else:
            meant = next((c for c in candidates if not (t.is_inference() or c.is_inference()) and share_version(t, c)), None)
        if meant is None:
            self._apart.add(number)
        self._meant[number] = candidates[0] if meant is None else meant

    def _unpack(self, number: Private) -> Private:
        if type(number) is tuple:
            of, inner = number
            return of.around([self._unpack(one) for one in inner])
        self._unpacked += 1
        return self.saved[number] if self._places is None else self._places.get(number)

    def _numbered(self, found: Found) -> dict[object, int]:
        """Nodes that have saved a Python number (of ``x * 2.0``), which goes through no hook, each with a number of its own.
        Autograd takes that from them, too, and cannot go through them a second time."""
        if self.recomputes:  # to show them, `checkpoint` would compute some anew; and such a part saves more
            return {}
        nodes: list[tuple[Private, Private]] = [(node, type(node)) for node in found.nodes if not isinstance(node, NODE)]
        saving = [node for node, kind in nodes if any(self._is_unheard(node, name) for name in names_of_saved(kind))]
        return {node: _HELD - 1 - i for i, node in enumerate(saving)}

    def _is_unheard(self, node: Private, name: str) -> bool:
        before = self._unpacked
        try:
            return isinstance(getattr(node, name), torch.Tensor) and self._unpacked == before
        except RuntimeError:  # it is gone: a backward ran inside
            return False

    def end(self) -> None:
        """The capture is over, with or without success: let go of all of it. The graph has this, and parts that are recomputed
        have the graph: a cycle that no garbage collector could see."""
        self.held, self.saved, self._known = {}, [], {}
        self._hooks, self._module_hooks, self._parts, self._selections, self._sources, self._given = [], [], [], [], [], []
        self._stands, self._slot_of, self.outside, self._meant = {}, {}, {}, {}
        self._contents, self._keepsakes = Contents([]), []

    def lost(self) -> bool:
        """After the capture, when all that it has made is gone: whether something still holds memory of it, which would have
        the values of the capture for ever, and was not found before. (A variable of a hook, say.)"""
        if self._some_lost():
            gc.collect()
        return self._some_lost()

    def _some_lost(self) -> bool:
        seen = [ref for key, ref in self._seen if key not in self._inputs_held]
        if any(ref() is not None for ref in (*self._made, *seen)):
            return True
        slots = [slot for slot in self._slots if slot[1] not in self._inputs_held]
        return any(ref() is not None and use_count(key) > count for ref, key, count in slots)

    def backward(
        self, function: Any, results: Mapping[int, torch.Tensor], attached: list[int], made: Mapping[int, Made],
        lease: Callable[[int], Lease], has_hooks: bool,
    ) -> Backward:  # fmt: skip
        """The backward of the captured call, as a function of the gradients of those of its `results` that are `attached`.

        `function` was called, and its code may have set hooks (`has_hooks`). `made` are the places of memory that the call
        made, by storage; `lease` lends one, or one that is `held`.

        Raises:
            Refusal: it needs something that cannot be traced back.
        """
        ends = [get_gradient_edge(results[i]) for i in attached]
        found = walk(ends)
        graph = self._graph(found, ends, attached)
        saved = self._saved_values(results, made, lease)
        kept = self._kept_by_code()
        seeded = found.dropout or (found.attention and self.recomputes)
        traced = Backward(
            graph=graph,
            saved=saved,
            kept=kept,
            recompute=self._recompute(found.python),
            function=function if found.python or has_hooks or self.recomputes else None,
            only_captured=seeded and results[attached[0]].is_cuda,
        )
        self.end()
        return traced

    def _graph(self, found: Found, ends: list[GradientEdge], attached: list[int]) -> Graph:
        numbered = self._numbered(found)
        stands = [stand for node, stand in self._stands.items() if node in found.sources]
        parameters = [*(p for p, _ in stands), *found.leaves]
        if any(waits_for_all(hook) is not None for p in parameters for hook in (p._backward_hooks or {}).values()):
            raise Refusal("has parameters with a hook that waits for all their gradients (register_multi_grad_hook), which "
                          "come in another order from a recording", "use register_post_accumulate_grad_hook")  # fmt: skip
        outside = [t for tensors in self.outside.values() for t in tensors]
        reentrant = [t for t in outside if t.is_leaf and t.requires_grad] * found.reentrant
        if any(getattr(t, "_post_accumulate_grad_hooks", None) for t in reentrant):
            raise Refusal("has a part with a backward of its own, and hooks that run once a gradient is added",
                          "use checkpoint(use_reentrant=False)")  # fmt: skip
        if not all(self.outside.keys() >= {*storages(p)} for p in parameters):
            raise Refusal("has results that depend on a tensor that requires a gradient and whose origin is not known",
                          "pass it as an argument, or keep it as an attribute, closure variable or global")  # fmt: skip
        sources = [s for s in self._sources if s.edge.node in found.sources]
        starts = {node: i for i, node in enumerate([*(x.edge.node for x in (*sources, *(start for _, start in stands))),
                                                    *map(identity, found.leaves)])}  # fmt: skip
        each = [walk([end]) for end in ends] if len(ends) > 1 else [found]
        reached = [one.sources for one in each] if len(ends) > 1 and sources else []
        return Graph(
            ends=ends,
            attached=attached,
            sources=sources,
            partial=frozenset(s.number for s in sources if any(s.edge.node not in some for some in reached)),
            parameters=parameters,
            stands=[start for _, start in stands],
            reaches=[frozenset(starts[x] for x in (*one.sources, *map(identity, one.leaves))) for one in each],
            numbered=[frozenset(number for node, number in numbered.items() if node in one.nodes) for one in each],
            lasting=bool(found.leaves),
            nested=found.reentrant,
            reentrant=reentrant,
        )

    def _saved_values(
        self, results: Mapping[int, torch.Tensor], made: Mapping[int, Made], lease: Callable[[int], Lease]
    ) -> Saved:  # fmt: skip
        numbers = {number: storage_id(t) for number, t in enumerate(self.saved)}
        own = made.keys() | self.held.keys()
        on = {storage_id(t): i for i, t in results.items()}
        constant = dict(self._meant)
        leaves = {n: t for n, t in constant.items() if n in self._themselves and place_of(t) == place_of(self.saved[n])}
        given = self._parts_of_arguments
        there = {identity(t): t for number, t in enumerate(self.saved) if number not in given}
        places = {which: self._place(t, own, lease) for which, t in there.items()}
        self._places = Places({n: places[identity(t)] for n, t in enumerate(self.saved) if n not in given}, leaves, given)
        ours = {storage_id(t): t for t in (*self.saved, *results.values())}
        self._made = [weakref.ref(t.untyped_storage()) for key, t in ours.items() if key in made and made[key].nbytes]
        memory = [lease(key) for key in dict.fromkeys((*numbers.values(), *self.held)) if key in own]
        unread = {n for n, key in numbers.items() if key in own} | given.keys() | ({_HELD} if self.held else set())
        return Saved(
            places=self._places,
            memory=memory,
            kept=frozenset(unread),
            constant=constant,
            unversioned=frozenset(self._apart),
            exposed={n: on[key] for n, key in numbers.items() if key in on and key in made},
            releasable={n: lease(key) for n, key in numbers.items() if key in made and key not in on},
        )

    def _kept_by_code(self) -> Kept:
        slots = {self._inputs[key]: unowned(self._slot_of[self._inputs[key]]) for key in self.held if key in self._inputs}
        themselves = frozenset(i for key, i in self._inputs.items() if key not in self._views_held)
        self._inputs_held = self.held.keys() & self._inputs.keys()
        return Kept(self._contents, list(self.held.values()), self._keepsakes, slots, themselves)

    def _recompute(self, python: list[Private]) -> Recompute:
        states = self._states.held()
        code = [lend_code(x) for x in (*self._parts, *(node for node in python if isinstance(node, REENTRANT)))]
        code += map(lend_module, self._module_hooks)
        calls = calls_that_draw(python)
        rewind = Rewind(self._device, states, self._drawn, calls) if (states and self._device.type == "cuda") or calls else None
        return Recompute(self._parts, code, self._selections, rewind)

    def _place(self, t: torch.Tensor, own: Set[int], lease: Callable[[int], Lease]) -> torch.Tensor:
        """Where a saved tensor will be found after each replay."""
        if is_valueless(t):
            return t
        key = storage_id(t)
        if key in own:
            return lease(key).template(t.dtype, t.size(), t.stride(), int(t.storage_offset()), t.is_conj(), t.is_neg())
        if key in self._owned:
            return alias(t)
        if key in self.outside:  # old weights must not be kept because of a recording that read them
            place = torch.conj(unowned(t)) if t.is_conj() else unowned(t)
            return neg_view(place) if t.is_neg() else place
        if not t.untyped_storage().nbytes():
            return t
        raise Refusal("saves a tensor for backward that phonograph cannot trace back", "pass it as an argument")
