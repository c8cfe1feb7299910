"""Memory that all recordings of one device share.

A recording's kernels have addresses baked in, so its memory can be reused only by agreement. Two terms carry that agreement:

* **footprint**: the bytes that playing a recording may overwrite: slots, intermediates, outputs.
* **lease**: the memory of an output that was handed out. It is *alive* while somebody holds a tensor on that storage.

The rule: *a recording may be played when no live lease lies in its footprint.* There are no paths, no generations, no stack of
calls. Recordings whose footprints overlap may be played in any order, while nobody holds what one of them would overwrite.
(CUDAGraph Trees decides by path instead, and has to record again or raise where the path differs.)

The same rule keeps memory small. While a recording is captured, only live leases count as taken, and it may reuse everything
else. The pool grows to the largest set of tensors alive at one time, not to their sum.

What always holds, and the tests that look:

1. *No launch overwrites a live lease.* The player asks for the rivals of a recording, the leases in its footprint, before it
   fills anything. `test_c05_outputs_held_and_released_in_random_order`, `test_c15_branches_with_all_outputs_held`
2. *A lease is alive when references exceed the recording's own*: to the storage in C++, or to its one Python object. So a view,
   a NumPy array and autograd's saved tensors count. `test_c05_output_held_as_a_numpy_array_keeps_its_value`,
   `test_c05_outputs_held_by_a_graph_of_autograd`
3. *A dropped result is free at once*, before the garbage collector runs. `test_c05_a_dropped_output_is_not_held`
4. *A lease outlives its recording.* The storage's finalizer keeps the pool's memory until the last tensor on it is gone.
   `test_c17_held_outputs_survive_a_reset`, `test_c05_results_of_recordings_that_had_to_go`
5. *A capture keeps clear of `protected()`*, the live leases: its allocator must not use their addresses. Replays allocate
   nothing. `test_c05_an_output_held_while_other_functions_are_recorded`
6. *Memory that a borrowed argument lay in stays in `footprints()`* when its owner goes: the other recording still writes there.
   `test_memory_that_a_borrowed_argument_lay_in_stays_taken_when_its_owner_goes`
7. *A loan ends before its memory is overwritten*, and a use of it raises from then on.
   `test_c05_a_borrowed_output_raises_once_it_was_overwritten`
8. *Finalizers only set a flag.* The garbage collector may run them anywhere, in a capture too; the next `sweep` does the work.
   `test_c05_garbage_that_is_collected_anywhere_in_a_capture`, `test_c17_a_recording_that_goes_in_a_capture`
9. *Recordings of all functions and sizes lie in one pool*, as large as the worst path needs.
   `test_c15_memory_is_that_of_the_worst_path_not_the_sum`, `test_c15_recordings_of_all_sizes_lie_in_one_pool`

Not handled: concurrent replays. The player orders replays on different streams one after the other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .._torch.dynamic import Thing
from .._torch.tensors import copy_all, neg_view, storage_at, use_count
from ..python.identity import identity
from .loans import Loan
from .spans import Spans

__all__ = [
    "Fill",
    "Lease",
    "Pool",
    "TensorAddress",
    "copy_of",
    "dense",
    "extent",
    "memory_of",
    "place_of",
    "row_of_bytes",
    "unexpanded",
    "unowned",
]

_references: Callable[[object], int] = sys.getrefcount


class TensorAddress(NamedTuple):
    """Address and layout of a tensor, without a reference to it."""

    address: int
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorAddress:
        storage = t.untyped_storage()
        return cls(storage.data_ptr(), storage.nbytes(), t.device, t.dtype, int(t.storage_offset()), t.size(), t.stride())

    def tensor(self) -> torch.Tensor:
        """Make a tensor at this address that does not own its memory."""
        storage = storage_at(self.address, self.nbytes, self.device)
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


def unowned(t: torch.Tensor) -> torch.Tensor:
    """Make a tensor on the memory of another one, with a storage object of its own that does not own the memory."""
    return TensorAddress.of(t).tensor()


def unexpanded(t: torch.Tensor) -> torch.Tensor:
    """View of an expanded tensor with each element once. (`copy_` refuses to write an element twice.)"""
    for dim, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if s == 0 and n > 1:
            t = t.narrow(dim, 0, 1)
    return t


class Fill:
    """Copy of tensors to fixed ones of the same metadata, by one kernel where torch has it.

    The fixed tensors' memory is kept by their owner: a view here would keep a lease alive."""

    def __init__(self, places: Sequence[torch.Tensor]) -> None:
        self.places = [p if (reduced := unexpanded(p)) is p else unowned(reduced) for p in places]
        self._plain = all(a is b for a, b in zip(self.places, places, strict=True))

    def __call__(self, sources: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
        if self.places:
            copy_all(self.places, sources if self._plain else [unexpanded(s) for s in sources])


def extent(t: torch.Tensor) -> int:
    """Number of storage elements from the first to the last element of a tensor."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def copy_of(t: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides. (`clone` makes a view dense, and compiled code asserts the strides of saved tensors.)"""
    if t.is_conj() or t.is_neg():
        return t.clone()
    copy = torch.empty(extent(t), dtype=t.dtype, device=t.device).as_strided(t.size(), t.stride())
    unexpanded(copy).copy_(unexpanded(t))
    return copy


def memory_of(t: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's storage lies, and how many bytes it has."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def place_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Address and layout of a tensor, for comparison."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


def row_of_bytes(t: torch.Tensor) -> torch.Tensor:
    """Bytes of the elements of a tensor, in their order."""
    whole = t.contiguous()  # (the stride of a single element may be any)
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def dense(t: torch.Tensor) -> bool:
    """Whether a tensor has no gaps and no overlaps in memory."""
    step = 1
    for s, n in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        if s != step:
            return False
        step *= n
    return t.numel() > 0


class Lease:
    """Memory of an output, with a count of the tensors on it that others hold.

    The storage does not own its memory: the pool does. A finalizer of the storage keeps the pool's memory (`anchor`) until the
    last tensor on it is gone, even if the recording is dropped before. The recording has a tensor of its own on it for each
    output (`template`); replays hand out aliases of these.
    """

    __slots__ = ("__weakref__", "_all", "address", "cdata", "nbytes", "own", "owns", "python")

    def __init__(self, address: int, nbytes: int, device: torch.device, anchor: object) -> None:
        self.address = address
        self.nbytes = nbytes
        storage = storage_at(address, nbytes, device)
        weakref.finalize(storage, _drop_anchor, anchor).atexit = False
        self.cdata = storage._cdata
        # The only Python object of the storage: `t.untyped_storage()` of each tensor on it returns this one.
        self.python = weakref.ref(storage)
        with torch.inference_mode(False), torch.no_grad():
            self._all = [torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))]
        del storage
        self.own = use_count(self.cdata)
        self.owns = _references(self.python())

    def template(
        self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int,
        conjugate: bool = False, negative: bool = False, inference: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Make a tensor of the recording's own on this memory. It does not keep the lease alive."""
        with torch.inference_mode(inference):
            made = torch.empty(0, dtype=dtype, device=self._all[0].device)
            made.set_(self._all[0].untyped_storage(), offset, size, stride)
        made = torch.conj(made) if conjugate else made
        self._all.append(neg_view(made) if negative else made)
        self.own = use_count(self.cdata)
        return self._all[-1]

    def bytes(self) -> torch.Tensor:
        """The whole memory, as uint8."""
        return self._all[0]

    @property
    def alive(self) -> bool:
        """Whether somebody outside holds a tensor on this memory, or its storage."""
        return use_count(self.cdata) > self.own or _references(self.python()) > self.owns

    def __repr__(self) -> str:
        return f"Lease({self.address:#x}, {self.nbytes} bytes, {'alive' if self.alive else 'free'})"


def _drop_anchor(anchor: object) -> None:
    """Do nothing: the finalizer drops its reference to the anchor."""


class Shares(Protocol):
    """Interface of a recording to the pool."""

    @property
    def leases(self) -> tuple[Lease, ...]: ...
    @property
    def releases(self) -> frozenset[Lease]: ...
    @property
    def footprint(self) -> Spans: ...
    @property
    def borrowed_memory(self) -> Spans: ...
    @property
    def rivals(self) -> list[tuple[int, int, Callable[[], object], int]]: ...
    @property
    def spoiled(self) -> list[str]: ...
    @property
    def backward(self) -> Thing: ...
    @property
    def program(self) -> Thing: ...


class Pool:
    """Recordings that share memory, and the leases that prevent their replays.

    Recordings are weakly referenced. When one is gone, its memory is free but for live leases.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.leases: list[Lease] = []
        self.untidy = False  # recordings have gone since the device last returned memory
        self.loans: set[Loan] = set()
        self._recordings: list[weakref.ref[Shares]] = []

    @property
    def recordings(self) -> list[Shares]:
        return [r for ref in self._recordings if (r := ref()) is not None]

    def add(self, recording: Shares) -> None:
        """Add a recording."""
        self._recordings.append(weakref.ref(recording, self._gone))
        self.leases.extend(recording.leases)
        self.sweep()

    def remove(self, recording: Shares) -> None:
        """Remove a recording. Its live leases stay protected."""
        self._recordings = [ref for ref in self._recordings if ref() is not recording]
        self.untidy = True
        self.sweep()

    def _gone(self, _: object) -> None:
        self.untidy = True  # no more than that: this runs whenever the garbage collector likes

    def sweep(self) -> None:
        """Forget dead recordings and their dead leases. Then find the rivals of each recording: the leases in its footprint."""
        self._recordings = [ref for ref in self._recordings if ref() is not None]
        owned = {identity(lease) for r in self.recordings for lease in r.leases}
        leases = [x for x in self.leases if identity(x) in owned or x.alive]
        for r in self.recordings:
            met = [x for x in leases if r.footprint.meets(x.address, x.nbytes)]
            r.rivals[:] = [(x.cdata, x.own, x.python, x.owns + (x in r.releases)) for x in met]
        self.leases = leases  # last: the rivals are addresses of storages, and those that go must be nobody's

    def take_back(self, footprint: Spans | None = None, keep: Sequence[Loan] = ()) -> None:
        """Invalidate borrowed outputs in a footprint (None: all), but for those to `keep`."""
        for loan in self.loans.difference(keep):
            if footprint is None or footprint.meets(loan.address, loan.nbytes):
                loan.end()
                self.loans.discard(loan)

    def protected(self) -> Spans:
        """Addresses of live leases."""
        return Spans((x.address, x.nbytes) for x in self.leases if x.alive)

    def leased(self) -> Spans:
        """Addresses of all leases, live or not."""
        return Spans((x.address, x.nbytes) for x in self.leases)

    @property
    def takes_turns(self) -> bool:
        """Whether several forwards of a function wait for their backwards at a time."""
        return any(r.backward is not None and r.backward.forward.takes_turns for r in self.recordings)

    def footprints(self) -> Spans:
        """Addresses that some recording may overwrite, slots in other recordings' outputs included."""
        return Spans(piece for r in self.recordings for piece in (*r.footprint, *r.borrowed_memory))

    def lease_of(self, t: torch.Tensor) -> Lease | None:
        """Lease of a tensor, if it is an output of a recording of this pool."""
        key = t.untyped_storage()._cdata
        return next((x for x in self.leases if x.cdata == key), None)
