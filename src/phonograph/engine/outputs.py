"""How a recorded call's result is handed out again by each replay.

Every leaf of the result is one of a few kinds (`output_kinds.py`), decided once, from where its memory is. What no
replay could hand out faithfully is refused here.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType

import torch

from .._torch.autograd import moves_views, share_version
from .._torch.dynamic import Leaves, Thing
from .._torch.process_groups import waits_by_itself
from .._torch.tensors import has_memory, is_shape, is_zero, kind_of, neg_view, storage_id
from ..autograd.kept_by_code import NODE
from ..call.signature import Call, attributes
from ..capture.recording import Output
from ..devices.base import Captured, Device
from ..errors import Attached, Refusal
from ..guards.reachable import Reach
from ..memory.pool import Lease, dense
from ..memory.spans import Spans
from ..memory.views import View, root
from ..python.identity import identity
from ..slots.gradients import Grads
from ..values.counters import Followed
from ..values.keys import BY_IDENTITY, NoSignature, class_of, plain_key
from ..values.object_layout import layout_of
from ..values.pytree_paths import inside, labels, tensors_apart
from ..values.tensor_subclasses import consists_of_parts, parts_of_all
from .evidence import Behaviour
from .output_kinds import (
    Aliased,
    Argument,
    Computed,
    Container,
    Copied,
    Empty,
    Fresh,
    Leased,
    Outside,
    Passed,
    Same,
    Value,
    Viewed,
    Zero,
)
from .returned import Given, GivenText, Returned

__all__ = ["lease", "moulds", "overlap", "plan"]

_REMEDIES = {"transformers.cache_utils": "pass use_cache=False, or set model.config.use_cache = False"}
_NESTS = (tuple, list, set, frozenset, dict, OrderedDict)
_MANY = 1 << 16  # elements of two results whose places are compared one by one


def plan(
    captured: Captured, behaviour: Behaviour, call: Call, reach: Reach, grads: Grads, leases: dict[int, Lease], device: Device,
    leaves: list[object], *, traced: bool,
) -> tuple[Output, ...]:  # fmt: skip
    """One `Output` for each leaf of the result. Adds to `leases`, by storage identity, the memory handed out, and to `leaves`,
    the leaves, what is none but has to be made first: what they are views of. Results may be attached to the graph of autograd
    if the capture was `traced`.

    Raises:
        Attached: one is, and it was not.
        Refusal: a leaf that a replay could not hand out.
    """
    _lasting(behaviour.returned, reach)
    outer = {identity(x) for x in reach.met}
    made = [c for c in behaviour.returned.containers if not isinstance(c, tuple)]
    returned = [identity(c) for c in (*made, *(leaf for leaf in leaves if type(leaf) is set))]
    if not behaviour.copied_sets.isdisjoint(returned):
        raise Refusal("returns a container that is an argument", "return a new container")
    if not outer.isdisjoint(returned) or len(set(returned)) < len(returned):  # a set is a leaf, of which there would be two
        raise Refusal("returns a container that outlives the call, or a set twice", "return new containers")
    found = _Plan(captured, behaviour, call, reach, grads, leases, device, leaves, traced).all()
    _apart(found, tensors_apart(behaviour.returned.shape))
    return found


def _apart(plan: tuple[Output, ...], tensors: list[range]) -> None:
    """Tensors that consist of parts are made anew: what autograd knows of their memory, it would not know of the new ones."""
    leases = [identity(o.lease) for o in plan if isinstance(o, Leased)]
    for o in (plan[i] for leaves in tensors for i in leaves):
        own = isinstance(o, Empty) or (isinstance(o, Leased) and leases.count(identity(o.lease)) == 1)
        if not own:
            raise Refusal("returns a tensor that consists of parts, and shares memory with another", "return a clone of it")


def moulds(plan: tuple[Output, ...], copied: Sequence[Lease]) -> tuple[torch.Tensor, ...]:
    """For each of these memories the tensor that a replay copies: the output itself, where that is all there is on it,
    and otherwise the bytes, of which the outputs are views."""
    found = []
    for lease in copied:
        templates = [o.memory for o in plan if isinstance(o, Leased) and o.lease is lease]
        whole = len(templates) == 1 and dense(templates[0]) and templates[0].nbytes == lease.nbytes
        found.append(templates[0] if whole else lease.bytes())
    return tuple(found)


def _lasting(returned: Returned, reach: Reach) -> None:
    """Refuse containers with keys, or other things besides their children, that were made by the call, or can be changed."""
    first, again = [*labels(returned.shape)], [*labels(returned.again())]
    if not all(_is_made_again(label, x) or _outlives(x, reach) for label in first for x in inside(label.value)):
        raise Refusal("returns a dictionary with a key that the call made, or an object with something else of that kind",
                      "use names or numbers as keys")  # fmt: skip
    # What pytree gives of an object is the object's own, if it is the same a second time.
    changing = {identity(x) for label in first if not label.copied for x in inside(label.value) if _can_change(x)}
    if any(identity(x) in changing for label in again for x in inside(label.value)):
        raise Refusal("returns an object that holds a container which pytree does not look into", "return new objects")


def _is_made_again(label: Thing, x: object) -> bool:
    """Whether this, as a label or in one, is of a kind that is found anew each time the object is taken apart."""
    return type(x) in _NESTS or (label.of_pytree and layout_of(type(x)) is not None)


def _can_change(x: object) -> bool:
    return isinstance(x, (list, dict, set)) or layout_of(type(x)) is not None


def _outlives(leaf: object, reach: Reach) -> bool:
    return _is_plain(leaf) or _is_global(leaf) or any(leaf is x for x in reach.met)


def _value(leaf: Thing, reach: Reach) -> Output:
    if type(leaf) is Given:
        kind = Outside if isinstance(leaf.thing, torch.Tensor) else Value
        return Container(leaf.number) if leaf.number >= 0 else kind(leaf.thing)
    if type(leaf) is GivenText:
        return Passed(leaf.place)
    if isinstance(leaf, Followed):
        return Computed(leaf.formula)
    if not _outlives(leaf, reach):
        made_of = "return tensors, numbers, containers or objects of these"
        raise Refusal(f"returns an object of class {class_of(leaf)}", _REMEDIES.get(type(leaf).__module__, made_of))
    return Value(leaf)


def _is_plain(leaf: object) -> bool:
    if isinstance(leaf, (*BY_IDENTITY, MethodType)):
        return False  # it may have been made by the call, and hold what belongs to it
    try:
        plain_key(leaf)
    except NoSignature:
        return False
    return True


def _is_global(leaf: object) -> bool:
    """Whether a function or class is found under its own name: one object for all calls."""
    if not isinstance(leaf, (FunctionType, BuiltinFunctionType, type)):
        return False
    return getattr(sys.modules.get(leaf.__module__ or ""), leaf.__name__, None) is leaf


class _Plan:
    """The outputs so far, by their number, and what is asked to find the next."""

    def __init__(
        self, captured: Captured, behaviour: Behaviour, call: Call, reach: Reach, grads: Grads, leases: dict[int, Lease],
        device: Device, leaves: Leaves, traced: bool,
    ) -> None:  # fmt: skip
        self._captured, self._behaviour, self._traced = captured, behaviour, traced
        self._reach, self._leases, self._device = reach, leases, device
        self._results = list(leaves)
        self._tensors = leaves  # those that are none among them as well
        self._numbers: dict[int, int] = {identity(t): i for i, t in reversed([*enumerate(leaves)])}
        self._found: dict[int, Output] = {}
        self._copies = {key: i for i, key in enumerate(captured.copied)}
        self._bases = Counter(
            identity(t._base) for t in {identity(t): t for t in leaves if isinstance(t, torch.Tensor)}.values()
        )
        self._apart: dict[int, list[torch.Tensor]] = defaultdict(list)
        """By storage: what was planned so far, is no view, and has no history."""
        self._outside = [*(x for _, x in reach.tensors.values()), *parts_of_all(grads.read())]

    def all(self) -> tuple[Output, ...]:
        for leaf in self._results:
            _ordinary(leaf)
        for i, leaf in enumerate(self._results):
            if not isinstance(leaf, torch.Tensor):
                self._found[i] = _value(leaf, self._reach)
            elif self._numbers[identity(leaf)] < i:
                self._found[i] = Same(self._numbers[identity(leaf)])
            else:
                _faithful(leaf, self._captured, self._behaviour, self._traced)
                self._number(leaf)
        return tuple(self._found[i] for i in range(len(self._tensors)))

    def _number(self, t: torch.Tensor) -> int:
        """The number of the output that this tensor is."""
        number = self._numbers.setdefault(identity(t), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(t)
        if number not in self._found:
            self._found[number] = self._output(t)
        return number

    def _output(self, t: torch.Tensor) -> Output:
        history = self._traced and t.grad_fn is not None
        base = _base(t, self._results, self._behaviour.code.sets_hooks) if self._traced else -1
        if base >= 0:
            return self._view(t, self._results[base] if t._base is None else t._base)
        for i, (slot, seen) in enumerate(zip(self._captured.used, self._behaviour.tensors, strict=True)):
            if t is slot or t is seen:
                return Argument(i)
        for x in self._outside:
            if t is x:
                return Outside(x)
        if is_zero(t):
            return Zero(t)
        key = storage_id(t)
        there = [x for x in (*self._behaviour.tensors, *self._outside) if storage_id(x) == key]
        if there and t.grad_fn is not None:
            theirs = t._base
            if theirs is not None and self._merely_views(t, [x for x in there if x is theirs]):
                return self._view(t, theirs)
            raise Refusal("returns a tensor with a history that shares memory with an argument or a tensor outside",
                          "return a clone of it")  # fmt: skip
        output = self._beside(t, there) if there else self._made(t, key)
        return _attached(output) if history else output

    def _merely_views(self, t: torch.Tensor, base: list[torch.Tensor]) -> bool:
        """Whether it is a view of this one of the caller's, with that one's history: then it can be made anew of that."""
        others = [x for x in self._results if isinstance(x, torch.Tensor) and x is not t]
        if not (base and moves_views) or self._behaviour.code.sets_hooks or _counts_from_the_storage(t):
            return False
        return _merely_viewed(t, others + base)

    def _beside(self, t: torch.Tensor, there: list[torch.Tensor]) -> Output:
        """A tensor on the memory of an argument, or of a tensor outside."""
        if t._base is not None:
            return self._view(t, next((x for x in there if root(x) is t._base), t._base))
        apart = self._apart[storage_id(t)]
        output = self._view(t, next((x for x in (*apart, *there) if _share_version(t, x)), there[0]))
        apart.append(t)
        return output

    def _made(self, t: torch.Tensor, key: int) -> Output:
        """A tensor on memory that the call made."""
        if t.device != self._device.torch_device:
            raise Refusal(f"returns a tensor on {t.device}", f"return it on {self._device.torch_device}")
        if t.untyped_storage().nbytes() == 0:
            return Empty(tuple(t.shape), t.stride(), t.dtype, t.is_inference(), consumed=t.grad_fn is not None, lazy=_lazy(t))
        if key not in self._captured.made:
            raise Refusal("returns a tensor whose memory was not made by the call", "return a clone of it")
        if not t.requires_grad:
            # Results that share memory go on sharing it: autograd follows a write to one of them, or notices it at least.
            base, apart = t._base, self._apart[key]
            if base is not None and not base.requires_grad and (self._bases[identity(base)] > 1 or self._is_shared(base, t)):
                return self._view(t, base)
            other = next((x for x in apart if base is None and _share_version(t, x)), None)
            if other is not None:
                return self._view(t, other)
            if base is None:
                apart.append(t)
        lent = lease(key, self._captured, self._leases, self._device)
        if any(isinstance(o, Leased) and o.lease is lent and o.memory.dtype is not t.dtype for o in self._found.values()):
            raise Refusal("returns one memory as tensors of two dtypes", "return a clone of one of them")
        place = t.dtype, t.size(), t.stride(), int(t.storage_offset())
        template = lent.template(*place, inference=t.is_inference())
        if key in self._copies:
            return Copied(template, lent, index=self._copies[key], consumed=t.requires_grad, lazy=_lazy(t))
        return Aliased(template, lent, consumed=t.requires_grad, lazy=_lazy(t))

    def _is_shared(self, base: torch.Tensor, t: torch.Tensor) -> bool:
        """Whether what a tensor is a view of is a result, or shares its version with another, or with what that views."""
        others = (x for x in self._results if isinstance(x, torch.Tensor) and x is not t and storage_id(x) == storage_id(base))
        return identity(base) in self._numbers or any(_share_version(base, root(x)) for x in others)

    def _view(self, t: torch.Tensor, base: torch.Tensor) -> Output:
        view = View.between(base, t) if t.grad_fn is None else View.like(t, base)
        if view is None:
            raise Refusal("returns a tensor that shares memory with another in a way that cannot be repeated",
                          "return a clone of it")  # fmt: skip
        return Viewed(self._number(base), view)


def _share_version(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not (a.is_inference() or b.is_inference()) and share_version(a, b)


def _lazy(t: torch.Tensor) -> Thing:
    return torch.Tensor.conj if t.is_conj() else neg_view if t.is_neg() else None


def lease(key: int, captured: Captured, leases: dict[int, Lease], device: Device) -> Lease:
    """The lease of a storage that the call made; a new one is noted in `leases`."""
    if key not in leases:
        made = captured.made[key]
        leases[key] = Lease(made.address, made.nbytes, device.torch_device, device.anchor(Spans([(made.address, made.nbytes)])))
    return leases[key]


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have memory in common. (The halves of `chunk` have none, and may interleave.)"""
    if storage_id(a) != storage_id(b):
        return False
    if a.numel() + b.numel() > _MANY or a.dtype is not b.dtype:
        return True
    return not set(_places(a)).isdisjoint(_places(b))


