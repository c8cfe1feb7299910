"""C23: a whole step of `DistributedDataParallel` is recorded, with its averaging; and a capture of one that is given
up, wherever it stood, leaves a wrapper that averages as before (C12). The programs are in `tests/ranks_ddp.py`."""

import functools

import pytest

from tests import ranks_ddp
from tests.contract.c23_ranks.two_ranks import BACKENDS, run

REFUSED = {
    "step_that_asks_for_unused": "contains DistributedDataParallel with find_unused_parameters",
    "step_of_a_static_graph": "contains DistributedDataParallel with static_graph",
    "step_that_averages_at_first": "a communication hook that goes by what it keeps (a PostLocalSGDState)",
    "step_with_a_hook_that_counts": None,
    "step_refused_in_its_backward": "reads a tensor's value on the host",
    "step_refused_on_one_rank": None,
}
APART = ("beside", "another", "evaluates", "seldom")
ONCE = [case for case in ranks_ddp.CASES if case not in REFUSED and not any(name in case for name in APART)]


@functools.cache
def found(backend: str, *cases: str) -> list[dict]:
    """What both ranks have found in all programs, or in these."""
    return run(backend, "tests.ranks_ddp", cases or ranks_ddp.CASES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ranks_ddp.CASES)
def test_c23_each_rank_has_the_averages_of_eager(case, backend):
    for told in found(backend):
        assert told.get(case, told["log"])["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_c17_all_processes_end(backend):
    for told in found(backend):
        assert told["status"] == 0, told["log"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ONCE)
def test_c23_a_step_is_recorded_as_soon_as_its_buckets_are_known(case, backend):
    for told in found(backend):
        assert (told[case]["live"], told[case]["recorded"]) == (2, 1), told[case]["reasons"]
        assert told[case]["replayed"] == ranks_ddp.CALLS - 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["evaluates", "evaluates_what_is_inside"])
def test_c23_what_averages_no_gradients_is_recorded_beside_any_wrapper(case, backend):
    for told in found(backend):
        assert told[case]["recorded"] == 1, told[case]["reasons"]
        assert told[case]["live"] == (2 if case == "evaluates" else 1), told[case]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_a_wrapper_that_averages_late_is_recorded_then(backend):
    for told in found(backend):
        assert told["averages_seldom"]["recorded"] >= 1, told["averages_seldom"]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c07_another_batch_is_another_recording_of_the_same_buckets(backend):
    for told in found(backend):
        assert 2 <= told["step_of_another_batch"]["recorded"] <= 3, told["step_of_another_batch"]["reasons"]
        assert told["step_of_another_batch"]["live"] <= 4, told["step_of_another_batch"]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["step_compressed_beside_later", "step_beside_another_group"])
def test_c09_what_a_reducer_averages_by_is_noticed(case, backend):
    for told in found(backend):
        assert "averaging" in told[case]["reasons"]
        assert told[case]["replayed"] >= 3, told[case]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", REFUSED)
def test_c11_what_a_wrapper_does_that_no_graph_can_have_is_named(case, backend):
    for told in found(backend):
        assert (REFUSED[case] or "") in told[case]["reasons"]
        assert told[case]["recorded"] == 0 or REFUSED[case] is None
