"""Record your PyTorch program once; play it back at GPU speed.

Start with `record`; `help(phonograph.record)` says what it does. torch is imported with the first of these names, and not
before: pytest loads `phonograph.pytest_plugin` in every project of an environment that has phonograph in it, and
``phonograph --version`` need not wait for it either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .python.whole_imports import whole
from .version import __version__

if TYPE_CHECKING:
    from .api import check, check_graphs, explain, live, prepare, record, report, reset, stats
    from .control.branches import cond, switch
    from .control.loops import repeat, while_loop
    from .engine.recorded import Recorded
    from .errors import Mismatch, PhonographError, RunsLive, Stale, StaleOutput, Unrecordable
    from .statistics import Stats
    from .wrappers.callables import make_graphed_callables

__all__ = [
    "Mismatch",
    "PhonographError",
    "Recorded",
    "RunsLive",
    "Stale",
    "StaleOutput",
    "Stats",
    "Unrecordable",
    "__version__",
    "check",
    "check_graphs",
    "cond",
    "explain",
    "live",
    "make_graphed_callables",
    "prepare",
    "record",
    "repeat",
    "report",
    "reset",
    "stats",
    "switch",
    "while_loop",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'phonograph' has no attribute {name!r}")
    with whole():
        from . import public

    globals().update({each: getattr(public, each) for each in public.__all__})
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
