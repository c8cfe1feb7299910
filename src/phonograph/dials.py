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

Only for classes of `torch.optim` whose step is plain arithmetic on them (`_KNOWN`): other code could take a dial's
value out of sight, through `math.sqrt` for instance. And only numbers that no other code reads, whosever it is. (Outside of
steps it finds the real ones, and what it makes of them is baked in.) So a call does not follow any if code in it takes an
optimizer's parameter groups, for more than the parameters in them, or has one from elsewhere (`Reach.lends_groups`).
"""

from __future__ import annotations

import inspect
import operator
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

from .identity import identity
from .introspection import takes_parameters_only
from .mentions import LIVE
from .optimizers import SMALLEST, divides_by_rate
from .reach import Reach
from .torch_private import optimizer_hooks, step_hooks, steps_itself
from .where import is_ours, is_torchs

__all__ = ["Dial", "Dials", "probing"]

Values = tuple[float, ...]
Formula = Callable[[Values], float]

_KNOWN = tuple([getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax",
                "NAdam", "RAdam", "ASGD", "Muon") if hasattr(torch.optim, name)])  # fmt: skip
_random = random.Random(0)  # our own: the user's generator is not touched


class Dial(float):
    """A probe: its float value is meaningless, `formula` says what it stands for."""

    __slots__ = ("dials", "formula")
    dials: Dials
    formula: Formula

    def __float__(self) -> float:
        self.dials.lost = True
        return self.formula(self.dials.values)

    def __reduce__(self) -> Any:
        return (float, (self.formula(self.dials.values),))

    def __bool__(self) -> bool:
        return bool(self.dials.decide(self.formula, bool))

    __hash__ = float.__hash__


def _arithmetic(name: str, function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Dial, Any], Any]:
    plain = getattr(float, name)

    def method(self: Dial, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        mine = self.formula
        if isinstance(other, Dial):
            theirs = other.formula
            return self.dials.derive(plain(self, other), lambda v: function(mine(v), theirs(v)))
        if swapped:
            return self.dials.derive(plain(self, other), lambda v: function(other, mine(v)))
        return self.dials.derive(plain(self, other), lambda v: function(mine(v), other))

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Dial, Any], Any]:
    def method(self: Dial, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        mine = self.formula
        theirs = other.formula if isinstance(other, Dial) else (lambda v: other)
        return self.dials.decide(lambda v: function(mine(v), theirs(v)), bool)

    return method


def _unary(name: str, function: Callable[[Any], Any]) -> Callable[[Dial], Any]:
    plain = getattr(float, name)

    def method(self: Dial) -> Any:
        mine = self.formula
        return self.dials.derive(plain(self), lambda v: function(mine(v)))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Dial, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), swapped=False))
    setattr(Dial, f"__r{_name}__", _arithmetic(f"__r{_name}__", getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Dial, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("neg", "abs"):
    setattr(Dial, f"__{_name}__", _unary(f"__{_name}__", getattr(operator, _name)))


def _is_number(v: Any) -> bool:
    """Whether it is one that operators take."""
    return isinstance(v, float) or (isinstance(v, int) and not isinstance(v, bool) and -(2**63) <= v < 2**63)


def _numbers(setting: Any) -> Values | None:
    """The numbers of a hyper-parameter that is one, or a tuple of them (`betas`)."""
    parts = setting if type(setting) is tuple else (setting,)
    return tuple(map(float, parts)) if parts and all(map(_is_number, parts)) else None


def _form(setting: Any) -> int:
    """How many numbers in a tuple; -1 for a number by itself."""
    return len(setting) if type(setting) is tuple else -1


def _bits(values: Values) -> bytes:
    """By which numbers are the same: 0.0 and -0.0 are not, two NaN may be."""
    return struct.pack(f"{len(values)}d", *values)


def _may_be_dialled(key: str, setting: Any) -> bool:
    """Numbers; and no momentum of 0, by which operators, too, decide that there is none."""
    numbers = _numbers(setting)
    return numbers is not None and (key in LIVE or all(numbers))


def _like(setting: Any, numbers: Iterator[Any]) -> Any:
    """A hyper-parameter of this form, made of the next numbers."""
    return tuple([next(numbers) for _ in setting]) if type(setting) is tuple else next(numbers)


def _probe() -> float:
    """A random number of which 1 / x and 1 / float32(x) differ as float32: which of them a program holds can be told."""
    while True:
        x = _random.uniform(0.25, 0.75)
        single = struct.unpack("f", struct.pack("f", x))[0]
        if struct.pack("f", 1 / x) != struct.pack("f", 1 / single):
            return x


class Dials:
    """The live hyper-parameters of one recording.

    `sources` are (group, key) pairs and `values` the numbers in them, `formulas` maps each probe to what it stands for,
    `used` are the probes that reached an operator.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], keys: Sequence[str]) -> None:
        self.sources = [
            (group, key)
            for o in optimizers if type(o) in _KNOWN
            for group in o.param_groups for key in keys
            if _may_be_dialled(key, group.get(key))
        ]  # fmt: skip
        self._last: list[Any] = [group[key] for group, key in self.sources]
        self._forms = [*map(_form, self._last)]
        read = [_numbers(v) or () for v in self._last]
        self._of = [i for i, numbers in enumerate(read) for _ in numbers]  # the source of each value
        self.values: Values = tuple([number for numbers in read for number in numbers])
        self.formulas: dict[float, Formula] = {}
        self.used: set[float] = set()
        self.lost = False
        self.read = False  # by code that is no optimizer's step
        self.in_step = False
        self.stepping: Callable[[bool], None] = lambda begins: None  # told when a step begins and ends; a device sets it
        self._conditions: list[tuple[Callable[[Values], Any], Any]] = []
        self._touched: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.sources)

    def source(self, i: int) -> Dial:
        """The dial of the i-th value."""

        def formula(values: Values) -> float:
            self._touched.add(i)
            return values[i]

        return self.derive(_probe(), formula)

    def derive(self, probe: float, formula: Formula) -> Dial:
        dial = Dial(probe)
        dial.dials, dial.formula = self, formula
        self.formulas[float.__pos__(dial)] = formula
        return dial

    def decide(self, formula: Callable[[Values], Any], kind: Callable[[Any], Any]) -> Any:
        """Decide by the real values, and keep the decision as a condition."""
        outcome = kind(formula(self.values))
        self._conditions.append((lambda v: kind(formula(v)), outcome))
        return outcome

    def see(self, number: Any) -> None:
        """An operator got this number as an argument."""
        if type(number) is float and number in self.formulas:
            self.used.add(number)

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
            elif not is_torchs(code.co_filename) and (_GROUPS in code.co_names or _GROUPS in code.co_consts):
                self.looks(code)

    def live(self) -> set[tuple[int, str]]:
        """The (group identity, key) pairs that the program follows: those whose value was used or decided by."""
        self._touched.clear()
        for probe in self.used:
            self.formulas[probe](self.values)
        for condition, _ in self._conditions:
            condition(self.values)
        baked = {of for i, of in enumerate(self._of) if i not in self._touched}
        return {(identity(group), key) for i, (group, key) in enumerate(self.sources) if i not in baked}

    def numbers(self) -> dict[float, float]:
        """What each used probe stands for now."""
        return {probe: self.formulas[probe](self.values) for probe in self.used}

    def turned(self) -> bool:
        """Whether a source has another value than at the last look; then `values` are the new ones."""
        now = [group.get(key) for group, key in self.sources]
        if all(map(operator.is_, now, self._last)):
            return False
        self._last = now
        read = [_numbers(v) for v in now]
        if None in read or [*map(_form, now)] != self._forms:
            self.values = ()
            return True
        before, self.values = self.values, tuple([number for numbers in read for number in numbers or ()])
        return _bits(before) != _bits(self.values)

    def fit(self) -> bool:
        """Whether the program still takes the branches that it took when it was captured, with numbers that can be worked out
        (eager raises where it divides by 1 - beta, say)."""
        if len(self.values) != len(self._of):
            return False
        try:
            fits = all(c(self.values) == outcome for c, outcome in self._conditions)
            return fits and all(type(number) is float for number in self.numbers().values())
        except ArithmeticError:
            return False


