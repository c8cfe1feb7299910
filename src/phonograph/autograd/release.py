"""Giving memory back in the middle of a backward.

What a forward has saved is read by a backward that does not retain the graph, and is nobody's from then on. Eager frees it as
it goes, so that a step never needs all that is saved and all that its backward makes at one time. A recording does the same:
while a backward is captured, what was saved counts as taken until all that lies there has been asked for and what was handed
out for it is gone. From then on the capture may put something else there.

Such a recording writes over what it has read. So only the last run of a backward may play it (`Backward.last`), and what it
overwrites must be held by nobody but the call whose backward it is.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from .._torch.modes import without_modes
from .._torch.tensors import neg_view, storage_id
from ..capture.dispatch import OperatorWatch
from ..memory.pool import Lease, unowned

__all__ = ["Release"]


class Release:
    """Of what is saved in one capture of a backward. `leases`: by the numbers of what is saved, the memory that may be given
    back."""

    def __init__(self, leases: Mapping[int, Lease]) -> None:
        self._leases = leases
        self._unread: dict[Lease, set[int]] = defaultdict(set)
        for number, lease in leases.items():
            self._unread[lease].add(number)
        self._open: Counter[Lease] = Counter()  # what was handed out of each, and is still there
        self._handed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._watch: OperatorWatch | None = None
        self.given: set[Lease] = set()
        self.again = False
        """Something was asked for again after its memory had been given back: this capture is none to play."""

    @property
    def places(self) -> list[tuple[int, int]]:
        """All that may be given back: addresses and bytes."""
        return [(lease.address, lease.nbytes) for lease in self._unread]

    @contextmanager
    def during(self, watch: OperatorWatch) -> Iterator[None]:
        """The capture runs, which this watches."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def take(self, number: int, place: torch.Tensor) -> torch.Tensor:
        """What is saved under this number: a tensor of which it is known when it is gone."""
        lease = self._leases.get(number)
        if lease is None or self._watch is None:
            return place
        self.again = self.again or lease in self.given
        with without_modes():
            t = unowned(place)
            t = torch.conj(t) if place.is_conj() else t
            t = neg_view(t) if place.is_neg() else t
        storage = t.untyped_storage()
        key = storage._cdata
        self._open[lease] += 1
        self._unread[lease].discard(number)
        self._watch.lend(t, storage_id(place))
        self._handed[key] = weakref.ref(storage, partial(_closed, weakref.ref(self), key, lease))
        return t

    def lends(self, t: torch.Tensor) -> bool:
        """Whether a tensor lies on what was handed out."""
        return storage_id(t) in self._handed

    def closed(self, key: int, lease: Lease) -> None:
        """Something that was handed out is gone, and nothing else lies on it."""
        del self._handed[key]
        self._open[lease] -= 1
        if self._watch is not None and not self._open[lease] and not self._unread[lease] and lease not in self.given:
            self.given.add(lease)
            self._watch.give_back(lease.address, lease.nbytes)


def _closed(release: weakref.ref[Release], key: int, lease: Lease, _: object) -> None:
    if (mine := release()) is not None:
        mine.closed(key, lease)
