"""Places that a call may read: an attribute, a variable, what a container holds, a class, a layer.

A place says how it is read again, how a value is put back there, and in which dictionaries that value lies, so that those can
be asked instead. Nothing of the user's runs when a place is read or compared: attributes are looked up in dictionaries, and
only values of Python's own are compared by what they are. All else is the same if it is the same object.
"""

from __future__ import annotations

import abc
import builtins
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import NamedTuple

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from .._torch.dynamic import Reading, Table, Thing
from .._torch.modes import without_subclasses
from .._torch.tensors import address, has_memory
from ..python.dict_versions import of_class
from ..python.identity import identity
from ..python.introspection import MISSING, contents, dictionary_of, own_dict

__all__ = [
    "CONSTANTS",
    "UNREAD",
    "Place",
    "Read",
    "alike",
    "all_of_space",
    "attribute",
    "cell",
    "changes",
    "code_of",
    "held",
    "imported",
    "in_class",
    "is_constant",
    "item_of",
    "klass",
    "layer",
    "member",
    "module_of",
    "mro_of",
    "of_class_alone",
    "optimizer",
    "registered",
    "slot",
    "subclasses",
    "tables",
    "tensor",
    "variable",
    "vars_of",
    "what_stays",
]  # fmt: skip

CONSTANTS = frozenset([int, float, str, bytes, bool, type(None), complex, range, type(...), torch.dtype, torch.device,
                       torch.Size, torch.layout, torch.memory_format])  # fmt: skip
UNREAD = frozenset(["__dict__", "__weakref__", "__doc__", "__getattribute__", "__setattr__", "__delattr__", "__slotnames__",
                  "_abc_impl", "__abstractmethods__", "__firstlineno__", "__static_attributes__"])  # fmt: skip
"""What a class has that is not read of it as a value, or that changes by itself."""
module_of: Callable[[type], object] = type.__dict__["__module__"].__get__
vars_of: Callable[[type], Thing] = type.__dict__["__dict__"].__get__
_mro_of: Callable[[type], tuple[type, ...] | None] = type.__dict__["__mro__"].__get__


def mro_of(kind: type) -> tuple[type, ...]:
    """A class and those that it derives from. (While a class is being made there are none yet.)"""
    return _mro_of(kind) or ()


class Place(NamedTuple):
    """The place `name` of the object `of`. `get` reads it, `put` takes what `get` gave.

    `inside` are the dictionaries in which all lies that can change it, None if there are none such; with them goes the object's
    `own` one, which may be replaced as a whole. It `holds` containers of which all is read.
    """

    of: object
    name: object
    path: str
    get: Callable[[], Reading]
    put: Callable[[Reading], object] | None = None
    inside: Callable[[], Iterable[Table]] | None = None
    own: Callable[[], Thing] | None = None
    holds: Callable[[], Iterable[Thing]] | None = None


class Read(NamedTuple):
    """A place and what was there. It is not `relied` on if the call has only written there."""

    place: Place
    value: Reading
    relied: bool = True

    @property
    def changed(self) -> bool:
        """Whether something else is there now."""
        return not alike(self.value, self.place.get())


# -- comparing


def is_constant(value: object) -> bool:
    """Whether a value is one of Python's own or of torch's that cannot change."""
    return type(value) in CONSTANTS


def alike(a: Reading, b: Reading) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _same(a: Thing, b: Thing) -> bool:
    """Whether two values cannot be told apart by a program: ``0.0`` and ``-0.0`` can be, so can ``1`` and ``True``."""
    if a is b or type(a) is not type(b):
        return a is b
    if type(a) is tuple:
        return alike(a, b)
    return type(a) in CONSTANTS and a == b and repr(a) == repr(b)


# -- attributes and variables


def in_class(kind: type, name: str) -> Thing:
    """What a class, or one that it derives from, has by this name; `MISSING` if nothing."""
    for base in mro_of(kind):
        found = vars_of(base).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def _dictionaries_of_class(kind: type) -> list[Table]:
    return [d for base in mro_of(kind) if base.__flags__ & 1 << 9 and isinstance(d := of_class(base), dict)]


