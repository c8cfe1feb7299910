"""Plain values, and functions, in modules of others: of installed packages, of torch, of the standard library.

Such a module's code is not searched for what it names, nor are its objects looked through: they have much that changes and does
not count. But a flag, a number, a short table of numbers may decide what a call does, and be set between two calls. It may lie
in the module, or be an attribute of a class or an object there. There are two ways to know that a call may read one:

* the user's code names it (`package.RATE`, `package.settings.rate`): then it is in reach like a global of the user's own;
* code of a package that ran in a capture names it: then it is found after that capture.

A package may change what is its own business, and count calls, say. What has changed while a call was captured is left out from
then on. (It changes in no replay, as no code runs.)
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch

from . import places
from .identity import identity
from .introspection import MISSING, has_attributes, is_users_class
from .keys import BY_IDENTITY, NoSignature, plain_key
from .places import Holder, own_dict
from .where import LIBRARY, is_ours, is_torchs, is_users, origin, written_out

__all__ = ["Packages", "Value", "as_they_are", "forwards_of", "functions_in", "is_anothers", "together", "values_in"]

_SHORT = 64  # items of a list or a dictionary that is looked at
_CONSTANT = (torch.dtype, torch.layout, torch.memory_format)  # of which torch's modules are full
_CONTAINERS = (list, dict, OrderedDict, set)

Key = tuple[int, str | None]


class Value(NamedTuple):
    """A plain value: what has this `name` in a dictionary or in a class; or all that is in a container."""

    path: str
    of: Any
    name: str | None = None

    @property
    def key(self) -> Key:
        return identity(self.of), self.name

    @property
    def space(self) -> Any:
        return vars(self.of) if isinstance(self.of, type) else self.of


def is_anothers(thing: ModuleType | type) -> bool:
    """Whether a Python module or a class is not the user's, nor ours."""
    if isinstance(thing, type):
        return not is_users_class(thing) and thing.__module__.partition(".")[0] not in ("builtins", "phonograph")
    space = vars(thing)
    where = space.get("__file__") or next(iter(space.get("__path__") or ()), None)
    if where is None:
        return space.get("__name__") in sys.builtin_module_names and space.get("__name__") != "builtins"
    return not is_users(where) and not is_ours(where)


def values_in(path: str, thing: ModuleType | type, names: Set[str]) -> Iterator[Value]:
    """What code that uses these names may read of a module of another's, or of a class."""
    if isinstance(thing, type):
        return _attributes(path, thing, names)
    return _globals(vars(thing), names, {identity(thing)})


def _globals(space: dict[str, Any], names: Set[str], seen: set[int], *, own: bool = False) -> Iterator[Value]:
    """Of what lies in a module. With `own`, also of all classes that are defined in it: it's their code that has the names."""
    module = str(space.get("__name__"))
    constant = _CONSTANT if module.partition(".")[0] == "torch" else ()
    named = names & space.keys()
    if own:
        named = named | {n for n, v in space.items() if isinstance(v, type) and v.__module__ == module}
    for name in sorted(n for n in named if not n.startswith("__")):
        value, path = space[name], f"{module}.{name}"
        inside: list[Value] = []
        if type(value) in _CONTAINERS:
            if len(value) <= _SHORT and all(map(_is_plain, (*value, *(value.values() if isinstance(value, dict) else ())))):
                inside = [Value(path, value)]
        elif isinstance(value, ModuleType):
            if is_anothers(value) and identity(value) not in seen:
                seen.add(identity(value))
                inside = [*_globals(vars(value), names, seen)]
        elif is_anothers(value if isinstance(value, type) else type(value)):
            inside = [*_attributes(path, value, names)]
        if inside or isinstance(value, torch.Tensor) or (_is_plain(value) and not isinstance(value, constant)):
            yield Value(path, space, name)
        yield from inside


def _attributes(path: str, thing: Any, names: Set[str]) -> Iterator[Value]:
    """Those of a class or an object that are plain."""
    kind = thing if isinstance(thing, type) else type(thing)
    if kind is not thing and not has_attributes(kind):
        return
    found = None if kind is thing else own_dict(thing)
    own = {} if found is None else found
    for base in kind.__mro__:
        held = [n for n in names & vars(base).keys() if not n.startswith("__") and _is_plain(vars(base)[n])]
        yield from [Value(f"{path}.{n}", base, n) for n in sorted(held)]
        if found is not None:  # where it is in the class only, the object may get one of its own
            yield from [Value(f"{path}.{n}", own, n) for n in sorted(held) if n not in own]
    held = [n for n in names & own.keys() if _is_plain(own[n])]
    yield from [Value(f"{path}.{n}", own, n) for n in sorted(held)]


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    try:
        plain_key(value)
    except NoSignature:
        return False
    return not isinstance(value, (*BY_IDENTITY, set))


