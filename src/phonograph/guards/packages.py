"""Plain values, and functions, in modules of others: of installed packages, of torch, of the standard library.

Such a module's code is not searched for what it names, nor are its objects looked through: they have much that changes and does
not count. But a flag, a number, a short table of numbers may decide what a call does, and be set between two calls. It may lie
in the module, or be an attribute of a class or an object there. There are two ways to know that a call may read one:

* the user's code names it (`package.RATE`, `package.settings.rate`): then it is in reach like a global of the user's own;
* code of a package that ran in a capture names it: then it is found after that capture.

A package may change what is its own business. A count that has moved on while a call was captured is left out from then on (it
moves in no replay, as no code runs), and so is an object in place of which another has come. Any other value that has changed
would have to change in each replay: such a call is refused, and what it has changed is put back.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

import torch

from .._torch.dynamic import Reading, Thing
from ..errors import Refusal
from ..python import containers
from ..python.bytecode import names_in
from ..python.dict_versions import of_class
from ..python.holders import Holder
from ..python.identity import identity
from ..python.introspection import MISSING, functions_of, has_attributes, is_users_class, is_users_function, own_dict
from ..python.origin import LIBRARY, is_ours, is_torchs, is_users, origin, written_out
from ..values.keys import BY_IDENTITY, SCALARS, NoSignature, plain_key

__all__ = ["Packages", "Value", "as_they_are", "attributes_of", "forwards_of", "functions_in", "is_anothers",
           "together", "values_in"]  # fmt: skip

_SHORT = 64  # items of a list or a dictionary that is looked at
_CONSTANT = (torch.dtype, torch.layout, torch.memory_format)  # of which torch's modules are full
_TABLES, _ROWS = (dict, OrderedDict), (list, set)

_PLAIN = (*SCALARS, float, complex, slice, range, frozenset, enum.Enum)

Key = tuple[int, object]
Named = tuple[str, "ModuleType | type"]
"""A module or a class, after what it is called."""
Following = Callable[[str], tuple[Set[str], Set[str]]]
"""By which names code reads attributes of what is called so, and of what has no name."""


class _All:
    """Stands for what is in a container, in place of a name."""


class Value(NamedTuple):
    """What has this `name` in a dictionary or in a class; or all that is in a list or a set, and all keys of a dictionary."""

    path: str
    of: Thing
    name: object = _All

    @property
    def key(self) -> Key:
        return identity(self.of), self.name

    @property
    def space(self) -> Thing:
        return vars(self.of) if isinstance(self.of, type) else self.of


def is_anothers(thing: ModuleType | type) -> bool:
    """Whether a Python module or a class is not the user's, nor ours."""
    if isinstance(thing, type):
        module: object = thing.__module__  # which code may set to anything
        return isinstance(module, str) and not is_users_class(thing) and module.partition(".")[0] not in _NEVER
    space = vars(thing)
    where = space.get("__file__") or next(iter(space.get("__path__") or ()), None)
    if where is None:
        return space.get("__name__") in sys.builtin_module_names and space.get("__name__") != "builtins"
    return not is_users(where) and not is_ours(where)


_NEVER = ("builtins", "phonograph")


def _is(value: object, kind: Thing) -> bool:
    """As `isinstance`, without asking the value, which may be a proxy."""
    return issubclass(type(value), kind)


def values_in(others: Iterable[Named], following: Following) -> Iterator[Value]:
    """What code that uses these names may read of modules of others', and of classes, that are called so."""
    modules, seen = set[tuple[int, str]](), set[tuple[int, str]]()

    def once(
        path: str, thing: object, names: Set[str], look: Callable[[str, object, Set[str]], Iterator[Value]]
    ) -> Iterator[Value]:
        key = identity(thing), path.rpartition(".")[2]
        if key not in seen:
            seen.add(key)
            yield from look(path, thing, names)

    for path, thing in others:
        if isinstance(thing, type):
            yield from once(path, thing, _any_of(following(path.rpartition(".")[2])), _attributes)
            continue
        for name, value, space in _named_in(path, thing, following, modules):
            module = str(space.get("__name__"))
            if not callable(value) and not _is(value, _CONSTANT if module.partition(".")[0] == "torch" else ()):
                yield Value(f"{module}.{name}", space, name)
                yield from once(f"{module}.{name}", value, _any_of(following(name)), _inside)
            elif _is(value, type) and is_anothers(value):
                yield from once(f"{module}.{name}", value, _any_of(following(name)), _attributes)
            elif is_anothers(type(value)):  # one that can be called
                yield from once(f"{module}.{name}", value, _any_of(following(name)), _inside)


