"""What a function can get at besides its arguments: found by walking, never by running it.

From the function outwards: closure cells, globals that its code names, default arguments, the object whose method it
is, and from there attributes, containers, modules, optimizers (`objects`), other functions of the user's.

What is not entered: torch's, the standard library's and installed packages' *code* (their objects' attributes are), Python
modules that are not the user's, and C objects. Of a class, a module or an object, only those functions and values are entered
that some code of the user's names; so the walk goes on until no new names turn up. (They can fall short: `names_in_code.py`.) A
tensor that a recorded call reads and that was not found here has an unknown origin, and the recorder refuses it: it could be
replaced without notice.
"""

from __future__ import annotations

import abc
import builtins
import functools
import operator
import os
import random
import sys
import threading
import types
import typing
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Set
from contextvars import ContextVar
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)

import torch

from .._torch import dynamo as torch_dynamo
from .._torch import modules as torch_modules
from .._torch import process_groups as torch_process_groups
from .._torch import tensors as torch_tensors
from .._torch.dynamic import Leaves, Reading, Table, Thing
from .._torch.modes import without_subclasses
from .._torch.native import Fact
from ..call.live_function import is_marked
from ..errors import Overlooked, Refusal
from ..python import containers, object_attributes
from ..python.bytecode import Used, names_in, words_of
from ..python.dict_versions import of_class
from ..python.executed_code import Ran, is_resumed
from ..python.holders import Holder, Spot, kept
from ..python.identity import identity, reading_parts
from ..python.introspection import MISSING, functions_of, functions_with, has_attributes, is_anothers, is_users_class, own_dict
from ..python.memos import MEMO
from ..python.names_in_code import CONSTRUCTORS, EVALUATED
from ..python.origin import is_ours, is_users, users_line, written_out
from ..python.read_gate import behind_gate
from ..python.subscripts import TABLES, keys_of_variables
from .attribute_effects import Left, Put, kinds
from .carried_state import Carried, is_filled
from .objects import BUFFERS, BUILTINS, LEAVES, LIMIT, UNNAMED, Enter, Objects, has_more
from .unwatchable import Found

__all__ = ["Reach"]

_SAMPLES: list[object] = [iter(()), iter([]), iter({}), iter(set()), iter(range(0)), iter({}.items()), iter({}.values())]
_ITERATORS = (GeneratorType, CoroutineType, AsyncGeneratorType, *map(type, _SAMPLES), zip, map, filter, enumerate)
_MEMBERS = (staticmethod, classmethod, property)
_ALIASES = (types.GenericAlias, types.UnionType, type(typing.List[int]))  # noqa: UP006 - which is no list[int]
# What every module has.
_MODULES_NAMES = frozenset({"__name__", "__doc__", "__loader__", "__spec__", "__package__", "__file__", "__cached__",
                            "__builtins__", "__path__", "__annotations__", "__conditional_annotations__"})  # fmt: skip
# What every class has, and no object's method.
_UNCALLED = frozenset({"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__annotations__",
                       "__annotate__", "__annotations_cache__", "__annotate_func__", "__orig_bases__", "__parameters__",
                       "__abstractmethods__", "_abc_impl", "__match_args__", "__dataclass_fields__", "__dataclass_params__",
                       "__firstlineno__", "__static_attributes__", "__type_params__"})  # fmt: skip
_GATED = ("__getattribute__", "forward")  # where something may stand in a class for the time of a call
# What Python keeps in a class once an object of it is copied or pickled (as results are, by us), or its annotations are read.
_KEPT_BY_PYTHON = frozenset({"__slotnames__", "__annotations_cache__"})

_bases_of, _name_of = operator.attrgetter("__bases__"), operator.attrgetter("__name__")


