"""C10: what cannot be noticed cheaply is found by `verify`."""

import contextlib
import os
import types
import warnings

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.recognising import Net, new_like
from tests.helpers import may_run_live, ramp, side_by_side

AROUND_THE_METHODS = {
    "p.data": lambda net: torch._C.TensorBase.data.__set__(net.first.weight, new_like(net.first.weight)),
    "parameters": lambda net: net.first._parameters.update(
        weight=torch.nn.Parameter(new_like(net.first.weight), requires_grad=False)
    ),
    "buffers": lambda net: net._buffers.update(shift=new_like(net.shift)),
    "modules": lambda net: net.layers._modules.update({"0": torch.nn.Linear(4, 4, device=net.shift.device)}),
    "attributes": lambda net: net.__dict__.update(scale=9.0),
    "object's setattr": lambda net: object.__setattr__(net, "scale", 9.0),
}


@may_run_live
@pytest.mark.parametrize("change", AROUND_THE_METHODS.values(), ids=AROUND_THE_METHODS)
def test_c10_changes_around_every_method_are_found_late_and_by_verify_at_once(device, caplog, change):
    net = Net(device)
    x = torch.randn(2, 4, device=device)
    f, verified = pg.record(lambda x: net(x), warmup=1), pg.record(lambda x: net(x), warmup=1, verify=1)
    with torch.no_grad():
        for _ in range(4):
            f(x)
            verified(x)
        change(net)
        caplog.clear()
        assert _right_or_said(verified, x, net(x), caplog)
        for _ in range(50):
            f(x)
        assert_same(f(x), net(x))


def _right_or_said(f, x, right, capture):
    """Calls f; whether it was right or said that something is wrong. Anything else is silently wrong."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = f(x)
    except pg.Mismatch:
        return True
    return torch.equal(result, right) or bool(said) or bool(capture.records)


def knobs():
    """Values out of reach of any look at Python objects, each with a way to set it."""
    import array
    import ctypes

    c_double, numbers = ctypes.c_double(2.0), array.array("d", [2.0])
    module = types.ModuleType("settings_of_somebody")
    module.value = 2.0
    numpy = pytest.importorskip("numpy").full(1, 2.0)
    return {
        "numpy": (lambda: float(numpy[0]), lambda v: numpy.fill(v)),
        "numpy as a tensor": (lambda: torch.from_numpy(numpy).item() + 0, lambda v: numpy.fill(v)),
        "ctypes": (lambda: c_double.value, lambda v: setattr(c_double, "value", v)),
        "array": (lambda: numbers[0], lambda v: numbers.__setitem__(0, v)),
        "module": (lambda: module.value, lambda v: setattr(module, "value", v)),
    }


@may_run_live
@pytest.mark.parametrize("knob", ["ctypes", "array", "module", "numpy", "numpy as a tensor"])
def test_c10_verify_finds_what_cannot_be_noticed(device, caplog, knob):
    read, write = knobs()[knob]
    f = pg.record(lambda x: x * read(), warmup=1, verify=1)
    x = ramp(device, 3)
    for _ in range(4):
        assert_same(f(x), x * 2)
    write(3.0)
    caplog.clear()
    assert _right_or_said(f, x, x * 3, caplog)


def test_c10_verify_changes_neither_results_nor_state_nor_random_numbers(device):
    def make():
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)).to(device).requires_grad_(False)
        total = torch.zeros((), device=device)

        def f(x):
            total.add_(x.sum())
            return net(x.mul_(2))

        return f, [net, total]

    both = side_by_side(make, verify=1, hold=True)
    for _ in range(7):
        both(torch.randn(4, 3, device=device))


def test_c10_verify_every_third_call(device, caplog):
    cell = __import__("ctypes").c_double(2.0)
    f = pg.record(lambda x: x * cell.value, warmup=1, verify=3)
    x = ramp(device, 3)
    for _ in range(4):
        f(x)
    cell.value = 3.0
    caplog.clear()
    found = [_right_or_said(f, x, x * 3, caplog) for _ in range(3)]
    assert any(found)


def test_c10_verify_of_each_of_two_signatures_that_take_turns(device, tmp_path, monkeypatch):
    """What is not noticed is the working directory."""
    there = str(tmp_path)
    f = pg.record(lambda x: x * (3 if len(x) == 3 and os.getcwd() == there else 2), warmup=1, verify=2, audit=0)
    for _ in range(4):
        f(ramp(device, 3))
        f(ramp(device, 4))
    monkeypatch.chdir(there)
    found = 0
    for _ in range(8):
        with contextlib.suppress(pg.Mismatch):
            f(ramp(device, 3))
            found -= 1
        found += 1
        f(ramp(device, 4))
    assert found == 4


def results(device):
    """Pairs of functions whose results have the same values."""
    one = torch.ones((), device=device, requires_grad=True)
    return {
        "keys": (lambda x: {"a": x * 2}, lambda x: {"b": x * 2}),
        "nesting": (lambda x: [x * 2], lambda x: (x * 2,)),
        "identity": (lambda x: x, lambda x: x.clone()),
        "one twice": (lambda x: (y := x * 2, y), lambda x: (x * 2, x * 2)),
        "strides": (lambda x: x.T * 2, lambda x: (x.T * 2).contiguous()),
        "memory": (lambda x: (y := x * 2, y[:1]), lambda x: (y := x * 2, y[:1].clone())),
        "history": (lambda x: x * one, lambda x: (x * one).detach()),
    }


@may_run_live
@pytest.mark.parametrize("kind", results("cpu"))
@pytest.mark.parametrize("first", [0, 1])
def test_c10_verify_looks_at_what_results_are(device, tmp_path, monkeypatch, kind, first):
    one, other = results(device)[kind] if first == 0 else results(device)[kind][::-1]
    there = str(tmp_path)
    f = pg.record(lambda x: other(x) if os.getcwd() == there else one(x), warmup=1, verify=1)
    for _ in range(4):
        f(ramp(device, 2, 3))
    assert pg.stats(f).replayed
    monkeypatch.chdir(there)
    with pytest.raises(pg.Mismatch):
        f(ramp(device, 2, 3))
