"""The public names that need torch, for `phonograph` to have them at the first look at one."""

from __future__ import annotations

from ._torch.skipped_frames import hide
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

hide()