class Reach(Objects):
    """Everything found by walking from `roots` (functions, modules, optimizers...), each thing once. With the code that `ran`,
    those attributes of the user's objects are left out that it cannot have read, and what it has `left`."""

    def __init__(
        self, roots: Iterable[tuple[str, object]], heard: Iterable[str] = (), ran: Ran | None = None, left: Left | None = None
    ) -> None:  # fmt: skip
        super().__init__(frozenset(heard), ran, left)
        self._roots = (*roots,)
        self._unbound: set[int] = set()  # the identities of methods that did not run
        self.compiles_a_step = False
        self.marked = False  # it has met functions that are marked `@pg.live`
        self.truncated = False  # there was more than could be looked at
        self._ways: dict[type, Enter] = {}  # how to enter an object of this type
        self._functions: list[FunctionType] = []
        self.cells: set[int] = set()  # identities of variables, of which each is one place in however many closures
        self._classes: set[int] = set()
        self._kinds: dict[type, list[type]] = {}  # classes met, each with those of its bases that are the user's
        self._given: dict[type, list[tuple[str, FunctionType]]] = {}  # and functions of the user's in these
        self._known: dict[type, set[str]] = {}  # and the names that its other bases know
        self._class_places: list[tuple[str, type]] = []
        self._descended: set[int] = set()  # classes whose subclasses are held
        self._python_modules: dict[int, tuple[ModuleType, set[str]]] = {}
        self._spaces: dict[int, tuple[dict[str, object], set[str]]] = {}  # the globals of functions
        self._module_named = False  # whether some code may read attributes that it does not name, of a module...
        self._self_around = False  # ...of a method's own object...
        self._modules_flow = False  # ...or of what may be one: whether any is handed on, and not only named
        self._looked_far = False
        self._far: set[int] = set()  # those of them to which nothing leads but their name
        self._imports = False
        # Variables of modules that no code names so far, and whether they are to be entered as soon as some does (functions of
        # modules that are far only if they run).
        self._unentered: list[tuple[str, object, bool]] = []
        self._others: dict[int, ModuleType | type] = {}  # modules and classes that are not the user's
        self._work.extend(self._roots)
        self._work.extend(("a hook", hook) for hook in (*torch_modules.module_hooks(), *torch_modules.optimizer_hooks()))
        self._drain()
        self._whole()

    def _whole(self) -> None:
        """What all functions, objects and modules have in common, each as one place."""
        self._what_tensors_say()
        functions, objects, modules = self._functions, self._objects, self.modules
        kinds = [base for bases in self._kinds.values() for base in bases]
        if functions:
            given = [set(f.__dict__) for f in functions]

            def restore(_: tuple[object, ...]) -> None:
                for f, names in zip(functions, given, strict=True):
                    for name in f.__dict__.keys() - names:
                        del f.__dict__[name]

            def facts() -> list[Fact]:
                return [("function", f) for f in functions]

            self._hold(Holder("code", reading_parts(functions), restore, facts=facts))
        if objects or kinds:
            self._hold(kept("class", lambda: (*map(type, objects), *map(_bases_of, kinds), *map(_name_of, kinds))))
        if any(isinstance(k, abc.ABCMeta) for k in kinds) and self.mentions.asks_kind:
            self._hold(kept("registered classes", lambda: (abc.get_cache_token(),)))
        if self._odd:
            self._hold(_kinds(self._odd))
        if modules:
            self._hold(kept("class", lambda: tuple(map(type, modules)))._replace(watched=True))
            self._hold(kept("global hooks", torch_modules.module_hooks, torch_modules.hooks_of_modules))
            self._hold(kept("settings of torch.nn", torch_modules.module_settings))
        if self.optimizers:
            self._hold(kept("hooks of all optimizers", torch_modules.optimizer_hooks, torch_modules.hooks_of_optimizers))
        environment = getattr(os.environ, "_data", None)
        if environment is not None and not self.mentions.names.isdisjoint({"environ", "getenv"}):
            place = kept("os.environ", lambda: (len(environment), *environment, *environment.values()))
            self._hold(place._replace(named=containers.keyed))

    def of_what_ran(self, ran: Ran, left: Left, carried: Carried) -> Reach | None:
        """The same walk again after a call, in which this code ran. None if it might read more than it names, or what the call
        has `left`, but for what is `carried`."""
        if ran.reflects:
            return None
        arguments = [Put(str(name), of, name) for of, name in carried.places()]
        tables = any(h.contents is not None and type(h.contents.now()) in TABLES for h in self.holders)
        noted = ran.reads is not None and any(map(ran.reads.knows, {*map(type, self._objects)}))
        states = self.optimizers and not ran.names("state", of_module=True)
        some = self._selected or self.unwatchable or noted or tables
        narrows = some or any(map(has_more, self.modules)) or any(self._kinds.values()) or states
        if not (left.paths or arguments or narrows):
            return self  # nothing is in reach of which it would leave out anything
        part = Reach(self._roots, self._heard, ran, left._replace(puts=(*left.puts, *arguments)))
        items = [*map(identity, left.items)]
        puts = [put for put in (*left.puts, *arguments) if not (identity(put) in items or is_filled(put.of))]
        names = [put.name for put in puts if not carried.has(put.of, put.name)]
        names += [*(count.name for count in left.counts), *left.lists]
        reads = part._any_attribute or any(map(part._named_otherwise, names))
        return None if (puts or left.counts or left.lists) and reads else part

    # -- walking

    def _drain(self) -> None:
        before = (-1, -1)
        # What is named may turn up later than what has the name.
        while (self._work or self._called_groups or before != (len(self._seen), len(self.mentions.names))) and (
            len(self.holders) < LIMIT
        ):
            before = (len(self._seen), len(self.mentions.names))
            self._work.extend(entry for entry in self._called_groups if identity(entry[1]) not in self._seen)
            self._called_groups.clear()
            while self._work and len(self.holders) < LIMIT:
                self._visit(*self._work.popleft())
            if self.mentions.gets_modules and not self._looked_far:
                self._looked_far, near = True, set(self._python_modules)
                for name, module in list(sys.modules.items()):
                    self._module_of_the_user(name, module)
                self._far = self._python_modules.keys() - near
            for kind, bases in list(self._kinds.items()):
                self._enter_methods(kind, bases)
                self._enter_given_methods(kind)
            modules = [module for module, _ in self._python_modules.values()]
            by_self = self._self_around and any(behind_gate(type(module)) is not ModuleType for module in modules)
            flow = self._modules_flow or self.mentions.gets_modules
            any_module = self._module_named or by_self or (self.mentions.looks_around_unknown and flow)
            for key, (module, held) in list(self._python_modules.items()):
                self._members(own_dict(module) or {}, held, any_module, deep=key not in self._far)
            if self.mentions.names_globals:
                of_module = self.mentions.looks_around_unknown and self.mentions.gets_modules
                for space, held in list(self._spaces.values()):
                    self._members(space, held, self.mentions.computes_globals or of_module)
            filled, self._filled = self._filled, []
            for name, value in filled:
                self._variable_of(name, value, {name})
            left, self._unentered = self._unentered, []
            for name, value, by_name in left:
                if (by_name and name in self.mentions.names) or self._runs_alike(value):
                    self._variable_of(name, value, self.mentions.bare)
                else:
                    self._unentered.append((name, value, by_name))
            for other in self._others.values():
                found = [(n, vars(other)[n]) for n in self.mentions.names & vars(other).keys()]
                for name, value in found:
                    if issubclass(type(value), torch.Tensor):
                        self._visit(name, value)
            for path, thing, entered in self._selected:
                self._enter_attributes(path, thing, entered)
            for path, thing, entered in self._some_slots:
                self._enter_slots(path, thing, entered)
            for path, table, taken in self._tables:
                keys = self._keys_read(table)
                taking = dict.keys(table) - taken if keys is None else (keys & dict.keys(table)) - taken
                taken |= taking
                self._items(path, {k: v for k, v in dict.items(table) if k in taking})
            for path, thing, entered in self._opaque:
                own = own_dict(thing) or {}
                new = (own.keys() & self.mentions.reads) - entered
                entered |= new
                self._items(path, {n: own[n] for n in own if n in new})
            for path, tensor in self.all_tensors if self.mentions.looks_for_absent else self._attributed:
                self._enter_own(path, tensor)
        self.truncated = bool(self._work)
        for path, thing, entered in self._opaque:
            if entered or self.mentions.looks_for_absent:
                self._hold(object_attributes.some(path, thing, self.mentions.reads))
        for path, thing, _ in self._some_slots:
            self._hold(object_attributes.slots(path, thing, self._slots_read(thing)))
        for path, thing, entered in self._selected:
            self._hold_attributes(path, thing, entered)
            if some := [n for n, value in (own_dict(thing) or {}).items() if self._slightly(thing, n, value)]:
                self._hold(kinds(path, thing, some))
        self._hold_items_set()
        for path, kind in self._class_places:
            self._hold_class(path, kind)
        for path, table, _ in self._tables:
            keys = self._keys_read(table)
            self._hold(containers.dictionary(path, table) if keys is None else containers.items(path, table, keys))

    @property
    def all_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Those that have memory, and those that consist of such, with their names."""
        return [*self.tensors.values(), *self.made.values()]

    @property
    def spaces(self) -> list[Table]:
        """The global variables of the user's functions, and of their modules."""
        modules = (own_dict(module) or {} for module, _ in self._python_modules.values())
        return [*(space for space, _ in self._spaces.values()), *modules]

    @property
    def found(self) -> Found:
        """By which ways code gets at what the walk has met."""
        hooks = *torch_modules.module_hooks(), *torch_modules.optimizer_hooks()
        return Found(
            self.unwatchable,
            self.met,
            roots=[*(thing for _, thing in self._roots), *hooks],
            classes=[kind for _, kind in self._class_places],
            spaces=[space for space, _ in self._spaces.values()],
            modules=[own_dict(module) or {} for module, _ in self._python_modules.values()],
            modules_flow=self._modules_flow or self.mentions.gets_modules,
        )

    @property
    def looks_at_gradients(self) -> bool:
        """Whether something may be decided by whether a gradient is there."""
        return bool(self.optimizers) or self.mentions.minds_gradients

    @property
    def trained_elsewhere(self) -> str:
        """The name of a tensor without memory that may have a gradient, which is not followed; "" if there is none."""
        with without_subclasses():
            trained = [(path, [type(t)]) for path, t in self._odd if t.requires_grad]
        say, fake = torch_tensors.say_themselves, torch_tensors.are_fake
        return next((path for path, kind in trained if say(kind) and not fake(kind)), "")

    def gives(self, name: str) -> bool:
        """Whether some object or class of the user's has an attribute of this name."""
        dicts = [own_dict(thing) for _, thing, _ in self._selected]
        dicts += [d for m in self.modules for d in (m._modules, m._parameters, m._buffers)]
        return any(name in d for d in dicts if d) or any(name in vars(k) for bases in self._kinds.values() for k in bases)

    def called(self, container: object) -> tuple[str, bool]:
        """By which name code gets at a container, or at what holds it, and whether it is an attribute of a module; "" if there
        are several names, or none."""
        if identity(container) in self.shared:
            return "", False
        for holder in self.holders:
            values = holder.read()
            i = next((i for i, value in enumerate(values) if value is container), -1)
            if i >= 0 and holder.contents is not None:
                return self.called(holder.contents.now())
            if i >= 0:
                name = holder.label(i, values).rpartition(".")[2] if [*holder.tables()] == [] else ""
                return name if name.isidentifier() else "", issubclass(type(holder.owner), torch.nn.Module)
        return "", False

    def overlooked(self, ran: Iterable[CodeType]) -> Overlooked | None:
        """What this walk lacked, going by the code that ran in a capture."""
        unread = {n for _, thing, entered in self._selected for n in (own_dict(thing) or {}).keys() - entered}
        names = self.mentions.overlooked(ran, unread)
        return Overlooked(names) if names else None

    def left_out(self, frame: FrameType) -> Overlooked | Refusal | None:
        """What this walk lacked, if the function that starts in this frame was not found: its name, or, where that is known,
        the function itself. Who calls it may be no Python code: a custom operator, `numpy.vectorize`, a `staticmethod`."""
        code = frame.f_code
        if not is_users(code.co_filename) or (code.co_filename == "<string>" and not _runs_for_the_user(frame)):
            return None
        first: object = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        kind: Thing = first if issubclass(type(first), type) else type(first)
        if code.co_name in CONSTRUCTORS and is_users_class(kind) and kind not in self._kinds:
            return Overlooked(frozenset(), [kind])  # whose methods and attributes count as well
        if not self.mentions.unknown(code) or (code.co_name == EVALUATED and not self._lasts(frame.f_globals)):
            return None
        if self.mentions.lacks(code.co_name):
            return Overlooked(frozenset({code.co_name}))
        found: Leaves = functions_with(code)
        if not found and not code.co_freevars:
            found = [FunctionType(code, frame.f_globals)]  # which reads the same
        if not found:
            return Refusal(f"runs {code.co_name}, a closure that cannot be found", "name it in the recorded function",
                           users_line(frame))  # fmt: skip
        if is_users_class(kind) and type(first).__weakrefoffset__:  # of a bound method, what it is bound to
            found = [*found, first]
        found = [x for x in found if identity(x) not in self._seen]
        return Overlooked(frozenset(), found) if found else None

    def _lasts(self, space: dict[str, object]) -> bool:
        """Whether globals outlast the call: those of a function, or of a module; but not of one that is being imported."""
        of_module = own_dict(sys.modules.get(str(space.get("__name__")))) is space
        return identity(space) in self._spaces or (of_module and not getattr(space.get("__spec__"), "_initializing", False))

    def _visit(self, path: str, thing: Thing) -> None:
        kind = type(thing)
        if kind in LEAVES:
            return
        if identity(thing) in self._seen:
            self.shared.add(identity(thing))
            self.lends_groups = self.lends_groups or identity(thing) in self._groups
            return
        self._seen.add(identity(thing))
        self.met.append(thing)
        enter = self._ways.get(kind)
        if enter is None:
            enter = self._ways[kind] = _way(kind)
        enter(self, path, thing)

    # -- code

    def _method(self, path: str, method: MethodType) -> None:
        self._work.append((path, method.__func__))
        self._work.append(("self", method.__self__))

    def _partial(self, path: str, p: functools.partial[object]) -> None:
        self._hold(kept(path, lambda: (p.func, p.args, p.keywords)))
        self._work.append((path, p.func))
        self._fixed(path, p.args)
        self._dict(path, p.keywords)
        self._object(path, p)

    def _alias(self, path: str, alias: Thing) -> None:
        """`Class[int]`, by which objects of the class are made, and its attributes read."""
        self._work.append((path, getattr(alias, "__origin__", None)))
        self._fixed(path, alias.__args__)

    def _getter(self, path: str, getter: object) -> None:
        """`operator.attrgetter("model.scale")` and its like name attributes as code does."""
        words = {word for name in getter.__reduce__()[1] if isinstance(name, str) for word in name.split(".")}
        self.mentions.add_words(words)

    def _builtin(self, path: str, f: BuiltinFunctionType | MethodWrapperType) -> None:
        """A method of an object (`append = results.append`), unless it is a function of a module."""
        self._descriptor(path, f)
        of_module = isinstance(f.__self__, ModuleType) and type(f) is BuiltinFunctionType
        if not of_module:
            self._work.append((path, f.__self__))
        if f.__name__ == "__subclasses__":
            self.mentions.names.add(f.__name__)

    def _descriptor(self, path: str, f: Thing) -> None:
        """A method of a built-in class, such as `object.__getattribute__`."""
        self.mentions.add_lookup(f.__name__)

    def _function(self, path: str, f: FunctionType) -> None:
        if is_marked(f):
            self.marked = True
            return  # what it reads and changes is its own business
        unbound = identity(f) in self._unbound  # what its variables are does not count, but for what they lead to
        if f.__closure__:
            cells = zip(f.__code__.co_freevars, f.__closure__, strict=True)
            held = {name: cell for name, cell in cells if identity(cell) not in self._put}
            place = object_attributes.cells(f"{f.__qualname__}'s closure", [*held.values()], [*held])
            if not unbound:
                self._hold(self._without_untouched(place))
            for (name, cell), value in zip(held.items(), place.read(), strict=True):
                if self._is_untouched(value):
                    continue
                self._variable_read(f, name, value)
                if name == "__class__" and isinstance(value, type):
                    self._class_of(value)  # `super()`, which makes no object of it
                elif identity(cell) not in self.cells:
                    self.cells.add(identity(cell))
                    self._variable_of(name, value, {name})
        for inner in ("__wrapped__", "_torchdynamo_orig_callable"):
            if inner in f.__dict__:
                self._work.append((path, f.__dict__[inner]))
        compiled = f.__dict__.get("_torchdynamo_orig_callable")
        code = getattr(compiled, "__code__", None)
        if getattr(compiled, "__name__", "") == "step" or (code is not None and "step" in names_in(code)):
            self.compiles_a_step = True
        if not is_users(f.__code__.co_filename):
            self.mentions.add_lookup(f.__name__)
            return
        self._functions.append(f)
        self._fixed(f"{f.__qualname__}'s default", (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()))
        if f.__kwdefaults__:
            self._dict(f"{f.__qualname__}'s defaults", f.__kwdefaults__)
        if f.__dict__.keys() - {"__wrapped__"}:
            self._dict(f.__qualname__, f.__dict__)
        self._code(f, unbound)

    def _code(self, f: FunctionType, unbound: bool) -> None:
        """What the code of a function of the user's names."""
        named, used = self.mentions.add(f.__code__, f.__name__)
        if is_resumed(f.__code__):
            self._resumed |= named
            self.mentions.looks_unseen = self.mentions.looks_unseen or bool(used.around)
        g = f.__globals__
        self._looks_around(used, g, is_method="<" not in f.__qualname__.rpartition(".")[0] and "." in f.__qualname__)
        self._imported(named, used, g)
        evaluated = f.__code__.co_name == EVALUATED
        by_name = used.variables if evaluated or not named.isdisjoint(("NameError", "Exception")) else used.sets
        absent = (named if used.spaces else by_name | used.asked) - g.keys()
        held, put = self._spaces.setdefault(identity(g), (g, set()))[1], self._put.get(identity(g), set())
        new = (((used.variables | used.asked) & g.keys()) | absent) - held
        if new and not unbound:
            held |= new
            self._hold(self._without_untouched(object_attributes.space("globals", g, sorted(new - put))))
        for n in (used.variables & g.keys()) - put:
            self._variable_read(f, n, g[n])
        for n in sorted((new & g.keys()) - put):
            if self._is_untouched(g[n]):
                continue
            self._variable_of(n, g[n], used.bare)
            if type(g[n]) is str and "format" in named:
                self.mentions.add_words(words_of(g[n]) if "{" in g[n] else set())
        hidden = sorted(used.variables - g.keys() - absent | (absent & used.variables - used.sets))
        if hidden and not unbound:  # a global that appears later may shadow a builtin, or a builtin appear
            found = ", ".join(f"of({n!r}, builtin({n!r}))" for n in hidden)
            read = written_out(f"lambda: ({found},)", {"of": g.get, "builtin": BUILTINS.get})
            self._hold(kept("builtins", read))
        function: Thing = f  # not every version of the types knows that it has builtins
        if function.__builtins__ is not BUILTINS:  # `exec` was given others
            self._work.append(("builtins", function.__builtins__))

    def _is_untouched(self, value: object) -> bool:
        """Whether a call that has ended has not loaded a variable that holds this, or has only compared it with None."""
        return self._ran is not None and self._ran.untouched(value)

    def _without_untouched(self, place: Holder) -> Holder:
        """A place of variables, of which for those with an untouched value only its kind counts."""
        if not any(map(self._is_untouched, place.read())):
            return place
        read, untouched = place.read, [*map(self._is_untouched, place.read())]
        kinds = kept(place.path, lambda: tuple([type(x) if left else x for x, left in zip(read(), untouched, strict=True)]))
        return kinds._replace(named=place.named, inside=place.inside)

    def _variable_read(self, f: FunctionType, name: str, value: object) -> None:
        """A function has a variable of this name, with this value, some of which it may have read."""
        if self._ran is not None and self._ran.has(f.__code__):
            self._may_be_table(value, keys_of_variables(f.__code__, type(value)).get(name, frozenset()))

    def _looks_around(self, used: Used, g: dict[str, object], *, is_method: bool) -> None:
        """Whether code may read attributes that it does not name of modules."""
        for path in used.around:
            if path == "" or (path == "self" and not is_method) or path.partition(".")[0] not in {*g, "self"}:
                self.mentions.looks_around_unknown = True
            elif path == "self":
                self._self_around = True
            else:
                self._module_named = self._module_named or _may_be_module(path, g)

    def _imported(self, named: Set[str], used: Used, g: dict[str, object]) -> None:
        """Modules that a function imports, or that something is looked up in by its name."""
        package = str(g.get("__package__") or "")
        parents = [package.rsplit(".", n)[0] for n in range(package.count(".") + 1)] if package else []
        candidates = named | {f"{parent}.{n}" for parent in parents for n in named}
        asked = words = {n for n in named if n.isidentifier()} if named >= {"sys", "modules"} else set[str]()
        if used.imports and not self._imports:
            self._imports = True
            self._hold(kept("builtins.__import__", lambda: (BUILTINS.get("__import__"),)))
        for level, name, of_it in used.imports:
            above = package.rsplit(".", level - 1)[0] if level > 1 else package
            whole = ".".join(part for part in (above if level else "", name) if part)
            steps = [whole.rsplit(".", n)[0] for n in range(whole.count(".") + 1)]
            candidates |= {*steps, *(f"{whole}.{n}" for n in of_it)}
            asked = words | asked | {*steps}
            self.mentions.names.update(whole.split("."))
            self.mentions.reads.update(whole.split("."))
        imported = sorted(candidates & sys.modules.keys())
        for name in imported:
            self._module_of_the_user(name, sys.modules[name])
        theirs = {name for name in imported if identity(sys.modules[name]) in self._python_modules}
        self._modules_flow = self._modules_flow or bool(theirs and used.imports)
        theirs |= asked - sys.modules.keys() if self.mentions.looks_for_absent or words else set()
        if theirs:
            held = sorted(theirs)
            self._hold(kept("sys.modules", lambda: tuple(map(sys.modules.get, held))))

    def _variable_of(self, name: str, value: object, bare: Set[str]) -> None:
        """A global variable, or one of a module."""
        if issubclass(type(value), ModuleType) and name not in bare:
            self._module_of_the_user(name, value)
        elif self._is_only_filled(name, value):
            self._filled.append((name, value))
            self._fills(name, name, value)
        else:
            self._work.append((name, value))

    def _handed_on(self, path: str, module: ModuleType) -> None:
        """A module that something has, or that code hands on: what may be it is anything that has no name."""
        self._module_of_the_user(path, module)
        self._modules_flow = self._modules_flow or identity(module) in self._python_modules

    def _module_of_the_user(self, path: str, module: Thing) -> None:
        space = own_dict(module)  # and no attributes, for which it may have a `__getattr__`
        if not issubclass(type(module), ModuleType) or space is None:
            self._work.append((path, module))  # `sys.modules` may have anything
            return
        if module is builtins:
            self._python_modules.setdefault(identity(module), (module, set()))
            return
        made = space.get("__spec__") is None and space.get("__name__") not in sys.builtin_module_names  # ModuleType("x")
        where = space.get("__file__") or next(iter(space.get("__path__") or ()), "<frozen>")
        is_near = identity(module) in self._python_modules and identity(module) not in self._far
        if (made or is_users(where)) and not is_near:
            self._far.discard(identity(module))  # then what it has is entered anew
            self.met.append(module)
            self._python_modules[identity(module)] = (module, set())
            self._work.append((f"{path}.__getattr__", space.get("__getattr__")))
            if (kind := behind_gate(type(module))) is not ModuleType:
                self._class_of(kind)
        elif is_anothers(module):
            self._others[identity(module)] = module

    def _members(self, space: dict[str, Thing], held: set[str], any_of_them: bool, *, deep: bool = True) -> None:
        """Those attributes of a Python module of the user's that some code names and that are not held yet; or `any_of_them`:
        then functions are not looked into, which is done where they run."""
        named = self.mentions.names | {"__getattr__"}
        new = {n for n in [*space] if n in named or (any_of_them and type(n) is str and n not in _MODULES_NAMES)} - held
        held |= new
        new -= self._put.get(identity(space), set())
        if new:
            self._hold(object_attributes.space("globals", space, sorted(new)))
        for n in sorted(new):
            is_function = issubclass(type(space[n]), FunctionType)
            if (n in named and deep) or (not is_function and (n in named or deep)):
                self._variable_of(n, space[n], self.mentions.bare)
            else:
                self._unentered.append((n, space[n], deep or not is_function))
                if deep and space[n].__dict__:
                    self._dict(n, space[n].__dict__)
        path = space.get("__name__", "module")
        if self.mentions.looks_for_absent and "" not in held:
            held.add("")
            self._hold(kept(path, lambda: tuple(sorted(named & space.keys()))))
        if any_of_them and "*" not in held:
            held.add("*")

            def restore(values: tuple[object, ...]) -> None:
                for n in space.keys() - set(values):
                    del space[n]

            self._hold(Holder(path, lambda: tuple(space), restore, inside=lambda: (space,)))

    def _kind(self, path: str, kind: type) -> None:
        if kind in (operator.attrgetter, operator.methodcaller) and path != kind.__name__:
            self.mentions.looks_anywhere()  # by another name than the one that code is searched for
        if is_users_class(kind):
            self._class_of(kind)
            self._making(kind)
        elif is_anothers(kind):
            self._others[identity(kind)] = kind

    def _class_of(self, kind: type) -> None:
        """Objects of this class are in reach: its methods may run."""
        if kind not in self._kinds:
            self._kinds[kind] = [base for k in (kind, type(kind)) for base in k.__mro__ if is_users_class(base)]
            others = [f for base in kind.__mro__ if base not in self._kinds[kind] for f in vars(base).items()]
            self._given[kind] = [(n, f) for n, f in others if type(f) is FunctionType and is_users(f.__code__.co_filename)]

    def _making(self, kind: type) -> None:
        """Objects of this class may be made, so that its constructors run."""
        for base in kind.__mro__:
            for name in CONSTRUCTORS & vars(base).keys():
                for f in functions_of(vars(base)[name]):
                    if isinstance(f, FunctionType) and is_users(f.__code__.co_filename):
                        self.mentions.add_reads(f.__code__)

    def _enter_methods(self, kind: type, bases: list[type]) -> None:
        """Those functions of the user's classes that some code may call: code of the user's names them, or a base class of
        another library knows them."""
        if not bases:
            return
        if kind not in self._known:
            self._known[kind] = {n for base in kind.__mro__ if base is not object and base not in bases for n in vars(base)}
        called = self.mentions.names | self._known[kind]
        if "__subclasses__" in called and identity(kind) not in self._descended:
            self._descended.add(identity(kind))
            self._hold(kept(f"{kind.__qualname__}.__subclasses__()", lambda: (*type.__subclasses__(kind),)))
            below: list[type] = type.__subclasses__(kind)
            self._work.extend((inner.__qualname__, inner) for inner in below)
        for base in bases:
            if identity(base) not in self._classes:
                self._classes.add(identity(base))
                self.met.append(base)
                self._class(base.__qualname__, base)
            for name, member in list(vars(base).items()):
                is_called = name in called or name in UNNAMED or (name.startswith("__") and name not in _UNCALLED)
                for f in functions_of(behind_gate(member)):
                    if is_called or (self.mentions.looks_around and self._runs_alike(f)):
                        if self._ran is not None and isinstance(f, FunctionType) and not self._ran.has(f.__code__):
                            self._unbound.add(identity(f))
                        self._visit(f"{base.__qualname__}.{name}", f)
                if is_called and isinstance(member, classmethod):
                    self._making(kind)

    def _enter_given_methods(self, kind: type) -> None:
        """Functions of the user's in classes of others: those that somebody has put there, or torch.fx generated."""
        for name, f in self._given.get(kind, ()):
            if name in self.mentions.names or name in UNNAMED or name in self._known.get(kind, ()):
                if self._ran is not None and not self._ran.has(f.__code__):
                    self._unbound.add(identity(f))
                self._visit(f"{kind.__qualname__}.{name}", f)

    def _runs_alike(self, f: object) -> bool:
        """Whether a function could run without being missed: it has the code of another, as all have that a decorator made."""
        return isinstance(f, FunctionType) and self.mentions.knows_alike(f.__code__)

    def _class(self, path: str, kind: type) -> None:
        space = vars(kind)
        if self._ran is None or self._ran.matches:
            self.mentions.add_words({n for n in space.get("__match_args__", ()) if isinstance(n, str)})
        names = [n for n, v in space.items() if n not in _UNCALLED and not functions_of(v)]
        self._work.extend((f"{path}.{n}", space[n]) for n in names)
        self._class_places.append((path, kind))

    def _hold_class(self, path: str, kind: type) -> None:
        """What a class itself has, but for plain values that no code which ran names."""
        space = vars(kind)
        left_out = _KEPT_BY_PYTHON | {n for n, v in space.items() if self._is_unread(n, v)}

        def read() -> Reading:
            own: Thing = space
            if not left_out.isdisjoint(own) or any(behind_gate(gate := own.get(name)) is not gate for name in _GATED):
                now = {n: behind_gate(v) for n, v in own.items() if n not in left_out}
                own = {n: v for n, v in now.items() if v is not MISSING}
            return (len(own), *own, *own.values())

        def restore(values: Reading) -> None:
            n = values[0]
            before = dict(zip(values[1 : n + 1], values[n + 1 :], strict=True))
            for name, value in before.items():
                if space.get(name, MISSING) is not value:
                    setattr(kind, name, value)
            for name in space.keys() - before.keys() - _KEPT_BY_PYTHON:
                delattr(kind, name)

        def spot(name: str) -> Spot:
            return Spot(
                (identity(kind), name), lambda: space.get(name, MISSING), lambda value: type.__setattr__(kind, name, value)
            )

        own = containers.by_key(spot) if type(kind).__setattr__ is type.__setattr__ else None  # ctypes has one of its own
        self._hold(Holder(path, read, restore, named=containers.keyed, spot=own, inside=lambda: (of_class(kind),)))

    def _is_unread(self, name: str, value: object) -> bool:
        """Whether nothing that ran can have read this attribute of a class."""
        return type(value) in LEAVES and not name.startswith("__") and self._leaves_alone(name)


