"""Traces of a profiler in which kernels of recordings get names: made by hand here, as a GPU's profiler writes them."""

from __future__ import annotations

import gzip
import json

import pytest

from phonograph.cli import main
from phonograph.observe.trace import annotate, load, measured

GRAPH, OTHER = 7 << 32, 9 << 32


def kernel(start, took, name, *, launch=1, node=None, stream=7):
    arguments = {"correlation": launch, "stream": stream} | ({} if node is None else {"graph node id": node})
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": took, "args": arguments}


def replay(label, number, start=0.0, took=100.0, *, stream=7):
    named = {"name": f"{label}, replay {number}", "args": {"External id": number}}
    return {"ph": "X", "cat": "gpu_user_annotation", "pid": 0, "tid": stream, "ts": start, "dur": took, **named}


FORWARD = ["aten::mm", "module", "model.0", False]
BACKWARD = ["aten::mm", "module", "model.0", True]
STEP = ["aten::add_", "optimizer", "SGD.step", False]
LINE = ["aten::mul", "line", "train.py:3", False]


def graph(*names, in_a_row=True):
    return {"names": [*names], "nodes": [*range(len(names))], "in_a_row": in_a_row}


def trace(events, *parts, label="train"):
    """`parts`: a graph and its segment, each."""
    graphs, segments = [*zip(*parts, strict=True)] or ((), ())
    return {"traceEvents": events, f"phonograph: {label}": {"label": label, "segments": segments, "graphs": graphs}}


def arguments(found):
    kernels = [e["args"] for e in found["traceEvents"] if e.get("cat") == "kernel"]
    return [{key: given.get(key) for key in ("module", "operator", "pass")} for given in kernels]


def modules(found):
    annotate(found)
    return [given["module"] for given in arguments(found)]


WHOLE = graph("mm", "mul", "", "mm", "add"), [[1, *FORWARD], [3, *LINE], [4, *BACKWARD], [5, *STEP]]


def test_kernels_in_a_row_have_names():
    """By their order; a node that does no work on the device is none of them."""
    events = [replay("train", 3), kernel(5, 2, "mm"), kernel(8, 3, "mul"), kernel(20, 4, "add"), kernel(12, 1, "mm")]
    found = trace(events, WHOLE)
    named = annotate(found)
    assert arguments(found) == [
        {"module": "model.0", "operator": "aten::mm", "pass": "forward"},
        {"module": "train.py:3", "operator": "aten::mul", "pass": "forward"},
        {"module": "SGD.step", "operator": "aten::add_", "pass": None},
        {"module": "model.0", "operator": "aten::mm", "pass": "backward"},
    ]
    assert [*map(round, (x * 1e6 for x in named))] == [7, 3, 0]


def test_kernels_of_branches_need_numbers():
    """Their order in time need not be that of the nodes."""
    numbered = [(5, "mm", 3), (8, "mul", 1), (9, "mm", 0), (20, "add", 4)]
    branched = graph("mm", "mul", "", "mm", "add", in_a_row=False), WHOLE[1]
    events = [replay("train", 3), *(kernel(at, 1, name, node=GRAPH + node) for at, name, node in numbered)]
    found = trace(events, branched)
    assert modules(found) == ["model.0", "train.py:3", "model.0", "SGD.step"]
    assert [given["pass"] for given in arguments(found)] == ["backward", "forward", "forward", None]
    without = [replay("train", 3), *(kernel(at, 1, name) for at, name, _ in numbered)]
    assert modules(trace(without, branched)) == [None] * 4


def test_a_track_shows_modules():
    """What one after the other is of one module and one pass, is one event."""
    events = [replay("train", 1), kernel(1, 2, "mm"), kernel(4, 2, "mul"), kernel(7, 1, "mm")]
    found = trace(events, (graph("mm", "mul", "mm"), [[2, *FORWARD], [3, *BACKWARD]]))
    annotate(found)
    tracks = [(e["name"], e["ts"], e["dur"]) for e in found["traceEvents"] if e.get("cat") == "module"]
    assert tracks == [("model.0", 1, 5), ("model.0 (backward)", 7, 1)]
    (name,) = [e["args"]["name"] for e in found["traceEvents"] if e.get("name") == "thread_name"]
    assert name == "modules, stream 7"