def _any_of(names: tuple[Set[str], ...]) -> Set[str]:
    return frozenset().union(*names)


def attributes_of(kind: type, names: Set[str]) -> Iterator[Value]:
    """What code that uses these names may read of a class of a package's through an object."""
    if _is_installed(kind):
        yield from _attributes(kind.__qualname__, kind, names)


def _is_installed(kind: type) -> bool:
    """Whether a class is an installed package's, other than torch."""
    module: object = sys.modules.get(str(kind.__module__))
    where = str(getattr(module, "__file__", None) or "<frozen>")
    return is_anothers(kind) and origin(where) is LIBRARY and not is_torchs(where)


def functions_in(others: Iterable[Named], following: Following) -> Iterator[Value]:
    """Functions and classes of packages or of torch that such code may call: somebody may put others in their place."""
    seen: set[tuple[int, str]] = set()
    for path, thing in others:
        for name, value, space in _named_in(path, thing, following, seen) if isinstance(thing, ModuleType) else ():
            if callable(value) and origin(space.get("__file__") or "<frozen>") is LIBRARY:
                yield Value(f"{space.get('__name__')}.{name}", space, name)


def _named_in(
    path: str, module: ModuleType, following: Following, seen: set[tuple[int, str]]
) -> Iterator[tuple[str, Thing, dict[str, object]]]:
    """What such code names of a module that is called so, and of modules in it: the name, what it is now, and the globals."""
    called, space = path.rpartition(".")[2], vars(module)
    if (identity(module), called) in seen:  # they refer to each other
        return
    seen.add((identity(module), called))
    named, unnamed = following(called)
    for name in sorted(n for n in named | (unnamed & space.keys()) if not n.startswith("__")):
        value = space.get(name, MISSING)
        yield name, value, space
        if _is(value, ModuleType) and is_anothers(value):
            yield from _named_in(name, value, following, seen)


def forwards_of(kinds: Iterable[type]) -> Iterator[Value]:
    """The `forward` of those of these classes, and of their bases, that are not the user's."""
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
        if "forward" in vars(base) and is_anothers(base):
            yield Value(f"{base.__qualname__}.forward", base, "forward")


class _Methods(dict[type, frozenset[int]]):
    """The code of what each class itself has, by identity."""

    def __missing__(self, kind: type) -> frozenset[int]:
        found = self[kind] = frozenset(identity(code) for member in list(vars(kind).values()) for code in _code_of(member))
        return found


def _globals(space: dict[str, Thing], names: Set[str], ran: Set[int], methods: _Methods) -> Iterator[Value]:
    """What code of a module that uses these names may read of what lies in it. It is their code that has the names of what all
    classes in it have, and objects of which a method `ran` (code, by identity)."""
    module = str(space.get("__name__"))
    own = {n for n, v in space.items() if (v.__module__ == module if _is(v, type) else _ran_for(v, ran, methods))}
    for name in sorted(n for n in (names & space.keys()) | own if not n.startswith("__")):
        value, path = space[name], f"{module}.{name}"
        if _is(value, ModuleType):
            yield Value(path, space, name)
            theirs = vars(value) if is_anothers(value) and not is_torchs(str(vars(value).get("__file__"))) else {}
            for n in sorted(names & theirs.keys()):
                if _is_plain(theirs[n]) and not n.startswith("__"):
                    yield Value(f"{path}.{n}", theirs, n)
        elif _is(value, type):
            if is_anothers(value):
                yield from _attributes(path, value, names)
        elif not callable(value) or is_anothers(type(value)) or is_users_function(value):
            yield Value(path, space, name)
            yield from _inside(path, value, names)


