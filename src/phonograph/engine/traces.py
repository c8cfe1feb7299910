"""Names in the traces of torch's profiler: a range for each replay ("train_step, replay 17"), and whose its kernels are.

Under `torch.autograd.profiler.emit_nvtx`, the ranges are NVTX's. What no profiler looks at costs one question a replay.

A profiler sees the kernels of a graph, and not who has called them. So the trace is given, beside its events, what the capture
knows (`capture/origins.py`): up to which node of which graph each operator has captured, and what the kernels of these nodes
are called. What puts both together is `observe/trace.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable

import torch

from .._torch.profiler import tell_trace
from ..capture.recording import Recording, Tensors, Work

__all__ = ["KEY", "REPLAY", "InSight", "label"]

KEY = "phonograph"  # the keys in a trace begin with it
REPLAY = re.compile("(?P<label>.+), replay [0-9]+", re.DOTALL)  # the names of ranges

_made = Counter[str]()  # recordings of functions of one name


def label(recording: Recording) -> str:
    """A name that no other recording has: "train_step", and then "train_step #2"."""
    _made[recording.name] += 1
    number = _made[recording.name]
    return recording.name if number == 1 else f"{recording.name} #{number}"


def _told(work: Work) -> dict[str, object]:
    """The work of one graph. Many of its kernels have one name."""
    names = list(dict.fromkeys(work.names))
    return {"names": names, "nodes": [*map(names.index, work.names)], "in_a_row": work.in_a_row}


class InSight:
    """One recording that a profiler has seen played."""

    def __init__(self, label: str, recording: Recording) -> None:
        self.label = label
        segments = [[[end, *origin] for end, origin in segment] for segment in recording.origins]
        graphs = [_told(work) for work in recording.program.work()]
        self._origins = json.dumps({"label": self.label, "segments": segments, "graphs": graphs})

    def run(self, number: int, run: Callable[[Tensors], list[torch.Tensor]], sources: Tensors) -> list[torch.Tensor]:
        """A replay of that number."""
        tell_trace(f"{KEY}: {self.label}", self._origins)  # each time: no one says when another trace begins
        with torch.profiler.record_function(f"{self.label}, replay {number}"):
            return run(sources)
