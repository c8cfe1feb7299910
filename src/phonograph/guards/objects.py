"""What of each kind of object is held, and where it leads: containers, objects of the user's and of others, torch's own.

Each place that holds values becomes a `Holder`, which can be read again at C speed; tensors, optimizers, generators and the
like are collected. Of an object of the user's, and of one of torch's, NumPy's or the standard library's, only those attributes
count that some code names (a trainer may count its steps on `self`), so that more are entered as more code is found.
"""

from __future__ import annotations

import abc
import builtins
import ctypes
import operator
import re
import sys
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Set
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from functools import cache, partial
from mmap import mmap
from types import CellType, FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, Generic, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._torch.ddp import MADE_ANEW, averages, averages_by
from .._torch.dynamic import Foreign, Reading, Table, Thing
from .._torch.process_groups import sharding_of
from .._torch.tensors import behind, has_memory, inner_names, is_shape
from ..memory.loans import Borrowed
from ..python import containers, memory_contents, object_attributes
from ..python.bytecode import ANY_KEY
from ..python.containers import item
from ..python.executed_code import Ran
from ..python.holders import Holder, Spot, kept, key_label
from ..python.identity import identity
from ..python.introspection import MISSING, is_users_class, is_users_function, own_dict, slots_of
from ..python.memos import kept_tensors
from ..python.names_in_code import CYCLED, LIVE, Mentions
from ..python.origin import is_users
from ..python.read_gate import Reads
from ..python.subscripts import TABLES
from ..values.tensor_subclasses import consists_of_parts, parts
from . import fsdp_state as shards
from .attribute_effects import Left
from .attribute_epochs import Room, room_of
from .unwatchable import ARRAY, CROWD, FILE, ITERATOR, Unwatchable

__all__ = ["BUFFERS", "BUILTINS", "FEW", "LARGE", "LEAVES", "LIMIT", "UNNAMED", "Enter", "Objects", "has_more"]

LIMIT = 50_000  # places; a function that reaches more is not recorded
FEW = 64  # so many parameters are all looked at before each replay
_BUFFER = 4096  # bytes of a buffer that are compared before each replay; larger ones are refused
LARGE = 64 << 20  # bytes of an array that is compared before each replay; larger ones are refused
MANY = 1 << 12  # objects in an array that are compared before each replay; an array of more is refused
_PLAIN_ARRAYS = ("ndarray", "memmap", "matrix", "recarray")  # whose bytes are all there is to them
BUFFERS = (bytearray, array, memoryview, mmap, ctypes._SimpleCData, ctypes.Structure, ctypes.Array, ctypes.Union)
LEAVES = frozenset({int, float, str, bytes, bool, type(None), complex, torch.dtype, torch.device, torch.Size})
# Methods of a class of the user's that are called without being named; an object may have its own.
UNNAMED = frozenset({"forward", "backward", "setup_context", "jvp", "vmap", "step"})
_COUNTED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))  # which know what they have left
# Classes that read no attributes of objects derived from them, other than those that they give them.
_SILENT_BASES = frozenset({object, torch.nn.Module, abc.ABC, Generic, Protocol})
_FIELDS = "__dataclass_fields__"
_LAYERS = "torch.nn.modules."
_FILLED = (list, deque, dict, defaultdict)
_EXPRESSION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*|\[\d+\])*")
_NOTES = "_per_optimizer_states"  # of gradient scalers
_MODULES_OWN = frozenset(n for n, v in vars(torch.nn.Module()).items() if type(v) in (dict, OrderedDict))
BUILTINS = vars(builtins)

Enter = Callable[[Thing, str, Thing], None]
"""How to enter an object, which lies at a path."""


def has_more(module: torch.nn.Module) -> bool:
    """Whether a layer of torch's has attributes that no code of its class names: the user's books, say."""
    kind: type = type(module)
    return kind.__module__.startswith(_LAYERS) and not (own_dict(module) or {}).keys() <= _named_in(kind)


@cache
def _named_in(kind: type) -> frozenset[str]:
    """The names and strings in the methods of a class, and what each module has."""
    codes = [f.__code__ for base in kind.__mro__ for f in vars(base).values() if type(f) is FunctionType]
    named = {name for code in codes for name in (*code.co_names, *(c for c in code.co_consts if type(c) is str))}
    return frozenset(named | vars(torch.nn.Module()).keys())


_CONTAINERS: tuple[Any, ...] = tuple, frozenset, list, set, deque


def _length(values: Collection[object]) -> int:
    """How many items there are, whatever a class of the user's says of that."""
    for kind in _CONTAINERS:
        if isinstance(values, kind):
            return int(kind.__len__(values))
    return len(values)


