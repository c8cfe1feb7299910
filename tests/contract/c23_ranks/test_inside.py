"""C23: modules that are recorded with their backward, and graphs of the compile backend, inside and around what spreads a model
over ranks: each step is eager's on each rank, and what is recorded is what docs/several-gpus.md says. The programs are in
`tests/inside.py`."""

import re

import pytest

from tests import inside
from tests.contract.c23_ranks.two_ranks import BACKENDS, Programs

# The CPU would tell the same of all others, or compiles for long.
ON_THE_CPU = {"module", "blocks", "module_accumulating", "module_recomputed", "renewed", "wrapper", "module_that_communicates",
              "module_that_communicates_in_its_backward",
              "sharded_of_recorded", "tensor_parallel", "gathered", "compiled_in_buckets"}  # fmt: skip
# How often what is recorded is called in all steps, and how many recordings that takes.
COUNTS = {
    "module": (20, 1), "module_after": (20, 1), "blocks": (60, 3), "last_block": (20, 1), "module_into_views": (20, 1),
    "module_into_gradients_that_stay": (20, 1), "module_compressed": (20, 1), "module_with_buffers": (20, 1),
    "module_accumulating": (60, 1), "module_called_twice": (40, 2), "module_recomputed": (20, 1),
    "wrapper_of_compiled": (20, 1), "tensor_parallel": (20, 1), "gathered": (20, 1), "compiled_gathered": (20, 1),
}  # fmt: skip
LIVE = {
    "module_that_communicates": "lies in DistributedDataParallel, and communicates with other ranks as well",
    "wrapper": "contains DistributedDataParallel",
    "sharded_of_recorded": "contains FSDPModule, whose backward cannot be recorded by itself",
    "recorded_of_sharded": "contains FSDPModule, whose backward cannot be recorded by itself",
}
LIVE_ON_GPUS = {
    "module_that_may_have_unused": "lies in DistributedDataParallel with find_unused_parameters",
    "module_of_a_static_graph": "lies in DistributedDataParallel with static_graph",
}
PROGRAMS = Programs("tests.inside", inside.CASES, ON_THE_CPU, lasts=150)
found, on_each = PROGRAMS.found, PROGRAMS.on_each


@pytest.mark.parametrize(("case", "backend"), on_each(inside.CASES))
def test_c23_each_rank_has_what_it_has_in_eager(case, backend):
    for told in found(backend):
        assert told.get(case, told["log"])["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_c17_both_processes_end(backend):
    for told in found(backend):
        assert told["status"] == 0, told["log"]


@pytest.mark.parametrize(("case", "backend"), on_each(COUNTS))
def test_c23_what_is_recorded_inside_is_replayed_in_every_step(case, backend):
    calls, recorded = COUNTS[case]
    few = (3 if case == "blocks" else 1) + (calls // 20 if backend == "nccl" else 0)  # the wrapper's first steps
    for told in found(backend):
        assert told[case]["recorded"] == recorded, told[case]["reasons"]
        assert calls - few <= told[case]["replayed"] < calls, told[case]["reasons"]


@pytest.mark.parametrize(("case", "backend"), on_each(COUNTS))
def test_c23_so_is_its_backward(case, backend):
    for told in found(backend):
        backwards = [line for line in told[case]["reasons"].splitlines() if line.startswith("the backward of")]
        assert backwards
        assert all(" 0 live" in line or " 1 live" in line for line in backwards), backwards


@pytest.mark.parametrize(("case", "backend"), on_each(LIVE))
def test_c11_what_spreads_a_model_is_named_where_its_backward_is_outside(case, backend):
    for told in found(backend):
        assert LIVE[case] in told[case]["reasons"]
        assert told[case]["recorded"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_what_communicates_in_a_backward_is_not_put_before_all_averages(backend):
    """That it does is known once it has."""
    for told in found(backend):
        case = told["module_that_communicates_in_its_backward"]
        assert LIVE["module_that_communicates"] in case["reasons"]
        assert case["replayed"] <= 2, case["reasons"]


@pytest.mark.parametrize(
    ("case", "backend"), on_each([case for case in inside.CASES if case.startswith("compiled_in_buckets")])
)
def test_c23_a_compiled_wrapper_is_recorded_a_bucket_at_a_time(case, backend):
    for told in found(backend):
        calls = 20 * (3 if "accumulating" in case else 1)
        parts = [int(n) for n in re.findall(r"^graph \d+ .*: (\d+) calls", told[case]["reasons"], re.MULTILINE)]
        assert len(parts) >= 2, told[case]["reasons"]
        assert {*parts} == {calls}
        assert told[case]["replayed"] >= len(parts) * (calls - 2), told[case]["reasons"]


@pytest.mark.cuda
@pytest.mark.parametrize("case", LIVE_ON_GPUS)
def test_c11_a_wrapper_in_which_no_backward_can_be_recorded_is_named(case):
    for told in found("nccl"):
        assert LIVE_ON_GPUS[case] in told[case]["reasons"]
        assert told[case]["recorded"] == 0


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["module", "blocks"])
def test_c19_a_module_in_a_wrapper_is_told_that_its_gradients_come_at_once(case):
    for told in found("nccl"):
        assert "lies in DistributedDataParallel, which averages gradients as they come" in told[case]["reasons"]
