"""Numbers that change from call to call: a coefficient that is annealed, a temperature, the learning rate of an optimizer of
the user's. They are followed as those of torch's optimizers are (`hyperparameters.py`), wherever the function reads them.

A number is followed once it has changed: until then it is a value like any other, on which a recording relies. From then on a
capture puts a dial in its place, where all code sees it. That code may do anything with it, so nothing is taken for granted:

* Python's own arithmetic, and NumPy's, gives dials. Comparisons and truth become conditions, and so does a whole number that
  has to be one of Python's (`int`, an index, a size): that it is this one. Everything else that Python can do with a number
  (a format, a copy) gets the real one, and is noted.
* `math` reads a number where no method is asked: for the time of the capture, its functions are replaced by such as give dials.
  So is `float`, which gives a plain number whatever a method says: in modules whose code only calls it.
* To torch a dial may only go as an argument of a function that hands it on, as it is, to an operator of the same name
  (`_PLAIN`); a mode looks at all of torch's functions for that. What else takes a number may work out others with it, or
  decide by it, unseen; a few such functions are written out here (`composite_functions`).
* Each use by an operator has a probe of its own, which has to be found in what that very operator has launched.

A number of which anything else becomes is baked in after all, with the reason noted, and a change makes a new recording.
"""

from __future__ import annotations

import dis
import inspect
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.dynamo import ran_compiled, uncompiled
from ..aten.operators import tensors_in
from ..call.signature import Call
from ..errors import Refusal
from ..python.bytecode import formats_any, hands_out, looks_around, uses_of_float, uses_of_int, uses_of_reductions, uses_of_type
from ..python.holders import Holder, Spot
from ..python.origin import is_ours, is_torchs, is_users
from ..python.read_gate import Reads, behind_gate
from ..python.rows import Element, elements
from ..python.unnamed_reads import is_harmless
from ..values.counters import Followed, Tally, are_rows, said
from ..values.formulas import Worked
from ..values.host_scalars import Numeral
from ..values.numbers import base_of
from ..values.pytree_nodes import Node
from ..values.pytree_paths import path_to
from ..values.wording import Naming
from .composite_functions import CONSTANTS, WRITTEN_OUT
from .hyperparameters import Dial, Dials, reals, unread
from .reachable import Reach
from .reductions import BUILT_IN, of_numpy, reducing

__all__ = ["Fixed", "Following", "Unfollowed", "asks_of_classes", "guarding", "is_compiled", "judged", "marked", "of_arguments",
           "reader", "takes"]  # fmt: skip

At = tuple[int, object]

_TRIES = 2  # captures in which a number could not be followed

_BASES = ("add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "lerp", "clamp", "clamp_min", "clamp_max", "fill", "full",
          "full_like", "new_full", "masked_fill", "gt", "lt", "ge", "le", "eq", "ne", "pow")  # fmt: skip
