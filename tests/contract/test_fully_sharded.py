"""Steps of training with sharded parameters on two ranks: recorded whole, with the communication in them (under
`fully_shard` on the CPU, with what stands for it). What is kept between steps ends as it has begun, and what has changed there
is noticed."""

import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch

from tests import ranks, sharded

BACKENDS = [pytest.param("gloo"), pytest.param("nccl", marks=pytest.mark.cuda)]
RECORDED = ["default", "reshards", "keeps", "mixed", "recomputes", "recomputes_dropout", "accumulates", "accumulates_mixed",
            "foreach", "plain", "momentum", "prefetches", "freezes", "slows_down", "loads", "trains_alone",
            "clips", "parametrized", "parametrized_foreach", "parametrized_clips"]  # fmt: skip
NOTICED = {
    "evaluates": "post_forward_order|_sharded_state|gathered",
    "stops_to_reduce": r"reduce_grads(.|\n)*begins with a gradient that is not reduced yet \(.*weight\)",
    "keeps_whole": r"reshard_after_backward(.|\n)*begins with a parameter that is gathered \(.*weight\)",
    "gathered_before": "_sharded_state",
}
# The CPU would tell the same of all others.
ON_THE_CPU = {"default", "keeps", "mixed", "recomputes_dropout", "accumulates_mixed", "prefetches", *NOTICED, "gives_up",
              "clips", "parametrized"}  # fmt: skip


def on_each(cases):
    """Each of these cases on each backend that is to run it."""
    both = [(backend, case) for backend in ("gloo", "nccl") for case in cases if backend == "nccl" or case in ON_THE_CPU]
    marks = {"gloo": (), "nccl": pytest.mark.cuda}
    return [pytest.param(case, backend, marks=marks[backend], id=f"{case}-{backend}") for backend, case in both]


@functools.cache
def found(backend: str) -> list[dict]:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with tempfile.TemporaryDirectory(prefix="phonograph-sharded-") as folder:
        cases = [case for case in sharded.CASES if backend == "nccl" or case in ON_THE_CPU]
        return ranks.start(backend, Path(folder), cases, "tests.sharded")


@pytest.mark.parametrize(("case", "backend"), on_each(sharded.CASES))
def test_c23_each_rank_has_what_it_has_in_eager(case, backend):
    for told in found(backend):
        assert told.get(case, told["log"])["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_c17_both_processes_end(backend):
    for told in found(backend):
        assert told["status"] == 0, told["log"]


@pytest.mark.parametrize(("case", "backend"), on_each(RECORDED))
def test_c23_a_step_is_recorded_whole(case, backend):
    for told in found(backend):
        live = told[case]["live"], told[case]["recorded"], told[case]["replayed"]
        assert live == (1, 1, sharded.CALLS - 1), told[case]["reasons"]


@pytest.mark.parametrize(("case", "backend"), on_each(NOTICED))
def test_c09_what_has_changed_between_steps_is_noticed(case, backend):
    for told in found(backend):
        assert re.search(NOTICED[case], told[case]["reasons"])
        assert told[case]["recorded"] == 1
        assert told[case]["replayed"] >= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_a_capture_that_is_given_up_leaves_parameters_sharded_and_nobodys_turn(backend):
    for told in found(backend):
        assert told["gives_up"]["live"] == sharded.CALLS
        assert "reads a tensor's value on the host" in told["gives_up"]["reasons"]