def _ran_for(thing: object, ran: Set[int], methods: _Methods) -> bool:
    """Whether a method of this object ran."""
    kind = type(thing)
    if kind.__module__ in _NEVER or _is(thing, (FunctionType, ModuleType)) or not is_anothers(kind):
        return False
    return not all(ran.isdisjoint(methods[base]) for base in kind.__mro__ if base is not object)


def _inside(path: str, value: Thing, names: Set[str]) -> Iterator[Value]:
    """What is in a container; which plain attributes an object has."""
    if type(value) in _TABLES:
        if len(value) <= _SHORT:
            if all(map(_is_plain, value.values())):  # or it is a cache, in which there may be more in each call
                yield Value(path, value)
            yield from [Value(f"{path}[{k!r}]", value, k) for k, v in value.items() if _is_plain(k) and _is_plain(v)]
    elif type(value) in _ROWS:
        if len(value) <= _SHORT and all(map(_is_plain, value)):
            yield Value(path, value)
    elif not _is_plain(value) and (is_anothers(type(value)) or is_users_class(type(value))):
        yield from _attributes(path, value, names)


def _attributes(path: str, thing: Thing, names: Set[str]) -> Iterator[Value]:
    """Those of a class or an object that are plain."""
    kind: type = thing if _is(thing, type) else type(thing)
    if kind is not thing and not has_attributes(kind):
        return
    found = None if kind is thing else own_dict(thing)
    own = {} if found is None else found
    spaces = [(base, vars(base)) for base in reversed(kind.__mro__)]
    named = [names & space.keys() for _, space in spaces]
    asked = [space[n] for (_, space), of in zip(spaces, named, strict=True) for n in of if isinstance(space[n], property)]
    if asked:
        names = set(names).union(*(code.co_names for member in asked for code in _code_of(member)))
        named = [names & space.keys() for _, space in spaces]
    later: set[str] = set()  # what bases have, and a class before them may get
    for (base, space), of in zip(spaces, named, strict=True):
        held = {n for n in of if not n.startswith("__") and _is_plain(space[n])}
        later |= held
        yield from [Value(f"{path}.{n}", base, n) for n in sorted(n for n in later if n in held or n not in space)]
        if found is not None:  # where it is in the class only, the object may get one of its own
            yield from [Value(f"{path}.{n}", own, n) for n in sorted(held) if n not in own]
    yield from [Value(f"{path}.{n}", own, n) for n in sorted(n for n in names & own.keys() if _is_plain(own[n]))]


def _code_of(member: object) -> list[CodeType]:
    return [f.__code__ for f in functions_of(member) if isinstance(f, FunctionType)]


def _is_plain(value: Thing) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(map(_is_plain, value))
    if not issubclass(kind, _PLAIN) and kind.__module__ != "numpy":  # a proxy may be asked nothing
        return False
    try:
        plain_key(value)
    except NoSignature:
        return False
    return not isinstance(value, (*BY_IDENTITY, set))


def together(values: Iterable[Value]) -> list[Holder]:
    """The places of these values."""
    each = list(values)
    single = [v for v in each if v.name is not _All]
    return [*([_named(single)] if single else []), *(_container(v.path, v.of) for v in each if v.name is _All)]


def as_they_are(values: Iterable[Value]) -> Holder:
    """Functions and classes, which are there and are seldom replaced: read as whether each still is what it was."""
    each = list(values)
    spaces: dict[int, tuple[Thing, list[str]]] = {}
    for v in each:
        spaces.setdefault(identity(v.of), (v.space, []))[1].append(str(v.name))
    single, at, parts, before = _named(each), dict[str, object](), "", list[object]()
    were = single.read()
    for i, (space, names) in enumerate(spaces.values()):
        at |= {f"g{i}": space.get, f"n{i}": names[0] if len(names) == 1 else names}
        parts += f"g{i}(n{i}), " if len(names) == 1 else f"*map(g{i}, n{i}), "
        before += map(space.get, names)
    read: Callable[[], Reading] = written_out(f"lambda: (({parts}) == before,)", at | {"before": (*before,)})

    def named(path: str, i: int, now: tuple[object, ...]) -> str:
        return next((v.path for v, was, is_ in zip(each, were, single.read(), strict=True) if was is not is_), path)

    return Holder("functions of packages", read, lambda _: single.restore(were), named=named, inside=single.inside)


