"""Record your PyTorch program once; play it back at GPU speed.

See https://pypi.org/project/phonograph for the documentation; start with `record`.
"""

from __future__ import annotations

from ._torch.skipped_frames import hide
from .api import explain, live, prepare, record, reset, stats
from .engine.recorded import Recorded
from .errors import Mismatch, PhonographError, RunsLive, Stale, StaleOutput, Unrecordable
from .statistics import Stats
from .version import __version__
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
    "explain",
    "live",
    "make_graphed_callables",
    "prepare",
    "record",
    "reset",
    "stats",
]

hide()


def __dir__() -> list[str]:
    return __all__