def _places(t: torch.Tensor) -> Iterable[int]:
    """Where in its storage each element is."""
    places = [int(t.storage_offset())]
    for n, step in zip(t.shape, t.stride(), strict=True):
        places = [p + i * step for p in places for i in range(n)]
    return places


def _attached(output: Output) -> Output:
    if not isinstance(output, Fresh):
        raise Refusal("returns a tensor with a history that shares memory with an argument or a tensor outside",
                      "return a clone of it")  # fmt: skip
    return replace(output, consumed=False, attached=True)


def _base(t: torch.Tensor, leaves: list[object], hooked: bool) -> int:
    """Which other result, one with a history, this one is a view of, or shares its version with and has none; -1 if none. Some
    tensor of the call may be `hooked`."""
    lazy = t.is_conj() or t.is_neg()
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x is not t]
    viewed = t.grad_fn is None or (not hooked and _merely_viewed(t, tensors))
    for i, x in enumerate(leaves if viewed else ()):
        if not isinstance(x, torch.Tensor) or x is t or x.grad_fn is None or storage_id(x) != storage_id(t) or x._is_view():
            continue
        same = x.dtype is t.dtype and not (lazy or x.is_conj() or x.is_neg() or t.is_inference())
        if same and (t._base is x if t.grad_fn is not None else share_version(t, x)):
            return i
    return -1