_LOSSES = ("huber_loss", "smooth_l1_loss")
_ACTIVATIONS = ("leaky_relu", "elu", "hardtanh", "threshold", "softplus", "softshrink", "hardshrink")
_MARGINS = ("margin_ranking_loss", "hinge_embedding_loss", "cosine_embedding_loss", "triplet_margin_loss")
_BOUNDS = ("clamp_min", "clamp_max", "minimum", "maximum")
_FOREACH = tuple([f"_foreach_{name}" for name in (*_BASES[:8], *_BOUNDS) if name != "rsub"])
_FUSED = tuple([f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")])
_PLAIN = frozenset(
    [*(f"{name}{way}" for name in (*_BASES, *_FOREACH) for way in ("", "_")), *_FUSED, "subtract", "multiply", "divide",
     "true_divide", "multiply_", "divide_", "subtract_", "true_divide_", "greater", "less", "__rsub__", "__rdiv__",
     "__rtruediv__", "__rmul__", "__radd__", "__add__", "__sub__", "__mul__", "__truediv__", "__iadd__", "__isub__", "__imul__",
     "__itruediv__", "__pow__", "__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__", "__rpow__", *_LOSSES, *_ACTIVATIONS,
     "_threshold", *_MARGINS,
     "nan_to_num", "nan_to_num_", "bernoulli_", "normal_", "multi_margin_loss", "addmm", "baddbmm", "addmv", "batch_norm",
     "layer_norm", "group_norm", "instance_norm", "scaled_dot_product_attention", "gumbel_softmax"])  # fmt: skip
"""Functions of torch's that hand a number on to an operator as it is. (Where one works out others, no operator takes it.)"""
_OPERATORS = frozenset(
    [*(f"aten::{name}{way}" for name in (*_BASES, *_FOREACH) for way in ("", "_")), *[f"aten::{name}" for name in _FUSED],
     *(f"aten::{name}{way}" for name in (*_LOSSES, *_ACTIVATIONS) for way in ("", "_backward")), "aten::nan_to_num",
     "aten::nan_to_num_", "aten::bernoulli_", "aten::normal_"])  # fmt: skip
"""Operators whose kernels have a number among their parameters as it is, or in one of the forms that are looked for."""
_WHOLE_OPERATORS = _OPERATORS | frozenset(
    [*(f"aten::{name}{way}" for name in ("multi_margin_loss", "native_batch_norm", "native_layer_norm", "native_group_norm",
                                         "_scaled_dot_product_flash_attention_for_cpu") for way in ("", "_backward")),
     "aten::addmm", "aten::baddbmm", "aten::addmv"])  # fmt: skip
"""Those that do the same with each number where a replay calls them, rather than what they have launched."""
_ARITHMETIC = frozenset(f"{name}{way}" for name in ("add", "sub", "mul", "div") for way in ("", "_")) | {
    "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__", "__truediv__",
    "__itruediv__", "fill_", *(f"clamp{end}{way}" for end in ("", "_min", "_max") for way in ("", "_")),
    *(f"{name}{way}" for name in _FOREACH for way in ("", "_"))}  # fmt: skip
"""Functions that do with a whole number what they do with the same as a float, if tensors are of floating-point numbers."""
_DIVISIONS = frozenset({"div", "__truediv__"})
"""Those of them that do so with tensors of integers as well. (In place, they cannot.)"""
_WITHOUT_GRADIENT = frozenset({"lerp", "lerp_", "pow", "pow_", "__pow__", "__rpow__"})
"""Those with which autograd works out other numbers."""

_SPECIAL: dict[str, Callable[[float], bool]] = {
    "aten::pow": lambda x: 2 * x == int(2 * x) if math.isfinite(x) else True,
    **dict.fromkeys([f"aten::{name}" for name in _LOSSES], lambda x: not x > 0.0),
    **dict.fromkeys(("aten::addcmul", "aten::addcmul_", "aten::addcdiv", "aten::addcdiv_"), lambda x: x == 1.0),
}  # fmt: skip
_SPECIAL["aten::pow_"] = _SPECIAL["aten::pow"]
_SPECIAL["aten::normal_"] = _SPECIAL["aten::softshrink"] = lambda x: not x >= 0.0  # they raise
_SPECIAL["aten::bernoulli_"] = lambda x: not 0.0 <= x <= 1.0
_SPECIAL["aten::addmm"] = _SPECIAL["aten::baddbmm"] = _SPECIAL["aten::addmv"] = lambda x: x in (0.0, 1.0)  # in the backward

# What takes numbers in C, or asks of which class they are, in code that names it.
_UNSEEN = frozenset({"ctypes", "c_float", "c_double", "struct", "pack", "pack_into", "Decimal", "timedelta", "array", "ops",
                     "type", "id"})  # fmt: skip
# By what code asks whether something looks at torch's functions: whoever does not hand over to that then goes another way. Of
# torch's own, autocast and devices ask for modes of theirs.
_ASKS = "has_torch_function"
_ASKS_FOR_MODES = (_ASKS, "_len_torch_function_stack", "_get_current_function_mode", "_is_torch_function_mode_enabled")
_PERCENT = re.compile(r"%[-+ #0-9.*]*[eEfFgG]")


class Following:
    """Which numbers the recordings of one function follow: those that have changed."""

    def __init__(self) -> None:
        self._wanted: dict[At, str] = {}  # with their names
        self._failed: Counter[At] = Counter()
        self.why: dict[str, str] = {}
        """By the names of those that cannot be followed: why."""
        self.arguments: set[tuple[Node | None, int]] = set()
        """Those that are arguments: (the structure of all arguments, the place)."""
        self.varying = set[str]()
        """Names of tensors outside that have changed time and again: what is read of one is not what it was."""
        self._advanced: set[At] = set()
        self._fixed: set[tuple[Node | None, int]] = set()
        self._differed: Counter[tuple[Node | None, int]] = Counter()

    @classmethod
    def only(cls, spots: Iterable[At]) -> Following:
        """Just those that lie there, as a recording does."""
        made = cls()
        made._wanted = dict.fromkeys(spots, "")
        made._advanced = set(made._wanted)
        return made

    def want_arguments(self, places: Iterable[tuple[Node | None, int]]) -> None:
        """A call has come that differs in these from the one before: a third number makes one that changes."""
        self._differed.update(places)
        self.arguments |= {place for place, n in self._differed.items() if n >= _TRIES} - self._fixed

    def fix(self, places: Iterable[tuple[Node | None, int]]) -> None:
        """These arguments are to be part of the signature again."""
        self._fixed |= {*places}
        self.arguments -= self._fixed

    def want(self, changed: Iterable[tuple[At, str]]) -> None:
        self._wanted.update((at, name) for at, name in changed if self._failed[at] < _TRIES)

    def advances(self, set_there: Iterable[tuple[At, str]], baked: Set[At]) -> bool:
        """A call sets numbers there. Whether some of them are to be followed that were not."""
        new = {at: name for at, name in set_there if self.may_want(at, baked)}
        self._wanted |= new
        self._advanced |= new.keys()
        return bool(new)

    def may_want(self, at: At, baked: Set[At]) -> bool:
        """Whether a number that lies there could be followed, and is not."""
        return at not in self._wanted and at not in baked and self._failed[at] < _TRIES

    def wanted(self) -> frozenset[At]:
        return frozenset(self._wanted)

    def doubtful(self) -> frozenset[At]:
        """Those without which it may be possible to record what cannot be with them."""
        return self.wanted() - self._advanced

    def fail(self, at: At, why: str) -> None:
        """A capture has shown that it cannot be followed, at least now."""
        self._failed[at] += 1
        if at in self._wanted:
            self.why[self._wanted[at]] = why
            if self._failed[at] >= _TRIES:
                del self._wanted[at]


class Fixed(Refusal):
    """Numbers among the arguments cannot be followed, those with these `numbers` of `Call.numbers`, or `texts` at these places
    are read: from the next call on they are part of the signature."""

    def __init__(self, numbers: Iterable[int] = (), texts: Iterable[int] = ()) -> None:
        super().__init__("has numbers among its arguments that cannot be followed", "pass them as tensors", this_call=True)
        self.numbers, self.texts = (*numbers,), (*texts,)


class Unfollowed(Exception):
    """A capture is taken back and made again without these numbers; with the reasons."""

    def __init__(self, spots: dict[At, str]) -> None:
        super().__init__()
        self.spots = spots


def of_arguments(call: Call, function: Callable[..., object]) -> tuple[list[Spot], list[object]]:
    """Where the numbers lie that are followed among the arguments of a call: in a list, of the values in the call that is made
    or played. Named as the function names its parameters."""
    found = [call.leaves[at] for at in call.numbers]
    values = [value * 1.0 if type(value) is float else value for value in found]  # objects of their own, as in `marked`

    naming = Naming(function) if values else None

    def spot(i: int) -> Spot:
        name = naming(path_to(call.shape, call.numbers[i])) if naming is not None else ""
        return Spot((-1, i), lambda: values[i], lambda value: values.__setitem__(i, value), name=name)

    return [spot(i) for i in range(len(values))], values


def marked(reach: Reach, wanted: frozenset[At]) -> list[Spot]:
    """Where the wanted numbers lie. There each is an object of its own from now on, which stands nowhere else: by that it is
    known. (One in a row is known by its place.)"""
    if not wanted or any(map(is_compiled, reach.met)):
        return []
    found: dict[At, Spot] = {}
    for holder in reach.holders:
        if holder.spot is None:
            continue
        values = holder.read()
        for i, value in enumerate(values):
            row = type(value) in (tuple, list) and are_rows(value, value)
            if (row or base_of(type(value)) is not None) and (spot := _spot(holder, i, values)) is not None:
                name = holder.label(i, values)
                places = elements(spot, value, name) if row else [spot._replace(name=name)]
                if all(place.at in wanted for place in places):
                    found = {place.at: place for place in places} | found
    for spot in found.values():
        if not isinstance(spot.at[1], Element):
            spot.put(spot.get() * 1.0 if type(spot.get()) is float else spot.get())
    return [*found.values()]


def _spot(holder: Holder, i: int, values: tuple[object, ...]) -> Spot | None:
    """Where the i-th of these values lies. How many there are lies nowhere."""
    assert holder.spot is not None
    try:
        spot = holder.spot(i, values)
        return spot if spot.get() is values[i] else None
    except (IndexError, TypeError):
        return None


def is_compiled(x: object) -> bool:
    """Whether this is what `torch.compile` gave: Dynamo would look at dials, and at the mode."""
    if issubclass(type(x), torch.nn.Module):
        return uncompiled(x) is not None
    code = getattr(uncompiled(x), "__code__", None) if type(x) is FunctionType else None
    return code is not None and is_users(code.co_filename)


def takes(dials: Dials, name: str, args: Args, kwargs: Kwargs, *, called: bool) -> tuple[Args, Kwargs] | None:
    """What an operator is given in place of these arguments, where there are numbers among them that are followed. It is
    `called` by a replay, or a kernel that it has launched is."""
    numbers = {n for n in _floats((*args, *kwargs.values())) if n in dials.wide}
    if not numbers:
        return None
    known = name in (_WHOLE_OPERATORS if called else _OPERATORS) and kwargs.get("rounding_mode") is None
    why = None if known else f"is taken by {name}"
    aliases = dials.taken(numbers, why, _SPECIAL.get(name))
    return tuple([_with(x, aliases) for x in args]), {k: _with(x, aliases) for k, x in kwargs.items()}


def _floats(values: Iterable[Thing]) -> Iterator[float]:
    for v in values:
        kind = type(v)
        if kind is float:
            yield v
        elif kind in (list, tuple) and v and not isinstance(v[0], torch.Tensor):
            yield from _floats(v)


def _with(value: Thing, numbers: dict[float, float]) -> object:
    kind = type(value)
    if kind is float:
        return numbers.get(value, value)
    if kind in (list, tuple) and value and not isinstance(value[0], torch.Tensor):
        return kind(_with(v, numbers) for v in value)
    return value


def _are_worked_with_as_floats(t: torch.Tensor, divides: bool) -> bool:
    return t.is_floating_point() or (divides and not t.is_complex())


class _Guard(TorchFunctionMode):
    """Looks at what torch's functions are given."""

    def __init__(self, dials: Dials) -> None:
        super().__init__()
        self._dials = dials

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Thing:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:  # in which the user's hooks may run
            with self:
                return _backward(*args, **kwargs)
        self._dials.blind = self._dials.blind or func is torch.autograd.grad
        dials = [*_dials_in((args, kwargs))]
        if not dials:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        graded = name in _WITHOUT_GRADIENT and torch.is_grad_enabled()
        divides = name in _DIVISIONS and not kwargs
        if name in _ARITHMETIC and all(_are_worked_with_as_floats(t, divides) for t in tensors_in(args, [])):
            args, kwargs = _as_floats(args), _as_floats(kwargs)
        elif name in _PLAIN or (func in WRITTEN_OUT and func not in CONSTANTS):
            which = Tally.is_real if name in _PLAIN or func is F.cross_entropy else _is_double
            args, kwargs = _as_floats(args, which), _as_floats(kwargs, which)
        whole = any(type(x) is Tally for x in _dials_in((args, kwargs)))
        if name in _PLAIN and not whole and not (graded and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args)):
            return self._taken(func, args, kwargs)
        if not whole and (written_out := WRITTEN_OUT.get(func)) is not None:
            with self:
                result = written_out(*args, **kwargs)
            if result is not NotImplemented:
                return result
        why = f"is given to {name}" + (", through which gradients go" if graded else "")
        return func(*reals(args, why), **reals(kwargs, why))

    def _taken(self, func: Callable[..., Thing], args: Args, kwargs: Kwargs) -> Thing:
        """Call a function which hands numbers on. Of what no operator has taken as it is, it has made others, unseen."""
        given = [x for x in _dials_in((args, kwargs)) if isinstance(x, Dial) and x.wide]
        times = self._dials.times_taken
        before = [times[dial.probe] for dial in given]
        result = func(*args, **kwargs)
        for dial, n in zip(given, before, strict=True):
            if times[dial.probe] == n:
                self._dials.stray(dial.formula, f"is worked with in {getattr(func, '__name__', func)}")
        return result


def _as_floats(value: Thing, which: Callable[[Tally], bool] = lambda tally: True) -> Thing:
    """The same with floats in the place of such tallies, as torch's functions read them."""
    if type(value) is Tally:
        return value.as_float() if which(value) else value
    if type(value) in (list, tuple):
        return type(value)([_as_floats(v, which) for v in value])
    return {k: _as_floats(v, which) for k, v in value.items()} if type(value) is dict else value


def _is_double(tally: Tally) -> bool:
    """Whether it stands for a `numpy.float64`, which is a float of Python's. (Not each function takes the others.)"""
    return isinstance(tally, float)


def _backward(
    self: torch.Tensor,
    gradient: Thing = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Thing = None,
) -> None:
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)


