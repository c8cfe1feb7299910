"""Loggers of the standard library's, which are asked whether a message is wanted.

What nobody wants to hear is no effect, and most messages of a level below the one that is set are just that. A recording relies
on it: where a level is set later that lets the message through, the function runs again, and says it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from logging import Logger, LoggerAdapter
from types import FrameType

from .._torch.dynamic import Thing
from .holders import Holder, kept
from .identity import identity
from .introspection import MISSING, own_dict
from .origin import USER, works_for

__all__ = ["ASKING", "Question", "decides_itself", "levels", "question"]

Question = tuple[object, int | None]
"""A logger, or an adapter of one, and the level of which it is asked whether it lets that through; None: which is its level."""

ASKING = frozenset(f.__code__ for kind in (Logger, LoggerAdapter) for f in (kind.isEnabledFor, kind.getEffectiveLevel))
"""The code of the functions that say what a logger lets through: all others ask them."""

_DECIDING = frozenset({"isEnabledFor", "getEffectiveLevel", "log", "_log", "handle", "callHandlers", "makeRecord"})
_SAYING = frozenset({"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal"})


def question(frame: FrameType, there: Container[int]) -> Question | None:
    """What is asked where such a function starts. But not what torch asks loggers of its own, and we ours; nor of an adapter
    that was not `there` (by identity) before the call: it asks its logger."""
    asks: object = frame.f_locals["self"]
    level = frame.f_locals.get("level")
    own = own_dict(asks) or {}
    if str(own.get("name")).partition(".")[0] in ("torch", "phonograph") and works_for(frame.f_back) is not USER:
        return None
    if isinstance(asks, LoggerAdapter) and identity(asks) not in there:
        return None
    return (asks, level) if level is None or isinstance(level, int) else None


def decides_itself(frame: FrameType) -> bool:
    """Whether a method starts of a logger that has its own idea of what it lets through, or of what it does then."""
    asks: object = frame.f_locals.get("self")
    kind = type(asks)
    base: object = next((b for b in (Logger, LoggerAdapter) if issubclass(kind, b)), kind)
    return not _DECIDING.isdisjoint(own_dict(asks) or ()) or any(
        getattr(kind, name, None) is not getattr(base, name, None) for name in _DECIDING
    )


def levels(questions: Iterable[Question]) -> Holder:
    """The answers."""
    asks = [_asks(*question) for question in questions]
    return kept("what a logger lets through", lambda: tuple([answer for ask in asks for answer in ask()]))


def _asks(asks: Thing, level: int | None) -> Callable[[], tuple[object, ...]]:
    """A function that asks again. It runs no code of a class of the user's, and raises nothing: what cannot be asked any more
    is something else than it was."""
    if isinstance(asks, LoggerAdapter):
        return lambda: ((own_dict(asks) or {}).get("logger", MISSING), type(asks))
    own = vars(asks)

    def ask() -> tuple[object, ...]:
        try:
            answer = Logger.getEffectiveLevel(asks) if level is None else Logger.isEnabledFor(asks, level)
        except (AttributeError, TypeError):
            return (object(),)
        # `logging.info` gives the root a handler where it has none. And an attribute may have come before a method.
        handled = asks is not logging.root or bool(asks.handlers)
        return answer, handled, type(asks), _SAYING.isdisjoint(own) and _DECIDING.isdisjoint(own)

    return ask
