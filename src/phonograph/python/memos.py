"""Functions wrapped in `functools.lru_cache`, wherever they are: what they keep outlives the call that has made it.

A package's code is not looked through, so nothing leads to such a function of it (a table of positions, by its size). Two
things have to be known of it. What it keeps is read in each call: it is in reach. And a call that is captured must not fill it:
what it kept would lie in memory of a recording, and be nothing that its function has given.

Python lists them only by going through all objects. So they are listed only where code of a package runs that may be one's, and
again only when there are new ones.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType

import torch

from .._torch.dynamic import Thing
from .._torch.tensors import has_memory
from .identity import identity
from .introspection import own_dict
from .origin import LIBRARY, is_torchs, origin

__all__ = ["MEMO", "Memos", "kept_tensors", "memos"]

MEMO: type = type(functools.lru_cache(int))
_DEEP = 4  # containers within each other, the one of all results among them


def kept_tensors(memo: object) -> list[torch.Tensor]:
    """The tensors among what it keeps, arguments and results."""
    own, found = own_dict(memo), list[torch.Tensor]()
    _gather([x for x in gc.get_referents(memo) if x is not own], _DEEP, found)
    return found


def _gather(things: list[Thing], deep: int, into: list[torch.Tensor]) -> None:
    for x in things:
        if issubclass(type(x), torch.Tensor):
            into.append(x)
        elif deep and type(x) in (tuple, list):
            _gather([*x], deep - 1, into)
        elif deep and type(x) is dict:
            _gather([*x.keys(), *x.values()], deep - 1, into)


def _code_of(memo: object) -> CodeType | None:
    code = getattr(getattr(memo, "__wrapped__", None), "__code__", None)
    return code if type(code) is CodeType else None


def _may_keep_tensors(code: CodeType, variables: Mapping[str, object]) -> bool:
    """Whether a function with this code and these globals is one of an installed package that knows torch."""
    library = origin(code.co_filename) is LIBRARY and not is_torchs(code.co_filename)
    return library and variables.get("torch") is torch


class Memos:
    """All of the process."""

    def __init__(self) -> None:
        self._all: dict[int, weakref.ref[object]] = {}
        self._codes: dict[int, CodeType] = {}  # by identity, and kept: no other code may come to have that meanwhile
        self._references = -1  # to their type when they were listed, less those of them that have gone since
        self._lock = threading.RLock()

    def wraps(self, code: CodeType, variables: Mapping[str, object]) -> bool:
        """Whether the function of a package with this code and these globals is wrapped in one, and may keep tensors in it."""
        if not _may_keep_tensors(code, variables):
            return False
        self._list()
        return identity(code) in self._codes

    def keeper(self, is_meant: Callable[[torch.Tensor], bool]) -> object:
        """One that keeps such a tensor; None if there is none."""
        self._list()
        return next((memo for memo in self._there() if any(map(is_meant, filter(has_memory, kept_tensors(memo))))), None)

    def _there(self) -> Iterator[object]:
        return (memo for ref in list(self._all.values()) if (memo := ref()) is not None)

    def _list(self) -> None:
        with self._lock:
            if sys.getrefcount(MEMO) == self._references:
                return
            found = [x for x in gc.get_referrers(MEMO) if type(x) is MEMO]
            self._all = {identity(memo): weakref.ref(memo, self._gone) for memo in found}
            self._codes = {identity(code): code for code in map(_code_of, found) if code is not None}
            self._references = sys.getrefcount(MEMO)

    def _gone(self, ref: weakref.ref[object]) -> None:
        self._references -= 1


memos = Memos()
