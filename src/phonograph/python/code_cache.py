"""What is worked out of a code object: once, for all recordings, and for as long as that code is there.

(By identity: the hash of a code object, which `functools.cache` asks for, goes through all that is in it.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

__all__ = ["of_code"]

T = TypeVar("T")

_identity: Callable[[object], int] = object.__hash__


def of_code(work: Callable[[CodeType], T]) -> Callable[[CodeType], T]:
    """A function that gives what this one has made of some code. That must not refer to the code itself."""
    known: dict[int, tuple[weakref.ref[CodeType], T]] = {}

    @functools.wraps(work)
    def told(code: CodeType) -> T:
        key = _identity(code)
        found = known.get(key)
        if found is None:
            found = known[key] = weakref.ref(code, lambda _: known.pop(key, None)), work(code)
        return found[1]

    return told
