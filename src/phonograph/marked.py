"""Functions that are marked `@pg.live`: they really run every time, also within recorded functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

__all__ = ["MARK", "Marked", "is_marked"]

MARK = "_phonograph_live"


class Marked:
    """Such a function. Between the segments of a recording it is what an operator is there that needs the host."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.run: Any = None  # what `pg.live` has made of it

    def name(self) -> str:
        f: Any = self.function
        while isinstance(f, partial):
            f = f.func
        return str(getattr(f, "__qualname__", type(f).__qualname__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def is_marked(f: FunctionType) -> bool:
    """Whether this is what `pg.live` has made: and no function around it, to which `functools.wraps` has copied the mark."""
    mark = f.__dict__.get(MARK)
    return isinstance(mark, Marked) and mark.run is f
