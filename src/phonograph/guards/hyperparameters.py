"""Hyper-parameters that stay live: a learning rate changes, and the next replay uses it, without a new recording. So do weight
decay, and momentum and betas, which OneCycleLR and CyclicLR turn with each step.

A number that an optimizer passes to an operator is baked into the recording: into the tape's arguments, or into the
parameters of a kernel node. To find *where*, the optimizer runs its captured step with a `Dial` in place of each such
number: a float whose value is a random probe that occurs nowhere else, and which remembers the arithmetic that is done
with it (``1 - lr * weight_decay``). A capture is a dry run, so wrong values do no harm. Every place of the program that
holds the value of a dial is then known with the formula that belongs to it, and is set from the real numbers before the
first launch and whenever they change.

What the optimizer *decides* by such a number (``if weight_decay != 0``) is decided by the real value and kept as a
condition: once it would be decided otherwise, the recording no longer fits. If any used value cannot be found in the
program, the numbers are baked in after all, and a change makes a new recording.

Step counts are followed likewise (`step_counts`): what a step reads of one is a dial, too, which stands for the count of then,
and so are the bias corrections that are worked out with it. The same arithmetic with the same dials gives one dial: hundreds of
parameters need a handful. A count is never baked in; a step whose count cannot be followed is not recorded.

Only for classes of `torch.optim` whose step is plain arithmetic on them (`_KNOWN`): other code could take a dial's value out of
sight, through `math.sqrt` for instance. (Counts are read by functions of `torch.optim` alone.) And only numbers that no other
code reads, whosever it is. (Outside of steps it finds the real ones, and what it makes of them is baked in.) So a call does not
follow any if code in it takes an optimizer's parameter groups, for more than the parameters in them, or has one from elsewhere
(`Reach.lends_groups`).
"""

from __future__ import annotations

import ctypes
import inspect
import math
import operator
import random
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from .._torch.autograd import on_thread_of_autograds
from .._torch.dynamic import Args, Kwargs, Leaves, Reading
from .._torch.modes import without_modes
from .._torch.modules import optimizer_hooks, step_hooks, steps_captured, steps_itself, unscale_grads
from .._torch.native import Fact
from ..errors import Unseen
from ..python.at_work import is_spelled
from ..python.holders import Spot
from ..python.identity import identity
from ..python.introspection import hands_on, takes_parameters_only
from ..python.names_in_code import LIVE
from ..python.origin import is_ours, is_torchs, written_out
from ..python.rows import Element, Handed, Row, leave, put_anew
from ..python.standing import ended
from ..values.counters import BY_C, LARGEST, Followed, Tally, Unread, said, universal
from ..values.formulas import Formula, Given, Values, Worked, written
from ..values.host_scalars import READS_NUMBER
from ..values.numbers import base_of, is_truth
from ..values.step_counts import Cell, StepCounts, begins, single
from .reachable import Reach

__all__ = ["DECIDES", "GOES_ON", "Decided", "Dial", "Dials", "Values", "probing", "reals", "unread"]

_KNOWN = tuple([getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax",
                "NAdam", "RAdam", "ASGD", "Muon", "Rprop") if hasattr(torch.optim, name)])  # fmt: skip
GOES_ON = " (by which it goes on)"
DECIDES = "a number by which it goes on"
_FLOATS = {float}
_NO_NUMBER = (ArithmeticError, TypeError, ValueError, RuntimeWarning)  # what formulas raise, where eager may not come to them
_LARGEST = struct.unpack("f", b"\xff\xff\x7f\x7f")[0]  # float32: operators refuse to take a larger one
_MAY_FAIL = frozenset(f"__{side}{name}__" for side in ("", "r") for name in ("truediv", "floordiv", "mod", "pow"))
_random = random.Random(0)  # our own: the user's generator is not touched


class Dial(float, Followed):
    """A probe: its float value is meaningless, `formula` says what it stands for. What would make another thing of it gets the
    real number, and then it is not followed."""

    __slots__ = ("dials", "formula")
    dials: Dials
    formula: Formula

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for code that asks for it
        return float

    @property
    def said(self) -> Any:
        return Dial, self.probe

    def __reduce__(self) -> tuple[object, ...]:
        return (float, (self.as_plain("is copied") if self.wide else self.formula(self.dials.values),))

    def __array__(self, *args: object, **kwargs: object) -> object:
        return sys.modules["numpy"].asarray(self.as_plain("is given to NumPy"), *args, **kwargs)

    def __array_ufunc__(self, function: object, method: str, *args: object, **kwargs: object) -> object:
        if not self.wide:
            return getattr(function, method)(*reals(args, "is given to NumPy"), **reals(kwargs, "is given to NumPy"))
        return universal(self.dials, function, method, args, kwargs)

    def __array_function__(self, function: Callable[..., object], types: object, args: Args, kwargs: Kwargs) -> object:
        if not self.wide:
            return function(*reals(args, "is given to NumPy"), **reals(kwargs, "is given to NumPy"))
        return universal(self.dials, function, "__call__", args, kwargs)

    @property
    def wide(self) -> bool:
        """Whether it may be anywhere in the user's code, and not only in the step of an optimizer of torch's."""
        return self.probe in self.dials.wide

    def as_plain(self, why: str) -> float:
        """The number that it stands for, which is not followed then."""
        self.dials.lose(self, why)
        return float(self.formula(self.dials.values))

    def as_decided(self, why: str) -> float:
        """The same: a number that is not whole is hardly ever the same again."""
        return self.as_plain(why)

    def __bool__(self) -> bool:
        return self.dials.decide(("__bool__", self.probe), self.formula)

    @property
    def probe(self) -> float:
        """Its value, as a plain number."""
        return float.__pos__(self)

    def __hash__(self) -> int:
        return hash(self.as_plain("is looked up") if self.wide else self.probe)