def _kinds(odd: list[tuple[str, torch.Tensor]]) -> Holder:
    """Of what kind tensors without memory are, and how often they were written."""
    names = [f"{path}'s {what}" for path, _ in odd for what in ("class", "version")]
    with without_subclasses():
        tensors = [(t, not t.is_inference()) for _, t in odd]

    def read() -> Reading:
        with without_subclasses():
            return tuple([x for t, counts in tensors for x in (type(t), t._version if counts else 0)])

    return kept("tensors", read)._replace(named=lambda path, i, _: names[i])


def _runs_for_the_user(frame: FrameType) -> bool:
    """Whether code that has no file is the user's: of `python -c`, say, and not what a package, or `namedtuple`, has made of a
    string. What runs while a module is imported is left alone: half of a module is nothing that anybody could use."""
    space = frame.f_globals
    where = space.get("__file__")
    if where is None and str(space.get("__name__", "")).startswith("namedtuple_"):
        return False
    if where is not None and not is_users(str(where)):
        return False
    outer: FrameType | None = frame.f_back
    if torch_dynamo.is_written_by_torch(frame.f_code.co_name, space, outer.f_code.co_filename if outer is not None else ""):
        return False
    while outer is not None and not is_ours(outer.f_code.co_filename):  # what imports us all is none of the call's business
        if outer.f_code.co_filename.startswith("<frozen importlib"):
            return False
        outer = outer.f_back
    return True


