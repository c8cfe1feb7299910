"""What a function can get at besides its arguments: found by walking, never by running it.

From the function outwards: closure cells, globals that its code names, default arguments, the object whose method it
is, and from there attributes, containers, modules, optimizers, other functions of the user's. Each place that holds
values becomes a `Holder`, which can be read again at C speed; tensors, optimizers, generators and the like are
collected on the way.

What is not entered: torch's, the standard library's and installed packages' *code* (their objects' attributes are),
Python modules that are not the user's, and C objects. Of a class or a module of the user's only those functions and values
are entered that some code of the user's names; so the walk goes on until no new names turn up. A tensor that a recorded call
reads and that was not found here has an unknown origin, and the recorder refuses it: it could be replaced without notice.
"""

from __future__ import annotations

import builtins
import functools
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from . import torch_private
from .introspection import (
    MISSING,
    asks_identity,
    contents,
    functions_of,
    has_attributes,
    is_users_class,
    names_in,
    parts,
    slots_of,
)
from .where import is_users

__all__ = ["FEW", "LIVE", "Holder", "Reach"]

LIVE = ("lr", "weight_decay")  # hyper-parameters of optimizers that a replay can follow (dials.py)
FEW = 64  # as many tensors, or optimizer states, are all looked at before each replay
_THREADS = frozenset({"Thread", "submit", "ThreadPoolExecutor", "start_new_thread", "run_in_executor", "to_thread",
                      "default_stream"})  # fmt: skip
_SETTINGS = frozenset({*LIVE, "param_groups", "state_dict", "get_last_lr", "defaults"})  # by which code reads them


class Holder(NamedTuple):
    """One place outside the arguments that holds values.

    `read` gives the values it holds now; `restore` puts such values back. `watched` says that the witness hears of
    changes, so that it need not be read before each replay; `dial`, that it is this (group identity, key) of an optimizer.
    """

    path: str
    read: Callable[[], tuple[Any, ...]]
    restore: Callable[[tuple[Any, ...]], None]
    watched: bool = False
    keyed: bool = False
    dial: tuple[int, str] | None = None

    def label(self, i: int, values: tuple[Any, ...]) -> str:
        """A name for the i-th of the values read."""
        if self.keyed:  # one dictionary or several: how many there are in it, the keys, the values
            at = 0
            while at < len(values):
                n = values[at]
                if at < i <= at + 2 * n:
                    key = values[at + 1 + (i - at - 1) % n]
                    return f"{self.path}.{key}" if isinstance(key, str) else f"{self.path}[{_label(key)}]"
                at += 1 + 2 * n
        return f"{self.path}[{i}]"


_ARRAY = 4096  # bytes of a NumPy array that are compared before each replay; larger ones are refused
_LIMIT = 50_000  # places; a function that reaches more is not recorded
_SAMPLES: list[Any] = [iter(()), iter([]), iter({}), iter(set()), iter(range(0)), iter({}.items()), iter({}.values())]
_ITERATORS = (GeneratorType, *map(type, _SAMPLES), zip, map,
              filter, enumerate)  # fmt: skip
_LEAVES = frozenset({int, float, str, bytes, bool, type(None), complex, torch.dtype, torch.device, torch.Size})
# Methods of a class of the user's that are called without being named.
_UNNAMED = ("forward", "backward", "setup_context", "jvp", "vmap", "step")


