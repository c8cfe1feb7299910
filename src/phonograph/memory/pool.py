"""The memory that all recordings of one device share.

A recording's kernels have addresses baked in, so its memory can be given to others only by agreement. Two facts make
that agreement simple:

* **footprint**: every recording knows the bytes that playing it may overwrite (its slots, intermediates and outputs).
* **lease**: every output that is handed out lies in memory that is still the recording's. As long as anybody holds a
  tensor on that storage, the lease is *alive*.

The one rule: *a recording may be played when its footprint meets no live lease.* Nothing else is ordered: there are no
paths, no generations, no stack of calls. Two recordings whose footprints overlap may be played in any order, as long as
nobody still holds what one of them would overwrite. (CUDAGraph Trees decides by path instead, and has to record again
or raise where the path differs.)

The same rule makes memory small: while a new recording is captured, only live leases count as taken, so that it may
reuse everything else, and the pool grows to the largest set of tensors alive at one time, not to their sum.

Replays never ask the allocator for anything, and the allocator does not know of leases. Only during a capture must its
view be true; `protected()` gives the addresses that the device's allocator has to keep its hands off.

Not handled: two replays at the same time. Recordings of one pool share memory, so the player orders replays on
different streams one after the other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .._torch.tensors import copy_all, neg_view, storage_at, use_count
from ..python.identity import identity
from .loans import Loan
from .spans import Spans

__all__ = ["Fill", "Lease", "Pool", "Spot", "copy_of", "dense", "extent", "once", "place_of", "row_of_bytes", "unowned"]

_references: Callable[[object], int] = sys.getrefcount


class Spot(NamedTuple):
    """Where a tensor lies, and how, without keeping it."""

    address: int
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    offset: int
    size: Any
    stride: Any

    @classmethod
    def of(cls, t: torch.Tensor) -> Spot:
        storage = t.untyped_storage()
        return cls(storage.data_ptr(), storage.nbytes(), t.device, t.dtype, int(t.storage_offset()), t.size(), t.stride())

    def tensor(self) -> torch.Tensor:
        """A tensor there, which does not own its memory."""
        storage = storage_at(self.address, self.nbytes, self.device)
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


def unowned(t: torch.Tensor) -> torch.Tensor:
    """The same memory and metadata without owning it, and without sharing `t`'s storage object."""
    return Spot.of(t).tensor()


def once(t: torch.Tensor) -> torch.Tensor:
    """A view that has each element of an expanded tensor once: `copy_` refuses to write one element twice."""
    for dim, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if s == 0 and n > 1:
            t = t.narrow(dim, 0, 1)
    return t