def attribute(thing: object, name: str, path: str) -> Place:
    """An attribute of an object: in its dictionary, in one that a module has for such, or in its class."""
    raw = in_class(type(thing), name)
    if type(raw) is MemberDescriptorType:
        return slot(thing, name, raw, path)
    if own_dict(thing) is None:
        return Place(thing, name, path, lambda: (in_class(type(thing), name),))
    find = dictionary_of(thing)
    if issubclass(type(thing), Module) and raw is MISSING and name not in find():
        return _of_module(thing, name, path, find)

    def get() -> Reading:
        return dict.get(find(), name, MISSING), in_class(type(thing), name), type(thing)

    def put(then: Reading) -> None:
        _set(find(), name, then[0])

    return Place(thing, name, path, get, put, lambda: _dictionaries_of_class(type(thing)), find)


def _set(table: Table, name: object, value: object) -> None:
    if value is MISSING:
        dict.pop(table, name, None)
    else:
        dict.__setitem__(table, name, value)


def _of_module(thing: object, name: str, path: str, find: Callable[[], Thing]) -> Place:
    """A parameter, buffer or module of a module, or what it does not have."""
    kinds = ("_parameters", "_buffers", "_modules")

    def within() -> list[Table]:
        return [d for kind in kinds if isinstance(d := dict.get(find(), kind), dict)]

    def get() -> Reading:
        return (*[dict.get(d, name, MISSING) for d in (find(), *within())], in_class(type(thing), name))

    def put(then: Reading) -> None:
        for d, value in zip((find(), *within()), then[:-1], strict=True):
            _set(d, name, value)

    return Place(thing, name, path, get, put, lambda: [*within(), *_dictionaries_of_class(type(thing))], find)


def slot(thing: object, name: str, descriptor: Thing, path: str) -> Place:
    """An attribute that is kept in a slot."""

    def get() -> Reading:
        try:
            return (descriptor.__get__(thing),)
        except AttributeError:
            return (MISSING,)

    def put(then: Reading) -> None:
        if then[0] is not MISSING:
            descriptor.__set__(thing, then[0])
        elif get()[0] is not MISSING:
            descriptor.__delete__(thing)

    return Place(thing, name, path, get, put)


def member(module: ModuleType, name: str, path: str) -> Place:
    """An attribute of a module, which it may also be asked for by a function of its own."""
    space = own_dict(module) or {}
    return Place(module, name, path, lambda: (dict.get(space, name, MISSING), dict.get(space, "__getattr__", MISSING)),
                 lambda then: _set(space, name, then[0]), lambda: (space,))  # fmt: skip


def of_class_alone(kind: type, name: str, path: str) -> Place:
    """What a class has by a name, for objects that the call makes."""
    return Place(kind, f"<{name}>", path, lambda: (in_class(kind, name),), None, lambda: _dictionaries_of_class(kind))


def variable(space: Table, name: str, path: str) -> Place:
    """A global variable, or what Python has built in by that name."""
    built_in = vars(builtins)

    def get() -> Reading:
        found = dict.get(space, name, MISSING)
        return found, built_in.get(name, MISSING) if found is MISSING else MISSING

    return Place(space, name, path, get, lambda then: _set(space, name, then[0]), lambda: (space, built_in))


def cell(cell: CellType, path: str) -> Place:
    """A variable of a function around."""

    def put(then: Reading) -> None:
        if then[0] is not MISSING:
            cell.cell_contents = then[0]
        elif contents(cell) is not MISSING:
            del cell.cell_contents

    return Place(cell, "<cell>", path, lambda: (contents(cell),), put)


# -- containers


def tables(of: object, name: object, path: str, find: Callable[[], Iterable[Thing]]) -> Place:
    """All that several dictionaries, lists, sets and deques hold, as one place. Each is a part of what is read: so a reading
    can be put back, whichever they were."""

    def get() -> Reading:
        found = list[object]()
        for table in find():  # (some are read in each replay, and have hundreds of items)
            found.append(table)
            found.extend(_parts(table))
            found.append(_END)
        return tuple(found)

    def put(then: Reading) -> None:
        for table, values in _taken_apart(then):
            if values != [*_parts(table)]:
                _refill(table, values)

    told = all(issubclass(type(table), dict) for table in find())
    return Place(of, name, path, get, put, find if told else None, holds=find)


_END = MISSING.__class__()


_PLAIN = (list, deque, set, frozenset, tuple)