def _dials_in(value: Thing) -> Iterator[Dial | Tally]:
    if type(value) in (Dial, Tally):
        yield value
    elif type(value) in (list, tuple):
        for v in value:
            yield from _dials_in(v)
    elif type(value) is dict:
        yield from _dials_in([*value.values()])


_OF_MATH = [f for f in vars(math).values() if type(f) is BuiltinFunctionType]  # whatever stands there later


@contextmanager
def guarding(dials: Dials, reach: Reach) -> Iterator[None]:
    """During the block, what takes numbers is looked at."""
    reads_later = dials.reads_later is not None and not _READING.isdisjoint(reach.mentions.names)
    if not (dials.spots or reads_later):
        dials.reads_later = None  # or the dials would keep the watch
        yield
        return
    instead = {f: _derived(dials, f) for f in _OF_MATH} | {f: reducing(f) for f in of_numpy()}
    modules, numpy = [vars(math)], sys.modules.get("numpy")
    if numpy is not None:  # whose other functions ask what stands there
        instead[numpy.arange] = _with_reals(numpy.arange)
        modules.append(vars(numpy))
    functions = [f for f in reach.met if type(f) is FunctionType]
    spaces = [*modules, *{id(f.__globals__): f.__globals__ for f in functions}.values()]
    sorts = {*map(type, instead)}
    own = [(space, name, f) for space in spaces for name, f in space.items() if type(f) in sorts]
    before = [(space, name, f) for space, name, f in own if f in instead]
    converters = _converters(dials) | {name: reducing(f) for name, f in BUILT_IN.items()}
    theirs = [*_own_code(functions, [*reach.modules, *reach.optimizers])]
    converting = [(name, space) for name in converters for space in _converting(name, theirs) if name not in space]

    def convert_no_more() -> None:
        for name, space in converting:
            if space.get(name) is converters[name]:
                del space[name]

    dials.convert_no_more = convert_no_more
    dials.converting = {(name, id(space)) for name, space in converting}
    try:  # (an exception may come at any moment)
        for space, name, f in before:
            space[name] = instead[f]
        for name, space in converting:
            space[name] = converters[name]
        if any(type(v) is BuiltinFunctionType and v in instead for h in reach.holders for v in h.read()):
            dials.stray_all("may be given to a function of math that is no global variable")
        with _Guard(dials) if dials.spots else nullcontext():  # by which some of torch's modules go another way
            yield
    finally:
        for space, name, f in before:
            if space.get(name) is instead[f]:
                space[name] = f
        convert_no_more()
        dials.reading, dials.reads_later, dials.convert_no_more = unread, None, _nothing  # for the watch keeps the dials


