"""What conditional nodes are made of, as far as no GPU is asked: structures of the driver's, and kernels."""

import ctypes
import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from phonograph.devices.cuda import conditional, driver


def assembler():
    """Triton's, where it is here."""
    triton = importlib.util.find_spec("triton")
    found = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas" if triton and triton.origin else Path()
    if not found.is_file():
        pytest.skip("no assembler is here")
    return str(found)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_kernels_can_be_assembled(tmp_path, arch):
    source = tmp_path / "kernels.ptx"
    source.write_bytes(conditional._PTX)
    command = [assembler(), "-c", f"-arch={arch}", str(source), "-o", str(tmp_path / "kernels.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_structures_are_as_large_as_the_drivers():
    assert ctypes.sizeof(conditional._NodeParams) == 256
    assert conditional._NodeParams.conditional.offset == 16
    assert conditional._Conditional.bodies.offset == 16


@pytest.mark.parametrize(("number", "wanted", "name"), [(torch.tensor(True), -1, "set_u8"),
                                                        (torch.tensor(2, dtype=torch.int32), 3, "set_s32")])  # fmt: skip
def test_handles_are_set_by_the_kernel_for_the_type(monkeypatch, number, wanted, name):
    launched = []
    monkeypatch.setattr(conditional, "_launch", lambda *given: launched.append(given))
    conditional.set_handle(7, 1 << 40, number, wanted)
    ((called, stream, *arguments),) = launched
    assert (called, stream, [x.value for x in arguments]) == (name, 7, [1 << 40, number.data_ptr(), wanted])


def test_a_driver_without_the_functions_has_no_kinds(monkeypatch):
    monkeypatch.setattr(conditional, "library", object)
    assert not any(map(conditional._works, (conditional.IF, conditional.WHILE, conditional.SWITCH)))


def test_a_driver_that_refuses_a_kind_does_not_have_it(monkeypatch):
    gone = []
    functions = {"cuGraphCreate": lambda graph, _: setattr(graph._obj, "value", 5) or 0, "cuGraphDestroy": gone.append}
    monkeypatch.setattr(conditional, "library", lambda: type("All", (), dict.fromkeys(conditional._SINCE)))
    monkeypatch.setattr(conditional, "function", lambda name, *_: functions.get(name, lambda *given: 1))
    monkeypatch.setattr(driver, "context", lambda: None)
    assert not conditional._works(conditional.SWITCH)
    assert [graph.value for graph in gone] == [5]
