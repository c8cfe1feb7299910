"""Signature of a call: the hashable key by which a recording is found.

Two calls have the same signature if they differ only in the *values* in their tensors: same nesting, same metadata of each
tensor, same aliasing, equal Python values, same modes. Nothing is cast or broadcast to make a call fit. (`copy_` into a slot
would do both silently, so the key has to be complete.)

`keys` compares Python values. An argument that cannot be compared (a generator, an open file) raises `NoSignature`, and the
call runs live.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

from .._torch.autograd import saved_tensors_hooks, takes_no_gradient
from .._torch.dynamic import Leaves, Reading, Thing
from .._torch.modes import default_device, dispatch_modes, function_modes, is_batched, is_traced
from .._torch.settings import fp32_precision, kept_settings, kernel_getters, kernel_setter, state_guard
from .._torch.tensors import has_memory, is_freed, is_leaf, is_shape, kind_of, says_history, says_version
from ..aten.autocast import USED_WHEN_ON, autocast, set_autocast
from ..memory.loans import Borrowed, plain
from ..memory.pool import copy_of
from ..memory.spans import Spans
from ..python.identity import identity
from ..python.origin import written_out
from ..values.keys import Identity, NoSignature, argument_key
from ..values.numbers import base_of
from ..values.pytree import Flattener
from ..values.pytree_nodes import Node
from ..values.pytree_paths import path_to, unhashable
from ..values.tensor_subclasses import consists_of_parts
from ..values.wording import Naming
from .recurring_objects import RecurringObjects

__all__ = [
    "ALIGNMENT",
    "HOOKS",
    "Call",
    "Key",
    "aliases",
    "attributes",
    "describe",
    "has_gradient_or_hooks",
    "modes",
    "put_back",
    "stands_in",
    "tensor_key",
    "unchanged",
    "unseen",
]


ALIGNMENT = 16  # bytes: the widest load of a GPU

Key: TypeAlias = tuple[Any, ...]
"""What two calls have in common that one recording is for: compared and hashed."""


class Call(NamedTuple):
    """Arguments of a call, flattened, and their signature.

    key: the signature.
    shape: the nesting of the arguments.
    leaves: all leaves.
    tensors: tensor leaves in order, each once.
    places: for each of these, its index among the leaves.
    like: the arguments as they were passed.
    again: (index among the leaves, index among the tensors), for each further use of a tensor.
    borrowed: borrowed outputs among the tensors, by index.
    containers: containers that were flattened, outer ones first.
    numbers: indices of leaves that are followed numbers, whose values are not in the key.
    texts: likewise of strings that the call is not to read.
    """

    key: Key
    shape: Node | None
    leaves: Leaves
    tensors: list[torch.Tensor]
    places: tuple[int, ...]
    like: Thing = None
    again: tuple[tuple[int, int], ...] = ()
    borrowed: dict[int, Borrowed] = {}  # noqa: RUF012 - the default is never written
    containers: Sequence[Any] = ()
    numbers: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()

    def borrowed_within(self, spans: Spans) -> list[int]:
        """Indices of tensors that are borrowed outputs in this memory."""
        return [i for i, b in self.borrowed.items() if spans.meets(b.loan.address, b.loan.nbytes)]

    def own_borrowed(self, within: Spans) -> None:
        """Copy borrowed outputs in this memory, which a replay will overwrite. (By the signature they do not overlap.)"""
        for i in self.borrowed_within(within):
            self.leaves[self.places[i]] = self.tensors[i] = copy_of(self.tensors[i])
            del self.borrowed[i]


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def describe(
    args: tuple[object, ...], kwargs: Mapping[str, object], naming: Callable[[], Naming] = Naming,
    recurring: RecurringObjects | None = None, followed: Set[tuple[Node | None, int]] = frozenset(),
) -> Call:  # fmt: skip
    """Flatten the arguments of a call, and make its signature.

    Args:
        args, kwargs: the arguments.
        naming: names an argument in messages.
        recurring: objects that come again and again, which are not flattened: their identities are in the key.
        followed: (nesting, index of a leaf) of numbers and strings whose values are not in the key.

    Raises:
        NoSignature: an argument cannot be described. The call can still run live.
    """
    recurring = RecurringObjects() if recurring is None else recurring
    while True:
        flattener, leaves = Flattener(recurring.standing, by_attributes=recurring.by_attributes), list[object]()
        try:
            shape = flattener.flatten((args, dict(kwargs)), leaves)
        except RecursionError:
            whole = flattener.unfinished()
            if whole is not None and recurring.seal(whole, ()):
                continue
            raise NoSignature("takes a container that contains itself", "pass a container that does not") from None
        if (flattener.spans or recurring.standing) and recurring.note(flattener, leaves):
            continue
        try:
            return _described(args, kwargs, shape, leaves, flattener, recurring, followed)
        except _Unplaced as e:
            whole = flattener.outermost(e.at) if e.at >= 0 else None
            if whole is None or not recurring.seal(whole[0], leaves[whole[1] : whole[2]]):
                raise _placed(e.of, shape, e.at, naming()) from None


class _Unplaced(Exception):
    """Failure to describe the leaf at an index, or the nesting itself (-1)."""

    def __init__(self, of: NoSignature, at: int) -> None:
        super().__init__()
        self.of = of
        self.at = at


def _described(
    args: tuple[object, ...], kwargs: Mapping[str, object], shape: Node | None, leaves: list[object], flattener: Flattener,
    recurring: RecurringObjects, followed: Set[tuple[Node | None, int]],
) -> Call:  # fmt: skip
    tensors: list[torch.Tensor] = []
    places: list[int] = []
    again: list[tuple[int, int]] = []
    borrowed: dict[int, Borrowed] = {}
    numbers: dict[int, int] = {}
    keys: list[object] = []
    given: list[int] = []
    texts: list[int] = []
    standing, at = recurring.standing, -1
    try:
        for at, leaf in enumerate(leaves):
            if (standing and identity(leaf) in standing) or _has_own(leaf, recurring):
                keys.append((type(leaf), Identity(leaf)))
            elif isinstance(leaf, torch.Tensor):
                number = numbers.setdefault(identity(leaf), len(tensors))
                if number < len(tensors):  # the function may test `q is k`
                    leaves[at] = tensors[number]
                    keys.append(number)
                    again.append((at, number))
                    continue
                if type(leaf) is Borrowed:
                    borrowed[number] = leaf
                    leaf = leaves[at] = plain(leaf)
                keys.append(tensor_key(leaf))
                tensors.append(leaf)
                places.append(at)
            elif followed and (shape, at) in followed and base_of(type(leaf)) is not None:
                keys.append((type(leaf),))  # for any number of that kind
                given.append(at)
            elif followed and type(leaf) is str and (shape, at) in followed:
                keys.append((str,))
                texts.append(at)
            else:
                keys.append(recurring.counted(argument_key(leaf)))
        at = -1
        key = (shape, tuple(keys), aliases(tensors), modes())
        hash(key)
    except NoSignature as e:
        raise _Unplaced(e, at) from None
    except TypeError as e:
        if at >= 0:
            raise
        raise NoSignature(f"takes an argument that cannot be hashed ({e})", "pass tensors, numbers, strings") from None
    containers = flattener.containers
    apart = [identity(c) for c in containers if isinstance(c, torch.Tensor)]
    if len({*apart}) < len(apart):  # the function may test `q is k`
        raise NoSignature("takes a tensor that consists of parts twice", "pass x.clone()")
    return Call(
        key, shape, leaves, tensors, tuple(places), (args, dict(kwargs)), tuple(again), borrowed, containers, tuple(given),
        tuple(texts),
    )  # fmt: skip


def stands_in(key: tuple[Any, ...], identities: Container[int]) -> bool:
    """Whether a key has the identity of one of these objects."""
    return any(isinstance(part, Identity) and part.is_of(identities) for leaf in key[1] if type(leaf) is tuple for part in leaf)


def _has_own(leaf: object, recurring: RecurringObjects) -> bool:
    """Whether a tensor goes into the key by its identity, as a parameter does: a leaf with a gradient or hooks, or a traceable
    wrapper subclass that is a parameter or requires a gradient."""
    if type(leaf) is torch.Tensor:
        return is_leaf(leaf) and has_gradient_or_hooks(leaf) and recurring.hold(leaf)
    if not isinstance(leaf, torch.Tensor) or not is_leaf(leaf) or not consists_of_parts(leaf):
        return False
    return (leaf.requires_grad or isinstance(leaf, torch.nn.Parameter)) and recurring.hold(leaf)


def _placed(e: NoSignature, shape: Node | None, at: int, naming: Naming) -> NoSignature:
    """Add the argument's name to the message."""
    if at >= 0:
        return e.of(f"as `{naming(path_to(shape, at))}`")
    path = unhashable(shape)
    return e.of(f"as a key of `{naming(path)}`, or beside its items", "use numbers or strings as keys") if path else e


