"""What a call leaves in attributes and containers, and each replay leaves there as well.

``self.steps += 1``, ``self.features = x``, ``features["early"] = h`` and ``history.append(loss)`` are effects that outlive the
call. A replay can have them, if it is certain that nothing in the call depends on what it finds there, which is something else
in each call:

* A number that is *counted*: no code that ran names such an attribute but to add a number to it that stands there. A replay
  adds what the call has added.
* A tensor, the number in one, or a new container of such and of plain values (``self.last = {"n": self.n, "loss": loss}``)
  that is *put* somewhere: it is one more result of the call. No code that ran reads such an attribute but where it has set it
  before; or what was there is one more argument of the call (`carried`), which it always is of items, and of variables
  (``nonlocal``, ``global``).
* Values that are *appended* to a list: no code that ran uses what has the list's name but to fill it.
* A new list of numbers, of the rates that a scheduler has set, in the place of another that no code reads.
* What a list holds that was *filled anew*, with as many tensors as before or where nothing was: they are put there, and what
  was there is carried, as it is of items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from operator import is_, is_not
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._torch.dynamic import Reading, Table, Thing
from .._torch.tensors import has_memory, storage_id
from ..python.holders import Holder, kept, key_label
from ..python.identity import identity
from ..python.introspection import MISSING, is_table, own_dict, table_of, tells_its_end
from ..values.counters import Followed, are_numbers, are_plain
from ..values.host_scalars import Numeral
from .carried_state import (
    CONTENTS,
    NUMBERS,
    Carried,
    Carries,
    Place,
    holders_in,
    is_filled,
    is_made_anew,
    is_state,
    put,
    tensors_in,
    variable,
)

if TYPE_CHECKING:
    from ..python.executed_code import Ran

__all__ = ["APPENDED", "Count", "Found", "Left", "Put", "before", "kinds", "left_by"]

APPENDED = MISSING
"""As the name of what is put into a list."""


class Count(NamedTuple):
    """An attribute in an object's dictionary to which each run of a call adds the same."""

    path: str
    of: object
    name: str
    by: int


class Put(NamedTuple):
    """An attribute, an item of a dictionary, or a variable (`bound`), that each run sets to something of its own: in the
    capture, to `new`. Or what it has `APPENDED` to a list, or all the `CONTENTS` of one."""

    path: str
    of: Thing
    name: Thing
    new: object = None
    bound: bool = False


class Left(NamedTuple):
    """All that a call leaves. What `lists` are called, code may read by that. Some of it is `behind` doors."""

    counts: tuple[Count, ...] = ()
    puts: tuple[Put, ...] = ()
    lists: tuple[str, ...] = ()
    behind: bool = False

    @property
    def paths(self) -> list[str]:
        return [count.path for count in self.counts] + [put.path for put in self.puts]

    @property
    def owners(self) -> list[object]:
        return [count.of for count in self.counts] + [put.of for put in self.puts]

    @property
    def items(self) -> list[Put]:
        """Those that are put into containers, and variables."""
        return [one for one in self.puts if is_filled(one.of)]

    def after(self) -> Left:
        """For when the capture is over: without its tensors."""
        return self._replace(puts=tuple([put._replace(new=None) for put in self.puts]))


_Table = tuple[Holder, object, Table]
_List = tuple[Holder, Thing, tuple[object, ...]]
_Variable = tuple[Holder, str, Thing, str, object]


class Found(NamedTuple):
    """What a call finds in attributes and containers, right before it: in objects and dictionaries `tables`, in `lists`, in
    `variables`."""

    tables: tuple[_Table, ...]
    lists: tuple[_List, ...]
    variables: tuple[_Variable, ...]


def before(holders: Sequence[Holder]) -> Found:
    tables, lists, variables = list[_Table](), list[_List](), dict[tuple[int, str], _Variable]()
    for h in holders:
        if h.owner is not None and (_sets_plainly(type(h.owner)) or _is_heard(type(h.owner))) and not is_table(h.owner):
            tables.append((h, h.owner, dict(own_dict(h.owner) or {})))
        tables += [(h, d, dict(d)) for d in h.tables() if is_table(d)]
        if h.contents is not None and type(of := h.contents.now()) in (list, deque):
            lists.append((h, of, (*of,)))
        values = h.read() if h.variables else ()
        variables |= {(identity(of), name): (h, h.label(i, values), of, name, value)
                      for i, ((of, name), value) in enumerate(zip(h.variables, values, strict=True))
                      if value is not MISSING}  # fmt: skip
    return Found(tuple(tables), tuple(lists), tuple(variables.values()))