def _nothing() -> None:
    """Nothing is converted otherwise."""


_READING = frozenset({"item", "tolist", "float", "int"})  # by what code reads numbers, of that which is looked at
_Own = tuple[CodeType, dict[str, Any]]


def _own_code(functions: Iterable[FunctionType], objects: Iterable[object]) -> Iterator[_Own]:
    """The code of these functions, and of the methods of these objects, but for torch's; with its global variables."""
    yield from ((f.__code__, f.__globals__) for f in functions)
    for kind in {base for thing in objects for base in type(thing).__mro__}:
        module = sys.modules.get(kind.__module__)
        if behind_gate(type(module)) is ModuleType and not is_torchs(getattr(module, "__file__", None) or ""):
            yield from ((f.__code__, f.__globals__) for f in vars(kind).values() if type(f) is FunctionType)


def _converting(name: str, theirs: Iterable[_Own]) -> list[dict[str, Any]]:
    """The global variables of modules in which `float`, `int` or `type` may be another function for a while: some of this code
    calls it, and no code there asks whether it is the class."""
    uses: Callable[[CodeType], Set[str]] = _USES[name] if name in _USES else lambda code: uses_of_reductions(code)[name]
    calling = {id(space): space for code, space in theirs if "calls" in uses(code)}
    asking = {id(space) for code, space in theirs if "other" in uses(code)}
    asking |= {at for at, space in calling.items() if any("other" in uses(code) for code in _codes_of(space))}
    found = [space for at, space in calling.items() if at not in asking]
    return [*map(vars, _CONVERTING), *found] if name == "float" else found


