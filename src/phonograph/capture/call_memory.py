"""Memory of a captured call, by storage, because views share one.

Storages from before the call (slots, tensors in reach) have names. Storages that the call makes are known without a name, until
they are freed: then another storage may get the same identity.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence, Set

import torch

from .._torch.autograd import counted_apart, set_version
from .._torch.tensors import has_memory, storage_id
from ..errors import Refusal
from ..guards import fsdp_state as shards
from ..guards.reachable import Reach
from ..python.holders import Holder
from ..values.pytree import flatten
from ..values.tensor_subclasses import parts
from .python_events import pause_profiling

__all__ = ["MOVED", "CallMemory"]

MOVED = -1
"""Mark for a version that moved on from an unknown one."""


class CallMemory:
    """Follows which storages one call reads and writes."""

    def __init__(self, reach: Reach, slots: Sequence[torch.Tensor], borrowed: Sequence[bool]) -> None:
        self.known: dict[int, str] = {storage_id(t): f"argument {i}" for i, t in enumerate(slots)}
        """Names of the storages that the call may touch, by identity; "" for those that it made."""
        self.slot_ids = frozenset(self.known)
        self.gathered = frozenset(shards.storage(t)._cdata for _, t in reach.gathered)
        self._births: dict[int, _Birth] = {}
        self.undelivered: BaseException | None = None
        """An exception (Ctrl-C) that came while the end of a storage was being noted."""
        self._made = 0  # storages that the call has made
        self._gone = _forgetting(weakref.ref(self))
        self._outside_at: dict[int, list[torch.Tensor]] = {}
        for name, t in reach.tensors.values():
            if has_memory(t):
                key = storage_id(t)
                self.known.setdefault(key, name)
                self._outside_at.setdefault(key, []).append(t)
        for name, t in reach.all_tensors:
            for part in parts(t.grad) if t.is_leaf and t.grad is not None else ():
                self._born(part, f"{name}.grad")
        self._outside = [t for _, t in reach.tensors.values()]
        self._made_versions = [(t, t._version) for _, t in reach.made.values() if not t.is_inference()]
        self.outside = set(self.known) - self.slot_ids
        """Storages of tensors in reach."""
        self.known |= dict.fromkeys(self.gathered, "")  # their memory is the call's own
        self.theirs = self.outside | {storage_id(s) for s, b in zip(slots, borrowed, strict=False) if b}
        """Storages that are no copies: of tensors in reach, and of `borrowed` slots, which are arguments used in place."""
        self.touched: set[int] = set()
        """Named storages that an operator was given."""
        self.written: dict[int, torch.Tensor] = {}
        """Slots and tensors in reach that an operator has written."""
        self._versions: dict[int, int] = {}  # before that
        self._beside: dict[int, list[tuple[torch.Tensor, int]]] = {}  # others in reach in the same storages, and theirs
        self._shown: dict[int, list[list[bool]]] = {}
        self._constants: set[int] = set()  # those of tensors that were made of numbers
        self.workplaces: tuple[torch.Tensor, ...] = ()
        self.given_outside: dict[int, torch.UntypedStorage] = {}
        """Memory outside that marked functions may write."""
        self.relied_on: dict[int, Holder] = {}
        """Memory outside whose contents the recording assumes to stay the same."""
        self.relies: Callable[[list[Holder]], None] = _nobody
        """Called with that memory."""

    # -- what begins and ends

    def works_in(self, places: Sequence[torch.Tensor]) -> None:
        """The call may work in this memory, of which nobody else makes anything."""
        self.workplaces = (*places,)
        for t in places:
            self.known.setdefault(storage_id(t), "a bucket of DistributedDataParallel")

    def lend(self, t: torch.Tensor, key: int) -> None:
        """This tensor stands for one in reach, on that storage, for as long as it lives."""
        self._born(t, self.known.get(key) or "what its forward has saved")
        self.outside.add(storage_id(t))
        self.theirs.add(storage_id(t))

    def _born(self, t: torch.Tensor, name: str = "") -> None:
        """Note a tensor that the call has made, or one outside (with a name) that it may let go of: either may be gone before
        the call ends, and its identity is then given to another storage."""
        if has_memory(t):
            self._begins(t.untyped_storage(), name)

    def _begins(self, storage: torch.UntypedStorage, name: str = "") -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = name
            self._births[key] = birth = _Birth(storage, self._gone)
            birth.key, birth.number = key, -1 if name else self._made
            self._made += not name

    def is_outside(self, key: int) -> bool:
        """Whether this storage was there before the call: an argument's, or one in reach."""
        return bool(self.known.get(key))

    def name_of(self, key: int) -> int | str | None:
        """How many storages the call had made before this one, or what one is called that was there before."""
        birth = self._births.get(key)
        return birth.number if birth is not None and birth.number >= 0 else self.known.get(key) or None

    def died(self, key: int) -> None:
        """A storage that the call created, or a gradient from before, is gone."""
        self.known.pop(key, None)
        self._births.pop(key, None)
        self._shown.pop(key, None)
        self._constants.discard(key)
        self.outside.discard(key)
        self.theirs.discard(key)

    def check_heard(self) -> None:
        """
        Raises:
            Refusal: it was not told that a storage has gone, whose identity another may have now.
            KeyboardInterrupt: likewise, because of this.
        """
        if isinstance(self.undelivered, KeyboardInterrupt):
            raise self.undelivered
        if self.undelivered is not None or any(birth() is None for birth in [*self._births.values()]):
            raise Refusal("was interrupted while it was captured", "nothing", this_call=True, final=False)

    def others(self, leaving: Set[int]) -> tuple[weakref.ref[torch.UntypedStorage], ...]:
        """Storages that operators of the call made, that are still there, and that are not among these."""
        births = list(self._births.items())  # garbage may be collected meanwhile
        return tuple(ref for key, ref in births if key not in leaving and key not in self.outside)

    # -- what is written

    def writes(self, t: torch.Tensor, version: int | None = None) -> None:
        """This tensor is going to be written; it had that version before, if not the one that it has now. `MOVED`: another."""
        key = t.untyped_storage()._cdata
        if self._shown:
            for shown in self._shown.get(key, ()):
                shown[0] = True
        if (key in self.outside or key in self.slot_ids) and key not in self.written:
            others = self._outside_at.get(key, ())
            self._versions[key] = version if version is not None else 0 if t.is_inference() else t._version
            self._beside[key] = [(o, o._version) for o in others if o is not t and not o.is_inference()]
            self.written[key] = t  # last: an exception may come between

    def shown(self, t: torch.Tensor) -> list[bool]:
        """This tensor is shown to somebody who may keep it: a list that says whether it is written afterwards."""
        self._shown.setdefault(storage_id(t), []).append(found := [False])
        return found

    def handed_out(self, result: object) -> None:
        """Whoever gets these tensors may write them."""
        leaves: list[object] = []
        flatten(result if self._shown else None, leaves)
        for t in leaves:
            if isinstance(t, torch.Tensor) and has_memory(t):
                for shown in self._shown.get(storage_id(t), ()):
                    shown[0] = True

    def changed(self) -> list[torch.UntypedStorage]:
        """The memory that outlives the call and that it has written so far."""
        return [t.untyped_storage() for key, t in self.written.items() if key in self.theirs]

    def moved_on(self) -> list[tuple[int, torch.Tensor]]:
        """Those tensors `written`, with their storages' identities, whose version has moved on. (Batch norm writes its running
        statistics, and leaves their version alone.) Of those that share memory, one for each version: parameters that are made
        of one vector have their own."""
        found = list[tuple[int, torch.Tensor]]()
        for key, t in self.written.items():
            there = [] if t.is_inference() else [(t, self._versions[key])]
            moved = [o for o, version in (*there, *self._beside[key]) if o._version != version]
            found += [(key, o) for o in (counted_apart(moved) if len(moved) > 1 else moved)]
        return found

    def put_versions_back(self) -> None:
        """What was written has the version again that it had before."""
        for key, t in self.written.items():
            if not t.is_inference() and self._versions[key] != MOVED:
                for o, version in ((t, self._versions[key]), *self._beside[key]):
                    set_version(o, version)

    def made_moved_on(self) -> list[torch.Tensor]:
        """The tensors outside that consist of parts, and have a version that has moved on."""
        return [t for t, version in self._made_versions if t._version != version]


def _nobody(found: list[Holder]) -> None:
    """Nobody relies on anything."""


class _Birth(weakref.ref[torch.UntypedStorage]):
    """Refers to a storage whose identity is (or was) this key. The call has made it after so many others; -1 if it did not."""

    __slots__ = ("key", "number")
    key: int
    number: int


def _forgetting(watch: weakref.ref[CallMemory]) -> Callable[[_Birth], None]:
    """What is called where a storage is gone. (The watch is not held: in a cycle it would keep the tensors that it has noted
    until garbage is collected.)"""

    def gone(birth: _Birth) -> None:
        if (mine := watch()) is not None:
            listening = pause_profiling()
            try:
                mine.died(birth.key)
            except BaseException as e:  # which Python prints, and nobody gets
                mine.undelivered = e
                raise
            finally:
                if listening is not None:
                    sys.setprofile(listening)

    return gone
