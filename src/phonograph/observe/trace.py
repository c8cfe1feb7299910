"""Names of modules for the kernels of recordings, in traces of torch's profiler.

A replay launches graphs. In a trace, the kernels of one launch share a correlation number, and a range on the device surrounds
the kernels of each replay. `engine/traces.py` has written the nodes of each graph into the trace. Some releases of torch number
the node of each kernel; elsewhere kernels are matched by order, if the graph has no branches. All kernels of a launch must have
the names that the nodes have. Otherwise none of them gets a module.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..capture.origins import MODULE, OPTIMIZER, Origin
from ..engine.traces import KEY, REPLAY

__all__ = ["Named", "Replays", "annotate", "load", "measured", "save"]

Event = dict[str, Any]
_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_OTHERS = frozenset({"Memcpy", "Memset"})  # which may be copies and fills of the driver's, or kernels of its own (memcpy128)
_NODE = "graph node id"
_LOWER = 0xFFFFFFFF
_ROUND = 0.01  # microseconds, by which times are rounded
_TRACK = 1_000_000  # the number of a stream's track of modules, beyond its own


@dataclass
class Replays:
    """Replays of one recording in a trace."""

    number: int = 0
    total: dict[Origin, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds on the device by origin, over all replays."""

    @property
    def seconds(self) -> dict[Origin, float]:
        """Seconds of one replay."""
        return {origin: took / self.number for origin, took in self.total.items()}


class Named(NamedTuple):
    """Seconds on the device of launched work, by how well its origin is known."""

    of_modules: float
    """Work of a module, or of an optimizer's step."""
    elsewhere: float
    """Work of no module: of a line, or a copy of arguments or results."""
    unknown: float
    """Work of unknown origin."""


class _Graph(NamedTuple):
    """One of a recording's."""

    names: list[str]
    """What a profiler calls the work of each node; "" for none."""
    origins: list[Origin | None]
    in_a_row: bool

    @classmethod
    def told(cls, work: Mapping[str, Any], segment: Sequence[Sequence[Any]]) -> _Graph:
        names = [str(work["names"][i]) for i in work["nodes"]]
        ends, places = [int(end) for end, *_ in segment], [Origin(*origin) for _, *origin in segment]
        origins = [places[at] if (at := bisect_right(ends, node)) < len(ends) else None for node in range(len(names))]
        return cls(names, origins, bool(work["in_a_row"]))

    def of(self, launched: Sequence[Event]) -> list[Origin | None] | None:
        """Where the work of one launch comes from; None if it is not this graph's."""
        nodes = [e["args"].get(_NODE) for e in launched]
        if all(nodes):
            found = [node & _LOWER for node in nodes]
        else:
            found = [i for i, name in enumerate(self.names) if name] if self.in_a_row else []
        fit = len(found) == len(launched) and all(self._is(e, node) for e, node in zip(launched, found, strict=True))
        return [self.origins[node] for node in found] if fit else None

    def _is(self, event: Event, node: int) -> bool:
        name = self.names[node] if node < len(self.names) else ""
        called = str(event["name"])
        return bool(name) and (called == name or (name in _OTHERS and called.lower().startswith(name.lower())))


class _Recording:
    """One that the trace was told of."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.label = str(told["label"])
        graphs = [_Graph.told(*of) for of in zip(told["graphs"], told["segments"], strict=bool(told["graphs"]))]
        self._graphs = [graph for graph in graphs if any(graph.names)]

    def placed(self, launches: Iterable[Sequence[Event]]) -> Iterator[tuple[Event, Origin | None]]:
        """The work of one replay, with where it comes from: nowhere, unless its graphs are there, each once, in their order."""
        found = [(launched, [graph.of(launched) for graph in self._graphs]) for launched in launches]
        fits = [origins for _, origins in found if any(one is not None for one in origins)]
        right = len(fits) == len(self._graphs) and all(origins[i] is not None for i, origins in enumerate(fits))
        numbers = iter(range(len(fits)))
        for launched, origins in found:
            known = origins[next(numbers)] if right and any(one is not None for one in origins) else None
            yield from zip(launched, known or [None] * len(launched), strict=True)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A trace as `export_chrome_trace` writes it.

    Raises:
        ValueError: it is none.
    """
    try:
        with _opened(Path(path), "rt") as file:
            trace = json.load(file)
    except ValueError:  # not JSON, or not even text
        trace = None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is no trace of torch's profiler (export_chrome_trace)")
    return trace