def functions_in(module: ModuleType, names: Set[str], seen: set[int] | None = None) -> Iterator[Value]:
    """Functions and classes that code which uses these names may call, of a package or of torch: somebody may put others in
    their place."""
    seen, space = set() if seen is None else seen, vars(module)
    seen.add(identity(module))
    if origin(space.get("__file__") or "<frozen>") is LIBRARY:
        for name in sorted(names & space.keys()):
            value = space[name]
            if isinstance(value, ModuleType):
                if is_anothers(value) and identity(value) not in seen:
                    yield from functions_in(value, names, seen)
            elif callable(value) and not name.startswith("__"):
                yield Value(f"{space.get('__name__')}.{name}", space, name)


def forwards_of(kinds: Iterable[type]) -> Iterator[Value]:
    """The `forward` of those of these classes, and of their bases, that are not the user's."""
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
        if "forward" in vars(base) and is_anothers(base):
            yield Value(f"{base.__qualname__}.forward", base, "forward")


def together(values: Iterable[Value]) -> list[Holder]:
    """The places of these values."""
    single = [v for v in values if v.name is not None]
    return [*([_named(single)] if single else []), *(_container(v.path, v.of) for v in values if v.name is None)]


def as_they_are(values: Iterable[Value]) -> Holder:
    """Functions and classes, which are there and are seldom replaced: read as whether each still is what it was."""
    each = list(values)
    spaces: dict[int, tuple[Any, list[str]]] = {}
    for v in each:
        spaces.setdefault(identity(v.of), (v.space, []))[1].append(str(v.name))
    single, at, parts, before = _named(each), dict[str, Any](), "", list[Any]()
    were = single.read()
    for i, (space, names) in enumerate(spaces.values()):
        at |= {f"g{i}": space.get, f"n{i}": names[0] if len(names) == 1 else names}
        parts += f"g{i}(n{i}), " if len(names) == 1 else f"*map(g{i}, n{i}), "
        before += map(space.get, names)
    read: Callable[[], tuple[Any, ...]] = written_out(f"lambda: (({parts}) == before,)", at | {"before": (*before,)})

    def named(path: str, i: int, now: tuple[Any, ...]) -> str:
        return next((v.path for v, was, is_ in zip(each, were, single.read(), strict=True) if was is not is_), path)

    return Holder("functions of packages", read, lambda _: single.restore(were), named=named)


def _named(values: list[Value]) -> Holder:
    names: dict[str, Any] = {f"v{i}": partial(v.space.get, v.name) for i, v in enumerate(values)} | {"missing": MISSING}
    parts = "".join(f"v{i}(missing), " for i in range(len(values)))
    read: Callable[[], tuple[Any, ...]] = written_out(f"lambda: ({parts})", names)

    def restore(saved: tuple[Any, ...]) -> None:
        for value, before in zip(values, saved, strict=True):
            if value.space.get(value.name, MISSING) is before:
                continue
            if isinstance(value.of, type):
                setattr(value.of, str(value.name), before) if before is not MISSING else delattr(value.of, str(value.name))
            elif before is MISSING:
                del value.of[value.name]
            else:
                value.of[value.name] = before

    return Holder("packages", read, restore, named=lambda path, i, _: values[i].path)


def _container(path: str, thing: Any) -> Holder:
    if isinstance(thing, dict):
        return places.dictionary(path, thing)
    return places.ordered(path, thing) if isinstance(thing, list) else places.unordered(path, thing)


class Packages:
    """What packages' own code reads of plain values, in the captures of one function."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[Value, Any]] = {}
        self._restless: set[Key] = set()

    def before(self) -> None:
        """A capture begins."""
        self._known = {key: (value, _read(value)) for key, (value, _) in self._known.items()}

    def after(self, ran: Iterable[tuple[CodeType, dict[str, Any]]], apart: Set[Key]) -> list[Holder]:
        """The places that count, going by the functions that ran in it, each given as its code and its globals; but for those
        `apart`, which are held already."""
        spaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, space in ran:
            if "__file__" in space and origin(code.co_filename) is LIBRARY and not is_torchs(code.co_filename):
                spaces.setdefault(identity(space), (space, set()))[1].update(code.co_names)
        found: dict[Key, Value] = {}
        for space, names in spaces.values():
            found |= {v.key: v for v in _globals(space, names, set(), own=True)}
        now = {key: _read(value) for key, (value, _) in self._known.items()}
        self._restless |= {k for k, (_, before) in self._known.items() if not _same(now[k], before)}
        self._known |= {key: (v, None) for key, v in found.items() if key not in self._known}
        return together([v for key, v in found.items() if key not in self._restless and key not in apart])


def _same(a: Any, b: Any) -> bool:
    return a is b or (_is_plain(a) and _is_plain(b) and bool(a == b))


def _read(value: Value) -> Any:
    if value.name is not None:
        return value.space.get(value.name, MISSING)
    return tuple(value.of.items()) if isinstance(value.of, dict) else tuple(value.of)
