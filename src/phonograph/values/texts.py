"""A string among the arguments that is another in each call, and that perhaps nobody reads: a path, an identifier, a caption.

In a capture a `Text` stands for it. It answers as the string does, and remembers that it was asked. Code in C that wants a
string takes it for none, and raises: who catches that is no judge of whether it was read.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from ..python.bytecode import catches, compares_identity
from ..python.code_cache import of_code
from ..python.origin import STDLIB, is_ours, is_torchs, origin

__all__ = ["Text", "held", "may_miss"]

_UNHEARD = frozenset({"type", "id", "ctypes", "is_", "is_not"})  # by what code may tell that it is no string, or look into it
_WITHIN = contextlib.__file__  # whose contexts let exceptions out, but for one


class Text:
    """Stands for a string."""

    __slots__ = ("_of", "_read")

    def __init__(self, of: str) -> None:
        self._of, self._read = of, False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return str

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)  # which a string has, or not, whatever it says
        self._read = True
        return found

    def real(self) -> str:
        """The string, which is read then."""
        self._read = True
        return self._of

    def was_read(self) -> bool:
        return self._read


def _real(x: object) -> object:
    return x.real() if type(x) is Text else x


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(self.real(), *map(_real, args))


_OTHERS: dict[str, Callable[..., Any]] = {
    "bool": bool, "hash": hash, "copy": copy.copy, "deepcopy": copy.deepcopy, "str": str, "repr": repr, "format": format,
    "reduce_ex": lambda text, protocol: text.__reduce_ex__(protocol), "radd": lambda text, other: other + text,
    "rmod": lambda text, other: other % text, "dir": dir, "rmul": operator.mul, "len": len, "iter": iter,
}  # fmt: skip
_OPERATIONS = ("eq", "ne", "lt", "le", "gt", "ge", "add", "mul", "mod", "contains", "getitem")

for _name, _function in {**_OTHERS, **{name: getattr(operator, name) for name in _OPERATIONS}}.items():
    setattr(Text, f"__{_name}__", _asking(_function))


def held(texts: Iterable[Text]) -> list[int]:
    """How often each is held anywhere."""
    return [sys.getrefcount(text) for text in texts]


def may_miss(ran: Iterable[CodeType]) -> bool:
    """Whether some of this code may have read one, and that was not noted. (The standard library has it from others, and lets
    such exceptions out.)"""
    theirs = [code for code in ran if not is_ours(code.co_filename) and not is_torchs(code.co_filename)]
    return any(map(_may_swallow, theirs)) or any(_may_miss(code) for code in theirs if origin(code.co_filename) is not STDLIB)


def _may_swallow(code: CodeType) -> bool:
    """Whether this ends a context, and may keep an exception there."""
    lets_out = code.co_filename == _WITHIN and code is not contextlib.suppress.__exit__.__code__
    return code.co_name == "__exit__" and not lets_out and code is not warnings.catch_warnings.__exit__.__code__


@of_code
def _may_miss(code: CodeType) -> bool:
    return catches(code) or compares_identity(code) or not _UNHEARD.isdisjoint(code.co_names)