def _may_be_module(path: str, space: dict[str, Thing]) -> bool:
    """Whether this global (of `Used.around`) may be one of the user's modules."""
    name, _, rest = path.partition(".")
    value = space[name]
    if issubclass(type(value), weakref.ProxyTypes):
        return True
    return not is_anothers(value) if issubclass(type(value), ModuleType) else rest != ""


def _exactly(kind: type, enter: Enter) -> tuple[type, Enter]:
    return (kind, lambda reach, path, x: enter(reach, path, x) if type(x) is kind else reach._object(path, x))


def _nothing(reach: Reach, path: str, thing: object) -> None:
    """Nothing that could change, or that a result could depend on."""


_WAYS: list[tuple[type, Enter]] = [
    (type, Reach._kind),
    (ModuleType, Reach._handed_on),
    (torch.Tensor, Reach._tensor),
    (torch.nn.Module, Reach._module),
    (torch.optim.Optimizer, Reach._optimizer),
    (torch.amp.GradScaler, Reach._scaler),
    (torch.Generator, lambda reach, path, g: reach.generators.append(g)),
    (torch.Stream, lambda reach, path, s: reach.streams.append(s)),
    (random.SystemRandom, _nothing),  # it has no state
    (random.Random, lambda reach, path, r: reach.host_rngs.append(r)),
    (FunctionType, Reach._function),
    (MethodType, Reach._method),
    (CellType, Reach._cell),
    (functools.partial, Reach._partial),
    (MEMO, Reach._cache),
    (operator.attrgetter, Reach._getter),
    (operator.methodcaller, Reach._getter),
    (BuiltinFunctionType, Reach._builtin),
    (MethodWrapperType, Reach._builtin),
    (WrapperDescriptorType, Reach._descriptor),
    (MethodDescriptorType, Reach._descriptor),
    (weakref.ref, Reach._weak),
    (weakref.ProxyType, Reach._proxy),
    (weakref.CallableProxyType, Reach._proxy),
    *((kind, lambda reach, path, member: reach._fixed(path, functions_of(member))) for kind in _MEMBERS),
    *((kind, Reach._alias) for kind in _ALIASES),
    (MappingProxyType, Reach._view),
    (type({}.keys()), lambda reach, path, view: reach._view(path, view.mapping)),
    (type({}.values()), lambda reach, path, view: reach._view(path, view.mapping)),
    (type({}.items()), lambda reach, path, view: reach._view(path, view.mapping)),
    (ContextVar, Reach._variable),
    (BaseException, Reach._exception),
    (threading.local, Reach._object),
    *((kind, Reach._iterator) for kind in _ITERATORS),
    _exactly(dict, Reach._dict),
    _exactly(list, Reach._list),
    _exactly(deque, Reach._list),
    _exactly(set, Reach._set),
    _exactly(tuple, Reach._tuple),
    _exactly(frozenset, Reach._tuple),
]


