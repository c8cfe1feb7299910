"""C9: modules of code."""

import importlib
import importlib.util
import sys

import pytest
import torch
import torch.fx

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import globals_as_before  # noqa: F401
from tests.helpers import counts, ramp, reasons

SOURCE = """
import torch

scale = 2.0

class Scaler:
    def of(self, x):
        return x * scale

class Net(torch.nn.Module):
    def forward(self, x):
        return x * scale
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A module of the user's, importable as `written_for_a_test`."""
    (tmp_path / "written_for_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("written_for_a_test")
    sys.modules.pop("written_for_a_test")


def imports_the_module(module):
    def f(x):
        import written_for_a_test

        return x * written_for_a_test.scale

    return f


def imports_the_name(module):
    def f(x):
        from written_for_a_test import scale

        return x * scale

    return f


def reads_an_attribute_of_the_module(module):
    return lambda x: x * module.scale


def uses_an_object_of_the_module(module):
    scaler = module.Scaler()
    return lambda x: scaler.of(x)


def uses_a_net_of_the_module(module):
    net = module.Net()
    return lambda x: net(x)


WAYS = [
    imports_the_module, imports_the_name, reads_an_attribute_of_the_module, uses_an_object_of_the_module,
    uses_a_net_of_the_module,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_c09_a_global_of_another_module(device, written, way):
    f = pg.record(way(written), warmup=1)
    for scale in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        written.scale = scale
        assert_same(f(ramp(device, 4)), ramp(device, 4) * scale)
    assert counts(f)[2] >= 3


@pytest.mark.parametrize("kind", ["Scaler", "Net"])
def test_c09_a_global_of_a_module_that_no_table_of_modules_has(device, tmp_path, kind):
    (tmp_path / "unlisted.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("unlisted", tmp_path / "unlisted.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, kind)()
    f = pg.record(lambda x: made.of(x) if kind == "Scaler" else made(x), warmup=1)
    for scale in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        module.scale = scale
        assert_same(f(ramp(device, 4)), ramp(device, 4) * scale)


class Generated(torch.nn.Module):
    """Its part's `forward` is written by torch.fx, as MACE and e3nn have it: a class of its own for each."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))
        self.part = torch.fx.symbolic_trace(lambda x, w: torch.einsum("ab,bc->ac", x, w).tanh())

    def forward(self, x):
        return self.part(x, self.weight)


def test_c09_many_modules_that_torch_fx_wrote(device):
    net = torch.nn.Sequential(*(Generated() for _ in range(12))).to(device)
    net.requires_grad_(False)
    f = pg.record(lambda x: net(x), warmup=1)
    for n in range(5):
        assert_same(f(ramp(device, 3, 4, start=n)), net(ramp(device, 3, 4, start=n)))
    assert counts(f) == (1, 1, 4), reasons(f)


def test_c09_what_modules_that_torch_fx_wrote_read_is_noticed(device):
    traced = torch.fx.symbolic_trace(Generated()).to(device).requires_grad_(False)
    f = pg.record(lambda x: traced(x), warmup=1)
    for _ in range(3):
        assert_same(f(ramp(device, 3, 4)), traced(ramp(device, 3, 4)))
    traced.graph = torch.fx.symbolic_trace(lambda x: x * 3).graph
    traced.recompile()
    for _ in range(3):
        assert_same(f(ramp(device, 3, 4)), ramp(device, 3, 4) * 3)


def test_c11_functions_that_no_look_finds_beforehand_are_found_one_after_the_other(device):
    """Each look finds one: that is no reason to give up."""
    library, parts = torch.library.Library("written_for_a_test", "FRAGMENT"), 12
    for n in range(parts):
        space = {}
        exec(compile(f"def part(x):\n    return x + {n}\n", f"/written/for/a/test/{n}.py", "exec"), space)
        library.define(f"part{n}(Tensor x) -> Tensor")
        library.impl(f"part{n}", space["part"], "CompositeImplicitAutograd")
    called = [getattr(torch.ops.written_for_a_test, f"part{n}") for n in range(parts)]

    def all_of_them(x):
        for part in called:
            x = part(x)
        return x

    f = pg.record(all_of_them, warmup=1)
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) + sum(range(parts)))
    assert counts(f) == (1, 1, 3), reasons(f)
    library._destroy()
