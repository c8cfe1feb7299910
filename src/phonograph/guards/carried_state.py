"""State that a function carries from call to call by rebinding: ``self.v = self.v * 0.9 + x``, ``shadow[name] = …``, ``global
hidden``, or by filling a list anew: ``losses.clear(); losses.extend(…)``.

What stands there before a call is one more argument, and what stands there after it one more result. So it is part of the
signature (whether it is there, its shape, its kind), has a slot that is filled from whatever stands there, and each replay
leaves there what it has made: a tensor of the caller's like any other result. Somebody may read it, keep it, put another
there (`net.reset()`) or take it away between two calls.

That an attribute, an item or what a list holds is such is learned in a capture, which is taken back: it has found nothing
there, None, or tensors (perhaps in a tuple or a list), and has left others. Where no operator has read the tensors that were
there, and the call hands none of them on (features that a hook sets, the weights of `weight_norm`), they are no argument; only
what they looked like counts.

An object that can be taken apart, a distribution say, is such a value as well: a replay leaves a new one of its class.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from types import CellType
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves, Thing
from .._torch.tensors import has_memory
from ..call.signature import has_gradient_or_hooks
from ..python.identity import identity
from ..python.introspection import MISSING, contents, is_table, table_of, tells_its_end
from ..values.counters import Followed
from ..values.host_scalars import Numeral
from ..values.pytree import Flattener, flatten

__all__ = [
    "CONTENTS",
    "NUMBERS",
    "Carried",
    "Carries",
    "Place",
    "holders_in",
    "is_filled",
    "is_made_anew",
    "is_state",
    "put",
    "tensors_in",
    "variable",
]


CONTENTS = object()
"""As the name of a place in a list: all that it holds."""

_LISTS = (list, deque)


def is_filled(of: object) -> bool:
    """Whether what is put into this is found there by no name of an attribute: a dictionary, also of global variables, a list,
    a cell."""
    return is_table(of) or type(of) in _LISTS or type(of) is CellType


def put(of: Thing, name: object, value: object) -> None:
    """Let this stand there: an attribute, an item, a variable, or all that a list holds."""
    if name is CONTENTS:
        of.clear()
        of.extend(value)
    elif type(of) is CellType:
        of.cell_contents = value
    else:
        own = table_of(of)
        assert own is not None
        own[name] = value


def variable(of: Thing, name: str) -> object:
    """What a variable holds now."""
    return contents(of) if type(of) is CellType else of.get(name, MISSING)


class Place(NamedTuple):
    """An attribute of an object, an item of a dictionary, a variable, or the `CONTENTS` of a list; whether what stands there
    before a call may be read. A number that stood there was replaced by state, if it is to be `told`."""

    path: str
    of: Thing
    name: Thing
    read: bool
    told: bool = False


class Carries(Exception):
    """A capture has left tensors in places which are not known to be carried. Never reaches the user: the capture is taken
    back, and made again."""

    def __init__(self, places: Iterable[Place]) -> None:
        super().__init__()
        self.places = tuple(places)


class _Known(NamedTuple):
    label: str
    of: Callable[[], Thing]
    name: Thing
    read: bool
    told: bool


class Carried:
    """The places in which one function carries state. It may be that it `learns` of no others."""

    def __init__(self, learns: bool = True) -> None:
        self.learns = learns
        self._known: dict[tuple[int, object], _Known] = {}
        self._learned = Counter[int]()  # how often something new, by what it was in
        self._trees: dict[tuple[object, ...], str] = {}  # names for what is not read, with what holds it
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._known)

    def learn(self, places: Sequence[Place], met: Iterable[object] = ()) -> bool:
        """Whether something of this is new. Containers that are not among what was `met` are forgotten."""
        there, new = {*map(identity, met)}, False
        for key in [key for key, known in self._known.items() if type(known.of) is not weakref.ref and key[0] not in there]:
            del self._known[key]
        for place in places:
            known = self._find(place.of, place.name)
            if known is None or (place.read and not known.read) or (place.told and not known.told):
                label, read, told = (known.label, known.read, known.told) if known else (self._label(place.path), False, False)
                of = weakref.ref(place.of) if tells_its_end(type(place.of)) else _always(place.of)
                key = identity(place.of), place.name
                self._known[key] = _Known(label, of, place.name, place.read or read, place.told or told)
                new = True
        self._learned.update({identity(place.of) for place in places})
        for key in [key for key in self._known if self._varies(key[0])]:
            del self._known[key]
        return new

    def may_learn_of(self, of: object) -> bool:
        """Whether something in this may be carried: not where it has other names time and again."""
        return self.learns and not self._varies(identity(of))

    def _varies(self, of: int) -> bool:
        return self._learned[of] > _LEARNS

    def _find(self, of: object, name: object) -> _Known | None:
        known = self._known.get((identity(of), name))
        return known if known is not None and known.of() is of else None

    def _label(self, path: str) -> str:
        taken = {known.label for known in self._known.values()}
        while path in taken:
            path += "'"
        return path

    def now(self) -> dict[str, Thing]:
        """What stands there, as arguments: tensors that are read; of everything else, what it is like."""
        return {known.label: self._as_argument(known) for known in self._known.values()}

    def _as_argument(self, known: _Known) -> object:
        value = _value(known)
        if type(value) is torch.Tensor and not known.read and has_memory(value):
            return value if _has_its_own(value) else _look(value)
        if known.told and type(value) in NUMBERS:
            return sys.intern(f"{type(value).__name__} {value!r}")
        if value is MISSING or not is_state(value):
            return sys.intern("nothing" if value is MISSING else f"a {type(value).__name__}")
        if value is None or known.read:
            return value
        leaves: Leaves = []
        shape = flatten(value, leaves, Flattener())
        if any(_has_its_own(x) for x in leaves if isinstance(x, torch.Tensor)):
            return value
        what = (shape, *[_look(x) if isinstance(x, torch.Tensor) else f"{type(x)} {x!r}" for x in leaves])
        if len(self._trees) >= _LOOKS:
            self._trees.clear()
        return self._trees.setdefault(what, f"{type(value).__name__} {next(self._numbers)}")

    def has(self, of: object, name: object) -> bool:
        return self._find(of, name) is not None

    def reads(self, of: object, name: object) -> bool:
        known = self._find(of, name)
        return known is not None and known.read

    def tells(self, of: object, name: object) -> bool:
        """Whether the signature tells which number stands there."""
        known = self._find(of, name)
        return known is not None and known.told

    def standing(self) -> list[object]:
        """What stands there and is an argument: tensors, and what holds them."""
        return [x for known in self._known.values() if known.read and is_state(x := _value(known)) and x is not None]

    def holders(self) -> set[int]:
        """The identities of the containers and objects that stand there."""
        return set[int]().union(*(holders_in(x) for known in self._known.values() if is_state(x := _value(known))))

    def unread(self) -> list[Place]:
        """Those places of which it is not known that what stands there is read, as if it were."""
        return [Place(k.label, of, k.name, True) for k in self._known.values() if not k.read and (of := k.of()) is not None]

    def places(self) -> list[tuple[object, object]]:
        """Those places of which the signature tells what stands there: state, and numbers where they are told. Of anything else
        it tells the kind alone: that is relied on, as if it were not carried."""
        there = [(of, known, _value(known)) for known in self._known.values() if (of := known.of()) is not None]
        return [(of, known.name) for of, known, value in there if is_state(value) or (known.told and type(value) in NUMBERS)]

    def stand(self, arguments: dict[str, object]) -> Callable[[], None]:
        """Take those of these arguments that are carried, and let them stand where they are found. Returns what puts back what
        stood there, unless something else does by then."""
        stood = list[tuple[_Known, object, object]]()
        for known in self._known.values():
            argument, before = arguments.pop(known.label, None), _value(known)
            if known.read and before is not MISSING and argument is not None and type(argument) is not str:
                stood.append((known, before, argument))
                put(known.of(), known.name, argument)

        def put_back() -> None:
            for known, before, argument in stood:
                if _is(_value(known), argument, known.name):
                    put(known.of(), known.name, before)

        return put_back


def _always(of: object) -> Callable[[], object]:
    return lambda: of


_LEARNS = 8  # times that something new may be learned of one object, or dictionary
_MANY = 256  # tensors that one place may hold
_ROWS = (list, tuple)
_FOUND = (Followed, Numeral)  # numbers that each replay finds anew
NUMBERS = (bool, int, float)
_PLAIN = (bool, int, float, str, torch.Size, torch.dtype, torch.device)


def is_state(value: object) -> bool:
    """Whether this may be carried: nothing yet, None, a plain tensor, or what can be taken apart into such. Numbers and names
    may be beside tensors."""
    if issubclass(type(value), torch.Tensor):  # `isinstance` asks the object
        return _is_plain(value)
    return value is None or value is MISSING or _is_row(value) or _holds_state(value)


def _is_row(value: Thing) -> bool:
    """Whether this is a list or a tuple of plain tensors, as most are that are carried: that is asked in each call."""
    return type(value) in _ROWS and 0 < len(value) <= _MANY and all(map(_is_plain, value))


def _is_plain(value: object) -> bool:
    return type(value) is torch.Tensor and has_memory(value)


def _holds_state(value: object) -> bool:
    leaves = _leaves_of(value)
    others = [x for x in leaves or () if not _is_plain(x) and x is not None]
    return leaves is not None and (not others or (any(map(_is_plain, leaves)) and all(type(x) in _PLAIN for x in others)))


def is_made_anew(value: object) -> bool:
    """Whether this is a container, or an object, that has something in it, and that each replay can make: of plain tensors, and
    of numbers, those that are followed or read of tensors among them."""
    leaves = _leaves_of(value) or []
    return bool(leaves) and all(_is_plain(x) or x is None or type(x) in _PLAIN or isinstance(x, _FOUND) for x in leaves)


def _leaves_of(value: object) -> Leaves | None:
    """What is in a container or an object; None if this is none, or has too much in it."""
    leaves: Leaves = []
    try:
        return leaves if flatten(value, leaves, Flattener()) is not None and len(leaves) <= _MANY else None
    except RecursionError:
        return None


def tensors_in(value: object) -> list[torch.Tensor]:
    return [x for x in _inside(value)[0] if isinstance(x, torch.Tensor)]


def holders_in(value: object) -> set[int]:
    """The identities of the containers and objects in this."""
    return {*map(identity, _inside(value)[1])}


def _inside(value: object) -> tuple[Leaves, Leaves]:
    flattener, leaves = Flattener(), list[object]()
    flattener.flatten(value, leaves)
    return leaves, flattener.containers


def _value(known: _Known) -> object:
    of = known.of()
    if of is None:  # it has gone
        return MISSING
    if type(of) is CellType:
        return variable(of, str(known.name))
    return [*of] if known.name is CONTENTS else (table_of(of) or {}).get(known.name, MISSING)


def _is(value: Thing, other: Thing, name: object) -> bool:
    """Whether this is what stood in a place of that name: of a list, the same in it."""
    return value is other if name is not CONTENTS or value is MISSING else [*map(identity, value)] == [*map(identity, other)]


def _has_its_own(t: torch.Tensor) -> bool:
    """Whether somebody has given a tensor what cannot be said of an argument: it makes the call run live."""
    return bool(t.__dict__) or has_gradient_or_hooks(t)


_looks: dict[tuple[object, ...], str] = {}
_LOOKS = 1024


def _look(t: torch.Tensor) -> str:
    """What a tensor is like that is not read."""
    what = (t.dtype, t.shape, t.stride(), t.requires_grad, t.is_leaf, t.is_inference(), t.is_conj(), t.is_neg(), t.device)
    found = _looks.get(what)
    if found is None:
        if len(_looks) >= _LOOKS:
            _looks.clear()
        found = _looks[what] = sys.intern(str(what))
    return found