def left_by(
    found: Found, ran: Ran, carried: Carried, touched: Set[int], handed_on: Set[int] | None, appended: Mapping[int, int],
    called: Callable[[object], tuple[str, bool]], traced: bool,
) -> Left:  # fmt: skip
    """What a call in which this code ran has left in attributes and containers, where it had `found` this; they are as before
    now. Of some of them it is known that they are `carried`. The call has read the storages `touched`, and `handed_on` those,
    and containers, by identity; None: any. So many values were `appended` to lists, by identity; what a list is `called`, and
    whether a module has it, says that function. Of a call that is `traced`, code may read attributes as late as in its
    backward.

    Raises:
        Carries: others are.
    """
    counts, puts, unknown, behind = list[Count](), list[Put](), list[Place](), False
    moved = [table for table in found.tables if not _is_as_before(table_of(table[1]), table[2])]
    rebound = [one for one in found.variables if _is_rebound(*one[2:])]
    given = touched | handed_on | _put_anywhere(moved, found.lists, rebound) if handed_on is not None else None

    changed = {identity(of) for _, of, _ in moved} | {identity(of) for _, of, was in found.lists if not _is_same(was, (*of,))}

    def read(value: object) -> bool:
        tensors, holders = tensors_in(value), holders_in(value)
        if not changed.isdisjoint(holders):
            return True
        return bool(tensors) if given is None else not given.isdisjoint([*map(storage_id, tensors), *holders])

    stood = {identity(of): old for _, of, old in found.tables} | {
        identity(of): {CONTENTS: [*was]} for _, of, was in found.lists
    }
    for *_, of, name, old in found.variables:
        stood[identity(of)] = {**stood.get(identity(of), {}), name: old}
    for place in carried.unread():  # others of its calls read what there is
        value = stood.get(identity(place.of), {}).get(place.name)
        may_be_late = traced and not is_filled(place.of) and not ran.is_torchs(place.name)
        unknown += [place] if is_state(value) and (read(value) or (may_be_late and tensors_in(value))) else []
    for holder, of, old in moved:
        own = table_of(of)
        if own is None or [*own][: len(old)] != [*old] or (len(own) > len(old) and own is not of):
            continue
        pairs = [(name, old.get(name, MISSING), b) for name, b in own.items() if b is not old.get(name, MISSING)]
        rates = {name: b for name, a, b in pairs
                 if own is not of and _are_rates(a, b) and ran.is_set_by_torch(name, type(of))}  # fmt: skip
        again = [name for name, a, b in pairs
                 if own is not of and name not in rates and _is_again(a, b) and ran.is_torchs(name)]  # fmt: skip
        for name in again:  # as `DistributedDataParallel` does with its buffers
            own[name] = old[name]
        pairs = [pair for pair in pairs if pair[0] not in again]
        if not pairs:
            continue
        item, module = own is of, issubclass(type(of), torch.nn.Module)  # `isinstance` asks the object
        plainly = not item and _sets_plainly(type(of))
        counted = {name: b - a for name, a, b in pairs
                   if plainly and type(a) is type(b) is int and ran.counts(name, of_module=module)}  # fmt: skip
        sets = {name: b for name, a, b in pairs
                if not (item or are_plain(a, b)) and ran.sets(name, of_module=module)
                and (_is_tensor(b) or is_made_anew(b))}  # fmt: skip
        sets |= rates
        may_carry = carried.may_learn_of(of) and (item or tells_its_end(type(of)))
        state = [(name, a, b) for name, a, b in pairs
                 if may_carry and name not in sets and _is_state_or_number(a) and _is_state_or_number(b)
                 and not (_is_empty(b) or are_plain(a, b))]  # fmt: skip
        # Those are judged by themselves.
        rest = {name for name, a, b in pairs if name not in counted and name not in sets and are_plain(a, b)}
        if len(counted) + len(sets) + len(state) + len(rest) == len(pairs):
            late = {name for name, *_ in state if traced and not item and not ran.is_torchs(name)}
            unknown += _not_known(holder, of, state, carried, read, late)
            counts += [Count(f"{holder.path}.{name}", of, name, by) for name, by in counted.items()]
            sets |= {name: b for name, _, b in state}
            puts += [Put(_path(holder, name), of, name, new) for name, new in sets.items()]
            behind = behind or holder.behind is not None
            for name, a, _ in (pair for pair in pairs if pair[0] not in rest):
                if a is MISSING:
                    del own[name]
                else:
                    own[name] = a
    lists = list[str]()
    for holder, of, was in found.lists:
        count, now = appended.get(identity(of), 0), (*of,)
        new = now[len(now) - count :]
        expected = (*was, *new)
        if type(of) is deque and of.maxlen is not None:
            expected = expected[max(0, len(expected) - of.maxlen) :]
        fits = 0 < count <= len(now) and [*map(identity, expected)] == [*map(identity, now)]
        name, of_module = called(of) if fits else ("", False)
        if name and ran.fills(name, of_module=of_module):
            lists.append(name)
            puts += [Put(holder.path, of, APPENDED, value) for value in new]
            holder.restore(was)
        elif _is_filled_anew(was, now) and carried.may_learn_of(of):
            unknown += _not_known(holder, of, [(CONTENTS, [*was], [*now])], carried, read, frozenset())
            puts.append(Put(holder.path, of, CONTENTS, [*now]))
            holder.restore(was)
    for holder, path, of, name, old in rebound:
        value = variable(of, name)
        if carried.may_learn_of(of) and not _is_empty(value):
            unknown += _not_known(holder, of, [(name, old, value)], carried, read, frozenset(), path)
            puts.append(Put(path, of, name, value, bound=True))
            put(of, name, old)
    if unknown:
        raise Carries(unknown)
    return Left(tuple(counts), tuple(puts), tuple(lists), behind)


