"""Our own code, which `torch.compile` is to let run as it is.

What Dynamo compiles may leave off in the middle (a graph break), and go on as ordinary Python: there Dynamo compiles by itself
each function that is called. Among these would be ours: what autograd calls of a recording's (its backward, hooks), what is
called when a tensor is gone, a recorded function that is called between two graphs. It all lives by facts that only the running
program has: what autograd does at the moment, which memory is whose. Compiled once, it would do for ever what it did then.

So all of the package's functions are marked, once, when they have been imported; nor is compiled what they call, which is
recorded or runs live. What is compiled as a part of other code (inlined) is not concerned by the marks.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache, cached_property, partial
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import TypeVar

from .dynamic import Private
from .dynamo import not_compiled_by_itself

__all__ = ["hide", "passes_on"]

F = TypeVar("F", bound=Private)

_PACKAGE = __name__.partition(".")[0]
_Cached = type(cache(repr))
_HOLDERS = {FunctionType, _Cached, dict, list, tuple, set, frozenset, MappingProxyType, CellType, staticmethod, classmethod,
            property, cached_property, partial}  # fmt: skip

_WRITTEN = (
    os.path.dirname(os.path.dirname(__file__)),
    "<string>",
)  # in files, and the methods of records, which are made by `dataclass`

_passing: set[CodeType] = set()
_hidden: set[str] = set()  # modules


def passes_on(function: F) -> F:
    """Let what this function calls be compiled, if it is called where functions are."""
    _passing.add(function.__code__)
    return function


def hide() -> None:
    """Mark the functions of all modules of the package that have been imported since."""
    found = {name: module for name, module in list(sys.modules.items()) if _ours(name) and name not in _hidden}
    _hidden.update(found)
    for code in _codes([vars(module) for module in found.values()]):
        not_compiled_by_itself(code, nor_what_it_calls=code not in _passing)


def _ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == _PACKAGE


def _codes(left: list[Private]) -> Iterator[CodeType]:
    """The code of our functions and classes to which these lead, and of functions that are made in them."""
    seen: set[int] = set()
    while left:
        x = left.pop()
        kind = type(x)
        if kind is CodeType and x.co_filename.startswith(_WRITTEN):
            yield x
            left += [inner for inner in x.co_consts if type(inner) is CodeType]
        elif kind not in _HOLDERS and not (issubclass(kind, type) and _ours(x.__module__)):
            continue
        elif id(x) not in seen:
            seen.add(id(x))
            if kind is FunctionType:
                left += [x.__code__, x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)]
            elif kind is _Cached:
                left.append(x.__wrapped__)
            else:
                left += vars(x).values() if issubclass(kind, type) else gc.get_referents(x)
