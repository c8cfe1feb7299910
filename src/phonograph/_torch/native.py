"""The helper in C (`_native.c`), which asks in nanoseconds what Python asks of tensors in a replay.

It is optional, and knows nothing of torch but where a few things lie in memory. That is found out here, once, by making
tensors, changing them and looking which bytes have changed; and then it is tried out whether each kind of change is heard.
Where a release of torch keeps its tensors in another way, or Python has no lock, all stays with Python: `instead` says why.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module

import torch

from .autograd import bump as _bump
from .dynamic import Private
from .modes import without_modes
from .tensors import TensorBase, _guards, is_ordinary, neg_view, tensor_check

__all__ = ["Fact", "bump", "dict_version", "instead", "known", "standing", "tells_versions"]

_WORD = ctypes.sizeof(ctypes.c_void_p)
_INLINE = 5  # dimensions, of which torch keeps the sizes in the tensor itself; those of more lie elsewhere
_KINDS = (torch.Tensor, torch.nn.Parameter)


class _Unclear(Exception):
    """It is not found where something lies."""


Question = Callable[[list[torch.Tensor]], bool]
Fact = tuple[object, ...]
"""What something is at the moment: ("item", dictionary, name), ("place", dictionary, name) of what is not to be kept, ("items",
list), ("cell", cell), ("function", function), ("version", dictionary), ("word", what has it, address); ("read", function) of
one that gives a tuple; ("called", function, result) and ("called", function, argument, result) of one that has to give that."""


def _size(at: int) -> int:
    """How many bytes have been allocated there."""
    asks: Private = ctypes.CDLL(None).malloc_usable_size
    asks.argtypes, asks.restype = [ctypes.c_void_p], ctypes.c_size_t
    return int(asks(at))


def _bytes(at: int, size: int = 0) -> bytes:
    return ctypes.string_at(at, size or _size(at))


def _words(at: int, size: int = 0) -> list[int]:
    raw = _bytes(at, size)
    return [int.from_bytes(raw[i : i + _WORD], "little") for i in range(0, len(raw) - _WORD + 1, _WORD)]


def _only(found: Iterable[Iterable[int]]) -> int:
    """The one place that is found each time. (Behind an object, and where nothing has been put yet, may lie the same bytes.)

    Raises:
        _Unclear: there are several, or none.
    """
    places = set[int].intersection(*map(set, found))
    if len(places) != 1:
        raise _Unclear
    return places.pop()


def _where(words: Sequence[int], word: int) -> Iterator[int]:
    return (i * _WORD for i, there in enumerate(words) if there == word)


def _impl(t: torch.Tensor) -> int:
    at: int = t._cdata
    return at


def _storage(t: torch.Tensor) -> int:
    at: int = t.untyped_storage()._cdata
    return at


def _word_at(at: int) -> int:
    return _words(at, _WORD)[0]


def _samples() -> list[torch.Tensor]:
    """Tensors of which everything is another number, and never one that comes up by chance."""
    made = [torch.zeros(12345 + i, device="cpu").as_strided((1, 9, 10, 11), (9900, 1100, 110, 1), 1234 + i) for i in range(8)]
    return [*made[:4], *map(neg_view, made[4:])]


def _counter_at(samples: Sequence[torch.Tensor]) -> int:
    """Where the reference to the counter of versions lies: `detach` shares it, `data` does not."""
    alike = [(t, t.detach(), t.data) for t in samples]
    rows = [[_words(_impl(x)) for x in same] for same in alike]
    storage = _only(_where(row[0], _storage(t)) for row, t in zip(rows, samples, strict=True))
    shared = ([i * _WORD for i, (a, b, c) in enumerate(zip(*row, strict=False)) if 0 != a == b != c] for row in rows)
    return _only([place for place in places if place > storage] for places in shared)


def _count_at(counter_at: int) -> int:
    """Where in the counter the number lies."""
    t = torch.zeros(3, device="cpu")
    counter, seen = _word_at(_impl(t) + counter_at), list[list[int]]()
    for _ in range(3):
        raw = _bytes(counter)
        seen.append([int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw) - 3, 4)])
        _bump([t])
    return _only([[4 * i for i, numbers in enumerate(zip(*seen, strict=True)) if [*numbers] == [0, 1, 2]]])


def _meta_at() -> int:
    """Where the reference lies to what autograd knows of a tensor, which is none at first."""
    t = torch.zeros(3, device="cpu")
    before = _words(_impl(t))
    t.requires_grad_()
    after = _words(_impl(t))
    return _only([[i * _WORD for i, (a, b) in enumerate(zip(before, after, strict=True)) if a == 0 != b]])


def _spans_of_meta(at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """What is before the gradient, and from behind it to whether one is required."""
    t = torch.zeros(3, device="cpu").requires_grad_()
    meta, kept = _word_at(_impl(t) + at), list[torch.Tensor]()
    required = _bytes(meta)
    t.requires_grad_(False)
    not_required = _bytes(meta)
    flag = _only([[i for i, (a, b) in enumerate(zip(required, not_required, strict=True)) if (a, b) == (1, 0)]])
    t.requires_grad_()
    places = list[Iterator[int]]()
    for _ in range(4):
        t.grad = torch.ones(3, device="cpu")
        kept.append(t.grad)
        places.append(_where(_words(meta), _impl(t.grad)))
    gradient = _only(places)
    if not _WORD <= gradient < flag:
        raise _Unclear
    behind = gradient + _WORD
    return (0, gradient), (behind, flag + 4 - behind)


def _layout() -> tuple[object, ...]:
    """Where everything lies, as `set_up` wants to know it.

    Raises:
        _Unclear: it lies otherwise.
    """
    samples = _samples()
    impls = [(t, _words(_impl(t))) for t in samples]
    storages = [(t.untyped_storage(), _words(_storage(t))) for t in samples]
    impl_at = _only(_where(_words(id(t), type(t).__basicsize__), _impl(t)) for t in samples)
    storage_at, last = (_only(_where(words, at(t)) for t, words in impls) for at in (_storage, _keys))
    offset = _only(_where(words, int(t.storage_offset())) for t, words in impls)
    counter_at, meta_at = _counter_at(samples), _meta_at()
    data_at = min(set.intersection(*({*_where(words, storage.data_ptr())} for storage, words in storages)))
    nbytes_at = _only(_where(words, storage.nbytes()) for storage, words in storages)
    inner = meta_at, counter_at, offset
    if not (storage_at < min(inner) and max(inner) < last and data_at < nbytes_at):
        raise _Unclear
    of_impl = storage_at, last + _WORD - storage_at
    of_storage = data_at, nbytes_at + 2 * _WORD - data_at  # with the flags behind, by which nobody may ask where it lies
    if sum(of_storage) > _size(_storage(samples[0])):
        raise _Unclear
    return impl_at, storage_at, meta_at, counter_at, _count_at(counter_at), of_impl, of_storage, *_spans_of_meta(meta_at)


def _keys(t: torch.Tensor) -> int:
    keys: Private = torch._C._dispatch_keys(t)
    return int(keys.raw_repr())


def _other_memory(t: Private) -> None:
    t.set_(torch.zeros(64, device="cpu").untyped_storage(), t.storage_offset(), t.size(), t.stride())


def _history(t: Private) -> None:
    with torch.enable_grad():
        t.mul_(torch.ones(1, device="cpu", requires_grad=True))


_CHANGES: dict[str, Callable[[Private], object]] = {
    "shape": lambda t: t.resize_(2, 2),
    "dimensions": lambda t: t.resize_(2, 2, 1),
    "strides": lambda t: t.as_strided_((3, 2), (1, 3)),
    "offset": lambda t: t.as_strided_((3, 2), (2, 1), 1),
    "memory": _other_memory,
    "data": lambda t: TensorBase.data.__set__(t, torch.zeros(3, 2, device="cpu")),
    "dtype": lambda t: TensorBase.data.__set__(t, torch.zeros(3, 2, dtype=torch.int32, device="cpu")),
    "storage": lambda t: t.untyped_storage().resize_(4096),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "copied lazily": getattr(torch, "_lazy_clone", lambda t: t.untyped_storage().resize_(1)),
    "requires": lambda t: t.requires_grad_(not t.requires_grad),
    "history": _history,
    "class": lambda t: setattr(t, "__class__", torch.nn.Parameter),
    "swapped": lambda t: torch._C._swap_tensor_impl(t, torch.zeros(3, 2, device="cpu")),
}


def _mould(has_meta: bool) -> torch.Tensor:
    """A tensor of which autograd knows something, or nothing."""
    t = torch.zeros(16, device="cpu").as_strided_((3, 2), (2, 1), 2)
    return t.requires_grad_().requires_grad_(False) if has_meta else t


def _hears(native: Private) -> bool:
    """Whether Python is asked again after each kind of change, and not without one; and versions are torch's."""
    for change in _CHANGES.values():
        for has_meta in (False, True):
            t = _mould(has_meta)
            asks = native.Standing(bool, callable)
            asks([t])
            t.add_(1)
            asks([t])
            if asks.asked != 1:
                return False
            change(t)
            asks([t])
            if asks.asked != 2:
                return False
    t = _mould(False)
    before = t._version
    view = t[:1]
    native.bump([t, view])
    return t._version == view._version == before + 2