def _is_as_before(now: dict[object, object] | None, old: dict[object, object]) -> bool:
    """Whether a dictionary has the same keys and values, in the same order. (Most have, which C code tells.)"""
    return now is not None and len(now) == len(old) and all(map(is_, now.values(), old.values())) and all(map(is_, now, old))


def _put_anywhere(tables: Sequence[_Table], lists: Sequence[_List], variables: Sequence[_Variable]) -> set[int]:
    """The storages of the tensors, and the identities of what holds such, that are in places in which they were not found."""
    new = [b for _, of, old in tables for name, b in (table_of(of) or {}).items() if b is not old.get(name, MISSING)]
    new += [x for _, of, was in lists if not _is_same(was, (*of,)) for x in of]
    new += [variable(of, name) for *_, of, name, _ in variables]
    found = [value for value in new if value is not None and is_state(value)]
    values = [x for value in new if value is not None for x in (tensors_in(value) if is_state(value) else [value])]
    return {storage_id(x) for x in values if isinstance(x, torch.Tensor) and has_memory(x)}.union(*map(holders_in, found))


def _is_rebound(of: Thing, name: str, old: object) -> bool:
    """Whether a variable holds another value now, which may be carried."""
    now = variable(of, name)
    return now is not old and now is not MISSING and is_state(old) and is_state(now)


def _is_same(was: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return len(was) == len(now) and all(map(is_, was, now))


def _is_filled_anew(was: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Whether a list holds other tensors than before, and as many, or where nothing was. (One that grows would be another in
    each call.)"""
    return not _is_same(was, now) and len(was) in (0, len(now)) and is_state([*was]) and is_state([*now])


def _path(holder: Holder, name: object) -> str:
    if name is CONTENTS:
        return holder.path
    return f"{holder.path}.{name}" if isinstance(name, str) else f"{holder.path}[{key_label(name)}]"


def _is_again(old: Thing, new: Thing) -> bool:
    """Whether a list or dictionary has what another had, each in its place."""
    if type(old) is not type(new) or type(new) not in (list, dict) or len(old) != len(new):
        return False
    values = (old, new) if type(new) is list else (old.values(), new.values())
    return (type(new) is list or [*old] == [*new]) and not any(map(is_not, *values))


def _is_state_or_number(value: object) -> bool:
    """Of a sum, say, which begins at 0.0."""
    return is_state(value) or type(value) in NUMBERS or isinstance(value, Followed)


def _is_empty(value: object) -> bool:
    """Whether this is a new container that may be what others fill later: an equal one is not it."""
    return type(value) in (list, dict) and not value


def _not_known(
    holder: Holder, of: object, state: Sequence[tuple[object, object, object]], carried: Carried,
    read: Callable[[object], bool], late: Set[str], path: str = "",
) -> Iterator[Place]:  # fmt: skip
    """Those places of which it is not known that they are carried, or that what was there is read, perhaps `late`."""
    for name, old, _ in state:
        reads, told = read(old) or (name in late and bool(tensors_in(old))), type(old) in NUMBERS
        lacks = (reads and not carried.reads(of, name)) or (told and not carried.tells(of, name))
        if lacks or not carried.has(of, name):
            yield Place(path or _path(holder, name), of, name, reads, told)


def _sets_plainly(kind: type) -> bool:
    """Whether to set a number or a tensor as an attribute of such an object is to put it into the object's dictionary."""
    sets: object = kind.__setattr__
    return sets in (object.__setattr__, torch.nn.Module.__setattr__, SimpleNamespace.__setattr__)


def _is_heard(kind: type) -> bool:
    """Whether code of Python's sets them: what that does besides is one more effect of the call, and what it makes of a tensor
    is one more tensor. (It may make another thing of a count, once that is large.)"""
    return type(kind.__setattr__) is FunctionType


def _are_rates(old: object, new: object) -> bool:
    """Whether a list of numbers, as that of a scheduler's last rates, has taken the place of another."""
    if type(old) is not list or type(new) is not list or len(old) != len(new):
        return False
    return old is not new and bool(new) and all(map(are_numbers, old, new))


def _is_tensor(value: object) -> bool:
    return (type(value) is torch.Tensor and has_memory(value)) or type(value) is Numeral


def kinds(path: str, of: object, names: Sequence[str]) -> Holder:
    """Of what types some attributes of an object are, whatever their values."""

    def read() -> Reading:
        own = own_dict(of) or {}
        return tuple([type(own.get(n)) for n in names])

    return kept(path, read)._replace(named=lambda path, i, _: f"{path}.{names[i]}")