def test_copies_and_fills_have_names():
    """Those of the driver's own, which says more of them; and of its kernels."""
    events = [replay("train", 1), kernel(1, 1, "Memcpy DtoD (Device -> Device)"), kernel(2, 1, "Memset (Device)"),
              kernel(3, 1, "memcpy128")]  # fmt: skip
    found = trace(events, (graph("Memcpy", "Memset", "Memcpy"), [[3, *FORWARD]]))
    assert modules(found) == ["model.0"] * 3


def test_segments_are_graphs_in_order():
    """What runs live between them has no name; a segment without work is none."""
    parts = (graph("mm"), [[1, *FORWARD]]), (graph(""), []), (graph("add"), [[1, *STEP]])
    events = [replay("train", 1), kernel(9, 1, "add", launch=3), kernel(5, 1, "live", launch=2), kernel(1, 1, "mm")]
    assert modules(trace(events, *parts)) == ["SGD.step", None, "model.0"]


def test_what_does_not_fit_has_no_name():
    """Kernels of other names, more or fewer, in another order; another recording; outside of a replay; a graph twice."""
    mm, add = kernel(1, 1, "mm"), kernel(2, 1, "add")
    part = graph("mm", "add"), [[1, *FORWARD], [2, *STEP]]
    for events in (
        [replay("train", 1), kernel(1, 1, "bmm"), add],
        [replay("train", 1), mm],
        [replay("train", 1), mm, add, kernel(3, 1, "add")],
        [replay("train", 1), kernel(3, 1, "mm"), add],
        [replay("evaluate", 1), mm, add],
        [mm, add],
        [replay("train", 1, took=10.0), kernel(31, 1, "mm"), kernel(32, 1, "add")],
        [replay("train", 1), mm, add, kernel(5, 1, "mm", launch=2), kernel(6, 1, "add", launch=2)],
        [replay("train", 1), kernel(1, 1, "mm", node=GRAPH), kernel(2, 1, "add", node=GRAPH + 5)],
    ):
        found = trace([*map(dict, events)], part)
        assert {*modules(found)} == {None}
        assert annotate(found).of_modules == 0


def test_replays_within_one_another_are_apart():
    """A live part of one may play another."""
    events = [replay("outer", 1, 0, 50), replay("inner", 1, 10, 5), kernel(1, 1, "mm"), kernel(11, 2, "mm", launch=2),
              kernel(30, 1, "add", launch=3)]  # fmt: skip
    outer = (graph("mm"), [[1, *FORWARD]]), (graph("add"), [[1, *STEP]])
    found = trace(events, *outer, label="outer") | trace(events, (graph("mm"), [[1, *LINE]]), label="inner")
    assert modules(found) == ["model.0", "train.py:3", "SGD.step"]


def test_device_time_is_that_of_one_replay():
    events = [replay("train", 1, 0, 10), kernel(1, 2, "mm"), replay("train", 2, 20, 10), kernel(21, 4, "mm", launch=2)]
    (replays,) = measured(trace(events, (graph("mm"), [[1, *FORWARD]]))).values()
    assert replays.number == 2
    assert [*replays.seconds.values()] == [pytest.approx(3e-6)]


def test_the_command_writes_a_trace(tmp_path, capsys):
    given, named = tmp_path / "in.json", tmp_path / "out.json.gz"
    given.write_text(
        json.dumps(trace([replay("train", 1), kernel(1, 2, "mm")], (graph("mm"), [[1, *FORWARD]]))), encoding="utf-8"
    )
    assert main(["trace", str(given), str(named)]) == 0
    assert "100.0% of 0.002 ms" in capsys.readouterr().out
    with gzip.open(named, "rt", encoding="utf-8") as file:
        assert arguments(json.load(file))[0]["module"] == "model.0"


def test_the_command_says_what_is_no_trace(tmp_path, capsys):
    (tmp_path / "none.json").write_text("[]", encoding="utf-8")
    assert main(["trace", str(tmp_path / "none.json"), str(tmp_path / "out.json")]) == 2
    assert "export_chrome_trace" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no trace"):
        load(tmp_path / "none.json")


def test_the_command_finds_no_kernel(tmp_path, capsys):
    (tmp_path / "in.json").write_text(json.dumps({"traceEvents": []}), encoding="utf-8")
    assert main(["trace", str(tmp_path / "in.json"), str(tmp_path / "out.json")]) == 1
    assert "ProfilerActivity.CUDA" in capsys.readouterr().out
