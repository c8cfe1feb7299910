"""A GPU's checks for which a run waits, and what is put back after one that has ended: with the CPU's memory in the place of a
GPU's."""

import types

import pytest
import torch

from phonograph.capture.recording import memory_of
from phonograph.capture.value_checks import Check, lookouts
from phonograph.devices.cuda import value_checks
from phonograph.devices.cuda.statuses import check_of, indices_of, looks, stops_by_values
from phonograph.devices.segments import Segments, TakenBack
from phonograph.memory.spans import Spans


@pytest.fixture
def page(monkeypatch):
    """The page of a device, of which a stream is waited for."""
    page = value_checks.CudaChecks(torch.device("cpu"))
    page._page = torch.ones(value_checks._MOST, dtype=torch.bool)
    page._bytes = (value_checks.ctypes.c_char * value_checks._MOST).from_address(page._page.data_ptr())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(synchronize=lambda: None))
    before = [*lookouts]
    yield page
    lookouts[:] = before
    value_checks.atexit.unregister(page._at_exit)


def awaited(text, where):
    check = Check(False, ValueError, text, where)
    check.awaited = True
    return check


def test_each_kind_of_check_has_its_bytes(page):
    late, first, second = Check(True, ValueError, "late"), awaited("first", "a.py:1"), awaited("second", "a.py:2")
    answers = page.answers()
    for check, answer in ((first, False), (late, True), (second, True)):
        answers.add(check, torch.tensor(answer))
    answers.keep()
    assert answers.awaited.places == "a.py:1, a.py:2"
    page.look()  # which those that are awaited are not found by
    assert answers.awaited.failed() is second
    assert answers.awaited.failed() is None  # it was told
    others = page.answers()
    others.add(awaited("third", ""), torch.tensor(True))
    others.keep()
    assert answers.awaited.failed() is None
    assert others.awaited.failed() is not None


def test_the_page_is_full_by_both(page):
    answers = page.answers()
    for _ in range(value_checks._MOST // 2 + 1):
        answers.add(awaited("", ""), torch.tensor(False))
    answers.keep()
    assert page.full
    assert answers.awaited.failed() is None


class Run:
    """A program that writes, draws, and then finds that a check has failed."""

    footprint = owned = Spans()
    amiss, waits, own_generators, outs, ran = None, "", (), (), 0

    def __init__(self, *places):
        self._places = places

    def run(self, sources):
        torch.rand(3)
        for t in self._places:
            t.fill_(7)
        raise TakenBack.by_check("a.py:1")


def test_a_run_that_is_taken_back_at_its_end_leaves_nothing():
    """What it wrote outside, what earlier ones had left in the memory of the recording, and random states."""
    outside, left, new = torch.zeros(3), torch.ones(4), torch.zeros(2)
    segments = Segments([Run(outside, left, new)], [], [outside.untyped_storage()], [torch.default_generator], 1, range(2), 0,
                        torch.device("cpu"))  # fmt: skip
    segments.owned = Spans([memory_of(left)])
    none = types.SimpleNamespace(disturbing=lambda gradients: lambda: False, dials=types.SimpleNamespace(counts=None))
    segments.exchanges(types.SimpleNamespace(constants=none, gradients=None, numbers=none))
    state = torch.get_rng_state()
    with pytest.raises(TakenBack, match=r"a check of values fails at a\.py:1"):
        segments.run(())
    assert outside.tolist() == [0, 0, 0]
    assert left.tolist() == [1, 1, 1, 1]
    assert new.tolist() == [7, 7]  # nobody's
    assert torch.equal(torch.get_rng_state(), state)


def test_what_looks_at_a_status():
    assert looks("aten::_linalg_check_errors", {})
    assert looks("aten::linalg_cholesky", {})
    assert looks("aten::linalg_cholesky_ex", {"check_errors": True})
    assert not looks("aten::linalg_cholesky_ex", {})
    error = check_of("linalg.inv", "a.py:1").error()
    assert type(error) is torch.linalg.LinAlgError
    assert "linalg.inv" in str(error)
    assert "a.py:1" in str(error)


def test_what_stops_a_gpu_by_values():
    x = torch.ones(3)
    assert stops_by_values("aten::bernoulli_", (x, x))
    assert stops_by_values("aten::bernoulli", (x,))
    assert not stops_by_values("aten::bernoulli_", (x, 0.9))  # dropout
    assert not stops_by_values("aten::bernoulli_", (x,))
    assert not stops_by_values("aten::bernoulli", (x, 0.5))
    assert stops_by_values("aten::multinomial", (x, 1))
    assert not stops_by_values("aten::binary_cross_entropy_with_logits", (x, x))
    assert not stops_by_values("aten::nll_loss_forward", (x, x.long(), None, 1, -100))


def test_what_stops_a_gpu_by_integers():
    x, i = torch.ones(3), torch.ones(3, dtype=torch.long)
    assert indices_of("aten::nll_loss_forward", (x, i, None, 1, -100), {})[0] is i
    assert indices_of("aten::index", (x, [None, i]), {})[0] is i
    assert indices_of("aten::index_put", (x, [x > 0], x), {}) == []
    assert indices_of("aten::add", (x, i), {}) == []
