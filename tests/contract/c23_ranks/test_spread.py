"""C23: tensors that are spread over two ranks (DTensor): tensor and sequence parallel as whole steps, and as modules whose
backward runs outside; arguments and results. They are recorded by their parts, and what communicates between them with them.

The programs are in `tests/spread.py`; two processes run all of them, once for each backend. (In one process of pytest:
`-n 0` or `--dist=loadfile`.)"""

import functools

import pytest

from tests import spread
from tests.contract.c23_ranks.two_ranks import BACKENDS, run

# Modules that are called twice in each call of the program, and how many recordings that takes.
TWICE = {"tp_module_adds_up": 1, "tp_module_waits_for_two": 2}


@functools.cache
def found(backend: str) -> list[dict]:
    """What both ranks have found in all programs."""
    return run(backend, "tests.spread", spread.CASES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", spread.CASES)
def test_c23_spread_tensors_are_on_each_rank_what_they_are_in_eager(case, backend):
    for told in found(backend):
        assert told["status"] == 0, told["log"]
        assert told.get(case, told["log"])["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", spread.CASES)
def test_c23_what_works_with_spread_tensors_is_recorded(case, backend):
    for told in found(backend):
        counts = tuple(told[case][which] for which in ("live", "recorded", "replayed"))
        calls = spread.CALLS * (2 if case in TWICE else 1)
        assert counts == (1, TWICE.get(case, 1), calls - 1), told[case]["reasons"]