def _arithmetic(name: str, function: Callable[[object, object], object], swapped: bool) -> Callable[[Dial, object], object]:
    plain = getattr(float, name)

    def method(self: Dial, other: object, *modulus: object) -> object:
        if isinstance(other, complex):
            number = self.as_plain("meets a complex number")
            return function(other, number) if swapped else function(number, other)
        if isinstance(other, (Tally, Unread)) or not (isinstance(other, (int, float)) or base_of(type(other))):
            return NotImplemented
        wide = self.wide or (isinstance(other, Dial) and other.wide)
        if wide and function is operator.add and not is_spelled(sys._getframe(1)):
            number, theirs = self.as_plain(BY_C), reals(other, BY_C)
            return function(theirs, number) if swapped else function(number, theirs)
        if type(other).__module__ == "numpy":
            return _beside_numpys(self, name, function, other, swapped)
        theirs = other.formula if isinstance(other, Dial) else other
        formula = Worked(function, theirs, self.formula) if swapped else Worked(function, self.formula, theirs)
        if wide and name in _MAY_FAIL:
            self.dials.may_fail((name, self.probe, said(other)), formula)
        return self.dials.derive((name, self.probe, said(other)), lambda: plain(self, other), formula, wide)

    return method


def _beside_numpys(dial: Dial, name: str, function: Callable[..., object], other: Any, swapped: bool) -> object:
    """Arithmetic with a number of NumPy's, which gives another."""
    if not dial.wide:
        number = dial.as_plain("meets a number of NumPy's")
        return function(other, number) if swapped else function(number, other)
    of = (other, dial.formula) if swapped else (dial.formula, other)
    return dial.dials.stands((name, dial.said, said(other)), Worked(function, *of))


def _comparison(name: str, function: Callable[[object, object], bool]) -> Callable[[Dial, object], object]:
    def method(self: Dial, other: object) -> object:
        if isinstance(other, complex):
            return function(self.as_plain("meets a complex number"), other)
        if isinstance(other, (Tally, Unread)) or not isinstance(other, (int, float)):
            return NotImplemented
        theirs = other.formula if isinstance(other, Dial) else other
        return self.dials.decide((name, self.probe, said(other)), Worked(function, self.formula, theirs))

    return method


def _unary(name: str, function: Callable[[object], object]) -> Callable[[Dial], object]:
    plain = getattr(float, name)

    def method(self: Dial) -> object:
        return self.dials.derive((name, self.probe), lambda: plain(self), Worked(function, self.formula), self.wide)

    return method


def _conversion(name: str) -> Callable[..., object]:
    plain = getattr(float, name)
    why = f"is converted ({name.strip('_')})"

    def method(self: Dial, *others: Any) -> object:
        return plain(self.as_plain(why), *reals(others, why))

    return method


def _to_whole(name: str, function: Callable[..., int]) -> Callable[[Dial], object]:
    """What has to be a whole number of Python's is a decision, that it is this one."""
    plain, why = getattr(float, name), f"is converted ({name.strip('_')})"

    def method(self: Dial) -> object:
        if not self.wide:
            return plain(self.as_plain(why))
        return self.dials.settled((name, self.said), Worked(function, self.formula))

    return method


def _round(self: Dial, *digits: Any) -> object:
    if not self.wide or not all(type(n) in (int, type(None)) for n in digits):
        return round(self.as_plain("is rounded"), *reals(digits, "is rounded"))
    return self.dials.stands(("__round__", self.said, digits), Worked(round, self.formula, *digits))


def _taken_apart(name: str) -> property:
    return property(lambda self: getattr(self.as_plain("is taken apart"), name))


def unread(t: object, name: str, frame: FrameType) -> None:
    """No tensor has a number that is followed."""