def _instead_of(t: torch.Tensor) -> str:
    """Remedy for a tensor without memory."""
    if is_shape(t):
        return "pass a tensor on the CPU or a GPU, or its shape"
    if t.is_nested:
        return "pass a padded tensor, and a mask or lengths"
    return "pass a dense tensor, or the tensors of which it is made (indices, values)"


def tensor_key(t: torch.Tensor) -> tuple[object, ...]:
    """Metadata of a tensor that a recording is specialised on."""
    if type(t) not in _TENSORS:
        historied = t.requires_grad and consists_of_parts(t)
        raise NoSignature(f"takes a tensor of class {type(t).__qualname__}{' that requires a gradient' if historied else ''}",
                          "pass it detached, or keep it as an attribute" if historied else
                          "pass a plain tensor: t.as_subclass(torch.Tensor), or to_local() of a DTensor")  # fmt: skip
    if not has_memory(t):
        if is_batched(t):
            raise NoSignature("takes a tensor of a batched computation (vmap, is_grads_batched)", "record what contains that")
        raise NoSignature(f"takes {kind_of(t)}", _instead_of(t))
    if t.__dict__ and type(t) is torch.Tensor and attributes(t):
        raise NoSignature("takes a tensor with attributes of its own", "pass t.view_as(t), and the attributes by themselves")
    if not is_leaf(t) and not says_history(t):
        raise NoSignature("takes a view made without gradients, whose base was written since", "pass a clone of it")
    if not says_version(t):
        raise NoSignature("takes a tensor of inference mode with the memory of another (.data = …)", "pass a clone of it")
    if type(t) is torch.Tensor and has_gradient_or_hooks(t):
        raise NoSignature("takes a tensor that has a gradient or hooks", "pass the same leaf tensor each time, or a view of it "
                          "(t.view_as(t))")  # fmt: skip
    if t.is_inference() and t.requires_grad:
        raise NoSignature("takes an inference tensor that requires grad", "pass it detached: t.detach()")
    if takes_no_gradient(t):
        raise NoSignature("takes a view of a leaf that was made in no_grad, and to which autograd gives no gradient",
                          "pass it detached: t.detach()")  # fmt: skip
    if t.is_conj() or t.is_neg():
        raise NoSignature("takes a tensor that is conjugated or negated when it is read", "pass t.resolve_conj().resolve_neg()")
    if is_freed(t):
        raise NoSignature("takes a tensor whose memory was freed", "pass it when it has memory again, or not at all")
    own = identity(t) if isinstance(t, torch.nn.Parameter) else None
    # Kernels load aligned data several elements at a time, and dropout then draws in another order.
    alignment = t.data_ptr() % ALIGNMENT
    return (t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.is_leaf, t.is_inference(), alignment, own)