def _parts(table: Thing) -> Iterable[object]:
    if type(table) in _PLAIN:
        return table  # type: ignore[no-any-return]
    for mapping in (OrderedDict, dict):
        if issubclass(type(table), mapping):
            return *mapping.keys(table), *mapping.values(table)
    if type(table) is MappingProxyType:
        return *table, *table.values()
    base: Thing = next(b for b in _PLAIN if issubclass(type(table), b))
    return (*base.__iter__(table),)


def _taken_apart(reading: Reading) -> Iterator[tuple[Thing, list[object]]]:
    parts = iter(reading)
    for table in parts:
        yield table, [*iter(functools.partial(next, parts), _END)]


def _refill(table: Thing, values: list[object]) -> None:
    kind = type(table)
    if issubclass(kind, dict):
        half = len(values) // 2
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        base.clear(table)
        for key, value in zip(values[:half], values[half:], strict=True):
            base.__setitem__(table, key, value)
    elif issubclass(kind, (list, deque)):
        row: Thing = list if issubclass(kind, list) else deque
        row.clear(table)
        row.extend(table, values)
    elif issubclass(kind, set):
        set.clear(table)
        set.update(table, values)


def what_stays(read: Read, now: Reading) -> Iterator[Read]:
    """Of containers that a call has written to, the items that it has left as they were."""
    after = {identity(table): values for table, values in _taken_apart(now)}
    for table, values in _taken_apart(read.value):
        if issubclass(type(table), dict):
            half = len(values) // 2
            found = dict(zip(map(_key, values[:half]), values[half:], strict=True))
            left = after.get(identity(table), [])
            for key, value in zip(left[: len(left) // 2], left[len(left) // 2 :], strict=True):
                if _same(found.get(_key(key), MISSING), value):
                    yield Read(item_of(table, key, read.place.path), (value,))


def changes(read: Read, now: Reading) -> Iterator[tuple[object, object, object]]:
    """By which name, if there is one, what was in a place, and what is. Of a row that is longer or shorter: how long it was,
    and is."""
    if read.place.name == "<all>":
        yield from _items_of(read.value[::2], read.value[1::2], now[::2], now[1::2])
    elif read.place.name == "<items>":
        for (table, before), (_, after) in zip(_taken_apart(read.value), _taken_apart(now), strict=False):
            if issubclass(type(table), dict):
                n, m = len(before) // 2, len(after) // 2
                yield from _items_of(before[:n], before[n:], after[:m], after[m:])
            elif len(before) != len(after):
                yield "", len(before), len(after)
            else:
                yield from zip([""] * len(after), before, after, strict=True)
    else:
        yield from ((read.place.name, a, b) for a, b in zip(read.value, now, strict=False))


def _items_of(
    keys: Sequence[object], values: Sequence[object], keys_now: Sequence[object], values_now: Sequence[object]
) -> Iterator[tuple[object, object, object]]:  # fmt: skip
    """By keys that were there or are."""
    before, after = (dict(zip(map(_key, k), v, strict=True)) for k, v in ((keys, values), (keys_now, values_now)))
    for key in [*keys, *(k for k in keys_now if _key(k) not in before)]:
        yield key, before.get(_key(key), MISSING), after.get(_key(key), MISSING)


def _key(key: object) -> object:
    """What tells keys apart without asking them: plain ones by value."""
    return (type(key), key) if type(key) in CONSTANTS else identity(key)


def item_of(table: Table, key: object, path: str) -> Place:
    """One item of a dictionary."""

    def get() -> Reading:
        return (next((v for k, v in dict.items(table) if _key(k) == _key(key)), MISSING),)

    plain = type(key) in CONSTANTS
    return Place(table, ("<item>", _key(key)), f"{path}[{key!r:.40}]" if plain else path,
                 (lambda: (dict.get(table, key, MISSING),)) if plain else get,
                 lambda then: _set(table, key, then[0]), lambda: (table,))  # fmt: skip


def held(container: object, path: str) -> Place:
    """All that a container holds."""
    return tables(container, "<items>", path, lambda: (container,))


def layer(module: Thing, path: str) -> Place:
    """All that a layer of torch's own has: its dictionary and those in it."""
    find = dictionary_of(module)

    def found() -> list[Table]:
        own = find()
        return [own, *(v for v in own.values() if type(v) in (dict, OrderedDict))]

    whole = tables(module, "<layer>", path, found)
    forward = functools.partial(in_class, type(module), "forward")
    return whole._replace(get=lambda: (*whole.get(), forward()), put=lambda then: whole.put and whole.put(then[:-1]),
                          inside=lambda: [*found()[1:], *_dictionaries_of_class(type(module))], own=find)  # fmt: skip


def optimizer(thing: Thing, path: str) -> Place:
    """All that an optimizer has: its groups, their entries, what it remembers of each parameter."""
    find = dictionary_of(thing)

    def found() -> list[Thing]:
        own = find()
        groups, state = own.get("param_groups", ()), own.get("state", {})
        lists = [v for g in groups for v in g.values() if type(v) is list]
        return [own, groups, *groups, *lists, state, *(v for v in dict.values(state) if isinstance(v, dict))]

    return tables(thing, "<optimizer>", path, found)


# -- functions and classes


def code_of(function: FunctionType, path: str) -> Place:
    """What a function runs, and what it has by default."""

    def put(then: Reading) -> None:
        function.__code__, function.__defaults__, function.__kwdefaults__ = then[:3]
        function.__dict__.clear()
        function.__dict__.update(then[3:])

    def get() -> Reading:
        return function.__code__, function.__defaults__, function.__kwdefaults__, *function.__dict__.items()

    return Place(function, "<code>", path, get, put)


def klass(kind: type, path: str, *, whole: bool) -> Place:
    """What a class has itself, and its bases; if not the `whole`, only what may be called."""

    def get() -> Reading:
        own = ((n, v) for n, v in vars_of(kind).items() if n not in UNREAD)
        found = [x for n, v in own if whole or type(v) not in CONSTANTS for x in (n, v)]
        return kind.__bases__, kind.__name__ if whole else "", *found

    def put(then: Reading) -> None:
        before, now = dict(zip(then[2::2], then[3::2], strict=True)), get()
        for name in {*now[2::2]} - before.keys():
            type.__delattr__(kind, name)
        for name, value in before.items():
            if vars_of(kind).get(name, MISSING) is not value:
                type.__setattr__(kind, name, value)

    return Place(kind, "<class>" if whole else "methods", path, get, put)


def subclasses(kind: type, path: str) -> Place:
    """The classes that derive from one."""
    return Place(kind, "<subclasses>", f"{path}.__subclasses__()", lambda: (*type.__subclasses__(kind),))


# -- modules


def imported(name: str) -> Place:
    """Which module an import finds."""
    found = sys.modules
    return Place(found, name, f"sys.modules[{name!r}]", lambda: (dict.get(found, name, MISSING),),
                 lambda then: _set(found, name, then[0]),
                 lambda: (found,))  # fmt: skip


def all_of_space(space: Table, path: str) -> Place:
    """All global variables of a module."""

    def get() -> Reading:
        return tuple(x for name, v in [*space.items()] if not str(name).startswith("__") for x in (name, v))

    def put(then: Reading) -> None:
        before, now = (dict(zip(some[::2], some[1::2], strict=True)) for some in (then, get()))
        for name in {**now, **before}:
            _set(space, name, before.get(name, MISSING))

    return Place(space, "<all>", path, get, put, lambda: (space,))


def registered() -> Place:
    """Which classes have been registered with abstract ones. (One number tells of all.)"""
    token = abc.get_cache_token

    def get(then: object = token()) -> Reading:  # the same object, as long as it is that number
        now = token()
        return (then if now == then else now,)

    return Place(abc, "<registered>", "the classes registered with abstract ones", get)


# -- tensors


def tensor(t: torch.Tensor, path: str) -> Place:
    """What a tensor is, but for its values, and the attributes that it has been given."""
    own = own_dict(t)

    def get() -> Reading:
        with without_subclasses():  # what its class makes of such questions is not asked
            hooks = [*(t._backward_hooks or {}).values(), *(getattr(t, "_post_accumulate_grad_hooks", None) or {}).values()]
            lies = has_memory(t)
            of_shape = () if is_lazy(t) else (t.shape, t.device, t.dtype)
            memory = (address(t), t.stride(), t.is_conj(), t.is_neg()) if lies else ()
            given = (x for item in (own or {}).items() for x in item)
            return (type(t), t.requires_grad, of_shape, memory, *hooks, *given)

    return Place(t, "<tensor>", path, get)
