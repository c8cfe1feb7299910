"""C17, C23: however a process ends that has recordings which communicate, it ends; and none waits for a rank that has gone.

The ways to end are in `tests/ends.py`; two processes go through all of them, once for each backend. (In one process of pytest:
`-n 0` or `--dist=loadfile`.)"""

import functools
import os
import re
import signal

import pytest
import torch

from tests import ends
from tests.contract.c23_ranks.two_ranks import BACKENDS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


CLEAN = [way for way in ends.WAYS if way not in ("raises_on_one_rank", "dies_on_one_rank")]


@functools.cache
def ended(backend: str, *ways: str, **environment: str) -> dict[str, tuple]:
    """What both ranks have told, by way."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    at_once = 1 if backend == "gloo" else 3
    return dict(ends.start(backend, ways or [*ends.WAYS], at_once, **environment))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", CLEAN)
def test_c17_processes_end_as_they_do_in_eager(way, backend):
    told = ended(backend)[way]
    assert ends.is_as_it_should_be(way, told), ends.as_text(told)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("way", "status"), [("raises_on_one_rank", 1), ("dies_on_one_rank", -signal.SIGKILL)])
def test_c23_no_rank_waits_for_one_that_has_gone(way, status, backend):
    survivor, gone = ended(backend)[way]
    assert gone["status"] == status, gone["log"]
    assert survivor["status"] not in (0, "did not end"), survivor["log"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_who_waits_for_a_rank_that_has_died_says_for_whom_and_in_what(backend):
    told, _ = ended(backend)["dies_on_one_rank"]
    assert told["status"] == -signal.SIGABRT, told["log"]
    said = re.search(
        r"phonograph: rank 0 has waited for (\d+) s \(timeout: 4 s\) for ranks 1 in replay \d+ of (step|tests.*)", told["log"]
    )
    assert said is not None, told["log"]
    assert int(said[1]) <= ends.TIMEOUT + 5
    assert "all_reduce at " in told["log"]
    assert "Missing, as they are in no replay: 1." in told["log"]


@pytest.mark.cuda
def test_c23_a_process_group_is_aborted_where_torch_would_abort_it():
    told, _ = ended("nccl", "dies_on_one_rank", TORCH_NCCL_ASYNC_ERROR_HANDLING="2")["dies_on_one_rank"]
    assert told["status"] == 0, told["log"]
    assert "The process group is aborted now" in told["log"]