_USES = {"float": uses_of_float, "int": uses_of_int, "type": uses_of_type}


def _codes_of(space: dict[str, Any]) -> Iterator[CodeType]:
    """The code of a module's functions, and of its classes' methods."""
    things = [*space.values()]
    for kind in [x for x in things if isinstance(x, type) and x.__module__ == space.get("__name__")]:
        there = [x for x in vars(kind).values() if not issubclass(type(x), Followed)]  # a count of the class's
        members = [getattr(x, "__func__", x) for x in there]
        things += [f for x in members for f in ((x.fget, x.fset, x.fdel) if isinstance(x, property) else (x,))]
    for f in map(inspect.unwrap, [x for x in things if type(x) is FunctionType]):
        if type(f) is FunctionType and f.__globals__ is space:
            yield f.__code__


def _converters(dials: Dials) -> dict[str, Callable[..., Thing]]:
    """What gives a number as a float, or as a whole one, followed as before, also that in a tensor; and its type."""

    def later(x: Thing, frame: FrameType) -> Thing:
        """What stands for the number in a tensor that is read when a replay has run."""
        if not isinstance(x, torch.Tensor) or dials.reads_later is None or threading.get_ident() != mine:
            return x
        numeral = dials.reads_later(x, frame)
        return x if numeral is None else numeral

    mine = threading.get_ident()

    def as_float(x: Thing = 0.0, /) -> Thing:
        if isinstance(x, torch.Tensor) and (number := dials.reading(x, "as float", sys._getframe(1))) is not None:
            return number
        x = later(x, sys._getframe(1))
        if type(x) is Tally:
            return x.as_float()
        if type(x) is Numeral:
            return x.worked(float, x)
        return x if type(x) is Dial and x.wide else float(x)

    def as_int(x: Thing = 0, /, *base: Thing, **kwargs: Thing) -> Thing:
        if isinstance(x, torch.Tensor) and (number := dials.reading(x, "as int", sys._getframe(1))) is not None:
            x = number
        if type(x) is Tally and not x.is_real():
            return x
        x = x if base or kwargs else later(x, sys._getframe(1))
        if type(x) is Numeral and not (base or kwargs):
            return x.as_whole()
        return int(x, *base, **kwargs)

    def as_type(x: Thing, /, *more: Thing, **kwargs: Thing) -> Thing:
        if type(x) is Numeral:
            return x.__class__
        if more or kwargs or not isinstance(x, Followed):
            return type(x, *more, **kwargs)
        return float if isinstance(x, Dial) else type(x.value)  # type: ignore[attr-defined]

    return {"float": as_float, "int": as_int, "type": as_type}


