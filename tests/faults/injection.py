"""Faults, one a trial: something raises once, somewhere in a call, and then nothing is as it should not be.

The oracle is eager. A call that raises has left what eager leaves that is broken off somewhere in that call, but for gradients,
which may be those of the whole call (docs/limits.md); one that does not has given what eager gives. Afterwards the house is as
it was, and five more calls are eager's from there.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

import phonograph as pg
from phonograph.devices.cuts import Cuts
from phonograph.engine import current_capture
from phonograph.python import read_gate, standing
from phonograph.reads import gate
from phonograph.state.reentrancy import Nested
from phonograph.testing import assert_same
from tests.faults.programs import PROGRAMS, Program, Same

__all__ = ["ERRORS", "PHASES", "Trial", "draw", "run"]

HOME = os.path.dirname(pg.__file__)
RESET = "reset"
PHASES = {"warm-up": 0, "capture": 1, "first replay": 2, "replay": 3, "eviction": 4, "audit": 9, RESET: 4}
"""How many calls come before the one that a fault is in, or before a reset that it is in."""
ERRORS: dict[str, type[BaseException]] = {
    "memory": MemoryError,
    "interrupt": KeyboardInterrupt,
    "out of memory": torch.OutOfMemoryError,
}
AFTER = 5
PATCHED = ("apply_", "map_", "numpy", "tensor_split", "tolist", "__bool__", "item", "__float__")


class Trial(NamedTuple):
    """A fault at the `at`-th start of one of our functions in a call (0: nowhere)."""

    program: str
    phase: str
    error: str
    at: int

    def __str__(self) -> str:
        return f"{self.program}, {self.phase}: {self.error} at function {self.at}"


class Injected(Exception):
    pass


# ---- where something raises ----------------------------------------------------------------------


class Functions:
    """Starts of functions of phonograph's own, counted; one of them raises."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error, self.count, self.where = at, error, 0, ""

    def __enter__(self) -> Functions:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            self.count += 1
            if self.count == self.at:
                self.where = f"{frame.f_code.co_filename[len(HOME) + 1 :]}:{frame.f_code.co_qualname}"
                raise self.error("injected")


class Broken(TorchDispatchMode):
    """Eager that is broken off before its `at`-th operator; it counts them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise Injected
        return func(*args, **(kwargs or {}))


# ---- the house -----------------------------------------------------------------------------------


def house() -> dict[str, object]:
    """What a call may replace in the process, and puts back."""
    classes = (torch.Tensor, PATCHED), (torch.nn.Module, ("__getattribute__",)), (torch.nn.Linear, ("__getattribute__",))
    patched = {f"{kind.__name__}.{name}": vars(kind).get(name) for kind, names in classes for name in names}
    return {
        **patched,
        "collector": (gc.isenabled(), [*gc.callbacks]), "nested": (Nested.running, Nested.waiting), "cuts": len(Cuts.now),
        "modes": _len_torch_dispatch_stack(), "captures": len(current_capture._captures),
        "gates": (read_gate._noting.locked(), len(gate._standing)),
        "standing": len(standing._all), "threads": torch._C._is_multithreading_enabled(), "grad": torch.is_grad_enabled(),
        "profile": sys.getprofile(), "autocast": torch.is_autocast_enabled("cpu"), "hook": sys.excepthook,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip


# ---- a trial -------------------------------------------------------------------------------------


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Those that draw where nobody names one."""
    return [torch.default_generator, *(torch.cuda.default_generators if device.type == "cuda" else ())]


class Side:
    """A program with generators of its own."""

    def __init__(self, name: str, device: torch.device, record: Any) -> None:
        self.program: Program = PROGRAMS[name](device, record)
        self.device = device
        self.generators = [torch.Generator(g.device).manual_seed(1).get_state() for g in generators_of(device)]
        self.python = random.Random(1).getstate()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        default = generators_of(self.device)
        for generator, state in zip(default, self.generators, strict=True):
            generator.set_state(state)
        random.setstate(self.python)
        try:
            yield
        finally:
            self.generators, self.python = [generator.get_state() for generator in default], random.getstate()

    def call(self, k: int) -> Any:
        with self.drawing():
            return self.program.call(k)

    def reset(self) -> None:
        for each in self.program.recorded:
            pg.reset(each)

    def state(self) -> list[Any]:
        """All but gradients."""
        return [*self.program.state(), *self.generators, self.python]

    def whole(self) -> list[Any]:
        return [*self.state(), *self.program.gradients()]

    def drop_gradients(self) -> None:
        for p in self.program.parameters():
            p.grad = None