class Fill:
    """Copies tensors to fixed places of the same metadata, all in one go where torch has a kernel for it. (Who has these places
    keeps their memory; a view of one would count as somebody who holds it.)"""

    def __init__(self, places: Sequence[torch.Tensor]) -> None:
        self.places = [p if (reduced := once(p)) is p else unowned(reduced) for p in places]
        self._plain = all(a is b for a, b in zip(self.places, places, strict=True))

    def __call__(self, sources: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
        if self.places:
            copy_all(self.places, sources if self._plain else [once(s) for s in sources])


def extent(t: torch.Tensor) -> int:
    """How many elements of storage a tensor spans, from its first to its last."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def copy_of(t: torch.Tensor) -> torch.Tensor:
    """A copy with the very strides: compiled code counts on those of what it has saved, and `clone` makes a view dense."""
    if t.is_conj() or t.is_neg():
        return t.clone()
    copy = torch.empty(extent(t), dtype=t.dtype, device=t.device).as_strided(t.size(), t.stride())
    once(copy).copy_(once(t))
    return copy


def place_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


def row_of_bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in their order."""
    whole = t.contiguous()  # (the stride of a single element may be any)
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def dense(t: torch.Tensor) -> bool:
    """Whether a tensor covers its memory from its first to its last element, each once."""
    step = 1
    for s, n in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        if s != step:
            return False
        step *= n
    return t.numel() > 0


class Lease:
    """The memory of one output of one recording, and whether somebody outside holds a tensor on it.

    The storage does not own its memory: the pool does, and a finalizer keeps the pool's memory (`anchor`) until the last
    tensor on it is gone, even if the recording is dropped before. The recording has its own tensors on it (`template`),
    one for each output; what is handed out are aliases of them.
    """

    __slots__ = ("__weakref__", "_all", "address", "cdata", "nbytes", "own", "owns", "python")

    def __init__(self, address: int, nbytes: int, device: torch.device, anchor: object) -> None:
        self.address = address
        self.nbytes = nbytes
        storage = storage_at(address, nbytes, device)
        weakref.finalize(storage, _let_go, anchor).atexit = False
        self.cdata = storage._cdata
        # The one Python object of the storage: a user who asks for the storage gets the very same.
        self.python = weakref.ref(storage)
        with torch.inference_mode(False), torch.no_grad():
            self._all = [torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))]
        del storage
        self.own = use_count(self.cdata)
        self.owns = _references(self.python())

    def template(
        self, dtype: torch.dtype, size: Any, stride: Any, offset: int, conjugate: bool = False, negative: bool = False,
        inference: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """A tensor of the recording's own on this memory; it does not count as use from outside."""
        with torch.inference_mode(inference):
            made = torch.empty(0, dtype=dtype, device=self._all[0].device)
            made.set_(self._all[0].untyped_storage(), offset, size, stride)
        made = torch.conj(made) if conjugate else made
        self._all.append(neg_view(made) if negative else made)
        self.own = use_count(self.cdata)
        return self._all[-1]

    def bytes(self) -> torch.Tensor:
        """All of the memory, as bytes."""
        return self._all[0]

    @property
    def alive(self) -> bool:
        """Whether anybody outside holds a tensor on this memory, or the storage itself."""
        return use_count(self.cdata) > self.own or _references(self.python()) > self.owns

    def __repr__(self) -> str:
        return f"Lease({self.address:#x}, {self.nbytes} bytes, {'alive' if self.alive else 'free'})"


def _let_go(anchor: object) -> None:
    """Nothing to do: dropping the reference to the anchor is the point."""


class Shares(Protocol):
    """A recording, as the memory's pool sees it."""

    @property
    def leases(self) -> tuple[Lease, ...]: ...
    @property
    def releases(self) -> frozenset[Lease]: ...
    @property
    def footprint(self) -> Spans: ...
    @property
    def lent(self) -> Spans: ...
    @property
    def rivals(self) -> list[tuple[int, int, object, int]]: ...
    @property
    def spoiled(self) -> list[str]: ...
    @property
    def backward(self) -> Any: ...
    @property
    def program(self) -> Any: ...


class Pool:
    """Which recordings share the memory, and which leases are in whose way.

    Recordings are known weakly: one that nobody can play any more is gone, and its memory with it, except for what is
    still held of its outputs.
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
        """Let a new recording take part."""
        self._recordings.append(weakref.ref(recording, self._gone))
        self.leases.extend(recording.leases)
        self.sweep()

    def remove(self, recording: Shares) -> None:
        """Take a recording out. What it handed out stays protected until it is dropped."""
        self._recordings = [ref for ref in self._recordings if ref() is not recording]
        self.untidy = True
        self.sweep()

    def _gone(self, _: object) -> None:
        self.untidy = True  # no more than that: this runs whenever the garbage collector likes

    def sweep(self) -> None:
        """Forget recordings that have gone, and what nobody holds of their outputs; and tell every other its rivals: the leases
        that its footprint meets."""
        self._recordings = [ref for ref in self._recordings if ref() is not None]
        owned = {identity(lease) for r in self.recordings for lease in r.leases}
        self.leases = [x for x in self.leases if identity(x) in owned or x.alive]
        for r in self.recordings:
            met = [x for x in self.leases if r.footprint.meets(x.address, x.nbytes)]
            r.rivals[:] = [(x.cdata, x.own, x.python, x.owns + (x in r.releases)) for x in met]

    def take_back(self, footprint: Spans | None = None, keep: Sequence[Loan] = ()) -> None:
        """End the loans of borrowed outputs that lie in a footprint (None: anywhere), but for these."""
        for loan in self.loans.difference(keep):
            if footprint is None or footprint.meets(loan.address, loan.nbytes):
                loan.end()
                self.loans.discard(loan)

    def protected(self) -> Spans:
        """The addresses of all live leases."""
        return Spans((x.address, x.nbytes) for x in self.leases if x.alive)

    def leased(self) -> Spans:
        """The addresses of all leases, live or not: where recordings hand out their outputs."""
        return Spans((x.address, x.nbytes) for x in self.leases)

    @property
    def takes_turns(self) -> bool:
        """Whether forwards of one function wait for their backwards at the same time."""
        return any(r.backward is not None and r.backward.forward.takes_turns for r in self.recordings)

    def footprints(self) -> Spans:
        """The addresses that any recording may overwrite, or fill because an argument lay there."""
        return Spans(piece for r in self.recordings for piece in (*r.footprint, *r.lent))

    def lease_of(self, t: torch.Tensor) -> Lease | None:
        """The lease that a tensor lies on, if it is an output of a recording of this pool."""
        key = t.untyped_storage()._cdata
        return next((x for x in self.leases if x.cdata == key), None)
