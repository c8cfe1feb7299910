"""What a recording assumes about the world outside its arguments, and how that is checked before each replay.

A recording has the addresses of weights and the values of attributes baked in. Each is a *reliance*: if it no longer
holds, the recording must not be played. Checking all of them in full costs milliseconds for a large model, so they are
kept in three groups:

* *hot*: closure cells, globals, attributes of plain objects and classes, hyper-parameters of optimizers, the addresses and
  metadata of tensors; of parameters too where there are few, and with the helper in C of few optimizers' tensors. Compared
  before every replay, by identity and at C speed.
* *behind a door*: gradients, and what optimizers remember. Compared in full when somebody may have come to them
  (`attribute_epochs.py`), and otherwise one at a time in rotation.
* *watched*: the insides of modules, and many parameters. Compared in full when the witness's epoch has moved, and otherwise a
  few at a time in rotation, which finds the changes that go around the witness.

Identity is the fast test; where it fails, plain values are compared by type and value, because an equal number in a
new object is no change. Nor is an equal list, dictionary or set in place of another: it is its contents that are compared from
then on. But where the other was found in several places, it is a change: the function may look at both now.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import cycle
from operator import is_
from typing import Any

import torch

from .._torch.dynamic import Reading, Thing
from .._torch.native import Fact, instead, known
from .._torch.tensors import has_memory
from ..call.signature import modes
from ..guards import module_epochs as witness
from ..guards.attribute_epochs import states
from ..guards.carried_state import Place, variable
from ..guards.entries import (
    Entries,
    by_dictionary,
    entry_of,
    facts_of,
    in_parts,
    in_pieces,
    read_together,
    reader_of,
    which,
)
from ..guards.hyperparameters import Dials
from ..guards.objects import FEW
from ..guards.reachable import Reach
from ..guards.sameness import same
from ..guards.snapshot import Snapshot
from ..guards.tensor_states import hook_values, like, states_of
from ..python.holders import Holder
from ..python.identity import identity
from ..python.introspection import is_table, own_dict, tells_its_end
from ..python.rows import elements
from ..values.counters import are_rows
from ..values.numbers import base_of
from ..values.object_layout import layout_of
from ..values.tensor_subclasses import parts_of_all
from .column import Check, Column
from .gradients import Grads

__all__ = ["Constants", "is_heard_of", "not_heard"]

_HOLDERS, _TENSORS, _REMEMBERED = 2, 64, 8  # watched places and tensors, and tensors of optimizers, in one look of the rotation
_PLACES, _OTHERS, _KEPT, _STATE = "places", "tensors", "tensors of optimizers", "optimizers' state"
_LAP = 4  # replays from one look at a kind to the next
_SMALL = 1 << 20  # bytes of a tensor that may be copied in each replay
_OFTEN = 8  # times that a dictionary was changed, and not what is relied on


class Constants(Entries, Column):
    """Everything that must still hold when a recording is played: what `snapshot` found before the capture, and the
    capture left alone."""

    def __init__(self, reach: Reach, snapshot: Snapshot, dials: Dials, fixed: Set[int], shared: Set[int]) -> None:
        """Of numbers that `dials` follow, nothing has to hold, nor of tensors in reach with the ids `fixed`. What has an
        identity among those `shared` is somewhere else, too."""
        live = dials.followed
        read = zip(snapshot.holders, snapshot.values, strict=True)
        super().__init__([entry_of(h, values, dials) for h, values in read if h.dial not in live], reach.shared | shared)
        relied = [entry for entry in snapshot.tensors if identity(entry[1]) not in fixed]
        tensors = [t for _, t, _ in relied]
        self.remembered = {i: room for i, room in reach.remembered.items() if i not in reach.shared}
        hot = [t for t in tensors if identity(t) not in self.remembered]
        hot = hot if len(hot) <= FEW else [t for t in hot if not isinstance(t, torch.nn.Parameter)]
        hot = tensors if not instead and len(tensors) <= FEW else hot  # (behind doors, too)
        self._pointed, self._alike = hot, like(hot)
        kept_there = [t for t in tensors if identity(t) in self.remembered]
        self._remembered = like(kept_there), kept_there
        # If one gets other memory, that may be seen late: until then replays write the old one, which must be nobody's.
        self._storages = [t.untyped_storage() for t in kept_there if has_memory(t)]
        self._tensors = [(t, state) for _, t, state in relied]
        looked_at = set(map(identity, hot))
        others = [t for t in tensors if identity(t) not in looked_at and identity(t) not in self.remembered]
        self._laps = {}
        if others:
            self._laps[_OTHERS] = _taking_turns(others, _TENSORS)
        if kept_there and hot is not tensors:
            self._laps[_KEPT] = _taking_turns(kept_there, _REMEMBERED)
        self._listens = False  # at the doors
        self._rather_read = set[int]()
        self._sort()
        _all.add(self)
        self._names = {identity(t): name for name, t, _ in relied}
        self._hooked = [(t, state[-1]) for t, state in self._tensors if state[-1]]
        witness.watch([*reach.modules, *tensors], self)
        self._epoch = witness.epoch

    def _sort(self) -> None:
        """What is looked at before each replay, and what the witness hears of."""
        self._behind = [entry for entry in self._held if entry[0].behind is not None]
        self._shut: tuple[int, list[int]] | None = None  # the epoch, and what was where, when nobody had any of it
        self._turn: Iterator[tuple[Thing, Thing, tuple[int, ...]]] = iter(())
        held = [(entry, is_heard_of(entry[0])) for entry in self._held if entry[0].behind is None]
        self._hot = [entry for entry, is_watched in held if not is_watched]
        self._watched = [entry for entry, is_watched in held if is_watched]
        # Which places need not be read where dictionaries say that they have not changed.
        self._told, self._told_by = by_dictionary([e for e in self._hot if identity(e) not in self._rather_read])
        self._in_vain = dict[int, int]()
        told = {identity(entry) for entries in self._told for entry in entries}
        self._read = [entry for entry in self._hot if identity(entry) not in told]
        self._read_hot = read_together([*map(reader_of, self._read)])
        self._last_hot: list[Reading] = []  # what was read when all of it was found unchanged
        self._moved_places = False
        kinds = [*[_PLACES][: len(self._watched)], *self._laps, *[_STATE][: len(self._behind)]]
        self._kinds: Iterator[str | None] = cycle([*kinds, *[None] * (_LAP - len(kinds))])
        self._rotates = bool(kinds)
        self._heard = in_parts(self._watched)
        heard = {identity(entry) for told, _ in self._heard for entries in told for entry in entries}
        others = [entry for entry in self._watched if identity(entry) not in heard]
        self._rounds = cycle([*self._heard, *(((part,), None) for part in in_pieces(others, _HOLDERS))])

    def __len__(self) -> int:
        return len(self._hot) + len(self._watched) + len(self._behind) + len(self._tensors)

    def close(self) -> None:
        """Nobody plays this recording any more."""
        self._shut = None
        states.leave(self)
        witness.leave(self)

    def fits(self) -> Sequence[Check]:
        return [known(self.broken, self._facts, None)]

    def _facts(self) -> list[Fact] | None:
        """What it rests on that nothing is broken. (The rotation goes on.)"""
        told = self._told_by.facts() if self._told else []
        if told is None or self._hooked or (self._behind and not self._is_shut()):
            return None
        rooms = [fact for entry in self._behind for fact in entry[0].behind.facts()]
        if self._behind:
            rooms.append(("item", vars(states), "epoch"))
        own: list[Fact] = [("item", vars(self), name) for name in ("_moved_places", "_read_hot", "_shut", "_epoch")]
        read = [fact for entry in self._read for fact in facts_of(entry)]
        tensors: list[Fact] = [("called", self._alike, self._pointed, True)] if self._pointed else []
        rotation: list[Fact] = [("called", self._rotate, None)] if self._rotates else []
        return [*own, ("item", vars(witness), "epoch"), *rooms, *told, *read, *tensors, *rotation]

    def broken(self) -> str | None:
        """What no longer holds, by name; None when the recording may be played. Costs about 0.3 us for each hot
        place that has to be read, and 0.06 us for each tensor."""
        if self._moved_places:
            self._sort()
        if self._told and (moved := self._told_by.moved()):
            for entry in {identity(entry): entry for i in moved for entry in self._told[i]}.values():
                if not self.unchanged(entry):
                    return which(entry)
            self._told_by.keep()
            self._told_in_vain(moved)
        if self._read:
            now, last = self._read_hot(), self._last_hot
            if len(now) != len(last) or not all(map(is_, now, last)):
                for entry in self._read:
                    if not self.unchanged(entry):
                        return which(entry)
                self._last_hot = now
        if self._behind and not self._is_shut() and (broken := self._look_behind()) is not None:
            return broken
        if self._pointed and not self._alike(self._pointed):
            return self._moved(self._tensors) or self._names[identity(self._pointed[0])]
        if self._hooked and any(hook_values(t) != hooks for t, hooks in self._hooked):
            return self._moved(self._tensors)
        if witness.epoch != self._epoch:
            return self._all_watched()
        return self._rotate() if self._rotates else None

    def _told_in_vain(self, moved: Sequence[int]) -> None:
        """These dictionaries have been changed, and not what is relied on. Where that happens again and again, it takes less to
        read these places: a script's loop goes on in the variables of its module, an object counts."""
        for i in moved:
            self._in_vain[i] = self._in_vain.get(i, 0) + 1
            if self._in_vain[i] == _OFTEN:
                self._rather_read |= set(map(identity, self._told[i]))
                self._moved_places = True

    def _is_shut(self) -> bool:
        """Whether nobody can have come to what lies behind a door since it was last looked at."""
        return self._shut == (states.epoch, [entry[0].behind.now() for entry in self._behind])

    def _look_behind(self) -> str | None:
        rooms = [entry[0].behind for entry in self._behind]
        if not self._listens:
            self._listens = True
            states.stay_for(self)
            for room in rooms:
                room.watch()
        now = (states.epoch, [room.now() for room in rooms])
        for entry in self._behind:
            if not self.unchanged(entry):
                return which(entry)
        are_such, tensors = self._remembered
        if tensors and not are_such(tensors):
            return self._moved(self._tensors) or self._names[identity(tensors[0])]
        shut = all(room.alone() for room in rooms)
        self._shut = now if shut else None
        self._turn = cycle([(room, *found) for room in rooms for found in room.read()] if shut else ())
        return None

    def named(self) -> Iterator[tuple[str, Any]]:
        """What was found in places that have names of their own (not: how many items there are)."""
        for holder, _, saved in self._held:
            named = ((holder.label(i, saved), value) for i, value in enumerate(saved))
            yield from ((name, value) for name, value in named if name != holder.path)

    def numbers_changed(self) -> list[tuple[tuple[int, Any], str]]:
        """Where numbers are now other numbers: the places, and their names."""
        found = []
        for holder, read, saved in self._held:
            now = read()
            if holder.spot is None or len(now) != len(saved):
                continue
            for i, (a, b) in enumerate(zip(saved, now, strict=True)):
                if a is b or type(a) is not type(b) or same(a, b):
                    continue
                if base_of(type(a)) is not None:
                    found.append((holder.spot(i, now).at, holder.label(i, now)))
                elif are_rows(a, b):
                    found += [(place.at, place.name) for place in elements(holder.spot(i, now), b, holder.label(i, now))]
        return found

    def object_stands_at(self, name: str) -> bool:
        """Whether a module, or an object that can be taken apart, stands now in the place of this name."""
        now = ((holder, read()) for holder, read, _ in self._held)
        kinds = {type(x) for holder, values in now for i, x in enumerate(values) if holder.label(i, values) == name}
        return any(issubclass(kind, torch.nn.Module) or layout_of(kind) is not None for kind in kinds)

    def tensors_replaced(self, device: torch.device) -> list[Place]:
        """Where small tensors of the user's on this device now are others like them: attributes, items of dictionaries,
        variables."""
        found = []
        for holder, read, saved in self._held:
            now = read()
            if holder.behind is not None or len(now) != len(saved):
                continue
            pairs = [(i, b) for i, (a, b) in enumerate(zip(saved, now, strict=True)) if a is not b and _are_alike(a, b, device)]
            places = list(_places_in(holder)) if pairs else []
            found += [Place(holder.label(i, now), of, name, True) for i, b in pairs for of, name, value in places if value is b]
        return found

    def explain(self) -> Iterator[str]:
        yield f"relies on {len(self)} places outside"

    def disturbing(self, gradients: Grads) -> Callable[[], bool]:
        """A function that says whether something has changed since this call, gradients too. (For the time of one replay: what
        is looked at in rotation is found before a later one.)"""
        read = read_together([entry[1] for entry in self._hot])
        before, grads, epoch, settings = read(), gradients.read(), witness.epoch, modes()

        def disturbed() -> bool:
            if modes() != settings or not all(map(is_, gradients.read(), grads)):
                return True
            now = read()
            same_objects = len(now) == len(before) and all(map(is_, now, before))
            if not (same_objects or all(map(self.unchanged, self._hot))) or not self._alike(self._pointed):
                return True
            if self._behind and not self._is_shut() and self._look_behind() is not None:
                return True
            return witness.epoch != epoch and self._all_watched() is not None

        return disturbed

    def versions(self) -> dict[int, int]:
        """How often tensors outside, and their gradients, have been written, by identity."""
        tensors = [t for t, _ in self._tensors]
        tensors += parts_of_all(t.grad for t in tensors if t.is_leaf)
        return {identity(t): t._version for t in tensors if not t.is_inference()}

    def _all_watched(self) -> str | None:
        epoch = witness.epoch
        for entry in self._watched:
            if not self.unchanged(entry):
                return which(entry)
        moved = self._moved(self._tensors)
        if moved is None:
            self._epoch = epoch
        return moved

    def _rotate(self) -> str | None:
        """A few at a time, of one kind. What is found once is found again: the next look is a full one."""
        kind, changed = next(self._kinds), None
        if kind is _PLACES:
            told, by = next(self._rounds)
            moved = range(len(told)) if by is None else by.moved()
            changed = next((which(e) for i in moved for e in told[i] if not self.unchanged(e)), None)
            if by is not None and moved and changed is None:
                by.keep()
        elif kind is _STATE:
            room, p, found = next(self._turn, (None, None, ()))
            return None if room is None or room.of(p) == found else self._look_behind()
        elif kind is not None:
            are_such, some = next(self._laps[kind])
            if not are_such(some):
                changed = self._moved(self._tensors) or self._names[identity(some[0])]
        if changed is not None:
            self._epoch = -1
        return changed

    def _moved(self, tensors: Sequence[tuple[torch.Tensor, Reading]]) -> str | None:
        states = states_of([t for t, _ in tensors])
        return next((self._names[identity(t)] for (t, state), now in zip(tensors, states, strict=True) if now != state), None)