class Reach:
    """Everything found by walking from `roots` (functions, modules, optimizers...), each thing once."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.holders: list[Holder] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.generators: list[torch.Generator] = []
        self.host_rngs: list[Any] = []
        self.iterators: list[str] = []
        self.arrays: list[str] = []
        self.compiles_a_step = False
        self.asks_identity = False  # whether some code may ask which object it has
        self.truncated = False  # there was more than could be looked at
        self._seen: set[int] = set()
        self._classes: set[int] = set()
        self._keep: list[Any] = []  # ids in _seen stay valid
        self._names: set[str] = set()  # every name that the user's code mentions
        self._kinds: dict[type, list[type]] = {}  # classes met, each with those of its bases that are the user's
        self._ways: dict[type, _Enter] = {}  # how to enter an object of this type
        self._attributed: list[tuple[str, torch.Tensor]] = []
        self._python_modules: dict[int, tuple[str, ModuleType, set[str]]] = {}
        self._work: deque[tuple[str, Any]] = deque(roots)
        self._work.extend(("a hook", hook) for hook in (*torch_private.module_hooks(), *torch_private.optimizer_hooks()))
        self._functions: list[FunctionType] = []
        self._objects: list[Any] = []
        self._drain()
        self._whole()

    @property
    def looks_at_gradients(self) -> bool:
        """Whether the code may decide something by whether a gradient is there, as optimizers do."""
        return bool(self.optimizers) or any(word in name for name in self._names for word in ("grad", "step", "clip"))

    @property
    def reads_settings(self) -> bool:
        """Whether the user's own code may look at the settings of an optimizer."""
        return not self._names.isdisjoint(_SETTINGS)

    @property
    def orders_streams(self) -> bool:
        """Whether the user's own code may rely on which stream is current, with threads of its own for instance."""
        return not self._names.isdisjoint(_THREADS)

    @property
    def reads_gradients(self) -> bool:
        """Whether the user's own code may look at a gradient."""
        return "grad" in self._names

    def _whole(self) -> None:
        """What all functions, objects and modules have in common, each as one place."""
        functions, objects, modules = self._functions, self._objects, self.modules
        if functions:
            self._hold("code", lambda: tuple([x for f in functions for x in (*parts(f), len(f.__dict__))]), _leave)
        if objects:
            self._hold("class", lambda: tuple([o.__class__ for o in objects]), _leave)
        if modules:
            self._hold("class", lambda: tuple([m.__class__ for m in modules]), _leave, watched=True)
            self._hold("global hooks", torch_private.module_hooks, _leave)
            self._hold("settings of torch.nn", torch_private.module_settings, _leave)
        if self.optimizers:
            self._hold("hooks of all optimizers", torch_private.optimizer_hooks, _leave)

    # -- walking

    def _drain(self) -> None:
        before = (-1, -1)
        while before != (len(self._seen), len(self._names)):  # what is named may turn up later than what has the name
            before = (len(self._seen), len(self._names))
            while self._work and len(self.holders) < _LIMIT:
                self._visit(*self._work.popleft())
            for bases in list(self._kinds.values()):
                for base in bases:
                    self._enter_methods(base)
            for path, module, held in list(self._python_modules.values()):
                self._members(path, module, held)
            for path, tensor in self._attributed:
                self._attributes(path, tensor)
        self.truncated = bool(self._work)

    def _visit(self, path: str, thing: Any) -> None:
        kind = type(thing)
        if kind in _LEAVES or id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        self._keep.append(thing)
        enter = self._ways.get(kind)
        if enter is None:
            enter = self._ways[kind] = _way(thing)
        enter(self, path, thing)

    def _kind(self, path: str, kind: type) -> None:
        if is_users_class(kind):
            self._class_of(kind)
            if is_users_class(type(kind)):
                self._class_of(type(kind))

    def _class_of(self, kind: type) -> None:
        """Objects of this class are in reach: its methods may run."""
        if kind not in self._kinds:
            self._kinds[kind] = [base for base in kind.__mro__ if is_users_class(base)]

    def _recorded(self, path: str, recorded: Any) -> None:
        """A recorded function: it runs as part of this one. The user may give it attributes, as any function."""
        attributes, own = recorded.__dict__, recorded.own

        def read() -> tuple[Any, ...]:
            return tuple([x for k, v in attributes.items() if k not in own for x in (k, v)])

        def restore(values: tuple[Any, ...]) -> None:
            for k in [k for k in attributes if k not in own]:
                del attributes[k]
            attributes.update(zip(values[::2], values[1::2], strict=True))

        self._hold(path, read, restore)
        self._fixed(path, read()[1::2])
        self._work.append((path, recorded.__wrapped__))

    def _hold(self, path: str, read: Any, restore: Any, *, watched: bool = False, keyed: bool = False) -> None:
        self.holders.append(Holder(path, read, restore, watched, keyed))

    def _dict(self, path: str, d: dict[Any, Any], *, watched: bool = False) -> None:
        def restore(values: tuple[Any, ...]) -> None:
            d.clear()
            d.update(_pairs(values, 0))

        self._hold(path, lambda: (len(d), *d, *d.values()), restore, watched=watched, keyed=True)
        self._items(path, d)

    def _items(self, path: str, d: dict[Any, Any]) -> None:
        seen, work = self._seen, self._work
        for k, v in list(d.items()):
            if type(v) not in _LEAVES and id(v) not in seen:
                work.append((f"{path}.{k}" if isinstance(k, str) else f"{path}[{_label(k)}]", v))
            if type(k) is not str and not isinstance(k, torch.Tensor):
                work.append((path, k))

    def _dicts(self, path: str, dicts: list[dict[Any, Any]], *, watched: bool) -> None:
        """Several dictionaries, most of them empty or small, as one place: reading it is cheaper than reading each."""
        dicts = [d for d in dicts if id(d) not in self._seen]

        def read() -> tuple[Any, ...]:
            return tuple([x for d in dicts for x in (len(d), *d, *d.values())] if any(dicts) else ())

        def restore(values: tuple[Any, ...]) -> None:
            at = 0
            for d in dicts:
                d.clear()
                d.update(_pairs(values, at))
                at += 1 + 2 * len(d)

        self._hold(path, read, restore, watched=watched, keyed=True)
        self._keep += dicts
        self._seen.update(map(id, dicts))
        for d in filter(None, dicts):
            self._items(path, d)

    def _list(self, path: str, values: list[Any]) -> None:
        self._hold(path, lambda: tuple(values), lambda saved: values.__setitem__(slice(None), saved))
        self._fixed(path, values)

    def _deque(self, path: str, values: deque[Any]) -> None:
        def restore(saved: tuple[Any, ...]) -> None:
            values.clear()
            values.extend(saved)

        self._hold(path, lambda: tuple(values), restore)
        self._fixed(path, values)
        self._class_of(type(values))

    def _set(self, path: str, values: set[Any]) -> None:
        def restore(saved: tuple[Any, ...]) -> None:
            values.clear()
            values.update(saved)

        self._hold(path, lambda: tuple(values), restore)
        self._fixed(path, values)
        self._class_of(type(values))

    def _fixed(self, path: str, values: Iterable[Any]) -> None:
        self._work.extend((f"{path}[{i}]", v) for i, v in enumerate(values) if type(v) not in _LEAVES)

    def _tuple(self, path: str, values: Any) -> None:
        self._fixed(path, values)
        if type(values) not in (tuple, frozenset):  # a subclass, which may have methods, and attributes of its own
            self._class_of(type(values))
            if getattr(values, "__dict__", None):
                self._dict(path, values.__dict__)

    def _object(self, path: str, thing: Any) -> None:
        if isinstance(getattr(thing, "__dict__", None), dict):
            self._dict(path, thing.__dict__)
            self._objects.append(thing)
        slots = [s for c in type(thing).__mro__ for s in slots_of(c)]
        if slots:

            def read() -> tuple[Any, ...]:
                return tuple(getattr(thing, s, MISSING) for s in slots)

            def restore(values: tuple[Any, ...]) -> None:
                for s, v in zip(slots, values, strict=True):
                    if v is not MISSING:
                        object.__setattr__(thing, s, v)

            self._hold(path, read, restore)
            self._fixed(path, read())
        if isinstance(thing, (dict, list)):  # a subclass with contents of its own
            enter: Any = self._dict if isinstance(thing, dict) else self._list
            enter(path, thing)
        self._class_of(type(thing))

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self.modules.append(module)
        own = module.__dict__
        inner = [d for name, d in own.items() if type(d) in (dict, OrderedDict) and name.startswith("_")]
        self._seen.add(id(own.get("_non_persistent_buffers_set")))
        self._dicts(path, [own, *inner], watched=True)
        self._class_of(type(module))

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)
        own = optimizer.__dict__
        self._dicts(path, [own, *(d for d in own.values() if type(d) in (dict, OrderedDict))], watched=False)
        self._seen.add(id(optimizer.state))
        self._hold(f"{path}.state", lambda: (*optimizer.state.values(),), _leave)
        self._dict(f"{path}.state", optimizer.state, watched=True)
        self._class_of(type(optimizer))
        for i, group in enumerate(optimizer.param_groups):
            self._group(f"{path}.param_groups[{i}]", group)
        # One dictionary a parameter: where there are many, they are looked at in turn.
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        self._dicts(f"{path}.state", states, watched=len(states) > FEW)

    def _group(self, path: str, group: dict[str, Any]) -> None:
        """A parameter group: its hyper-parameters, the live ones each as a place of its own."""
        self._seen.add(id(group))
        self._keep.append(group)

        def read() -> tuple[Any, ...]:
            return tuple([v for k, v in group.items() if k not in LIVE])

        def restore(values: tuple[Any, ...]) -> None:
            group.update(zip([k for k in group if k not in LIVE], values, strict=True))

        self._hold(path, read, restore)
        for key in LIVE:
            if key in group:
                self.holders.append(_live_place(path, group, key))
        self._fixed(path, group.values())

    def _array(self, path: str, array: Any) -> None:
        if array.nbytes > _ARRAY:
            self.arrays.append(path)
        else:
            before = array.copy()
            self._hold(path, lambda: (array.shape, array.dtype.str, array.tobytes()), lambda _: array.__setitem__(..., before))

    def _bytes(self, path: str, values: bytearray) -> None:
        if len(values) > _ARRAY:
            self.arrays.append(path)
        else:
            self._hold(path, lambda: (bytes(values),), lambda saved: values.__setitem__(slice(None), saved[0]))

    def _reference(self, path: str, ref: weakref.ref[Any]) -> None:
        self._hold(path, lambda: (ref() is None,), _leave)
        self._work.append((path, ref()))

    def _view(self, path: str, view: MappingProxyType[Any, Any]) -> None:
        self._hold(path, lambda: (len(view), *view, *view.values()), _leave, keyed=True)
        self._fixed(path, view.values())

    def _builtin(self, path: str, f: BuiltinFunctionType | MethodWrapperType) -> None:
        """A method of an object (`append = results.append`), unless it is a function of a module."""
        if not isinstance(f.__self__, (ModuleType, type)):
            self._work.append((path, f.__self__))

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        self.tensors[id(tensor)] = (path, tensor)
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            if hooks:
                self._fixed(f"{path}'s hook", hooks.values())
        if getattr(tensor, "__dict__", None):
            self._attributed.append((path, tensor))

    def _attributes(self, path: str, tensor: torch.Tensor) -> None:
        if id(tensor.__dict__) not in self._seen and not self._names.isdisjoint(tensor.__dict__):
            self._seen.add(id(tensor.__dict__))
            self._dict(path, tensor.__dict__, watched=len(self.tensors) > FEW)

    def _method(self, path: str, method: MethodType) -> None:
        self._work.append((path, method.__func__))
        self._work.append(("self", method.__self__))

    def _partial(self, path: str, p: functools.partial[Any]) -> None:
        self._work.append((path, p.func))
        self._fixed(path, p.args)
        self._dict(path, p.keywords)

    def _function(self, path: str, f: FunctionType) -> None:
        names = f.__code__.co_freevars
        cells = f.__closure__ or ()
        if cells:
            self._cells(f.__qualname__, names, cells)
        for inner in ("__wrapped__", "_torchdynamo_orig_callable"):
            if inner in f.__dict__:
                self._work.append((path, f.__dict__[inner]))
        compiled = f.__dict__.get("_torchdynamo_orig_callable")
        code = getattr(compiled, "__code__", None)
        if getattr(compiled, "__name__", "") == "step" or (code is not None and "step" in names_in(code)):
            self.compiles_a_step = True
        if not is_users(f.__code__.co_filename):
            return
        self._functions.append(f)
        self._fixed(f"{f.__qualname__}'s default", (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()))
        if f.__kwdefaults__:
            self._dict(f"{f.__qualname__}'s defaults", f.__kwdefaults__)
        if f.__dict__.keys() - {"__wrapped__"} and f.__qualname__.partition(".")[0] != "live":
            self._dict(f.__qualname__, f.__dict__)
        named = names_in(f.__code__)
        self._names |= named
        self.asks_identity = self.asks_identity or asks_identity(f.__code__)
        package = f.__globals__.get("__package__") or ""
        parents = [package.rsplit(".", n)[0] for n in range(package.count(".") + 1)] if package else []
        candidates = named | {f"{parent}.{n}" for parent in parents for n in named}
        for name in candidates & sys.modules.keys():
            self._module_of_the_user(name, sys.modules[name])  # `import` inside the function
        self._globals(f.__globals__, sorted(named & f.__globals__.keys()))
        missing = sorted(n for n in named & vars(builtins).keys() if n not in f.__globals__)
        if missing:  # a global that appears later may shadow a builtin
            g = f.__globals__
            self._hold("globals", lambda: tuple([n in g for n in missing]), _leave)

    def _cells(self, owner: str, names: tuple[str, ...], cells: tuple[CellType, ...]) -> None:
        def read() -> tuple[Any, ...]:
            return tuple(map(contents, cells))

        def restore(values: tuple[Any, ...]) -> None:
            for cell, value in zip(cells, values, strict=True):
                if value is not MISSING:
                    cell.cell_contents = value

        self._hold(f"{owner}'s closure", read, restore)
        self._work.extend(zip(names, read(), strict=True))

    def _globals(self, space: dict[str, Any], names: list[str]) -> None:
        if not names:
            return

        def read() -> tuple[Any, ...]:
            return tuple([space.get(n, MISSING) for n in names])

        def restore(values: tuple[Any, ...]) -> None:
            space.update((n, v) for n, v in zip(names, values, strict=True) if v is not MISSING)

        self._hold("globals", read, restore)
        self._work.extend((name, space.get(name)) for name in names)

    def _module_of_the_user(self, path: str, module: ModuleType) -> None:
        made = module.__spec__ is None and module.__name__ not in sys.builtin_module_names  # ModuleType("x")
        if made or is_users(getattr(module, "__file__", None) or "<frozen>"):
            self._keep.append(module)
            self._python_modules.setdefault(id(module), (path, module, set()))

    def _members(self, path: str, module: ModuleType, held: set[str]) -> None:
        """Those attributes of a Python module that some code names and that are not held yet."""
        new = (self._names & module.__dict__.keys()) - held
        held |= new
        self._globals(module.__dict__, sorted(new))

    def _enter_methods(self, kind: type) -> None:
        """Those functions of a class of the user's that some code names."""
        if id(kind) not in self._classes:
            self._classes.add(id(kind))
            self._keep.append(kind)
            self._class(kind.__qualname__, kind)
        for name, member in list(vars(kind).items()):
            if name in self._names or name in _UNNAMED or name.startswith("__"):
                for f in functions_of(member):
                    self._visit(f"{kind.__qualname__}.{name}", f)

    def _class(self, path: str, kind: type) -> None:
        space = vars(kind)

        def restore(values: tuple[Any, ...]) -> None:
            before = dict(_pairs(values, 0))
            for n, v in before.items():
                if space.get(n, MISSING) is not v:
                    setattr(kind, n, v)
            for n in space.keys() - before.keys():
                delattr(kind, n)

        self._hold(path, lambda: (len(space), *space, *space.values()), restore, keyed=True)
        names = [n for n, v in space.items() if not n.startswith("__") and not functions_of(v)]
        self._work.extend((f"{path}.{n}", space[n]) for n in names)