def _merely_viewed(t: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether between this view and its base autograd has nothing but views, and no code (a function that gives a view, a hook
    of a module); and whether no other result depends on it, whose gradient would be a part of this one's."""
    base, start = t._base, (t.grad_fn, t.output_nr)
    edge: tuple[Thing, int] = start
    while base is not None and edge != (base.grad_fn, base.output_nr) and getattr(edge[0], "variable", None) is not base:
        before = [e for e in edge[0].next_functions if e[0] is not None]
        if isinstance(edge[0], NODE) or len(before) != 1:
            return False
        edge = before[0]
    return base is not None and any(x is base for x in others) and start not in _edges(others)


def _counts_from_the_storage(t: torch.Tensor) -> bool:
    """Whether autograd has `as_strided` among the views between this one and its base, which may begin elsewhere in its storage
    in each call."""
    node, base = t.grad_fn, None if t._base is None else t._base.grad_fn
    while node is not None and node is not base and not hasattr(node, "variable"):
        if "AsStrided" in node.name() or len(node.next_functions) != 1:
            return True
        node = node.next_functions[0][0]
    return False


def _edges(tensors: list[torch.Tensor]) -> set[object]:
    """What is between the nodes of the graph behind these: each a node, and which of its outputs."""
    found: set[object] = set()
    seen = {t.grad_fn for t in tensors if t.grad_fn is not None}
    work: list[Thing] = [*seen]
    while work:
        edges = [edge for edge in work.pop().next_functions if edge[0] is not None]
        found.update(edges)
        work += {node for node, _ in edges} - seen
        seen.update(node for node, _ in edges)
    return found


def _ordinary(leaf: object) -> None:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            historied = leaf.requires_grad and consists_of_parts(leaf)
            said = f"{class_of(leaf)} that requires a gradient" if historied else class_of(leaf)
            remedy = "return it detached" if historied else "return a plain tensor: as_subclass(torch.Tensor)"
            if waits_by_itself([type(leaf)]):
                remedy = "compute something of it in the recorded code, which waits for it, or record the whole step"
            raise Refusal(f"returns a tensor of class {said}", remedy)
        if not has_memory(leaf) and not (is_zero(leaf) and not leaf.requires_grad):
            raise Refusal(f"returns {kind_of(leaf)}", "return its shape" if is_shape(leaf) else "return it dense: to_dense()")


def _faithful(t: torch.Tensor, captured: Captured, behaviour: Behaviour, traced: bool) -> None:
    try:
        t.grad_fn  # noqa: B018
    except RuntimeError:
        raise Refusal("returns a view made without gradients, whose base was written since", "return a clone of it") from None
    if not traced and t.grad_fn is not None and not (behaviour.code.runs_backward and _consumed(t.grad_fn)):
        raise Attached("returns a tensor whose backward would run outside",
                       "run backward inside the recorded function, or return .detach(), or use torch.no_grad()")  # fmt: skip
    if storage_id(t) in captured.made and attributes(t):
        raise Refusal("returns a tensor with attributes of its own", "set them outside, or return the values")
    if t.grad_fn is not None and (t.retains_grad or t._backward_hooks):
        raise Refusal("returns a tensor with a hook, or one that retains its gradient",
                      "set hooks and call retain_grad() on the result")  # fmt: skip
    if t.requires_grad and t.grad_fn is None and storage_id(t) in captured.made:
        raise Refusal("returns a new leaf tensor that requires grad", "call .requires_grad_() on the result")


def _consumed(node: Thing) -> bool:
    """Whether backward through this node would raise because it already ran: saved tensors are gone. The nearest ones tell;
    further on there may be a `checkpoint`, which would compute them anew to show them."""
    work, seen = deque([node]), {node}
    while work and len(seen) < 10_000:
        n = work.popleft()
        for name in dir(n):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    saved = getattr(n, name)
                except RuntimeError:
                    return True
                if isinstance(saved, torch.Tensor) or (isinstance(saved, (tuple, list)) and torch.Tensor in map(type, saved)):
                    return False
        for nxt, _ in n.next_functions:
            if nxt is not None and nxt not in seen:
                seen.add(nxt)
                work.append(nxt)
    return False