_TAKING_PARAMETERS = [
    inspect.unwrap(f).__code__ for f in (torch.optim.Optimizer.zero_grad, torch.amp.GradScaler._unscale_grads_)
]
_SCHEDULERS, _TELLING = torch.optim.lr_scheduler.__file__, ("get_last_lr", "get_lr", "state_dict")
_GROUPS = "param_groups"


@contextmanager
def _watched(dials: Dials) -> Iterator[None]:
    """During the block, who takes the parameter groups of an optimizer is noticed: for that time they are a property. (They
    stay where they are, in its dictionary.)"""
    kind: Any = torch.optim.Optimizer
    if not dials or _GROUPS in vars(kind):
        yield
        return

    def get(optimizer: torch.optim.Optimizer) -> Any:
        dials.looks(sys._getframe(1).f_code)
        try:
            return vars(optimizer)[_GROUPS]
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {_GROUPS!r}") from None

    def put(optimizer: torch.optim.Optimizer, groups: Any) -> None:
        vars(optimizer)[_GROUPS] = groups

    kind.param_groups = property(get, put, lambda optimizer: vars(optimizer).pop(_GROUPS))
    try:
        yield
    finally:
        del kind.param_groups


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether other code runs within `step`, and might see the probes."""
    return bool(step_hooks(optimizer) or optimizer_hooks())


def _divides_by(rate: Dial) -> Callable[[Values], Any]:
    return lambda values: abs(rate.formula(values)) >= SMALLEST


@contextmanager
def probing(reach: Reach, wanted: Sequence[str]) -> Iterator[Dials]:
    """During the block, optimizers' steps see dials in place of those of the `wanted` hyper-parameters that they can."""
    seen = (
        reach.compiles_a_step or reach.mentions.reads_settings or reach.lends_groups or any(map(_has_hooks, reach.optimizers))
    )
    keys = [key for key in wanted if key in LIVE or key not in reach.mentions.names]
    dials = Dials(() if seen else reach.optimizers, keys)
    real = list(dials._last)
    sources = map(dials.source, range(len(dials.values)))
    probes = [_like(v, sources) for v in real]
    dividing = {identity(group) for o in reach.optimizers for group in o.param_groups if divides_by_rate(o, group)}
    for probe, (group, key) in zip(probes, dials.sources, strict=True):
        if key == "lr" and identity(group) in dividing:
            dials.decide(_divides_by(probe), bool)

    # New objects of the same value: that the function sets a number is seen even if it sets what is there already.
    values = (v * 1.0 for v in dials.values)
    marks = [_like(v, values) for v in real]

    def put(now: Sequence[Any], then: Sequence[Any], begins: bool) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            dials.stepping(begins)
            dials.in_step = begins
            if len(args) > 1 or kwargs:
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
        with _watched(dials):
            yield dials
    finally:
        for handle in handles:
            handle.remove()
        for (group, key), probe, mark, value in zip(dials.sources, probes, marks, real, strict=True):
            if group.get(key) is mark or group.get(key) is probe:
                group[key] = value
            else:
                dials.lost = True  # the function itself sets it