def eager(trial: Trial, device: torch.device, calls: int, broken: int = 0) -> Side:
    """Eager after so many calls, the last of which is broken off before an operator (0: it is not)."""
    side = Side(trial.program, device, Same())
    for k in range(calls - bool(broken)):
        side.call(k)
    if broken:
        with side.drawing(), Broken(broken) as mode:
            try:
                side.program.call(calls - 1)
            except Injected:
                pass
            else:
                raise StopIteration(mode.count)
    return side


def same(a: object, b: object) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def broken_off(trial: Trial, device: torch.device, calls: int, state: list[Any]) -> Side | None:
    """Eager broken off in its last call where that leaves this state."""
    for at in range(1, 100000):
        try:
            side = eager(trial, device, calls, at)
        except StopIteration:
            return None
        if same(side.state(), state):
            return side
    return None


def run(trial: Trial, device: torch.device) -> tuple[int, str]:
    """How many places the call has, and what is wrong ("" if nothing is)."""
    calls = PHASES[trial.phase]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("phonograph").setLevel(logging.CRITICAL + 1)
        ours = Side(trial.program, device, pg.record)
        try:
            return _run(trial, device, calls, ours)
        finally:
            with suppress(TypeError):  # a module that was reset is not recorded any more
                ours.reset()


def _run(trial: Trial, device: torch.device, calls: int, ours: Side) -> tuple[int, str]:
    for k in range(calls):
        ours.call(k)
    before, raised, result = house(), None, None
    with Functions(trial.at, ERRORS[trial.error]) as fault:
        try:
            result = ours.reset() if trial.phase == RESET else ours.call(calls)
        except BaseException as error:
            raised = error
    after = house()
    if wrong := [name for name in before if before[name] != after[name]]:
        return fault.count, f"{fault.where}: left behind {', '.join(wrong)}"
    if raised is not None and "injected" not in str(raised):
        return fault.count, f"{fault.where}: raises {type(raised).__name__}: {raised}"
    raises = raised is not None
    raised = None
    if trial.phase == RESET:
        theirs = eager(trial, device, calls)
        if not same(theirs.whole(), ours.whole()):
            return fault.count, f"{fault.where}: a reset changes the state: {told(theirs.whole(), ours.whole())}"
        return fault.count, follow(ours, theirs, calls, fault.where)
    theirs, said = beside(trial, device, calls, ours, raises, result)
    if theirs is None:
        return fault.count, f"{fault.where}: {said}"
    return fault.count, follow(ours, theirs, calls + 1, fault.where)


def beside(trial: Trial, device: torch.device, calls: int, ours: Side, raised: bool, result: Any) -> tuple[Side | None, str]:
    """Eager in the state of ours; None, and what is wrong, where it has none like it."""
    state = ours.whole()
    whole = eager(trial, device, calls)
    if raised and same(whole.whole(), state):
        return whole, ""
    theirs = whole.call(calls)
    if same(whole.whole(), state):
        return (whole, "") if raised or same(theirs, result) else (None, f"another result: {theirs} {result}")
    if not raised:
        return None, f"another state without a word: {told(whole.whole(), state)}"
    between = broken_off(trial, device, calls + 1, ours.state())
    if between is None:
        return None, f"raises, and leaves what eager never leaves: {told(whole.state(), ours.state())}"
    for side in (ours, between):
        side.drop_gradients()
    return between, ""


def told(theirs: list[Any], ours: list[Any]) -> str:
    try:
        assert_same(ours, theirs, "state")
    except AssertionError as error:
        return str(error)[:300]
    return ""


def follow(ours: Side, theirs: Side, calls: int, where: str) -> str:
    for k in range(calls, calls + AFTER):
        try:
            found = ours.call(k)
        except Exception as error:
            return f"{where}: call {k - calls + 1} afterwards raises {type(error).__name__}: {error}"
        wanted = theirs.call(k)
        if not same(found, wanted) or not same(ours.state(), theirs.state()):
            return (
                f"{where}: call {k - calls + 1} afterwards differs: {told([wanted, *theirs.state()], [found, *ours.state()])}"
            )
    return ""


def draw(chosen: random.Random, device: torch.device, places: dict[tuple[str, str], int], program: str = "") -> Trial:
    """A trial, of one program or of any. `places` remembers how many places the calls have."""
    program, phase, error = program or chosen.choice([*PROGRAMS]), chosen.choice([*PHASES]), chosen.choice([*ERRORS])
    key = program, phase
    if key not in places:
        places[key], _ = run(Trial(program, phase, error, 0), device)
    return Trial(program, phase, error, chosen.randrange(1, max(places[key], 1) + 1))