def _live_place(path: str, group: dict[str, Any], key: str) -> Holder:
    """One hyper-parameter that a replay may follow."""

    def restore(values: tuple[Any, ...]) -> None:
        group[key] = values[0]

    return Holder(f"{path}.{key}", lambda: (group.get(key, MISSING),), restore, dial=(id(group), key))


def _pairs(values: tuple[Any, ...], at: int) -> Iterator[tuple[Any, Any]]:
    """The items of the dictionary that was read into `values`, from `at` on."""
    n = values[at] if values else 0
    return zip(values[at + 1 : at + 1 + n], values[at + 1 + n : at + 1 + 2 * n], strict=True)


def _label(key: Any) -> str:
    """A dictionary key in a name for people. (Never the repr of a tensor: it would read its values.)"""
    return repr(key)[:40] if isinstance(key, (int, float, tuple, bytes)) else type(key).__name__


def _leave(_: tuple[Any, ...]) -> None:
    """For places whose change a capture does not undo: code, classes, hooks of all modules."""


_Enter = Callable[[Reach, str, Any], None]


def _exactly(kind: type, enter: _Enter) -> tuple[Any, _Enter]:
    return (kind, lambda reach, path, x: enter(reach, path, x) if type(x) is kind else reach._object(path, x))


_WAYS: list[tuple[Any, _Enter]] = [
    (type, Reach._kind),
    (ModuleType, Reach._module_of_the_user),
    (torch.Tensor, Reach._tensor),
    (torch.nn.Module, Reach._module),
    (torch.optim.Optimizer, Reach._optimizer),
    (torch.Generator, lambda reach, path, g: reach.generators.append(g)),
    (random.SystemRandom, lambda reach, path, r: None),  # it has no state
    (random.Random, lambda reach, path, r: reach.host_rngs.append(r)),
    (FunctionType, Reach._function),
    (MethodType, Reach._method),
    (functools.partial, Reach._partial),
    ((BuiltinFunctionType, MethodWrapperType), Reach._builtin),
    (weakref.ref, Reach._reference),
    (MappingProxyType, Reach._view),
    (bytearray, Reach._bytes),
    (_ITERATORS, lambda reach, path, it: reach.iterators.append(path)),
    _exactly(dict, Reach._dict),
    _exactly(list, Reach._list),
    (deque, Reach._deque),
    (set, Reach._set),
    ((tuple, frozenset), Reach._tuple),
]


def _way(thing: Any) -> _Enter:
    """How to enter things of this type."""
    for kinds, enter in _WAYS:
        if isinstance(thing, kinds):
            return enter
    kind = type(thing)
    if kind.__module__.startswith("phonograph.") and hasattr(thing, "__wrapped__"):
        return Reach._recorded
    if hasattr(kind, "__next__"):
        return lambda reach, path, it: reach.iterators.append(path)
    if kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in ("Generator", "RandomState"):
        return lambda reach, path, rng: reach.host_rngs.append(rng)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return Reach._array
    return Reach._object if has_attributes(thing) else lambda reach, path, thing: None