def attributes(t: torch.Tensor) -> dict[str, object]:
    """Attributes of a tensor in its `__dict__`, without the marks of `torch.compile`."""
    return {name: value for name, value in t.__dict__.items() if not name.startswith("_dynamo_")}


def unseen(_: object) -> None:
    """Hook of phonograph's own on a result of a recorded call. It is no hook of the user's."""


unseen.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save need not warn that it is left out


def has_gradient_or_hooks(t: torch.Tensor) -> bool:
    """Whether a tensor has a gradient or hooks, which its slot would lack."""
    hooks = t._backward_hooks
    if hooks and any(hook is not unseen for hook in hooks.values()):
        return True
    return bool(getattr(t, "_post_accumulate_grad_hooks", None)) or (t.is_leaf and t.grad is not None)


def aliases(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Overlaps: for each tensor that shares memory with an earlier one, both indices and the distance in bytes.

    A function that writes one of two overlapping arguments is another program than one with separate arguments. Addresses are
    compared, not storage objects: two storages may have the memory of one NumPy array.
    """
    if len(tensors) < 2:
        return ()
    spans = sorted((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes(), i) for i, t in enumerate(tensors))
    found: list[int] = []
    end, first = 0, -1
    for at, nbytes, i in spans:
        if at < end and nbytes:
            found += [i, first, tensors[i].data_ptr() - tensors[first].data_ptr()]
        else:
            first = i
        end = max(end, at + nbytes)
    return tuple(found)


def _getters() -> list[Callable[[], object]]:
    """Getters of the process-wide settings that change what a call computes."""
    found: list[Callable[[], object]] = [
        torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype,
        torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled,
        torch.is_anomaly_enabled, torch.get_num_threads,
    ]  # fmt: skip
    found += kernel_getters()
    return [*found, is_traced, function_modes, dispatch_modes, saved_tensors_hooks]


_GETTERS = _getters()
_FUNCTION_MODES = _GETTERS.index(function_modes)
HOOKS = _GETTERS.index(saved_tensors_hooks)
"""Index of the saved-tensor hooks among the settings."""
_DETERMINISTIC = _GETTERS.index(torch.are_deterministic_algorithms_enabled)


def modes() -> tuple[Any, ...]:
    """Process- and thread-wide settings that a recording is specialised on."""
    try:
        settings = _settings()
    except RuntimeError:  # old and new ways to set the precision of matrix products were mixed: some answer no more
        settings = _one_by_one()
    rare: tuple[object, ...] = ()
    if settings[_FUNCTION_MODES] or settings[_DETERMINISTIC]:
        rare = default_device(), getattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return settings, autocast(), forward_ad._current_level, rare


def unchanged() -> Callable[[], bool]:
    """Make a fast test of whether `modes` would return what it returns now. It may say no although they are equal, and never
    yes where they differ. For equal settings it is the same function."""
    now = modes()
    found = _unchanged.pop(now, None)
    if found is None or not found():  # it looks at more than what `modes` gives
        found = _unchanged_from(now)
    _unchanged[now] = found
    if len(_unchanged) > _MODES:
        del _unchanged[next(iter(_unchanged))]
    return found


_MODES = 64  # such functions are kept, the last ones used
_unchanged: dict[object, Callable[[], bool]] = {}


def _unchanged_from(now: Reading) -> Callable[[], bool]:
    settings, cast, level, rare = now
    if rare or len(settings) != len(_GETTERS):
        return bool
    same, guarded = state_guard()
    names: dict[str, object] = {"same": same, "kept": _kept, "was": _kept.raw, "forward_ad": forward_ad, "level": level}
    asked = ["same()"] * bool(guarded) + ["kept.raw == was"] * bool(_in_memory) + ["forward_ad._current_level == level"]
    casting = [(get, get()) for get in USED_WHEN_ON]  # torch's guard checks these only while autocast is on
    for i, (get, value) in enumerate([*zip(_GETTERS, settings, strict=True), (autocast, cast), *casting]):
        if getattr(get, "__name__", "") not in guarded | _in_memory:
            names |= {f"g{i}": get, f"v{i}": value}
            asked.append(f"g{i}() is v{i}" if value is None or isinstance(value, bool) else f"g{i}() == v{i}")
    found: Callable[[], bool] = written_out(f"lambda: {' and '.join(asked)}", names)
    return found


def put_back(before: Reading) -> None:
    """Restore settings that are plain values."""
    now = modes()
    if now == before:
        return
    then = dict(zip(_GETTERS, before[0], strict=False))
    for get, set_to in _SETTERS.items():
        if then[get] is not _NO_ANSWER and _asked(get) != then[get]:
            set_to(then[get])
    only_warn = then[torch.is_deterministic_algorithms_warn_only_enabled]
    torch.use_deterministic_algorithms(then[torch.are_deterministic_algorithms_enabled], warn_only=only_warn)
    set_autocast(before[1])


def _setters() -> dict[Callable[[], object], Callable[[object], object]]:
    """Setters of the settings, by getter. (Without the order of attention's kernels, which torch chooses at their first
    call.)"""
    found: dict[Callable[[], Any], Callable[[Any], Any]] = {
        torch.is_grad_enabled: torch.set_grad_enabled, torch.get_default_dtype: torch.set_default_dtype,
        torch.is_anomaly_enabled: torch.set_anomaly_enabled, torch.get_num_threads: torch.set_num_threads,
    }  # fmt: skip
    for get in _GETTERS:
        setter = kernel_setter(get)
        if setter is not None and isinstance(get(), (bool, str)):
            found.setdefault(get, setter)
    return found


def setting_names() -> list[str]:
    """What the settings are called, in their order."""
    return [getattr(get, "__name__", "a setting of torch's") for get in _GETTERS]


def _written_out(getters: list[Callable[[], Any]]) -> Callable[[], tuple[object, ...]]:
    """Compile ``lambda: (g0(), g1(), ...)``. It runs in every replay, and a loop would double its cost."""
    names: dict[str, object] = {f"g{i}": get for i, get in enumerate(getters)}
    calls: Callable[[], Reading] = written_out(f"lambda: ({', '.join(f'{name}()' for name in names)},)", names)
    return calls


_settings = _written_out(_GETTERS)
_SETTERS = _setters()
_kept, _in_memory = kept_settings()


def _one_by_one() -> Reading:
    """The settings, and what those go by that do not answer. Where all do, what was raised was something else's (being out of
    memory is a RuntimeError too), and this is what it would have been."""
    settings = (*map(_asked, _GETTERS),)
    if all(value is not _NO_ANSWER for value in settings):
        return settings
    return *settings, *[fp32_precision(*which) for which in _PRECISIONS]


def _asked(get: Callable[[], object]) -> object:
    try:
        return get()
    except RuntimeError:
        return _NO_ANSWER


_NO_ANSWER = "(torch does not answer)"


_PRECISIONS = [(b, op) for b in ("generic", "cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")
               if b != "generic" or op == "all"]  # fmt: skip
