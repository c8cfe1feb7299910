"""Looking at a live call: whatever a capture would refuse is noted, and runs all the same.

A capture ends at the first refusal, because nobody knows there what the operator would have given. A live call knows; so one
look finds all that stands in the way. What is found so is *likely*: only a capture can tell what the recorder can deal with,
and what only shows at its end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch

from .._torch.modes import without_modes
from .._torch.tensors import has_memory, storage_id
from ..aten import operators
from ..call.signature import Call
from ..errors import Again, Elsewhere, Refusal, Unseen
from ..guards.reachable import Reach
from ..python.origin import users_frame
from .dispatch import OperatorWatch
from .effects import SCHEDULER, Starts
from .notes import Note
from .python_events import Listener
from .value_checks import Check

__all__ = ["LookingListener", "LookingWatch", "Place", "Seen"]

_PASSING = (Again, Elsewhere, Unseen)  # a second call would not be refused so
_SCHEDULES = os.path.join("optim", "lr_scheduler.py")


@dataclass(frozen=True)
class Place:
    """A part of the user's source: columns count characters from 0; -1: not known."""

    file: str
    line: int
    begin: int = -1
    end: int = -1
    last: int = 0
    """The line on which it ends."""

    @classmethod
    def of(cls, code: CodeType, at: int, line: int) -> Place:
        """Where the instruction `at` this place of code stands."""
        if hasattr(code, "co_positions"):
            first, last, begin, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
            if first is not None and begin is not None and end is not None:
                return cls(code.co_filename, first, begin, end, last or first)
        return cls(code.co_filename, line, last=line)


@dataclass
class Seen:
    """Something that a capture would refuse."""

    refusal: Refusal
    place: Place | None
    after: int
    """Operators of the call before it."""
    times: int = 1
    operator: bool = False
    """An operator, before and behind which there could be recordings."""


class LookingWatch(OperatorWatch):
    """Watches a live call, and notes what it would refuse."""

    def __init__(self, device: torch.device, reach: Reach, call: Call) -> None:
        super().__init__(device, reach, list(call.tensors), [True] * len(call.tensors))
        self.seen: dict[object, Seen] = {}
        """By the user's expression that does it: what is done within an operator, or by a library, is that expression's."""
        self._given: list[Any] = []  # what operators have given that run within each other
        steps = [s.get("step") for o in reach.optimizers for s in o.state.values() if isinstance(s, dict)]
        self._steps = {storage_id(t) for t in steps if isinstance(t, torch.Tensor) and has_memory(t)}

    # -- what is noted

    def note(self, refusal: Refusal, frame: FrameType | None = None) -> None:
        """Note what the user's code has just come to."""
        if isinstance(refusal, _PASSING):
            return
        users = users_frame(frame)
        key = (users.f_code, users.f_lasti) if users is not None else refusal.reason
        known = self.seen.get(key)
        if known is None:
            place = Place.of(users.f_code, users.f_lasti, users.f_lineno) if users is not None else None
            refusal.drop_references()
            self.seen[key] = Seen(refusal, place, self.operators, operator=refusal.operator is not None)
        elif known.after < self.operators and known.refusal.reason == refusal.reason:
            known.times += 1

    def located(self, refusal: Refusal) -> Refusal:
        found = super().located(refusal)
        self.refusal = None  # nothing has ended
        self.note(found)
        return found

    def refuse_read(self, refusal: Refusal) -> None:
        self.located(refusal)

    def _rely(self, key: int, where: str) -> None:
        """Nothing is played that would rely on it."""

    # -- and runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._given.append(_NOTHING)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Refusal as refusal:
            refusal.drop_references()  # of the call's graph, whose parameters would add up gradients where this call ran
            given = self._given[-1]
            return func(*args, **(kwargs or {})) if given is _NOTHING else given
        finally:
            self._given.pop()

    def perform(self, func: Any, m: operators.Meaning, args: Any, kwargs: Any, note: Note | None = None) -> Any:
        self._given[-1] = out = func(*args, **kwargs)
        for t in self.memory_in(m, operators.tensors_in(out, [])):
            self._begins(t.untyped_storage())
        return out

    def refuse_untraced(self, m: operators.Meaning, t: torch.Tensor) -> None:
        """Nothing: what leads to it may not have been looked at."""

    def is_constant(self, m: operators.Meaning, args: Any, kwargs: Any) -> bool:
        """Optimizers read their step counts, which are followed."""
        if super().is_constant(m, args, kwargs):
            return True
        return m.reads_host and bool(self._steps) and has_memory(args[0]) and storage_id(args[0]) in self._steps

    def answered(self, t: torch.Tensor, frame: FrameType) -> bool | None:
        check = Check.asked(frame, self.outermost)
        if check is None or not self.takes(check) or t.numel() != 1 or not has_memory(t):
            return None
        with without_modes():
            return bool(t.item())

    def checks(self, check: Check, answer: torch.Tensor) -> bool:
        with without_modes():
            check(answer, [])
        return check.good

    def communicates(self, m: operators.Meaning, args: Any, kwargs: Any) -> None:
        """Devices differ in this."""

    def _see(self, m: operators.Meaning, args: Any, kwargs: Any, note: Note) -> None:
        super()._see(m, args, kwargs, note)
        if m.copies and copies_to_host(m, args, kwargs) and any(not t.is_cpu for t in note.tensors):
            raise operators.brings_to_host(m.name)

    def frames(self) -> Starts:
        return {**super().frames(), "step": [(_SCHEDULES, lambda frame: True, SCHEDULER)]}


_NOTHING = object()


def copies_to_host(m: operators.Meaning, args: Any, kwargs: Any) -> bool:
    """Whether an operator that copies brings something to the host."""
    target = kwargs.get("device")
    if target is not None:
        return torch.device(target).type == "cpu"
    return m.name == "aten::copy_" and args[0].device.type == "cpu"


class LookingListener(Listener):
    """Hears effects of Python code for a `LookingWatch`, and lets them happen."""

    def refuse(self, refusal: Refusal, frame: FrameType) -> None:
        assert isinstance(self._follower, LookingWatch)
        self._follower.note(refusal, frame)