_CONVERTERS = {c for c in _converters.__code__.co_consts if isinstance(c, CodeType)}
_CONVERTING = (torch.nn.utils.clip_grad, torch.nn.modules.batchnorm)
"""Modules of torch's in which `float` is only called."""


def reader(frame: FrameType) -> FrameType:
    """The frame whose code reads what this one does: that which has called `float` or `int`, where that is another function."""
    return frame.f_back if frame.f_code in _CONVERTERS and frame.f_back is not None else frame


def _derived(dials: Dials, function: Callable[..., Thing]) -> object:
    """A function of math, which gives a dial where it is given one."""

    @wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        if len(args) == 1 and type(args[0]) is Numeral and not kwargs:
            asks = function.__name__ in _ASK_OF_FLOATS
            return args[0].worked(function, *args) if asks else args[0].carefully(function, *args)
        given = [*_dials_in((args, kwargs))]
        if not any(type(x) is Tally or x.wide for x in given):
            return function(*args, **kwargs)
        if kwargs or len(given) != sum(isinstance(x, Followed) for x in args):
            why = f"is given to math.{function.__name__}"
            return function(*reals(args, why), **reals(kwargs, why))
        key = (function.__name__, tuple(map(said, args)))
        worked = Worked(function, *[x.formula if isinstance(x, Followed) else x for x in args])
        if function.__name__ in _NO_FLOATS:
            return dials.stands(key, worked)
        formula = Worked(float, worked)
        if any(type(x) is Tally for x in given):  # which has its real value: so would what is worked out, in a program as well
            return dials.derive_float(key, formula)
        return dials.derive(key, lambda: function(*map(_stands, args)), formula, wide=True)

    return called


