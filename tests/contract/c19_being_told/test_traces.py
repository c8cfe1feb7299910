"""C19: names in the traces of torch's profiler, and whose operators a recording has."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.capture.origins import ARGUMENTS, MODULE, RESULTS
from phonograph.engine.ledger import ledgers
from phonograph.observe.trace import annotate, load
from tests.helpers import ramp


class Block(nn.Module):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.recomputed = nn.Linear(3, 3), nn.Linear(3, 3), recomputed

    def inner(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x))


def origins_of(step):
    """Those of the operators that the recording of a step has, in order."""
    (ledger,) = [one for one in ledgers() if one.name == step.name]
    (made,) = ledger.recordings
    return [origin for segment in made.origins for _, origin in segment]


def training(model, device, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = pg.record(train, keep="always", name=f"train {id(model)}", **options)
    for _ in range(3):
        step(ramp(device, 2, 3))
    return step


def places(origins, *, backward):
    return {origin.place for origin in origins if origin.backward is backward and origin.operator}


def test_c19_operators_have_their_module(device):
    """In the forward, in the backward, and in the optimizer's step."""
    model = nn.Sequential(Block(), Block()).to(device)
    found = origins_of(training(model, device))
    forward, backward = places(found, backward=False), places(found, backward=True)
    leaves = {f"model.{i}.{name}" for i in "01" for name in ("first", "second")}
    assert leaves | {"model.0", "model.1", "AdamW.step"} <= forward
    assert leaves | {"model.0", "model.1"} <= backward
    assert "AdamW.step" not in backward


def test_c19_a_nodes_module_is_that_of_its_forward(device):
    """The two products of a layer's backward are that layer's, layer by layer from the last one."""
    found = origins_of(training(nn.Sequential(Block(), Block()).to(device), device))
    products = [origin.place for origin in found if origin.backward and origin.operator == "aten::mm"]
    order = [*dict.fromkeys(products)]
    assert order == ["model.1.second", "model.1.first", "model.0.second", "model.0.first"]


def test_c19_recomputed_operators_have_their_module(device):
    found = origins_of(training(nn.Sequential(Block(recomputed=True)).to(device), device))
    products = [origin for origin in found if origin.operator == "aten::addmm"]
    assert [origin.place for origin in products].count("model.0.first") >= 1
    assert {origin.place for origin in found if origin.backward and origin.operator == "aten::mm"} <= {
        "model.0.second", "model.0.first", ""
    }  # fmt: skip


def test_c19_operators_outside_of_modules_have_their_line(device):
    step = pg.record(lambda x: x * 2 + 1, keep="always", name="no module")
    for _ in range(3):
        step(ramp(device, 3))
    found = [origin for origin in origins_of(step) if origin.operator]
    assert [origin.place.partition(":")[0] for origin in found] == ["test_traces.py"] * 2
    assert all(origin.kind != MODULE for origin in found)


def test_c19_modules_are_named_as_the_function_names_them(device):
    actor, critic = nn.Linear(3, 3).to(device), nn.Linear(3, 1).to(device)
    step = pg.record(lambda x: critic(actor(x)).sum(), keep="always", name="two modules")
    with torch.no_grad():
        for _ in range(3):
            step(ramp(device, 2, 3))
    assert {"actor", "critic"} <= {origin.place for origin in origins_of(step)}


def test_c19_a_shared_module_has_one_name(device):
    layer = nn.Linear(3, 3).to(device)
    model = nn.ModuleDict({"first": layer, "again": layer})
    step = pg.record(lambda x: model["again"](model["first"](x)), keep="always", name="shared")
    with torch.no_grad():
        for _ in range(3):
            step(ramp(device, 2, 3))
    assert {origin.place for origin in origins_of(step) if origin.kind == MODULE} == {"model.first"}


def test_c19_a_backward_outside_has_its_modules(device):
    """Its nodes were made when the forward was captured."""
    model = pg.record(nn.Sequential(Block(), Block()).to(device), keep="always", name="outside")
    for _ in range(4):
        model(ramp(device, 2, 3)).square().mean().backward()
    (backward,) = [one for one in ledgers() if one.name == "the backward of outside"]
    (made,) = backward.recordings
    found = [origin for segment in made.origins for _, origin in segment if origin.operator == "aten::mm"]
    assert {origin.place for origin in found} == {f"self.{i}.{name}" for i in "01" for name in ("first", "second")}


def test_c19_each_replay_has_a_range(device, tmp_path):
    step = pg.record(lambda x: x * 2, keep="always", name="ranged")
    for _ in range(3):
        step(ramp(device, 3))
    with torch.profiler.profile(acc_events=True) as profiler:
        for _ in range(3):
            step(ramp(device, 3))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    named = [e["name"] for e in trace["traceEvents"] if ", replay " in e.get("name", "") and e["cat"] == "user_annotation"]
    assert named == [f"ranged, replay {n}" for n in (3, 4, 5)]
    told = trace["phonograph: ranged"]
    assert told["label"] == "ranged"
    assert bool(told["graphs"]) is (device.type == "cuda")
    known = {place for segment in told["segments"] for *_, place, _ in segment}
    assert all(place in (ARGUMENTS, RESULTS) or place.startswith("test_traces.py:") for place in known)


def test_c19_recordings_of_one_function_differ_in_name(device, tmp_path):
    step = pg.record(lambda x: x * 2, keep="always", name="of two shapes")
    shapes = (3, 4)
    for n in shapes * 3:
        step(ramp(device, n))
    with torch.profiler.profile(acc_events=True) as profiler:
        for n in shapes:
            step(ramp(device, n))
    named = {e.name.partition(", ")[0] for e in profiler.events() if ", replay " in e.name}
    assert named == {"of two shapes", "of two shapes #2"}


def test_c19_without_a_profiler_there_are_no_ranges(device, monkeypatch):
    from phonograph.engine import player

    monkeypatch.setattr(player.InSight, "run", lambda *_: pytest.fail("a range"))
    step = pg.record(lambda x: x * 2, keep="always")
    for _ in range(4):
        assert torch.equal(step(ramp(device, 3)), ramp(device, 3) * 2)


@pytest.mark.cuda
def test_c19_kernels_have_their_module(tmp_path):
    """All of a whole step, backward and optimizer included, but for the loss outside of modules."""
    device = torch.device("cuda")
    model = nn.Sequential(*[Block() for _ in range(4)]).to(device)
    step = training(model, device)
    with torch.profiler.profile(acc_events=True) as profiler:
        for _ in range(3):
            step(ramp(device, 2, 3))
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    named = annotate(trace := load(tmp_path / "trace.json"))
    assert named.unknown <= 0.05 * sum(named)  # no graph launches what fills in random states before it
    assert named.of_modules > 0.8 * sum(named)
    kernels = [e["args"] for e in trace["traceEvents"] if e.get("cat") == "kernel" and "module" in e["args"]]
    assert {f"model.{i}.{name}" for i in range(4) for name in ("first", "second")} <= {given["module"] for given in kernels}
    assert {"forward", "backward"} <= {given.get("pass") for given in kernels}
