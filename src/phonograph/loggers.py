"""Loggers of the standard library's, which are asked whether a message is wanted.

What nobody wants to hear is no effect, and most messages of a level below the one that is set are just that. A recording relies
on it: where a level is set later that lets the message through, the function runs again, and says it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from logging import Logger, LoggerAdapter
from types import FrameType
from typing import Any

from .places import Holder, kept

__all__ = ["ASKING", "Question", "asked", "decides_itself", "levels"]

Question = tuple[Any, int | None]
"""A logger, or an adapter of one, and the level of which it is asked whether it lets that through; None: which is its level."""

ASKING = frozenset(f.__code__ for kind in (Logger, LoggerAdapter) for f in (kind.isEnabledFor, kind.getEffectiveLevel))
"""The code of the functions that say what a logger lets through: all others ask them."""

_DECIDING = ("isEnabledFor", "getEffectiveLevel", "log", "_log", "handle", "callHandlers", "makeRecord")


def asked(frame: FrameType) -> Question | None:
    """What is asked where such a function starts; but not of torch's loggers, and ours, by which these log for themselves."""
    logger: Any = frame.f_locals["self"]
    name = getattr(logger, "name", None)  # of an adapter, its logger's
    if isinstance(name, str) and name.partition(".")[0] in ("torch", "phonograph"):
        return None
    return logger, frame.f_locals.get("level")


def decides_itself(frame: FrameType) -> bool:
    """Whether a method starts of a logger of a class that has its own idea of what it lets through, or of what it does then."""
    kind = type(frame.f_locals.get("self"))
    base: Any = next((b for b in (Logger, LoggerAdapter) if issubclass(kind, b)), kind)
    return any(getattr(kind, name, None) is not getattr(base, name, None) for name in _DECIDING)


def levels(questions: Iterable[Question]) -> Holder:
    """The answers."""
    asks = [_asks(*question) for question in questions]
    return kept("what a logger lets through", lambda: tuple([ask() for ask in asks]))


def _asks(logger: Any, level: int | None) -> Callable[[], object]:
    if isinstance(logger, LoggerAdapter):
        return lambda: logger.logger  # which is asked next
    if level is None:
        return partial(Logger.getEffectiveLevel, logger)
    lets_through = partial(Logger.isEnabledFor, logger, level)
    # `logging.info` gives the root a handler where it has none.
    return lets_through if logger is not logging.root else lambda: (lets_through(), bool(logging.root.handlers))
