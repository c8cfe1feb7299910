"""Changes of the process that stand for a while: the garbage collector is off, methods of tensors are others, classes gated.

Each is noted here before it is made, with what takes it back. For it is not certain that the end of its `with` block does:

* Ctrl-C, or a lack of memory, may come at the very first instruction of what the block ends with. Then whoever began the call
  takes back what stands (`unwound`), and whoever answers the exception by a live run (`unwind`).
* The process may be forked meanwhile by another thread. The child does not have the thread that would take it back, nor those
  that would release a lock.

What takes a change back may be called before it is made, and when it was taken back by half.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from .putting_back import put_back

__all__ = ["Standing", "ended", "fresh_in_children", "standing", "stands", "unwind", "unwound"]

T = TypeVar("T")

_all: list[Standing] = []
"""Those of all threads, the latest last."""


class Standing:
    """One change, of the thread that makes it."""

    __slots__ = ("_undo", "thread")

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo, self.thread = undo, threading.get_ident()
        _all.append(self)

    def end(self) -> None:
        """Take it back, if it stands."""
        if self in _all:
            self._undo()
            _all.remove(self)
            self._undo = int  # does nothing: or it would keep whoever has this


@contextmanager
def standing(undo: Callable[[], object]) -> Iterator[None]:
    """The block makes a change, which is taken back at its end."""
    one = Standing(undo)
    try:
        yield
    finally:
        one.end()


class ended(AbstractContextManager[T]):  # noqa: N801 - it is used as a function
    """A context manager, which is left in any case."""

    def __init__(self, manager: AbstractContextManager[T]) -> None:
        self._manager, self._within = manager, False

    def __enter__(self) -> T:
        self._one = Standing(self._undo)
        try:
            found = self._manager.__enter__()
            self._within = True
            return found
        except BaseException:
            self._one.end()
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._leave(*error)
        finally:
            self._one.end()

    def _leave(self, *error: Any) -> bool | None:
        self._within, within = False, self._within
        return self._manager.__exit__(*error) if within else None

    def _undo(self) -> None:
        self._leave(None, None, None)


@contextmanager
def unwound() -> Iterator[None]:
    """An exception of the block takes back what this thread has changed in it, and has not taken back by itself."""
    before = stands()
    try:
        yield
    except BaseException:
        unwind(before)
        raise


def stands() -> list[Standing]:
    """All that stands now."""
    return [*_all]


def unwind(before: list[Standing]) -> None:
    """Take back what this thread has changed since, and has not taken back by itself."""
    here = threading.get_ident()
    put_back(*[one.end for one in reversed(_all) if one.thread == here and one not in before])


def _forked() -> None:
    here = threading.get_ident()
    put_back(*[one.end for one in reversed(_all) if one.thread != here])


def fresh_in_children(lock: T) -> T:
    """This lock is free in a forked child, whoever has it here."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
