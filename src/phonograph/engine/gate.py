"""Calls that run live whatever their arguments: of functions that can never be recorded, and of those of which a backward has
shown that it cannot, where gradients are wanted."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ..errors import Refusal
from ..python.origin import users_line
from ..state import capturable as optimizers
from ..values.wording import defined_at

__all__ = ["Gate"]


class Gate:
    """Of one function. `final`: once a refusal was told, calls need not come here again."""

    def __init__(self, function: Callable[..., object], *, final: bool) -> None:
        self._final = final
        self._doubts: list[tuple[Callable[[], bool], Refusal]] = []
        self._stopped: Refusal | None = None
        self.never = _never(function)
        """Why it can never be recorded."""
        self.closed: Refusal | None = None
        """Why calls run live, once that was told: all, or those that want gradients."""

    def check(self) -> None:
        """Let a call pass.

        Raises:
            Refusal: it runs live.
        """
        why = self.never
        if why is None:
            while self._doubts:
                broken, refusal = self._doubts.pop()
                if broken():
                    self.stop(refusal)
            why = self._stopped if torch.is_grad_enabled() else None
        if why is not None:
            self.closed = why if self._final else None
            raise why

    def stop(self, refusal: Refusal) -> None:
        """Close it to calls that want gradients."""
        self._stopped = refusal.at(users_line())

    def doubt(self, broken: Callable[[], bool], refusal: Refusal) -> None:
        """Likewise, should this say so at the next call."""
        self.closed = None
        self._doubts.append((broken, refusal))

    def reset(self) -> None:
        self._stopped = self.closed = None


def _never(function: Callable[..., object]) -> Refusal | None:
    """Why a function can never be recorded, whatever its arguments."""
    inner = inspect.unwrap(function)
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        return Refusal("is a generator or coroutine function, which runs only after the call", "record what it calls",
                       defined_at(function))  # fmt: skip
    return optimizers.never(function)
