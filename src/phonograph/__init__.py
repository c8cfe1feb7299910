"""Record your PyTorch program once; play it back at GPU speed.

See https://pypi.org/project/phonograph for the documentation; start with `record`.
"""

from __future__ import annotations

from .api import explain, live, prepare, record, reset, stats
from .callables import make_graphed_callables
from .errors import Mismatch, PhonographError, RunsLive, StaleOutput, Unrecordable
from .hidden import hide
from .observe import Stats
from .recorded import Recorded

__all__ = [
    "Mismatch",
    "PhonographError",
    "Recorded",
    "RunsLive",
    "StaleOutput",
    "Stats",
    "Unrecordable",
    "explain",
    "live",
    "make_graphed_callables",
    "prepare",
    "record",
    "reset",
    "stats",
]

__version__ = "0.1.0"

hide()
