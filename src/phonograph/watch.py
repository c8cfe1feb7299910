"""Watching a call while it is captured: every operator (below autograd), and every call of Python's own functions.

Two watchers, because a program touches the world in two ways. `OperatorWatch` is a `TorchDispatchMode`: it sees which
tensors from outside each operator reads and writes and refuses operators that cannot be captured, *before* they run, so
that a refused capture ends in good order instead of an invalidated stream. `watching_python` is a profile function: it
refuses effects on the outside world (`print`, `time.time`, an outer list's `append`), again before they happen, so that
the live run that follows is the only one that has them.

`OperatorWatch` answers True to `ignore_compile_internals`: otherwise a compiled function inside the call would run
eagerly, and stay so for ever.
"""

from __future__ import annotations

import _warnings
import operator
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import operators
from .dials import Dials
from .errors import Refusal
from .reach import Reach
from .where import is_users, users_line

__all__ = ["OperatorWatch", "storage_id", "watching_python"]


def storage_id(t: torch.Tensor) -> int:
    """The identity of a tensor's memory: the same for all its views, for as long as it lives."""
    return int(t.untyped_storage()._cdata)


_cdata: Any = operator.attrgetter("_cdata")


class OperatorWatch(TorchDispatchMode):
    """Sees every operator of one call on one device.

    `known` maps the storages that the call may touch (slots, and tensors in reach) to their names; storages that
    operators of the call create are added. `touched` and `written` collect those that were there before.
    """

    def __init__(self, device: torch.device, reach: Reach, slots: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.known: dict[int, str] = {storage_id(t): f"argument {i}" for i, t in enumerate(slots)}
        self.slot_ids = frozenset(self.known)
        self._births: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for name, t in reach.tensors.values():
            if t.layout is torch.strided and not t.is_meta:
                self.known.setdefault(storage_id(t), name)
                if t.is_leaf and t.grad is not None:
                    self._may_die(t.grad, f"{name}.grad")
        self.outside = set(self.known) - self.slot_ids
        self.touched: set[int] = set()
        self.written: dict[int, torch.Tensor] = {}
        self.strangers: list[tuple[int, int, str, str]] = []  # (address, bytes, operator, line) of unknown origin
        self.generators: list[torch.Generator] = list(reach.generators)
        self.operators = 0
        self.dials: Dials | None = None
        self.refusal: Refusal | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            m = operators.meaning(func)
            operators.check(m, args, kwargs)
            self._see(m, args, kwargs)
        except Refusal as refusal:
            raise self._located(refusal) from None
        self.operators += 1
        return self.perform(func, m, args, kwargs)

    def _located(self, refusal: Refusal) -> Refusal:
        refusal.where = refusal.where or users_line(sys._getframe(2))
        # User code may catch every exception; the first refusal counts even if it never arrives at the recorder.
        self.refusal = self.refusal or refusal
        return refusal

    def perform(self, func: Any, m: operators.Meaning, args: Any, kwargs: Any) -> Any:
        """Run the operator; devices that keep a tape override this."""
        out = func(*args, **kwargs)
        for t in operators.tensors_in(out, []):
            self._born(t)
        return out

    def _may_die(self, t: torch.Tensor, name: str) -> None:
        """A tensor outside that the call may let go of: its identity may be given to another storage then."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            self.known[key] = name
            self._births[key] = weakref.ref(storage, lambda _: self.died(key))

    def _born(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            self.known[key] = ""
            # An identity is given out again once its storage is gone: forget it then.
            self._births[key] = weakref.ref(storage, lambda _: self.died(key))

    def died(self, key: int) -> None:
        """A storage that the call created, or a gradient from before, is gone."""
        self.known.pop(key, None)
        self._births.pop(key, None)
        self.outside.discard(key)

    def _see(self, m: operators.Meaning, args: Any, kwargs: Any) -> None:
        for t in operators.tensors_in(list(kwargs.values()), operators.tensors_in(args, [])):
            key = storage_id(t)
            name = self.known.get(key)
            if name is None:
                self.stranger(m, t)
            elif name:
                self.touched.add(key)
        for t in operators.written_by(m, args, kwargs):
            if storage_id(t) in self.outside or storage_id(t) in self.slot_ids:
                self.written.setdefault(storage_id(t), t)
        if self.dials:
            _numbers_in(args, self.dials)
            _numbers_in(list(kwargs.values()), self.dials)
        generator = kwargs.get("generator")
        if generator is not None and all(generator is not g and _cdata(generator) != _cdata(g) for g in self.generators):
            self.meet(generator)

    def stranger(self, m: operators.Meaning, t: torch.Tensor) -> None:
        """An operator reads a tensor that is neither an argument, nor in reach, nor made by a watched operator."""
        if operators.is_constant(m):
            return
        raise Refusal(
            f"{m.name} reads a tensor that phonograph cannot trace back to an argument or to the function's own variables",
            "pass it as an argument, or keep it as an attribute, closure variable or global",
        )

    def meet(self, generator: torch.Generator) -> None:
        """A generator that was not in reach is used."""
        self.generators.append(generator)


def _numbers_in(values: Any, dials: Dials) -> None:
    for v in values:
        if type(v) is float:
            dials.see(v)
        elif isinstance(v, (list, tuple)) and v and not isinstance(v[0], torch.Tensor):
            _numbers_in(v, dials)


_CLOCKS = {time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns,
           time.process_time, time.process_time_ns, time.sleep}  # fmt: skip
_SAYING = {print, input, open, _warnings.warn}
_SHARING = {torch.from_numpy, torch.frombuffer}
_SEEDING = {"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"}
_CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "update", "add", "discard", "setdefault", "popitem",
            "appendleft", "popleft", "sort", "reverse", "__setitem__"}  # fmt: skip
_OUTSIDE = "do it outside the recorded function"


def _effect(function: Any, users: bool, outer: set[int]) -> tuple[str, str] | None:
    """What calling this built-in function would do that a replay cannot repeat, and the remedy. Of library code
    (`users` is False) only what concerns torch's generators."""
    name, owner = getattr(function, "__name__", None), getattr(function, "__self__", None)
    if isinstance(owner, torch.Generator) and name in _SEEDING:
        return f"sets the state of a random generator ({name})", _OUTSIDE
    if not users or not name:
        return None
    try:
        if function in _SAYING:
            return f"calls {name}()", _OUTSIDE
        if function in _SHARING:
            return f"calls torch.{name}, whose tensor shares memory with a host object", "pass the tensor as an argument"
        if function in _CLOCKS:
            return f"reads the clock ({name})", "read it outside and pass the value as an argument"
    except TypeError:
        return None
    if name in ("now", "utcnow", "today") and getattr(owner, "__module__", "") == "datetime":
        return "reads the clock", "read it outside and pass the value as an argument"
    if name in ("write", "writelines", "flush"):
        return f"writes output ({name})", _OUTSIDE
    if name in _CHANGES and owner is not None and id(owner) in outer:
        return f"changes a {type(owner).__name__} that outlives the call ({name})", "return the value and do it outside"
    return None


def _saying(frame: FrameType) -> tuple[str, str] | None:
    """Python functions whose start is refused: those that put something out."""
    code = frame.f_code
    if code.co_name == "_str" and code.co_filename.endswith("_tensor_str.py"):
        return "prints a tensor, which reads its values on the host", "return the tensor and print it outside"
    if code.co_name == "handle" and code.co_filename.endswith(os.path.join("logging", "__init__.py")):
        return "logs a message", _OUTSIDE
    if code.co_name in ("write", "writelines") and frame.f_back is not None and is_users(frame.f_back.f_code.co_filename):
        return f"writes output ({code.co_name})", _OUTSIDE
    return None


@contextmanager
def watching_python(outer: set[int], forbid: Callable[[FrameType], Refusal | None]) -> Iterator[list[Refusal]]:
    """Refuse effects of Python code while the block runs.

    `outer` holds the ids of containers that were there before the call. `forbid` may refuse the start of a Python
    function. Yields a list that gets the refusals, also those that the user's code swallowed.
    """
    found: list[Refusal] = []

    def refuse(frame: FrameType, effect: tuple[str, str] | None) -> None:
        if effect is not None:
            found.append(Refusal(*effect, where=users_line(frame)))
            raise found[-1]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            refuse(frame, _effect(arg, is_users(frame.f_code.co_filename), outer))
        elif event == "call":
            refuse(frame, _saying(frame))
            refusal = forbid(frame)
            if refusal is not None:
                found.append(refusal)
                raise refusal

    before = sys.getprofile()
    if before is not None:
        yield found  # somebody else is profiling; operators are still watched
        return
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
