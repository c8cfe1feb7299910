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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from .putting_back import put_back

__all__ = ["Standing", "ended", "exchanged", "fresh_in_children", "standing", "stands", "unwind", "unwound"]

T = TypeVar("T")

_INHERITED = object()


def _never(put_back: Callable[[], None], exchange: Callable[[], None]) -> AbstractContextManager[None]:
    return nullcontext()


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


@contextmanager
def exchanged(
    places: Sequence[tuple[Any, str]], by: Callable[[str, Any], Any],
    pauses: Callable[[Callable[[], None], Callable[[], None]], AbstractContextManager[None]] = _never,
) -> Iterator[None]:  # fmt: skip
    """In the block these attributes are others: what `by` makes of a name and of what is there. It may be called with what puts
    them back and what exchanges them again, for a while in which others must find their own (`pauses`)."""
    own = [vars(holder).get(name, _INHERITED) for holder, name in places]
    others = [by(name, getattr(holder, name)) for holder, name in places]

    def put_back() -> None:
        for (holder, name), before in zip(places, own, strict=True):
            if before is not _INHERITED:
                setattr(holder, name, before)
            elif name in vars(holder):
                delattr(holder, name)

    def exchange() -> None:
        for (holder, name), other in zip(places, others, strict=True):
            setattr(holder, name, other)

    with standing(put_back), pauses(put_back, exchange):
        exchange()
        yield


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
