"""C23: steps of training in stages of a pipeline (`torch.distributed.pipelining`) on two ranks, recorded whole, with what the
stages send to each other. What a schedule keeps between steps counts, and what it sets up with the others runs live."""

import pytest

from tests import stages
from tests.contract.c23_ranks.two_ranks import BACKENDS, Programs

NOT_WHOLE = {"evaluates", "turns_back"}
# The CPU would tell the same of all others.
ON_THE_CPU = {"one_forward_one_backward", "all_forwards_first", "clips", "keeps_losses", "recomputes_dropout", "interleaved",
              "no_bubble", *NOT_WHOLE}  # fmt: skip
PROGRAMS = Programs("tests.stages", stages.CASES, ON_THE_CPU)
found, on_each = PROGRAMS.found, PROGRAMS.on_each


def counts(told: dict) -> tuple[int, int, int]:
    return told["live"], told["recorded"], told["replayed"]


def leave_out_what_eager_cannot(case: str, backend: str) -> None:
    """A release of torch that lets a rank send to itself, which gloo does not."""
    errors = [told.get(case, {}).get("unable") for told in found(backend)]
    if all(errors) and backend == "gloo" and any("Pair is not connected" in error for error in errors):
        pytest.skip(errors[0])


@pytest.mark.parametrize(("case", "backend"), on_each(stages.CASES))
def test_c23_each_rank_has_what_it_has_in_eager(case, backend):
    leave_out_what_eager_cannot(case, backend)
    for told in found(backend):
        assert told.get(case, told["log"])["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_c17_both_processes_end(backend):
    for told in found(backend):
        assert told["status"] == 0, told["log"]


@pytest.mark.parametrize(("case", "backend"), on_each([case for case in stages.CASES if case not in NOT_WHOLE]))
def test_c23_a_step_is_recorded_whole_on_each_rank(case, backend):
    for told in found(backend):
        assert counts(told[case]) == (1, 1, stages.CALLS - 1), told[case]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c09_a_step_after_an_evaluation_sets_the_pipeline_up_live_and_the_next_is_recorded(backend):
    for told in found(backend):
        live, recorded, replayed = counts(told["evaluates"])
        assert (live, replayed) == (2, stages.CALLS - 2), told["evaluates"]["reasons"]
        assert recorded <= 2  # that from before, if it fits again


@pytest.mark.parametrize("backend", BACKENDS)
def test_c11_where_stages_hand_on_what_they_give_without_sending_it_the_step_is_live_by_name(backend):
    leave_out_what_eager_cannot("turns_back", backend)
    sends, hands_on = [told["turns_back"] for told in found(backend)]
    assert counts(sends) == (1, 1, stages.CALLS - 1), sends["reasons"]
    assert counts(hands_on)[0] == stages.CALLS
    assert "].buffer (and" in hands_on["reasons"]
    assert "which outlives the call" in hands_on["reasons"]
