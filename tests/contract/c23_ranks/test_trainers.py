"""C23: a step that is a method of a trainer, which has files, threads, iterators and process groups in its attributes, is
recorded as the same step by itself is. The programs are in `tests/trainers.py`, all of them in `benchmarks/trainers.py`."""

import pytest

from tests import ranks, trainers
from tests.contract.c23_ranks.two_ranks import BACKENDS, Programs

# The CPU would tell the same of all others.
ON_THE_CPU = {
    "ddp-plain", "ddp_accumulates-trainer", "ddp_bf16_hook-decorated", "ddp_clips-counting", "ddp_counts_in_views-trainer",
    "ddp_counts_with_schedule-plain", "ddp_static_graph-trainer", "ddp_power_sgd-plain",
    "fsdp2_keeps-trainer", "fsdp2_recomputes-decorated", "fsdp2_accumulates-counting",
}  # fmt: skip
RECORDED = [case for case in trainers.CASES if case.partition("-")[0] not in trainers.LIVE]
IN_TURNS = [case for case in RECORDED if case.startswith("ddp_counts")]
PROGRAMS = Programs("tests.trainers", trainers.CASES, ON_THE_CPU, lasts=300)
found, on_each = PROGRAMS.found, PROGRAMS.on_each


@pytest.mark.parametrize(("case", "backend"), on_each(trainers.CASES))
def test_c23_each_rank_has_what_it_has_in_eager(case, backend):
    for told in found(backend):
        assert told.get(case, told["log"])["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_c17_both_processes_end(backend):
    for told in found(backend):
        assert told["status"] == 0, told["log"]


@pytest.mark.parametrize(("case", "backend"), on_each([case for case in RECORDED if case not in IN_TURNS]))
def test_c23_a_step_is_recorded_whatever_its_trainer_has(case, backend):
    for told in found(backend):
        live = 2 if case.startswith("ddp") else 1
        counts = told[case]["live"], told[case]["recorded"], told[case]["replayed"]
        assert counts == (live, 1, ranks.CALLS - live), told[case]["reasons"]


@pytest.mark.parametrize(("case", "backend"), on_each(IN_TURNS))
def test_c15_steps_that_average_in_turns_settle(case, backend):
    """A capture that is made again makes the reducer anew, on which no other recording relies."""
    for told in found(backend):
        assert told[case]["recorded"] <= 4, told[case]["reasons"]
        assert told[case]["live"] <= 6, told[case]["reasons"]


@pytest.mark.parametrize(("case", "backend"), on_each([case for case in trainers.CASES if case not in RECORDED]))
def test_c11_what_no_graph_can_have_is_named_in_a_trainer_too(case, backend):
    for told in found(backend):
        assert trainers.LIVE[case.partition("-")[0]] in told[case]["reasons"]
        assert told[case]["recorded"] == 0
