"""What stood in the place of what we have put into torch's classes, for those who read a class: to them it is as it was.

Doors are hung with the first recording and taken away with the last. That is no change of the class on which a call relies.
"""

from __future__ import annotations

from ..python.identity import identity
from ..python.introspection import MISSING

__all__ = ["as_was", "back_again", "stands_for"]

_was: dict[int, object] = {}


def stands_for(ours: object, was: object = MISSING) -> None:
    """This object of ours is in the place of what `was` there; by default there was nothing. It lives at least as long as it is
    there."""
    _was[identity(ours)] = was


def back_again(ours: object) -> None:
    """It stands nowhere any more."""
    _was.pop(identity(ours), None)


def as_was(value: object) -> object:
    """What was where this is now; itself, if it is none of ours."""
    return _was.get(identity(value), value)