class Objects:
    """What is in reach, by kinds, each thing once; what has been met and is still to be visited. What code leads to, and which
    way leads into what, is a `Reach`'s business."""

    whole = False
    """Whether it has all attributes of objects of torch's and of the standard library's, and not only those that are named."""

    def __init__(self, heard: frozenset[str], ran: Ran | None, left: Left | None) -> None:
        self._heard = heard
        self._ran = ran
        self._put: dict[int, set[object]] = defaultdict(set)  # where it has put something: into what, and under which names
        for put in left.puts if left is not None else ():
            self._put[identity(put.of)].add(put.name)
        self._resumed: set[str] = set()  # what generators name, which may have run unheard
        self.mentions = Mentions(heard)
        self.holders: list[Holder] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.modules: list[torch.nn.Module] = []
        self.names: dict[int, str] = {}  # of modules, by identity
        self.optimizers: list[torch.optim.Optimizer] = []
        self.remembered: dict[int, Room] = {}  # tensors in optimizers' states that lie behind a door, by identity
        self.generators: list[torch.Generator] = []
        self.streams: list[torch.Stream] = []
        self.host_rngs: list[Thing] = []
        self.unwatchable: list[Unwatchable] = []
        self.works: list[str] = []  # collectives that are under way, or were
        self.sharded = False  # it has met what `fully_shard` keeps
        self.gathered: list[tuple[str, torch.Tensor]] = []  # its tensors that have memory only for a time
        self.borrowed: list[str] = []
        self.array_places: list[tuple[int, int]] = []  # address and bytes of those that are compared
        self.lends_groups = False  # it has met a parameter group of an optimizer elsewhere than there
        self.caching: set[int] = set()  # the identities of the code of functions whose results a cache keeps
        self.met: list[object] = []  # everything; ids in _seen stay valid
        self._seen: set[int] = set()
        self.shared: set[int] = set()  # the identities of what was met in more than one place
        self._work: deque[tuple[str, object]] = deque()  # what is to be visited, and where it was found
        self._groups: set[int] = set()  # the identities of parameter groups, and of lists of them
        self._called_groups: list[tuple[str, object]] = []  # what has that name elsewhere: who reads it there names it
        self._objects: list[object] = []
        self._slotted: dict[type, list[tuple[str, Thing]]] = {}  # classes met, and their slots
        self._some_slots: list[tuple[str, object, set[Thing]]] = []  # objects of which only some count, and those entered
        self._plain: dict[type, bool] = {}  # whether only the user's code knows their attributes
        self._selected: list[tuple[str, object, set[str]]] = []  # objects of such classes, and their attributes entered so far
        self._filled: list[tuple[str, object]] = []  # variables whose containers are only filled, as far as is known
        self._leading: dict[int, set[object]] = {}  # containers that are only filled: keys by which one gets to where it puts
        self._set_items: dict[int, tuple[str, Table, Set[object]]] = {}  # such ones, by identity: keys of items that are set
        self._tables: list[tuple[str, Table, set[object]]] = []  # dictionaries of which only some keys may be read, likewise
        self._keys: dict[int, set[Thing] | None] = {}  # those keys, or None, by the dictionaries' identities
        self._opaque: list[tuple[str, object, set[str]]] = []  # objects of others, likewise
        self.made: dict[int, tuple[str, torch.Tensor]] = {}  # those that consist of others, which are among `tensors`
        self._said: dict[Reading, list[tuple[str, torch.Tensor]]] = defaultdict(
            list
        )  # those that say what they are, by how they do
        self._odd: list[tuple[str, torch.Tensor]] = []  # sparse ones and others that are no memory with a shape
        self._attributed: list[tuple[str, torch.Tensor]] = []  # those to which the user gave attributes

    @property
    def iterators(self) -> list[str]:
        """The names of iterators and files."""
        return [one.path for one in self.unwatchable if one.kind in (ITERATOR, FILE)]

    @property
    def objects(self) -> list[object]:
        """Those that have attributes which code may read."""
        return [*self._objects, *self.modules]

    def models(self) -> dict[str, torch.nn.Module]:
        """The modules, by the expressions that give them."""
        named = {self.names[identity(m)]: m for m in self.modules}
        return {name: m for name, m in named.items() if _EXPRESSION.fullmatch(name)}

    def _class_of(self, kind: type) -> None:
        """Objects of this class are in reach: its methods may run."""
        raise NotImplementedError

    def _hold(self, place: Holder) -> None:
        self.holders.append(place)

    def _fixed(self, path: str, values: Iterable[object]) -> None:
        """The items of something that cannot change, or is held already."""
        self._work.extend((f"{path}[{i}]", v) for i, v in enumerate(values) if type(v) not in LEAVES)

    # -- containers

    def _is_crowd(self, path: str, thing: object, values: Collection[object]) -> bool:
        """Whether something holds more than can be walked through at all."""
        if _length(values) <= LIMIT:
            return False
        crowd = sum(not (kind in LEAVES or issubclass(kind, torch.Tensor)) for kind in map(type, [*values])) > LIMIT
        if crowd:
            self.unwatchable.append(Unwatchable(path, thing, CROWD))
        return crowd

    def _dict(self, path: str, d: Table, *, watched: bool = False) -> None:
        put = self._put.get(identity(d))
        if self._is_crowd(path, d, dict.values(d)):
            return
        if leading := self._leading.get(identity(d)):
            self._hold(containers.items(path, d, leading))
            self._items(path, {k: dict.get(d, k) for k in leading})
            return
        if not (put or watched) and self._keys_read(d) is not None:
            self._tables.append((path, d, set()))
            return
        self._hold(containers.dictionary_without(path, d, put) if put else containers.dictionary(path, d, watched=watched))
        self._items(path, {k: v for k, v in dict.items(d) if k not in put} if put else d)

    def _keys_read(self, d: object) -> set[Thing] | None:
        """The keys that code which ran has read of a dictionary, or of a `SimpleNamespace`; None if it may be any."""
        unknown = self._reads is None or identity(d) in self.shared or self.mentions.names_globals
        return None if unknown else self._keys.get(identity(d))

    def _may_be_table(self, value: object, keys: Set[object] | None) -> None:
        """A variable or an attribute has this value. If it is a dictionary, or a `SimpleNamespace`, these keys are read of it
        there, or any."""
        if type(value) in TABLES:
            known = self._keys.get(identity(value), set())
            self._keys[identity(value)] = None if keys is None or known is None else known | keys

    def _items(self, path: str, d: Table) -> None:
        seen, work = self._seen, self._work
        for k, v in list(dict.items(d)):
            named = type(k) is str
            if type(v) not in LEAVES and v is not BUILTINS:  # `exec` puts all of them there
                if named and k == "param_groups":
                    self._called_groups.append((f"{path}.{k}", v))
                elif identity(v) not in seen or issubclass(type(v), (type, ModuleType)):  # which may have several names
                    work.append((f"{path}.{k}" if named else f"{path}[{key_label(k)}]", v))
                else:
                    self.shared.add(identity(v))
                    self.lends_groups = self.lends_groups or identity(v) in self._groups
            if named:
                continue
            if type(k) is torch.Tensor:
                self.mentions.asks_identity = self.mentions.keyed_by_identity = True  # looking it up does
            if not isinstance(k, torch.nn.Parameter):
                work.append((path, k))

    def _dicts(self, path: str, dicts: list[dict[object, object]], *, watched: bool = False) -> None:
        dicts = [d for d in dicts if identity(d) not in self._seen]
        for d in [d for d in dicts if identity(d) in self._put]:
            self._seen.add(identity(d))
            self.met.append(d)
            self._dict(path, d)
        dicts = [d for d in dicts if identity(d) not in self._put]
        self._hold(containers.dictionaries(path, dicts, watched=watched))
        self.met += dicts
        self._seen.update(map(identity, dicts))
        for d in filter(None, dicts):
            self._items(path, d)

    def _list(self, path: str, values: list[object] | deque[object]) -> None:
        if identity(values) in self._put or self._is_crowd(path, values, values):
            return
        place, leading = containers.ordered(path, values), self._leading.get(identity(values))
        self._hold(place)
        self._fixed(path, [v for i, v in enumerate(place.read()) if not leading or i in leading])

    def _set(self, path: str, values: set[object]) -> None:
        if self._is_crowd(path, values, values):
            return
        place = containers.unordered(path, values)
        self._hold(place)
        self._fixed(path, place.read())
        if torch.Tensor in map(type, place.read()):
            self.mentions.asks_identity = self.mentions.keyed_by_identity = True

    def _tuple(self, path: str, values: Thing) -> None:
        items = (*(tuple if issubclass(type(values), tuple) else frozenset).__iter__(values),)
        if not self._is_crowd(path, values, items):
            self._fixed(path, items)

    def _view(self, path: str, view: MappingProxyType[object, object]) -> None:
        self._hold(kept(path, lambda: (*view, *view.values())))
        self._fixed(path, view.values())

    def _array(self, path: str, array: Foreign) -> None:
        if type(array).__name__ in _PLAIN_ARRAYS and array.dtype.kind == "O" and array.size <= MANY:
            self._hold(memory_contents.frozen_array(path, array))
            items = memory_contents.array_of_objects(path, array)
            self._hold(items)
            self._fixed(path, items.read())
            return
        if array.dtype.hasobject or type(array).__name__ not in _PLAIN_ARRAYS:
            self.unwatchable.append(Unwatchable(path, array, ARRAY))
            return
        if _is_frozen(array):
            self._hold(memory_contents.frozen_array(path, array))
        elif array.nbytes > LARGE:
            self.unwatchable.append(Unwatchable(path, array, ARRAY))
            return
        else:
            self._hold(memory_contents.array_of_numpys(path, array))
        self.array_places.append((array.__array_interface__["data"][0], array.nbytes))

    def _record(self, path: str, row: object) -> None:
        """A row of an array of records: what is written to one is seen in the other."""
        self._array(path, sys.modules["numpy"].asarray(row))

    def _buffer(self, path: str, thing: Thing) -> None:
        if memoryview(thing).nbytes > _BUFFER or not memoryview(thing).c_contiguous:
            self.unwatchable.append(Unwatchable(path, thing, ARRAY))
        else:
            self._hold(memory_contents.buffer(path, thing))

    # -- objects

    def _object(self, path: str, thing: object) -> None:
        """An object of some class: its attributes, its contents if it is a container as well, its methods."""
        self._objects.append(thing)
        own = own_dict(thing)
        if own is not None and self._is_plain(type(thing)):
            self._selected.append((path, thing, set()))
        elif own is not None:
            # No gate hears what is read of torch's own objects. A scheduler outside of the part of the step that ran does not
            # count: that is known by the names in the code.
            alone = self._ran is not None and issubclass(type(thing), torch.optim.lr_scheduler.LRScheduler)
            put = self._put.get(identity(thing), set())
            names = [n for n in own if not (n in put or self._leaves_alone(n))] if alone else None
            self._hold(object_attributes.attributes(path, thing, names))
            self._items(path, own if names is None else {n: own[n] for n in names})
        self._slots(path, thing)
        for kind, enter in _CONTENTS:
            if issubclass(type(thing), kind):
                enter(self, path, thing)
        self._class_of(type(thing))

    def _slots(self, path: str, thing: object) -> None:
        kind = type(thing)
        if kind not in self._slotted:
            self._slotted[kind] = [slot for base in kind.__mro__ for slot in slots_of(base)]
        if not self._slotted[kind]:
            return
        if self._ran is not None and self._is_plain(kind):
            self._some_slots.append((path, thing, set()))
        else:
            self._hold(object_attributes.slots(path, thing, self._slotted[kind]))
            self._enter_slots(path, thing, set())

    def _enter_slots(self, path: str, thing: object, entered: set[Thing]) -> None:
        new = [(name, slot) for name, slot in self._slots_read(thing) if slot not in entered]
        entered.update(slot for _, slot in new)
        values = object_attributes.slots(path, thing, new).read()
        self._work.extend((f"{path}.{name}", v) for (name, _), v in zip(new, values, strict=True) if type(v) not in LEAVES)

    def _slots_read(self, thing: object) -> list[tuple[str, Thing]]:
        """The slots of an object that the call may have read."""
        read = self._names_read(thing)
        return [(name, slot) for name, slot in self._slotted[type(thing)] if read is None or slot.__name__ in read]

    def _is_plain(self, kind: type) -> bool:
        """Whether it is known which attributes are read of such objects: once the call has run, because that was noted; before,
        because only the user's code knows them, and names them. (Dataclasses are made to be handed on.)"""
        if self._ran is not None:
            return self._reads is not None and self._reads.knows(kind)
        if kind not in self._plain:
            foreign = {base for base in kind.__mro__ if not is_users_class(base)} - _SILENT_BASES
            self._plain[kind] = not (foreign or any(_FIELDS in vars(base) for base in kind.__mro__))
        return self._plain[kind]

    def _enter_attributes(self, path: str, thing: object, entered: set[str]) -> None:
        """Those attributes of an object that some code may read."""
        own = own_dict(thing) or {}
        if self._ran is None:
            wanted = {n for n in own if self._any_attribute or n in self.mentions.reads or n.startswith("__")}
            wanted |= {n for n in own.keys() & UNNAMED if callable(own[n])}
            if issubclass(type(thing), torch.nn.Module):
                wanted |= {n for n in own if n == "training" or n.startswith("_")}
        else:
            read = self._names_read(thing)
            wanted = {*own} if read is None else {n for n in read & own.keys() if not self._slightly(thing, n, own[n])}
        wanted -= entered | self._put.get(identity(thing), set())
        module = issubclass(type(thing), torch.nn.Module)
        filled = {n for n in wanted if self._is_only_filled(n, own[n], of_module=module)}
        wanted -= filled
        entered |= wanted
        for name in filled:
            self._fills(f"{path}.{name}", name, own[name])
        tables = self._reads.tables if self._reads is not None and self._names_read(thing) is not None else {}
        for name in wanted:
            self._may_be_table(own[name], tables.get(identity(own[name])))
        self._items(path, {n: own[n] for n in own if n in wanted})

    @property
    def _reads(self) -> Reads | None:
        """What the call has read of objects, if that is known."""
        return self._ran.reads if self._ran is not None and not self.mentions.looks_past else None

    def _hold_attributes(self, path: str, thing: object, entered: set[str]) -> None:
        """Those attributes of an object count."""
        own, module = own_dict(thing) or {}, issubclass(type(thing), torch.nn.Module)
        read = self._names_read(thing)
        if read is not None:  # also what is not there yet
            absent = read - own.keys() - self._put.get(identity(thing), set())
            if entered or absent:
                self._hold(object_attributes.named(path, thing, sorted(entered | absent), watched=module))
            return
        every = self._any_attribute if self._ran is None else identity(thing) not in self._put
        names = None if every else [n for n in own if n in entered]
        self._hold(object_attributes.attributes(path, thing, names, watched=module))

    def _names_read(self, thing: object) -> Set[str] | None:
        """The names of the attributes that the call has read of an object; None if it is not known, or may be any."""
        if self._reads is None:
            return None
        return self._keys_read(thing) if type(thing) is SimpleNamespace else self._reads.names(thing)

    @property
    def _any_attribute(self) -> bool:
        """Whether attributes of the user's objects or classes may be read that are not named."""
        ran, mentions = self._ran, self.mentions
        return mentions.looks_around if ran is None else ran.looks_around or mentions.looks_unseen

    def _slightly(self, thing: object, name: str, value: object) -> bool:
        """Whether only its kind counts of what an attribute holds."""
        ran, module = self._ran, issubclass(type(thing), torch.nn.Module)
        return ran is not None and ran.slightly(name, value, of_module=module) and not self._named_otherwise(name)

    def _is_only_filled(self, name: str, value: Any, *, of_module: bool = False) -> bool:
        """Whether an attribute, or a variable, holds a container to which code that ran only adds, if at all: a log of each
        tenth step."""
        if self._ran is None or type(value) not in _FILLED or identity(value) in self._put or self._named_otherwise(name):
            return False
        if not isinstance(value, dict) and self._ran.items_set(name) and not all(isinstance(v, torch.Tensor) for v in value):
            return False  # such an item may be set to what it is
        return self._ran.fills(name, of_module=of_module) and not (self._put and self._leads_to_put(value))

    def _leads_to_put(self, value: Thing) -> bool:
        """Whether the call puts something into this, or into what lies in it: what leads there has to be what it was."""
        key = identity(value)
        if key in self._put or not issubclass(type(value), (dict, list, deque)):
            return key in self._put
        if key not in self._leading:
            self._leading[key] = set()  # for the case that it contains itself
            items = dict.items(value) if isinstance(value, dict) else enumerate(containers.ordered("", value).read())
            self._leading[key] = {k for k, v in items if self._leads_to_put(v)}
        return bool(self._leading[key])

    def _fills(self, path: str, name: str, value: object) -> None:
        """Code only fills a container. A replay does not set an item to what it is: such ones have to be what they were."""
        keys = self._ran.items_set(name) if self._ran is not None else None
        if keys and isinstance(value, dict):
            self._set_items[identity(value)] = (path, value, keys)

    def _hold_items_set(self) -> None:
        """(A tensor that the call makes is another than that which is there.)"""
        for path, d, keys in self._set_items.values():
            there = [(k, v) for k, v in dict.items(d) if ANY_KEY in keys or k in keys]
            made = {k for k, v in there if isinstance(v, torch.Tensor) and identity(v) not in self.tensors}
            self._hold(containers.items(path, d, [k for k, v in there if k not in made and type(v) not in _FILLED]))

    def _named_otherwise(self, name: str) -> bool:
        """Whether what may read attributes of this name is not among the code that is known to have run."""
        return name in self.mentions.words or name in self._heard or name in self._resumed

    def _theirs(self, path: str, thing: object) -> None:
        """An object of torch's, of NumPy's or of the standard library's that is not known better: it has much that changes and
        does not count, so that only those of its attributes do which code of the user's names."""
        if self.whole:
            self._object(path, thing)
            return
        if isinstance(thing, WeakIdKeyDictionary):
            self.mentions.asks_identity = self.mentions.keyed_by_identity = True
            self._work.extend((path, key) for key in thing)
        own = own_dict(thing)
        if own is not None:
            self._opaque.append((path, thing, set()))
            functions = [x for x in own.values() if is_users_function(x) or is_users_class(type(x))]
            if type(thing).__module__.partition(".")[0] != "torch":  # a custom operator may run live
                self._fixed(path, functions)  # `numpy.vectorize` calls one

    def _weak(self, path: str, ref: weakref.ref[object]) -> None:
        self._hold(kept(path, lambda: (ref() is None,)))
        self._work.append((path, ref()))

    def _proxy(self, path: str, proxy: Thing) -> None:
        with suppress(ReferenceError, AttributeError):  # it may stand for nothing any more
            self._work.append((path, proxy.__init__.__self__))

    def _cell(self, path: str, cell: CellType) -> None:
        if identity(cell) in self._put:
            return
        place = object_attributes.cells(path, [cell], ["cell_contents"])
        self._hold(place)
        self._fixed(path, place.read())

    def _exception(self, path: str, e: BaseException) -> None:
        self._hold(kept(path, lambda: (*e.args, e.__cause__, e.__context__)))
        self._fixed(path, e.args)
        self._object(path, e)

    def _default(self, path: str, d: defaultdict[object, object]) -> None:
        self._object(path, d)
        self._hold(kept(path, lambda: (d.default_factory,)))
        self._work.append((path, d.default_factory))

    def _variable(self, path: str, variable: ContextVar[object]) -> None:
        self._hold(kept(path, lambda: (variable.get(MISSING),)))
        self._work.append((path, variable.get(MISSING)))

    def _cache(self, path: str, wrapper: object) -> None:
        """A function wrapped in `functools.lru_cache`."""
        self._object(path, wrapper)
        code = getattr(getattr(wrapper, "__wrapped__", None), "__code__", None)
        if code is not None and is_users(code.co_filename):
            self.caching.add(identity(code))
            place = containers.cache(path, wrapper)
            self._hold(place)
            self._fixed(path, place.read())
        elif tensors := kept_tensors(wrapper):  # of others, these count for as long as it keeps them
            self._hold(kept(path, lambda: _still_among(tensors, kept_tensors(wrapper))))
            self._fixed(path, tensors)

    def _recorded(self, path: str, recorded: Thing) -> None:
        """A recorded function: it runs as part of this one. The user may give it attributes, as any function."""
        attributes, own = recorded.__dict__, recorded.own

        def read() -> Reading:
            if attributes.keys() <= own:
                return ()
            return tuple([x for k, v in attributes.items() if k not in own for x in (k, v)])

        def restore(values: Reading) -> None:
            for k in [k for k in attributes if k not in own]:
                del attributes[k]
            attributes.update(zip(values[::2], values[1::2], strict=True))

        self._hold(Holder(path, read, restore))
        self._fixed(path, read()[1::2])
        self._work.append((path, recorded.__wrapped__))

    def _iterator(self, path: str, it: object) -> None:
        """One that is used up gives nothing more. What others have left nobody could put back."""
        if type(it) in _COUNTED and _used_up(it):
            self._hold(kept(path, lambda: (operator.length_hint(it),)))
        else:
            self.unwatchable.append(Unwatchable.iterating(path, it))

    # -- torch's objects

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self.modules.append(module)
        self.names[identity(module)] = path
        if averages(module):  # these are made anew by each capture that is given up, and recordings have what they need of them
            self._put[identity(module)] |= MADE_ANEW
            self._hold(kept(f"{path}'s averaging", partial(averages_by, module)))
        if (sharding := sharding_of(module)) is not None:
            self._work.append((f"{path}'s fully_shard", sharding))
        own = module.__dict__
        inner = [d for name, d in own.items() if name in _MODULES_OWN and type(d) in (dict, OrderedDict)]
        self._seen.add(identity(own.get("_non_persistent_buffers_set")))
        self._dicts(path, inner, watched=True)
        if self._is_plain(type(module)):
            self._selected.append((path, module, set()))
        else:
            put = self._put.get(identity(module), set())
            rest = {n: x for n, x in own.items() if n not in put}
            self._hold(object_attributes.attributes(path, module, [*rest] if put else None, watched=True))
            self._items(path, rest)
        self._slots(path, module)
        self._class_of(type(module))

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "param_groups"):  # it only holds others
            self._object(path, optimizer)
            return
        self.optimizers.append(optimizer)
        self._objects.append(optimizer)
        own = optimizer.__dict__
        if self._leaves_alone("state") and "state" in own:  # it zeroes gradients, say
            self._dicts(path, [d for k, d in own.items() if type(d) in (dict, OrderedDict) and k != "state"])
            self._hold(containers.without(path, own, "state"))
            # Nor does it step, perhaps: in the first of several backwards no learning rate is read.
            alone = {"state", "param_groups"} if self._leaves_alone("param_groups") else {"state"}
            self._items(path, {k: x for k, x in own.items() if k not in alone})
            self._seen.add(identity(own["state"]))
            if "param_groups" not in alone:
                self._param_groups(path, optimizer)
            return
        room = room_of(optimizer)
        if room is not None and any(identity(state) in self._put for state in own["state"].values()):
            room = None
        self._dicts(path, [d for k, d in own.items() if type(d) in (dict, OrderedDict) and not (room and k == "state")])
        self._hold(containers.dictionary(path, own) if room is None else containers.without(path, own, "state"))
        self._items(path, own)
        self._param_groups(path, optimizer)
        outer = optimizer.state if room is None else own["state"]
        self._seen.add(identity(outer))
        if room is None:
            self._hold(kept(f"{path}.state", lambda: (*optimizer.state.values(),)))
            self._dict(f"{path}.state", outer)
        else:
            self._hold(containers.nested(f"{path}.state", own, "state", room))
            self._items(f"{path}.state", outer)
        # One dictionary a parameter. Where nobody hears when a momentum is replaced by hand, all are looked at each time.
        states = [state for state in outer.values() if isinstance(state, dict)]
        if room is None:
            self._dicts(f"{path}.state", states)
            return
        self.met += states
        self._seen.update(map(identity, states))
        for state in filter(None, states):
            kept_there = [x for x in state.values() if isinstance(x, torch.Tensor) and type(x) is not torch.nn.Parameter]
            self.remembered |= {identity(x): room for t in kept_there for x in (t, *parts(t))}
            self._items(f"{path}.state", state)

    def _param_groups(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        self._is_group(groups)
        if isinstance(groups, list):
            self._hold(containers.ordered(f"{path}.param_groups", groups))
        self._class_of(type(optimizer))
        for i, group in enumerate(groups):
            self._group(f"{path}.param_groups[{i}]", group)

    def _leaves_alone(self, attribute: str) -> bool:
        """Whether the code that ran, torch's own included, reads no attribute of this name."""
        ran = self._ran
        if ran is None or self._any_attribute or ran.packages_look_around:
            return False
        return not (self._named_otherwise(attribute) or ran.names(attribute, of_module=True))

    def _shards(self, path: str, thing: object) -> None:
        """An object of `fully_shard`'s, and all that it leads to."""
        self.sharded = True
        own, whole = thing.__dict__, shards.gathered(thing)
        self._hold(shards.attributes(path, thing))
        if whole:
            name = own.get("_param_fqn") or path
            self._hold(shards.memory(name, whole))
            self.gathered += [(name, t) for t in whole]
            self._seen.update(map(identity, whole))
            self.met += whole
        left_out = ModuleType, Enum, torch.Stream
        self._items(path, {n: x for n, x in own.items() if not (isinstance(x, left_out) or shards.is_renewed(x))})

    def _stages(self, path: str, thing: object) -> None:
        """An object of a pipeline's: what it receives comes to memory of its own, and all that it keeps counts."""
        own = own_dict(thing)
        if own is None:
            self._object(path, thing)
            return
        self._hold(object_attributes.attributes(path, thing)._replace(owner=None))
        self._items(path, {n: x for n, x in own.items() if not isinstance(x, ModuleType)})

    def _scaler(self, path: str, scaler: torch.amp.GradScaler) -> None:
        """A gradient scaler. Its notes on each optimizer, which `step` makes, are dropped by `update` for an empty new
        dictionary: that is no change."""
        own = scaler.__dict__
        notes = own.get(_NOTES)
        if notes is None:  # it is switched off
            self._object(path, scaler)
            return
        self._objects.append(scaler)
        self._hold(containers.with_inner(path, own, _NOTES))
        self._items(path, {k: v for k, v in own.items() if k != _NOTES})
        for i, note in enumerate(notes.values()):
            self._items(f"{path}.{_NOTES}[{i}]", note.get("found_inf_per_device", {}))
        self._class_of(type(scaler))

    def _is_group(self, group: object) -> None:
        """An optimizer has this, a parameter group or a list of them."""
        self.lends_groups = self.lends_groups or (identity(group) in self._seen and identity(group) not in self._groups)
        self._groups.add(identity(group))
        self._seen.add(identity(group))
        self.met.append(group)

    def _group(self, path: str, group: dict[str, object]) -> None:
        """A parameter group: its hyper-parameters, those that may be followed each as a place of its own."""
        followed = (*LIVE, *CYCLED)
        put = self._put.get(identity(group), set())
        apart = put.union(followed)
        self._is_group(group)

        def read() -> Reading:
            return tuple([v for k, v in group.items() if k not in apart])

        def restore(values: tuple[object, ...]) -> None:
            group.update(zip([k for k in group if k not in apart], values, strict=True))

        def spot(i: int, _: object) -> Spot:
            return item(group, [k for k in group if k not in apart][i])

        def named(path: str, i: int, _: object) -> str:
            return f"{path}.{[k for k in group if k not in apart][i]}"

        self._hold(Holder(path, read, restore, named=named, tables=lambda: [group], spot=spot, inside=lambda: (group,)))
        for key in followed:
            if key in group:
                self._hold(_live_place(path, group, key))
        self._fixed(path, [v for k, v in group.items() if k not in put])

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        if type(tensor) is Borrowed:
            self.borrowed.append(path)
            return
        if not (has_memory(tensor) or is_shape(tensor)):
            self._without_memory(path, tensor)
            return
        self.tensors[identity(tensor)] = (path, tensor)
        self._hooks_of(path, tensor)
        if tensor.__dict__:
            self._attributed.append((path, tensor))

    def _hooks_of(self, path: str, tensor: torch.Tensor) -> None:
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            if hooks:
                self._fixed(f"{path}'s hook", hooks.values())

    def _without_memory(self, path: str, tensor: torch.Tensor) -> None:
        """A tensor that is no memory with a shape: what it is made of may be, and is what operators work with."""
        if consists_of_parts(tensor):
            self.made[identity(tensor)] = (path, tensor)
            self._hooks_of(path, tensor)
        else:
            self._odd.append((path, tensor))
        self._fixed(path, behind(tensor))
        names = inner_names(tensor)
        if not names:
            return
        own = tensor.__dict__
        if own.keys() - _MARKS:
            self._dict(path, own)
        else:
            self._attributed.append((path, tensor))
        slots = tuple([slot for base in type(tensor).__mro__ for slot in slots_of(base)])
        apart = tuple([name for name in names if name not in own and name not in dict(slots)])  # properties
        self._said[type(tensor), slots, apart].append((path, tensor))
        self._fixed(path, object_attributes.of_tensors(path, [(path, tensor)], slots, apart).read())

    def _what_tensors_say(self) -> None:
        """One place for each class, or a few: parameters, where they are many, what optimizers remember, and the rest."""
        for (_, slots, apart), found in self._said.items():
            groups: dict[Reading, list[tuple[str, torch.Tensor]]] = defaultdict(list)
            many = len(found) > FEW
            for path, t in found:
                room = self.remembered.get(identity(t)) if identity(t) not in self.shared else None
                groups[room, many and isinstance(t, torch.nn.Parameter)].append((path, t))
            for (room, watched), some in groups.items():
                self._hold(object_attributes.of_tensors("tensors", some, slots, apart)._replace(behind=room, watched=watched))

    def _enter_own(self, path: str, tensor: torch.Tensor) -> None:
        """Attributes that the user gave a tensor, or may give it."""
        own, mentions = tensor.__dict__, self.mentions
        if identity(own) not in self._seen and (mentions.looks_for_absent or not mentions.names.isdisjoint(own)):
            self._seen.add(identity(own))
            self.met.append(own)
            self._dict(path, own, watched=len(self.tensors) > FEW)


_MARKS = frozenset({"_is_param"})  # that torch makes for `Parameter`


def _live_place(path: str, group: dict[str, object], key: str) -> Holder:
    """One hyper-parameter that a replay may follow."""

    def restore(values: tuple[object, ...]) -> None:
        group[key] = values[0]

    return Holder(f"{path}.{key}", lambda: (group.get(key, MISSING),), restore, named=lambda path, *_: path,
                  dial=(identity(group), key), spot=lambda *_: item(group, key), inside=lambda: (group,))  # fmt: skip


def _is_frozen(array: Foreign) -> bool:
    """Whether nobody can write an array: neither it nor what it is a view of, unless nobody else has that."""
    kind = sys.modules["numpy"].ndarray
    while type(array) is kind and not array.flags.writeable:
        base = array.base
        if base is None:
            return bool(array.flags.owndata)
        alone = sys.getrefcount(base) <= _ITS_BASE
        if type(base) is kind and alone and base.base is None:
            return bool(base.flags.owndata)
        array = base
    return False


def _still_among(tensors: list[torch.Tensor], now: list[torch.Tensor]) -> Reading:
    """Which of these tensors are among those that are there now."""
    there = {identity(t) for t in now}
    return tuple([identity(t) in there for t in tensors])


def _used_up(it: object) -> bool:
    """Whether it has nothing left, and cannot get more: nobody else has its list, which could grow."""
    return operator.length_hint(it) == 0 and _references(it) <= _ITS_OWN


def _references(it: object) -> int:
    """To the list that an iterator goes through."""
    values = it.__reduce__()[1][0]
    return sys.getrefcount(values) if isinstance(values, list) else 0


_ITS_OWN = _references(iter([]))
_ITS_BASE = 3  # references to an array: a view's, a local variable's and that of the call which counts

_CONTENTS: list[tuple[type | tuple[type, ...], Enter]] = [
    (dict, Objects._dict),
    ((list, deque), Objects._list),
    (set, Objects._set),
    ((tuple, frozenset), Objects._tuple),
]