def save(trace: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    with _opened(Path(path), "wt") as file:
        json.dump(trace, file)


def _opened(path: Path, mode: str) -> IO[str]:
    opens: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    return opens(path, mode, encoding="utf-8")


def measured(trace: Mapping[str, Any]) -> dict[str, Replays]:
    """How long the device worked for each place, by the labels of recordings."""
    found: dict[str, Replays] = defaultdict(Replays)
    for label, replays in groupby(_replays(trace), lambda one: one[0].label):
        for _, events in replays:
            found[label].number += 1
            for event, origin in events:
                if origin is not None:
                    found[label].total[origin] += event["dur"] * 1e-6
    return found


def annotate(trace: dict[str, Any]) -> Named:
    """Give the kernels of recordings `module`, `operator` and `pass` as arguments, and each stream a track of modules."""
    took = {True: 0.0, False: 0.0, None: 0.0}
    tracks: list[Event] = []
    for _, events in _replays(trace):
        for event, origin in events:
            took[None if origin is None else origin.kind in (MODULE, OPTIMIZER)] += event["dur"] * 1e-6
            if origin is not None:
                more = {"module": origin.place, "operator": origin.operator, "pass": _pass(origin)}
                event["args"].update({key: value for key, value in more.items() if value})
        tracks += _track(events)
    trace["traceEvents"] += [*tracks, *_names_of(tracks)]
    return Named(took[True], took[False], took[None])


def _pass(origin: Origin) -> str:
    return "" if not origin.operator or origin.kind == OPTIMIZER else "backward" if origin.backward else "forward"


def _replays(trace: Mapping[str, Any]) -> Iterator[tuple[_Recording, list[tuple[Event, Origin | None]]]]:
    """The work of each replay, with where it comes from."""
    told = [_Recording(value) for key, value in trace.items() if key.startswith(f"{KEY}: ")]
    recordings = {one.label: one for one in told}
    ranges, launches = _ranges(trace), defaultdict[Any, list[Event]](list)
    for e in sorted((e for e in trace["traceEvents"] if e.get("cat") in _WORK), key=itemgetter("ts")):
        launches[e["args"].get("correlation")].append(e)
    replays: dict[Any, list[list[Event]]] = defaultdict(list)
    for launched in launches.values():
        first = launched[0]
        around = [
            r for r in ranges if r["tid"] == first["tid"] and r["ts"] - _ROUND <= first["ts"] <= r["ts"] + r["dur"] + _ROUND
        ]
        if around:
            innermost = min(around, key=itemgetter("dur"))
            replays[innermost["name"], innermost["args"].get("External id")].append(launched)
    for (name, _), some in replays.items():
        match = REPLAY.fullmatch(name)
        if match is not None and (recording := recordings.get(match["label"])) is not None:
            yield recording, [*recording.placed(some)]


def _is_in(e: Event, of: Event) -> bool:
    begun: float = e["ts"] - of["ts"]
    return bool(e["tid"] == of["tid"] and -_ROUND <= begun <= of["dur"] + _ROUND)


def _ranges(trace: Mapping[str, Any]) -> list[Event]:
    """Those around the work of replays, on the device."""
    found = (e for e in trace["traceEvents"] if e.get("cat") == "gpu_user_annotation")
    return [e for e in found if REPLAY.fullmatch(e["name"])]


def _track(events: Sequence[tuple[Event, Origin | None]]) -> Iterator[Event]:
    """What one after the other belongs to the same place, as one event on a track of its own."""
    named = [
        (e, f"{origin.place}{' (backward)' * origin.backward}") for e, origin in events if origin is not None and origin.place
    ]
    for stream in dict.fromkeys(e["tid"] for e, _ in named):
        for place, run in groupby((x for x in named if x[0]["tid"] == stream), lambda x: x[1]):
            of = [e for e, _ in run]
            ends = max(e["ts"] + e["dur"] for e in of)
            yield {"ph": "X", "cat": "module", "name": place, "pid": of[0]["pid"], "tid": _TRACK + stream,
                   "ts": of[0]["ts"], "dur": ends - of[0]["ts"]}  # fmt: skip


def _names_of(tracks: Sequence[Event]) -> Iterator[Event]:
    for pid, tid in dict.fromkeys((e["pid"], e["tid"]) for e in tracks):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"modules, stream {tid - _TRACK}"}}