def _loaded() -> tuple[Private, str]:
    """The helper, if it can be used; otherwise why not."""
    if os.environ.get("PHONOGRAPH_NATIVE") == "0":
        return None, "PHONOGRAPH_NATIVE=0"
    try:
        native: Private = import_module("._native", __package__)
    except ImportError as e:
        return None, "not built" if isinstance(e, ModuleNotFoundError) else str(e)
    try:
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            native.set_up(_KINDS, TensorBase, _bump, *_layout())
            return (native, "") if _hears(native) else (None, "some changes of tensors would not be heard")
    except TypeError:
        return None, "built of another source"
    except (_Unclear, StopIteration, AttributeError, RuntimeError):
        return None, "this release of torch keeps its tensors in another way"


_native, instead = _loaded()
"""The helper; or why it is not in use."""

bump: Callable[[Sequence[torch.Tensor]], None] = _bump if _native is None else _native.bump
"""Move the version counters on, as an operator that writes does: autograd then notices a saved tensor that changed."""


tells_versions = _native is not None and bool(_native.tells_versions)
"""Whether dictionaries have versions in memory, which the helper can compare."""

dict_version: Private = _native.version if tells_versions else getattr(_guards, "dict_version", None)
"""A number of a dictionary's, which is another one when it was changed: the helper's, or that of torch.compile's guards."""


def known(ask: Callable[[], object], facts: Callable[[], list[Fact] | None], usual: object) -> Callable[[], Private]:
    """The same question, whose `usual` answer rests on these facts alone; None: on others as well at the moment. Where the
    helper can see that all are what they were, it is the answer. It may be asked twice."""
    return ask if _native is None else _native.Known(ask, facts, usual)


def standing(tensors: Sequence[torch.Tensor], ask: Question) -> Question:
    """The same question about lists of tensors like these, whose answer depends on the tensors, not on what they hold, and on
    the state of the thread alone. Where the helper can see that none has changed since the answer was yes, it is yes."""
    of_one = tensor_check(tensors[:1])
    if _native is None or of_one is None or not all(is_ordinary(t) and t.dim() <= _INLINE for t in tensors):
        return ask
    asks: Question = _native.Standing(ask, of_one)
    return asks