def _named(values: list[Value]) -> Holder:
    names: dict[str, object] = {f"v{i}": partial(v.space.get, v.name) for i, v in enumerate(values)} | {"missing": MISSING}
    parts = "".join(f"v{i}(missing), " for i in range(len(values)))
    read: Callable[[], Reading] = written_out(f"lambda: ({parts})", names)

    def restore(saved: Reading) -> None:
        for value, before in zip(values, saved, strict=True):
            if value.space.get(value.name, MISSING) is before:
                continue
            if isinstance(value.of, type):
                setattr(value.of, str(value.name), before) if before is not MISSING else delattr(value.of, str(value.name))
            elif before is MISSING:
                del value.of[value.name]
            else:
                value.of[value.name] = before

    inside = [*{identity(v.of): of_class(v.of) if isinstance(v.of, type) else v.of for v in values}.values()]
    return Holder("packages", read, restore, named=lambda path, i, _: values[i].path, inside=lambda: inside)


def _container(path: str, thing: Thing) -> Holder:
    if type(thing) in _TABLES:

        def restore(before: Reading) -> None:
            for key in [key for key in thing if key not in before]:
                del thing[key]

        return Holder(path, lambda: (*thing,), restore)
    return containers.ordered(path, thing) if isinstance(thing, list) else containers.unordered(path, thing)


class Packages:
    """What packages' own code reads of plain values, in the captures of one function."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[Value, object]] = {}
        self._restless: set[Key] = set()

    def before(self) -> None:
        """A capture begins."""
        self._known = {key: (value, _read(value)) for key, (value, _) in self._known.items()}

    def restore(self) -> None:
        """It is taken back."""
        known = [(v, before) for v, before in self._known.values() if v.name is not _All and _is_plain(before)]
        moved = [(v, before) for v, before in known if not _same(_read(v), before)]
        if moved:
            _named([v for v, _ in moved]).restore(tuple([before for _, before in moved]))

    def after(
        self, ran: Iterable[tuple[CodeType, dict[str, object]]], apart: Set[Key], kinds: Iterable[type]
    ) -> list[Holder]:  # fmt: skip
        """The places that count, going by the functions that ran in it, each given as its code and its globals; but for those
        `apart`, which are held already. There are objects of these `kinds`.

        Raises:
            Refusal: one has changed that is no count.
        """
        spaces: dict[int, tuple[dict[str, object], set[str], set[int]]] = {}
        for code, space in ran:
            # What a package has written itself has no file of its own.
            where = str(space.get("__file__")) if code.co_filename.startswith("<") else code.co_filename
            if "__file__" in space and origin(where) is LIBRARY and not is_torchs(where):
                _, names, codes = spaces.setdefault(identity(space), (space, set(), set()))
                names |= names_in(code)
                codes.add(identity(code))
        found: dict[Key, Value] = {}
        methods = _Methods()
        for space, names, codes in spaces.values():
            found |= {v.key: v for v in _globals(space, names, codes, methods)}
        read = set[str]().union(*(names for _, names, _ in spaces.values()))
        for kind in kinds:  # whose methods may lie in other modules
            found |= {v.key: v for v in attributes_of(kind, read)}
        for key, (value, before) in self._known.items():
            now = _read(value)
            if _same(now, before):
                continue
            if key in found and key not in self._restless and _is_plain(now) and not type(now) is type(before) is int:
                raise Refusal(f"changes {value.path}, which outlives the call", "change it outside", final=False)
            self._restless.add(key)
        self._known |= {key: (v, _read(v)) for key, v in found.items() if key not in self._known}
        return together([v for key, v in found.items() if key not in self._restless and key not in apart])


def _same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and _is_plain(a) and bool(a == b))


def _read(value: Value) -> object:
    return tuple(value.of) if value.name is _All else value.space.get(value.name, MISSING)
