"""C9: modules of code."""

import importlib
import importlib.util
import sys

import pytest

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import globals_as_before  # noqa: F401
from tests.helpers import counts, ramp

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