_all: weakref.WeakSet[Constants] = weakref.WeakSet()
_unheard: set[int] = set()  # identities of objects, in whose dictionaries replays set attributes


def not_heard(things: Iterable[int]) -> None:
    """Replays will set attributes of the objects with these identities, or their items, and the witness does not hear of it:
    whoever relies on those has to look by himself."""
    new = {*things} - _unheard
    if new:
        _unheard.update(new)
        for constants in _all:
            constants._sort()


def is_heard_of(holder: Holder) -> bool:
    """Whether the witness hears of changes in a place."""
    if not holder.watched or identity(holder.owner) in _unheard:
        return False
    return not _unheard or _unheard.isdisjoint(map(identity, holder.tables()))


def _are_alike(old: object, new: object, device: torch.device) -> bool:
    """Whether one tensor on this device may have taken the place of another, and nobody trains them."""
    if type(old) is not torch.Tensor or type(new) is not torch.Tensor or old.requires_grad or new.requires_grad:
        return False
    there = has_memory(old) and has_memory(new) and old.device == new.device == device and new.nbytes <= _SMALL
    return there and old.shape == new.shape and old.dtype is new.dtype


def _places_in(holder: Holder) -> Iterator[tuple[Thing, Thing, object]]:
    """The places that a holder reads, by name, and what stands there now. (Not those of a module's buffers.)"""
    of = holder.owner
    if of is not None and not is_table(of) and tells_its_end(type(of)):
        yield from ((of, name, value) for name, value in (own_dict(of) or {}).items())
    for table in filter(is_table, () if holder.watched else holder.tables()):
        yield from ((table, name, value) for name, value in table.items())
    yield from ((of, name, variable(of, name)) for of, name in holder.variables)


def _taking_turns(
    tensors: list[torch.Tensor], size: int
) -> Iterator[tuple[Callable[[list[torch.Tensor]], bool], list[torch.Tensor]]]:
    """So many of these tensors at a time, and what says whether they are what they were."""
    return cycle([(like(part), part) for part in in_pieces(tensors, size)] or [(bool, [])])