def _with_reals(function: Callable[..., Thing]) -> object:
    """A function of NumPy's that reads numbers where no method is asked."""

    @wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        why = f"is given to {function.__name__}"
        return function(*reals(args, why), **reals(kwargs, why))

    return called


def _stands(x: object) -> object:
    """By what it is told which of several forms of a number a program holds."""
    return x.probe if isinstance(x, Dial) else x


def _unseen_by(code: CodeType) -> frozenset[str]:
    """What of that this code names; but for `device.type`."""
    found = _UNSEEN.intersection(code.co_names)
    if "type" not in found or "builtins" in code.co_names:
        return found
    named = {i.opname for i in dis.get_instructions(code) if i.argval == "type" and i.opname != "LOAD_CONST"}
    return found - {"type"} if named <= {"LOAD_ATTR", "LOAD_METHOD"} else found


_ASK_OF_FLOATS = frozenset({"isnan", "isinf", "isfinite"})
_NO_FLOATS = frozenset({"isnan", "isinf", "isfinite", "isclose", "floor", "ceil", "trunc", "frexp", "modf", "gcd", "lcm",
                        "isqrt", "comb", "perm", "factorial", "fsum", "prod", "dist", "sumprod"})  # fmt: skip


def judged(
    dials: Dials, ran: Sequence[tuple[CodeType, dict[str, object]]], hooked: bool, more: Iterable[object], training: bool,
    reads: Reads | None,
) -> None:  # fmt: skip
    """This code has run: whether some of it may have got at a number unseen. `hooked`: there may have been hooks. Functions
    among `more` may have run as well. In `training` no module of torch's goes by what it asks. What it `reads`, if that is
    known."""
    if ran_compiled([code for code, _ in ran]):
        dials.stray_all("may be read by compiled code")
    if dials.blind and (hooked or any(code.co_name == "backward" and is_users(code.co_filename) for code, _ in ran)):
        dials.stray_all("may be read by code that runs in torch.autograd.grad")
    both = [*ran, *((f.__code__, f.__globals__) for f in more if type(f) is FunctionType)]
    for code, space in both:
        for name, uses in _USES.items():
            if (name, id(space)) in dials.converting and not uses(code) <= {"calls"}:
                dials.stray_all(f"is read where code asks for the class {name}")
        asks = _ASKS if is_torchs(code.co_filename) else _ASKS_FOR_MODES
        goes_by = not (training and is_torchs(code.co_filename)) and "handle_torch_function" not in code.co_names
        if goes_by and any(name.startswith(asks) for name in code.co_names):
            dials.stray_all("is read where code asks for modes")
        if is_torchs(code.co_filename) or is_ours(code.co_filename) or is_harmless(code):
            continue
        if unseen := _unseen_by(code) - ({"type"} if ("type", id(space)) in dials.converting else set()):
            dials.stray_all(f"may be taken by {min(unseen)} in {code.co_name}", _kept(dials, reads))
        elif any(type(c) is str and _PERCENT.search(c) for c in code.co_consts):
            dials.stray_all(f"may be formatted by % in {code.co_name}", _kept(dials, reads))


