"""Refusing a capture where it touches what nobody could watch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

import torch

from ..capture.python_events import HEARS_ALL_THREADS, Listener, hears_instructions
from ..errors import Overlooked, Refusal
from ..guards.reachable import Reach
from ..guards.unwatchable import Untouched, Unwatchable
from ..python.origin import users_line
from ..python.read_gate import Reads
from ..python.variable_loads import Load

__all__ = ["Touches"]


class Touches:
    """Hears of a captured call where it comes to what it must not touch (`Untouched`), and refuses the call there."""

    def __init__(self, reach: Reach, reads: Reads | None, device: torch.device, refused: list[Refusal]) -> None:
        """Raises:
        Refusal: it could come there unheard.
        """
        self._reach, self._refused = reach, refused
        self._untouched = Untouched(reach.found, reads)
        self.some = bool(self._untouched)
        """Whether there is anything to be heard of."""
        self._listener: Callable[[], Listener | None] = lambda: None
        self._heard = hears_instructions()
        if not self.some:
            return
        past = reach.mentions.looks_past or not reach.mentions.names.isdisjoint({"__getattribute__", "__get__"})
        reads_past = past or not (HEARS_ALL_THREADS or device.type == "cpu")
        one = next(iter(reach.unwatchable)) if reads_past else self._untouched.unavoidable
        if one is not None:
            raise one.refusal(reach.mentions.read_at(one.name))
        assert reads is not None
        reads.touching, reads.untouched = self, self._untouched.whole

    def heard_by(self, listener: Listener) -> None:
        """Refuse where it listens. (It refers to this.)"""
        self._listener = weakref.ref(listener)

    def left_out(self, frame: FrameType) -> Overlooked | Refusal | None:
        """What was overlooked of the code that starts in this frame, or what that may touch unheard."""
        one = self._untouched.started(frame, heard=self._heard) if self.some else None
        return one.refusal(users_line(frame)) if one is not None else self._reach.left_out(frame)

    def loads(self, code: CodeType) -> Mapping[int, Load] | None:
        return self._untouched.loads(code)

    def loaded(self, frame: FrameType, load: Load) -> None:
        self._refuse(self._untouched.loaded(frame, load), frame)

    def read(self, value: object, frame: FrameType, name: str) -> None:
        self._refuse(self._untouched.read(value, frame, name), frame)

    def read_all(self, thing: object, frame: FrameType) -> None:
        self._refuse(self._untouched.held_by(thing), frame)

    def unheard(self) -> None:
        """From here on nothing would be heard."""
        self._refused.append(self._reach.unwatchable[0].refusal(""))
        raise self._refused[-1]

    def _refuse(self, one: Unwatchable | None, frame: FrameType) -> None:
        listener = self._listener()
        if one is not None and listener is not None and listener.concerned():
            listener.refuse(one.refusal(users_line(frame)), frame)