# What has nothing but what is said of it above, unless it is of a class of the user's.
_BARE = (torch.Generator, torch.Stream, random.SystemRandom, random.Random, weakref.ref)


def _with_its_own(enter: Enter) -> Enter:
    def both(reach: Reach, path: str, thing: object) -> None:
        enter(reach, path, thing)
        reach._object(path, thing)

    return both


def _way(kind: type) -> Enter:
    """How to enter objects of this type. (By the type alone: what they say of themselves may be code of the user's.)"""
    if issubclass(kind, defaultdict):
        return Reach._default
    for base, enter in _WAYS:
        if issubclass(kind, base):
            return _with_its_own(enter) if base in _BARE and is_users_class(kind) else enter
    top = kind.__module__.partition(".")[0]
    if any(base.__module__ == "phonograph.engine.recorded" and base.__name__ == "Recorded" for base in kind.__mro__):
        return Reach._recorded
    if kind.__module__.startswith("phonograph.") and hasattr(kind, "reached"):  # a function of our own
        return lambda reach, path, function: reach._fixed(path, function.reached())
    if any("__next__" in vars(base) for base in kind.__mro__):
        return Reach._iterator
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return Reach._array
    if numpy is not None and issubclass(kind, numpy.void):
        return Reach._record
    if top == "numpy" and (kind.__name__ in ("Generator", "RandomState") or hasattr(kind, "random_raw")):
        return lambda reach, path, rng: reach.host_rngs.append(rng)
    if top == "numpy" and kind.__name__ == "SeedSequence":
        return Reach._iterator
    if torch_process_groups.keeps_shards(kind):
        return Reach._shards
    if torch_process_groups.keeps_stages(kind):
        return Reach._stages
    if torch_process_groups.is_work(kind):
        return lambda reach, path, work: reach.works.append(path)
    if issubclass(kind, BUFFERS):
        return _with_its_own(Reach._buffer) if is_users_class(kind) else Reach._buffer
    return Reach._object if has_attributes(kind) else Reach._theirs if top != "phonograph" else _nothing
