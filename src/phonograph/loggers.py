"""Loggers of the standard library's, of which a function asks whether a message is wanted.

What nobody wants to hear is no effect, and most messages of a level below the one that is set are just that. A recording relies
on it: where a level is set later that lets the message through, the function runs again, and says it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import FrameType

from .places import Holder, kept
from .where import USER, works_for

__all__ = ["ASKING", "asked", "levels"]

ASKING = frozenset({logging.Logger.isEnabledFor.__code__, logging.Logger.getEffectiveLevel.__code__})
"""The code of the functions that say what a logger lets through: all others ask them."""


def asked(frame: FrameType) -> logging.Logger | None:
    """The logger that is asked where such a function starts, if it is for code of the user's."""
    logger = frame.f_locals["self"]
    return logger if works_for(frame.f_back) is USER else None


def levels(loggers: Iterable[logging.Logger]) -> Holder:
    """What these let through."""
    each = [*loggers]

    def read() -> tuple[object, ...]:
        return tuple([x for one in each for x in (logging.Logger.getEffectiveLevel(one), one.manager.disable, one.disabled)])

    return kept(f"the level of the logger {each[0].name}", read)