def asks_of_classes(dials: Dials, ran: Iterable[tuple[CodeType, dict[str, object]]]) -> bool:
    """Whether code that has run may have asked of which class a number is that nobody knows yet, and was not told."""
    for code, space in ran:
        if is_torchs(code.co_filename) or is_ours(code.co_filename) or is_harmless(code):
            continue
        uses = {name: found for name, uses in _USES.items() if (found := uses(code))}
        if any((name, id(space)) in dials.converting and not found <= {"calls"} for name, found in uses.items()):
            return True
        compares = is_users(code.co_filename) or not _CLASSES.isdisjoint(code.co_names)
        if "type" in uses and ("type", id(space)) not in dials.converting and compares:
            return True
    return False


_CLASSES = frozenset({"float", "int", "bool", "complex", "Number", "numbers"})


def _kept(dials: Dials, reads: Reads | None) -> Set[int]:
    """Which whole numbers no code has got but such as names them, and hands them to no other."""
    spots = [(i, spot.at) for i, spot in enumerate(dials.spots) if spot.kind is not None and dials.is_whole(i)]
    readers = {i: reads.readers(*at) for i, at in spots} if reads is not None else {}
    return {i for i, (_, name) in spots if (who := readers.get(i)) is not None and all(_keeps(code, name) for code in who)}


def _keeps(code: CodeType, name: object) -> bool:
    """Whether code that has read an attribute of this name keeps it to itself."""
    if is_torchs(code.co_filename) or is_ours(code.co_filename):
        return True
    return name in code.co_names and name not in hands_out(code) and not (looks_around(code) or formats_any(code))