def reals(value: Any, why: str) -> Any:
    """The same with real numbers in the place of dials, which are not followed then."""
    if isinstance(value, (Dial, Tally)):
        return value.as_decided(why)
    if type(value) in (list, tuple):
        return type(value)([reals(v, why) for v in value])
    return {k: reals(v, why) for k, v in value.items()} if type(value) is dict else value


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Dial, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), swapped=False))
    setattr(Dial, f"__r{_name}__", _arithmetic(f"__r{_name}__", getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Dial, f"__{_name}__", _comparison(f"__{_name}__", getattr(operator, _name)))
for _name in ("neg", "abs"):
    setattr(Dial, f"__{_name}__", _unary(f"__{_name}__", getattr(operator, _name)))
for _name in ("float", "str", "repr", "format"):
    setattr(Dial, f"__{_name}__", _conversion(f"__{_name}__"))
for _name, _whole in (("int", int), ("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)):
    setattr(Dial, f"__{_name}__", _to_whole(f"__{_name}__", _whole))
setattr(Dial, "__round__", _round)  # noqa: B010 - as those above
setattr(Dial, "__divmod__", lambda self, other: (self // other, self % other))  # noqa: B010
setattr(Dial, "__rdivmod__", lambda self, other: (other // self, other % self))  # noqa: B010
for _name in ("hex", "is_integer", "as_integer_ratio", "conjugate"):
    setattr(Dial, _name, _conversion(_name))
for _name in ("real", "imag"):
    setattr(Dial, _name, _taken_apart(_name))


def _is_number(v: object) -> bool:
    """Whether it is one that operators take."""
    if isinstance(v, int):
        return not isinstance(v, bool) and -(2**63) <= v < 2**63
    return isinstance(v, float) or base_of(type(v)) is float


def _numbers(setting: object) -> Values | None:
    """The numbers of a hyper-parameter that is one, or a tuple of them (`betas`)."""
    parts = setting if type(setting) is tuple else (setting,)
    return tuple(map(_kept, parts)) if parts and all(map(_is_number, parts)) else None


def _kept(number: Any) -> float:
    """As a number is worked with: one of NumPy's that is narrower than a float rounds otherwise."""
    return number if _is_narrow(number) else float(number)


def _is_narrow(number: object) -> bool:
    return not isinstance(number, float) and base_of(type(number)) is float


def _form(setting: object) -> tuple[object, ...]:
    """How many numbers in a tuple, -1 for a number by itself; and of which kinds narrow ones are."""
    parts = setting if type(setting) is tuple else (setting,)
    return len(parts) if parts is setting else -1, *[(i, type(n)) for i, n in enumerate(parts) if _is_narrow(n)]


def _bits(values: Values) -> bytes:
    """By which numbers are the same: 0.0 and -0.0 are not, two NaN may be."""
    return struct.pack(f"{len(values)}d", *values)


def _looking(sources: Sequence[tuple[dict[str, Any], str]]) -> Callable[[], list[Any]]:
    """A function that gets what is in these groups now."""
    names: dict[str, object] = {f"get{i}": group.get for i, (group, _) in enumerate(sources)}
    look: Callable[[], list[Any]] = written_out(
        f"lambda: [{', '.join(f'get{i}({key!r})' for i, (_, key) in enumerate(sources))}]", names
    )
    return look


def _may_be_dialled(key: str, setting: object) -> bool:
    """Numbers; and no momentum of 0, by which operators, too, decide that there is none."""
    numbers = _numbers(setting)
    return numbers is not None and (key in LIVE or all(numbers))


def _like(setting: object, numbers: Iterator[object]) -> object:
    """A hyper-parameter of this form, made of the next numbers."""
    return tuple([next(numbers) for _ in setting]) if type(setting) is tuple else next(numbers)


def _probe() -> float:
    """A random number that is `_telling`."""
    while True:
        x = _random.uniform(0.25, 0.75)
        if _telling(x):
            return x


def _probe_of_sign(of: float) -> float:
    """One on the side of zero on which this is: an operator may ask for that."""
    return math.copysign(_probe(), of)


def _telling(x: object) -> bool:
    """Whether 1 / x and 1 / float32(x) differ as float32: which of them a program holds can be told."""
    if type(x) is not float or not 1e-9 < abs(x) < 1e9:
        return False
    return struct.pack("f", 1 / x) != struct.pack("f", 1 / single(x))


class Dials:
    """What is followed in one recording: hyper-parameters, and step counts.

    `sources` are (group, key) pairs. `values` are the numbers in them, after these those at `spots`, and those of `counts`, one
    a class. `formulas` maps each probe to what it stands for, `used` are the probes that reached an operator. Those that come
    of spots are `wide`.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], keys: Sequence[str], counts: StepCounts, spots: Sequence[Spot] = ()
    ) -> None:
        wide = {(at[0], at[1].key if isinstance(at[1], Element) else at[1]) for at in (spot.at for spot in spots)}
        self.sources = [
            (group, key)
            for o in optimizers if type(o) in _KNOWN
            for group in o.param_groups for key in keys
            if _may_be_dialled(key, group.get(key)) and (identity(group), key) not in wide
        ]  # fmt: skip
        self.counts, self._counting = counts, bool(counts)
        self._look = _looking(self.sources)
        self._last: list[Any] = [group[key] for group, key in self.sources]
        self._forms = [*map(_form, self._last)]
        read = [_numbers(v) or () for v in self._last]
        self._of = [i for i, numbers in enumerate(read) for _ in numbers]  # the source of each value
        self._settings: Values = tuple([number for numbers in read for number in numbers])
        self.spots = [*spots]
        self.given: Leaves = []
        """The numbers among the arguments of the call, where some of the spots are; a player sets them."""
        self.wide: set[float] = set()
        self.strays: dict[int, str] = {}
        """Which spots cannot be followed, by number, and why."""
        self._aliases = 0
        self.times_taken: Counter[float] = Counter()
        """How often operators took each that is wide, by its probe."""
        self.reading: Callable[[object, str, FrameType], Any] = unread
        """What stands for the number in a tensor, for a frame that reads it by a function of that name; None: nothing does."""
        self.reads_later: Callable[[torch.Tensor, FrameType], Any] | None = None
        """What stands for the number in a tensor that this frame reads, and that a replay reads when it has run."""
        self.convert_no_more: Callable[[], None] = lambda: None
        """Lets all code make numbers of tensors as they are, from now on."""
        self.converting: Set[tuple[str, int]] = frozenset()
        """`float` or `int` that were other functions, and the ids of the global variables among which they were."""
        self.blind = False  # whether code may have run that no mode looked at
        self._seen_last: list[Any] = [spot.get() for spot in spots]
        self._others: list[int] = []  # where there was another number at the last look
        self._at_spots: Values = tuple(self._seen_last)
        self._kinds = [*map(type, self._seen_last)]
        self._tallies: dict[int, Tally] = {}
        self._become: dict[int, Formula | int | float] = {}
        """What the call leaves at spots, where that is something else than what it has found there."""
        self._put_late: list[Spot] = []  # where it leaves what is read when it has run
        self._leave: Callable[[Values], Reading] = lambda values: ()
        self._leaves: Reading = ()  # what the next run leaves
        self._handed_out: list[Formula] = []
        self._counts_from = len(self._of) + len(self.spots)
        self._length = self._counts_from + len(set(counts.of))
        self.values: Values = (*self._settings, *self._at_spots, *(counts.values() or ()))
        self.formulas: dict[float, Formula] = {}
        self._derived: dict[object, Dial] = {}
        self.used: set[float] = set()
        self.lost = False
        self.read = False  # by code that is no optimizer's step
        self.in_step = False
        self._hand_on = [*_handing_on(optimizers)]
        self.stepping: Callable[[bool], None] = lambda begins: None  # told when a step begins and ends; a device sets it
        self._conditions: dict[object, tuple[Formula, bool]] = {}
        self._touched: set[int] = set()
        classes = [self.source(k) for k in range(self._counts_from, self._length)]
        self._stand: list[Dial] = [classes[k] for k in counts.of]  # the dial for what each count is by now
        self._found = list(self._stand)  # when the call begins
        self._moving_at: list[tuple[int, int, Dial]] = []  # at which position of the call which of them becomes another
        self._marks: list[list[Dial]] = []  # those at the ends of segments
        self._thread = threading.get_ident()
        # Known once the capture is over: what depends on counts, which are others at each replay.
        self._settled: _Settled | None = None
        self._moves: list[tuple[Callable[[Values], Values], list[list[Cell]]]] = []
        self.followed: set[tuple[int, str]] = set()
        """The (group identity, key) pairs that the program follows: those whose value was used or decided by."""
        self.marks: set[int] = set()
        """The identities of the floats that were at spots: what the call has not touched it does not go by either."""
        self.whole: set[tuple[int, object]] = set()
        """Where there are whole numbers, or NumPy's, all of which it follows."""
        self._handed: list[Handed] = []
        self._elsewhere: Callable[[Iterable[object]], set[Row]] = lambda containers: set()
        self._put: list[Callable[[int | float], None]] = []  # how what the call leaves is put there
        self.rows: set[tuple[int, object]] = set()
        """Where there are tuples of numbers, all of which it follows."""
        self._numbers: dict[float, float] = {}
        self._worked_out: Values | None = None  # the values for which they were
        self._stale = True  # others than counts have changed since these were worked out

    def __bool__(self) -> bool:
        return bool(self.sources or self.spots or self.counts)

    def alike(self) -> Values:
        """Numbers in the place of the values, which are the same for each capture of a call. Step counts are one number: which
        of them are equal, and so how many values there are, varies."""
        return tuple([type(v)(3 + min(i, self._counts_from)) for i, v in enumerate(self.values)])

    # -- during the capture

    def source(self, i: int) -> Dial:
        """The dial of the i-th value."""
        return self.derive(("source", i), _probe, Given(i, self._touched), len(self._of) <= i < self._counts_from)

    def spot(self, i: int) -> Dial | Tally:
        """What stands for the number at the i-th spot."""
        if self._kinds[i] is float:
            return self.source(len(self._of) + i)
        if i not in self._tallies:
            self._tallies[i] = Tally(self, i, Given(len(self._of) + i, self._touched), self._seen_last[i])
        return self._tallies[i]

    def is_whole(self, i: int) -> bool:
        """Whether there is a whole number at the i-th spot."""
        return self._kinds[i] is int

    def derive_float(self, key: object, formula: Formula) -> Dial:
        """The dial of what is worked out of a tally."""
        return self.derive(key, _probe, formula, wide=True)

    def stands(self, key: object, formula: Worked) -> object:
        """What stands for that which a formula gives, of which the key says what it is."""
        self.may_fail(key, formula)
        value = formula(self.values)
        if is_truth(value):
            return type(value)(self.decide(key, formula))
        if type(value) is float:
            return self.derive_float(key, formula)
        if base_of(type(value)) is None:
            self.stray(formula, "is made something else")
            return value
        return Tally(self, key, formula, value)

    def settled(self, key: object, formula: Worked) -> Any:
        """The whole number that a formula gives, which has to be this one each time."""
        self.may_fail(key, formula)
        value = formula(self.values)
        self.decide(("is", key), Worked(operator.eq, formula, value))
        return value

    def left(self) -> list[tuple[Callable[[Any], None], Any]]:
        """The call is over: what it has left at spots is noted, and put back. Gives what is known there only when a replay has
        run, and how to put it there."""
        unread = list[tuple[Callable[[Any], None], Any]]()
        anew = put_anew([spot.row for spot in self.spots if spot.row is not None])
        self._handed, self._elsewhere, handed = anew.handed, anew.elsewhere, {row for row, _, _ in anew.handed}
        for i, spot in enumerate(self.spots):
            now, stood = spot.get(), self.spot(i)
            changed = now is not stood or spot.row in anew.rows
            if isinstance(now, Unread) and spot.row is None:
                unread.append((spot.put, now))
                self._put_late.append(spot)
                spot.put(stood)
            elif changed and (isinstance(now, (Dial, Tally)) or base_of(type(now))):
                self._become[i] = now.formula if isinstance(now, Followed) else now
                self._put.append(_with_its_list if spot.row in handed else spot.put)
                spot.put(stood)
        if self._become:
            self._leave = written(map(_as_formula, self._become.values()))
        return unread

    def left_in(self, containers: Iterable[object]) -> None:
        """What the call returns, or leaves elsewhere, has these."""
        elsewhere = self._elsewhere(containers)
        for i, spot in enumerate(self.spots):
            if spot.row in elsewhere:
                self.strays.setdefault(i, "is in a list that is kept elsewhere, too")

    def hands_out(self, number: Followed) -> None:
        """The call returns this."""
        if isinstance(number, Dial) and not number.wide:
            self.lost = True
        self._handed_out.append(number.formula)

    @property
    def deciding(self) -> str:
        """What it is that decides otherwise, where it does not fit."""
        if not self.spots:
            return "a hyper-parameter that decides what the optimizer does"
        names = [name for i in self._others if (name := self.spots[i].name)]
        return f"{' or '.join(names[:3]) or 'a number'}{GOES_ON}"

    def other_decision(self) -> object | None:
        """The first decision that comes out otherwise by now, by name; None if none does, or it cannot be taken."""
        try:
            found = (key for key, (formula, was) in self._conditions.items() if bool(formula(self.values)) is not was)
            return next(found, None) if len(self.values) == self._length else None
        except _NO_NUMBER:
            return None

    @property
    def advanced(self) -> list[Spot]:
        """Where replays leave other numbers."""
        return [*(self.spots[i] for i in self._become), *self._put_late]

    def derive(self, key: object, probe: Callable[[], Any], formula: Formula, wide: bool = False) -> Dial:
        """The dial for a formula, of which the key says what it is: with this probe, if it is `_telling`."""
        known = self._derived.get(key)
        if known is not None:
            return known
        try:
            number = probe()
        except ArithmeticError:
            number = None
        if not _telling(number) or number in self.formulas:
            negative = type(number) is float and number < 0
            number = -_probe() if negative else _probe()
        dial = self._derived[key] = Dial(number)
        dial.dials, dial.formula = self, formula
        self.formulas[number] = formula
        if wide:
            self.wide.add(number)
        return dial

    def lose(self, dial: Dial, why: str) -> None:
        """This one has become something else, which is not followed."""
        if dial.wide:
            self.stray(dial.formula, why)
        else:
            self.lost = True

    def stray(self, formula: Formula, why: str) -> None:
        """What this depends on cannot be followed."""
        self._touched.clear()
        with suppress(ArithmeticError):
            formula(self.values)
        for i in self._touched:
            if 0 <= i - len(self._of) < len(self.spots):
                self.strays.setdefault(i - len(self._of), why)

    def stray_all(self, why: str, but: Set[int] = frozenset()) -> None:
        """Nothing that lies at spots can be followed, but for these."""
        self.strays = dict.fromkeys([i for i in range(len(self.spots)) if i not in but], why) | self.strays

    def stray_tensors(self, why: str) -> None:
        """Nor can what lies in tensors."""
        self.strays = {i: why for i, spot in enumerate(self.spots) if spot.memory is not None} | self.strays

    def taken(self, numbers: Iterable[float], why: str | None, special: Callable[[float], bool] | None) -> dict[float, float]:
        """An operator takes these, which are wide: or, for a reason `why`, it cannot be told where it would keep them. Gives
        what it is to take instead: each use has a number of its own, because each has to be found. Where the real number is
        `special`, the operator may do something else."""
        aliases: dict[float, float] = {}
        for n in numbers:
            self.times_taken[n] += 1
            formula = self.formulas[n]
            if why is None and special is not None and self.decide(("special", n, special), Worked(special, formula)):
                why = "is one that an operator treats by itself"
            if why is not None:
                self.stray(formula, why)
                continue
            self._aliases += 1
            aliases[n] = self.derive(("use", self._aliases), partial(_probe_of_sign, n), formula).probe
            self.used.add(aliases[n])
        return aliases

    def decide(self, key: object, formula: Formula) -> bool:
        """Decide by the real values, and keep the decision as a condition."""
        outcome = bool(formula(self.values))
        self._conditions.setdefault(key, (formula, outcome))
        return outcome

    def decided(self) -> Decided | None:
        """The decisions so far that depend on numbers at spots alone; None if there are none."""
        there = range(first := len(self._of), self._counts_from)
        lying = [c for c in self._conditions.values() if {*self._places(c[0])} <= {*there}]
        return Decided([*self.spots], first, self.given, _decisions(lying)) if lying else None

    def _places(self, formula: Formula) -> set[int]:
        """The places of the numbers on which this depends."""
        self._touched.clear()
        with suppress(*_NO_NUMBER):
            formula(self.values)
        return {*self._touched}

    def may_fail(self, key: object, formula: Worked) -> None:
        """Let an operation raise what it raises live: that is decided by the real values, too."""
        try:
            formula(self.values)
        except _NO_NUMBER:
            self.decide(("fails", key), Worked(partial(_fails, formula.function), *formula.of))
            raise

    reals = staticmethod(reals)

    def see(self, number: Any) -> None:
        """An operator got this number as an argument."""
        if type(number) is float and number in self.formulas and number not in self.wide:
            self.used.add(number)

    def stands_in(self, t: torch.Tensor) -> bool:
        """Whether this tensor on the CPU, made of numbers, has some that stand for others."""
        if not (t.is_cpu and t.is_floating_point() and self.formulas):
            return False
        with torch.inference_mode(False), torch.no_grad():
            probes = torch.tensor([*self.formulas], dtype=torch.float64, device="cpu").to(t.dtype)
            found = torch.isin(t.detach(), probes).any()
        return bool(ctypes.c_bool.from_address(found.data_ptr()))  # methods that read values are refused here

    def count(self, x: object) -> float | None:
        """What stands for this step count; None if it is none, or if another thread asks."""
        i = self.counts.index.get(identity(x))
        if i is None or not (threading.get_ident() == self._thread or on_thread_of_autograds()):
            return None
        return self._stand[i]

    def moves(self, name: str, counts: Any, by: Any, position: int) -> bool:
        """An operator adds numbers to these tensors, or multiplies them by some, at this position of the call: whether they are
        step counts. Then it must not run."""
        several = isinstance(counts, (list, tuple))
        places = [self.counts.index.get(identity(t)) for t in (counts if several else (counts,))]
        if not places or None in places:
            return False
        numbers = by if isinstance(by, (list, tuple)) else [by] * len(places)
        for i, number in zip(places, numbers, strict=True):
            if i is not None:
                self._stand[i] = self._moved(name, i, _plain(number))
                self._moving_at.append((position, i, self._stand[i]))
        return True

    def _moved(self, name: str, i: int, number: float) -> Dial:
        """What a count is after an operator. It is worked out in the type of the count."""
        as_kept: Callable[[float], float] = single if self.counts.tensors[i].dtype is torch.float32 else float
        does = operator.add if name == "add" else operator.mul
        other = self.formulas.get(number)
        by = Worked(as_kept, other) if other is not None else as_kept(number)
        formula = Worked(as_kept, Worked(float, Worked(does, self._stand[i].formula, by)))
        return self.derive((name, self._stand[i].probe, number), _probe, formula)

    def mark(self) -> None:
        """A segment ends, and code of the user's runs that may look at counts."""
        self._marks.append(list(self._stand))

    def taken_by(self, frame: FrameType) -> None:
        """What runs in this frame takes parameter groups: or, of an optimizer that stands before another, who asks for them."""
        while self._hands_on(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        self.looks(frame.f_code)

    def _hands_on(self, code: CodeType) -> bool:
        return any(code is one for one in self._hand_on)

    def looks(self, code: CodeType) -> None:
        """This code takes parameter groups, in which it may read numbers."""
        known = any(code is taking for taking in _TAKING_PARAMETERS)
        if not (self.in_step or known or is_ours(code.co_filename) or takes_parameters_only(code)):
            self.lost = self.read = True

    def ran(self, codes: Iterable[CodeType]) -> None:
        """This code ran: that of a scheduler, perhaps, by which it tells the rates that it has set, or of a library whose
        optimizer has the groups of another."""
        for code in codes if self.sources else ():
            if code.co_filename == _SCHEDULERS and code.co_name in _TELLING:
                self.lost = self.read = True
            elif not (is_torchs(code.co_filename) or self._hands_on(code)) and (
                _GROUPS in code.co_names or _GROUPS in code.co_consts
            ):
                self.looks(code)

    # -- once it is over

    def settle(self) -> None:
        """Work out what depends on what."""
        turning = [n for n in self.used if self._turns(self.formulas[n])]
        deciding = [c for c in self._conditions.values() if self._turns(c[0])]
        every = _numbers_of(self._taken_as(self.used)), _decisions(self._conditions.values())
        self._settled = _Settled(_numbers_of(self._taken_as(turning)), every[0], _decisions(deciding), every[1])
        self._moves = [*map(self._moving, (*self._marks, self._stand))]
        self._marks, self._derived = [], {}
        self._leaves = self._leave(self.values)
        self._tallies, self._elsewhere = {}, lambda containers: set()
        alone = [not isinstance(spot.at[1], Element) for spot in self.spots]
        self.marks = {identity(mark) for mark, one in zip(self._seen_last, alone, strict=True) if one and type(mark) is float}
        self.whole = {spot.at for spot, kind in zip(self.spots, self._kinds, strict=True) if kind is not float}
        self.rows = {(spot.at[0], spot.at[1].key) for spot in self.spots if isinstance(spot.at[1], Element)}
        self.followed = {(identity(group), key) for group, key in self.sources}

    def _turns(self, formula: Formula) -> bool:
        """Whether this depends on a count."""
        self._touched.clear()
        formula(self.values)
        return any(i >= self._counts_from for i in self._touched)

    def _moving(self, stand: Sequence[Dial]) -> tuple[Callable[[Values], Values], list[list[Cell]]]:
        """What counts are when these dials stand for them: the formulas, and the counts' cells of each."""
        places: dict[float, list[int]] = {}
        for i, dial in enumerate(stand):
            places.setdefault(dial.probe, []).append(i)
        return written([self.formulas[probe] for probe in places]), [*map(self.counts.cells, places.values())]

    def _taken_as(self, probes: Iterable[float]) -> dict[float, Formula]:
        """What operators take for these: floats, whatever they were worked out of."""
        narrow = any(map(_is_narrow, self.values))
        return {probe: Worked(float, self.formulas[probe]) if narrow else self.formulas[probe] for probe in probes}

    def numbers(self) -> dict[float, float]:
        """What each used probe stands for now. (The same dictionary each time, and the same numbers where they are.)"""
        if self._worked_out is self.values and not self._stale:
            return self._numbers
        if self._settled is None:
            self._numbers = {probe: formula(self.values) for probe, formula in self._taken_as(self.used).items()}
        else:
            self._numbers.update(self._settled.all_numbers(self.values) if self._stale else self._settled.turning(self.values))
        self._worked_out, self._stale = self.values, False
        return self._numbers

    def turned(self, *, running: bool = False) -> bool:
        """Whether a source has another value than at the last look; then `values` are the new ones. While a call is `running`,
        its counts are those with which it began."""
        now, settings, at_spots, others = self._look(), self._settings, self._at_spots, self._others
        there = self._there(running) if self.spots else self._seen_last
        sets, moves = not all(map(operator.is_, now, self._last)), not all(map(operator.is_, there, self._seen_last))
        if not (sets or moves or self._counting):
            return False
        counts = self.values[self._counts_from :] if running or not self._counting else self.counts.values()
        if sets:
            read = [_numbers(v) for v in now]
            other = None in read or [*map(_form, now)] != self._forms
            settings = () if other else tuple([number for numbers in read for number in numbers or ()])
        if moves:
            others = [i for i, (a, b) in enumerate(zip(there, self._seen_last, strict=True)) if a is not b]
            exact = all(-LARGEST < n < LARGEST for n in there if base_of(type(n)) is int)
            at_spots = tuple(there) if exact and [*map(type, there)] == self._kinds else ()
        values = (*settings, *at_spots, *counts) if counts is not None else ()
        turned = values != self.values or _bits(values) != _bits(self.values)
        # All at once, and last: a look that is broken off has seen nothing.
        self._stale = self._stale or sets or moves
        self._last, self._settings, self._seen_last, self._at_spots, self._others = now, settings, there, at_spots, others
        self.values = values
        return turned

    def _there(self, running: bool) -> list[Any]:
        """What lies at spots. A call that is `running` goes by the numbers that tensors held before it wrote them."""
        both = zip(self.spots, self._seen_last, strict=True)
        return [seen if running and spot.memory is not None else spot.get() for spot, seen in both]

    def facts(self) -> list[Fact] | None:
        """Which say that no source has another value than at the last look."""
        if self._counting or self.spots or any(type(group) is not dict or type(key) is not str for group, key in self.sources):
            return None
        return [("item", vars(self), "values"), *(("item", group, key) for group, key in self.sources)]

    def fit(self) -> bool:
        """Whether the program still takes the branches that it took when it was captured, with numbers that can be worked out
        (eager raises where it divides by 1 - beta, say)."""
        if len(self.values) != self._length:
            return False
        try:
            settled = self._settled or _Settled(all_decided=_decisions(self._conditions.values()))
            if not (settled.all_decided if self._stale else settled.decided)(self.values):
                return False
            numbers = self.numbers().values()
            for formula in self._handed_out:
                formula(self.values)  # which may raise
            self._leaves = self._leave(self.values) if self._become else ()
            if self.wide and any(_LARGEST < abs(number) < math.inf for number in numbers):
                self._stale = True
                return False
            return {*map(type, numbers)} <= _FLOATS
        except _NO_NUMBER:
            self._stale = True
            return False

    def advance(self, segment: int = -1) -> None:
        """The program has run, up to the end of this segment: counts are what eager would have left."""
        become, cells = self._moves[segment]
        self.counts.put(become(self.values), cells)
        if segment == -1:
            self._leave_numbers()

    def break_off(self, ran: int, *, shows: bool) -> None:
        """An exception has ended a run when so much had run: counts are what eager would have left there, and, where the run
        `shows`, numbers at spots."""
        stand = list(self._found)
        for position, i, dial in self._moving_at:
            if position < ran:
                stand[i] = dial
        become, cells = self._moving(stand)
        self.counts.put(become(self.values), cells)
        if shows:
            self._leave_numbers()

    def _leave_numbers(self) -> None:
        leave(self._handed, self._leave_each) if self._handed else self._leave_each()

    def _leave_each(self) -> None:
        for put, number in zip(self._put, self._leaves, strict=True):
            put(number)


def _with_its_list(number: int | float) -> None:
    """How a number is put of which the list is handed on."""


def _fails(function: Callable[..., object], *of: object) -> bool:
    try:
        function(*of)
    except _NO_NUMBER:
        return True
    return False


def _as_formula(x: Formula | int | float) -> Formula:
    return x if isinstance(x, (Given, Worked)) else Worked(lambda: x)


def _none(values: Values) -> Iterable[tuple[float, float]]:
    return ()


def _none_decided(values: Values) -> bool:
    return True


def _numbers_of(formulas: Mapping[float, Formula]) -> Callable[[Values], Iterable[tuple[float, float]]]:
    """What these probes stand for."""
    names = [*formulas]
    now = written([*formulas.values()])
    return lambda values: zip(names, now(values), strict=True)


def _decisions(conditions: Iterable[tuple[Formula, bool]]) -> Callable[[Values], bool]:
    """Whether all of these are decided as they were."""
    decided = [*conditions]
    if not decided:
        return _none_decided
    outcomes = tuple([outcome for _, outcome in decided])
    now = written([Worked(bool, formula) for formula, _ in decided])
    return lambda values: now(values) == outcomes


class Decided(NamedTuple):
    """Decisions that a call has taken by numbers at these spots, of which the first ones are `given` as arguments."""

    spots: list[Spot]
    first: int
    given: Leaves
    alike: Callable[[Values], bool]

    def again(self, given: Sequence[object]) -> bool:
        """Whether a call would decide so again, if it is given these."""
        self.given[:] = given
        try:
            return self.alike((*[0.0] * self.first, *[spot.get() for spot in self.spots]))
        except (*_NO_NUMBER, LookupError):
            return False


class _Settled(NamedTuple):
    """Of a capture that is over: the numbers and decisions that depend on counts, which are others at each replay; and all."""

    turning: Callable[[Values], Iterable[tuple[float, float]]] = _none
    all_numbers: Callable[[Values], Iterable[tuple[float, float]]] = _none
    decided: Callable[[Values], bool] = _none_decided
    all_decided: Callable[[Values], bool] = _none_decided


def _plain(number: Any) -> float:
    """What an operator of step counts is given: a number, or one in a tensor. (To read that is nothing that the call does.)"""
    if not isinstance(number, torch.Tensor):
        return float(number)
    with without_modes():
        return float(READS_NUMBER(number))


_TAKING_PARAMETERS = [inspect.unwrap(f).__code__ for f in (torch.optim.Optimizer.zero_grad, unscale_grads)]
_SCHEDULERS, _TELLING = torch.optim.lr_scheduler.__file__, ("get_last_lr", "get_lr", "state_dict")
_GROUPS = "param_groups"


def _handing_on(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[CodeType]:
    """The code of properties and of `__getattr__` by which optimizers that stand before others hand on the groups of those."""
    for kind in {base for o in optimizers if not steps_itself(o) for base in type(o).__mro__}:
        groups = vars(kind).get(_GROUPS)
        for getter in (groups.fget if isinstance(groups, property) else None, vars(kind).get("__getattr__")):
            if isinstance(getter, FunctionType) and hands_on(getter.__code__):
                yield getter.__code__


@contextmanager
def _watched(dials: Dials) -> Iterator[None]:
    """During the block, who takes the parameter groups of an optimizer is noticed: for that time they are a property. (They
    stay where they are, in its dictionary.)"""
    kind: Any = torch.optim.Optimizer
    if not dials.sources or _GROUPS in vars(kind):
        yield
        return

    def get(optimizer: torch.optim.Optimizer) -> Any:
        dials.taken_by(sys._getframe(1))
        try:
            return vars(optimizer)[_GROUPS]
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {_GROUPS!r}") from None

    def put(optimizer: torch.optim.Optimizer, groups: object) -> None:
        vars(optimizer)[_GROUPS] = groups

    kind.param_groups = property(get, put, lambda optimizer: vars(optimizer).pop(_GROUPS))
    try:
        yield
    finally:
        del kind.param_groups


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether other code runs within `step`, and might see the probes."""
    return bool(step_hooks(optimizer) or optimizer_hooks())


@contextmanager
def probing(reach: Reach, wanted: Sequence[str], spots: Sequence[Spot] = ()) -> Iterator[Dials]:
    """During the block, optimizers' steps see dials in place of those of the `wanted` hyper-parameters that they can, and all
    code in place of what is at the `spots`."""
    compiled = reach.compiles_a_step
    seen = compiled or reach.mentions.reads_settings or reach.lends_groups or any(map(_has_hooks, reach.optimizers))
    keys = [key for key in wanted if key in LIVE or key not in reach.mentions.names]
    dials = Dials(() if seen else reach.optimizers, keys, StepCounts(() if compiled else reach.optimizers), spots)
    real = list(dials._last)
    sources = map(dials.source, range(len(dials._of)))
    probes = [_like(v, sources) for v in real]

    # New objects of the same value: that the function sets a number is seen even if it sets what is there already.
    values = (v * 1.0 for v in dials._settings)
    marks = [_like(v, values) for v in real]

    def put(now: Sequence[object], then: Sequence[object], before: bool) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: Args, kwargs: Kwargs) -> None:
            if before and begins(optimizer):
                raise Unseen("steps an optimizer for the first time", "call it once before", final=False)
            dials.stepping(before)
            dials.in_step = before
            if dials.sources and any(x is not None for x in (*args[1:], *kwargs.values())):
                dials.lost = True  # a closure, which may read what it likes
            for (group, key), was, value in zip(dials.sources, now, then, strict=True):
                if any(group is g for g in optimizer.param_groups):
                    if group.get(key) is was:
                        group[key] = value
                    else:
                        dials.lost = True  # the function itself sets it

        return hook

    handles = []
    for o in filter(steps_itself, reach.optimizers if dials else ()):
        handles += [o.register_step_pre_hook(put(marks, probes, True)), o.register_step_post_hook(put(probes, marks, False))]
    try:
        for (group, key), mark in zip(dials.sources, marks, strict=True):
            group[key] = mark
        for i, spot in enumerate(spots):
            spot.put(dials.spot(i))
        with ended(_watched(dials)), ended(steps_captured(dials.count)):
            yield dials
    finally:
        for i, (spot, mark) in enumerate(zip(spots, dials._seen_last, strict=True)):
            if spot.get() is dials.spot(i):
                spot.put(mark)
            else:
                dials.strays[i] = "is set by the function itself"
        for handle in handles:
            handle.remove()
        for (group, key), probe, mark, value in zip(dials.sources, probes, marks, real, strict=True):
            if group.get(key) is mark or group.get(key) is probe:
                group[key] = value
            else:
                dials.lost = True  # the function itself sets it
