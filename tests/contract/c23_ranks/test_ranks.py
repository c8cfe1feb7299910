"""C23: several ranks. No collective is left out, moved, or read before it has arrived: what communicates is recorded, and done
on all ranks once in each call, or runs live and says so. Recordings go before the process group that they communicate by (C17).

The programs are in `tests/ranks.py`; two processes run all of them, once for each backend. (In one process of pytest: `-n 0` or
`--dist=loadfile`.)"""

import functools
import re

import pytest
import torch

import phonograph as pg
from tests import ranks
from tests.contract.c23_ranks.two_ranks import BACKENDS, run

NOT_IN_GRAPHS, FUNCTIONS = ranks.NOT_IN_GRAPHS, ranks.FUNCTIONS
RECORDED = tuple(case for case in FUNCTIONS if case not in NOT_IN_GRAPHS)  # on both devices
OTHERS = (
    "broadcast_of_an_argument", "reduce_scatter", "all_to_all", "for_the_first_time", "functional_view",
    "functional_coalesced", "recomputes", "functional_operators", "row_parallel_module", "column_parallel_module",
    "splits_at_a_collective", "all_reduce_while_it_works", "two_under_way", "gathers_in_place", "broadcast_of_indices",
    "all_reduce_of_integers", "functional_while_it_works", "gather", "scatter", "sends_both_ways", "all_reduce_coalesced",
    "functional_is_returned", "reduces_before_a_branch", "reduces_after_a_loop",
)  # fmt: skip
REFUSED = {
    "gathers_objects": r"communicates with other ranks \(all_gather_object\)",
    "never_waits": r"communicates with other ranks \(all_reduce\), and does not wait for what it begins",
    "is_refused_within_a_group": r"reads the clock \(time\)",
    "catches_what_fails": r"communicates with other ranks \(all_reduce\), and an except or finally clause",
    "asks_how_far_it_is": r"asks how far a collective is \(is_completed\)",
}


ALONE = ["peer_is_missing", "is_of_another_release", "anew"]  # cases that are not `Case`s, on the CPU


@functools.cache
def found(backend: str, *cases: str, **environment: str) -> list[dict]:
    """What both ranks have found in all programs, or in these."""
    last = ["steady", *(ALONE if backend == "gloo" else [])]
    return run(backend, "tests.ranks", cases or (*[c for c in ranks.CASES if has(backend, c)], *last), **environment)


def has(backend: str, case: str) -> bool:
    """Whether the backend has what the program calls: gloo has no all_to_all of lists in torch 2.11 and 2.12."""
    return (backend, case) != ("gloo", "all_to_all") or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ranks.CASES)
def test_c23_each_rank_has_what_it_has_in_eager(case, backend):
    if not has(backend, case):
        pytest.skip(f"{backend} does not have it in this release of torch")
    for told in found(backend):
        assert told.get(case, told["log"])["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_all_processes_end(backend):
    for told in found(backend):
        assert told["status"] == 0, told["log"]


@pytest.mark.parametrize(("backend", "at_least"), [("gloo", 28), pytest.param("nccl", 26, marks=pytest.mark.cuda)])
def test_c23_functions_of_collectives_are_recorded(backend, at_least):
    assert len(FUNCTIONS) == 28
    for told in found(backend):
        live = {case: told[case]["reasons"] for case in FUNCTIONS if told[case]["replayed"] < ranks.CALLS - 3}
        assert len(FUNCTIONS) - len(live) >= at_least, live


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", RECORDED + OTHERS)
def test_c23_what_communicates_is_recorded_once_and_replayed(case, backend):
    if not has(backend, case):
        pytest.skip(f"{backend} does not have it in this release of torch")
    for told in found(backend):
        assert told[case]["recorded"] == 1, told[case]["reasons"]
        assert told[case]["replayed"] >= ranks.CALLS - 2, told[case]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c01_a_group_or_a_mesh_that_is_an_argument_is_one_or_another(backend):
    for told in found(backend):
        assert told["given_its_group"]["recorded"] == 2, told["given_its_group"]["reasons"]
        assert told["given_its_group"]["replayed"] >= ranks.CALLS - 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_branches_do_not_communicate(backend):
    for told in found(backend):
        assert "(all_reduce) in a branch or loop" in told["reduces_in_a_branch"]["reasons"]
        assert told["reduces_in_a_branch"]["live"] == ranks.CALLS


@pytest.mark.cuda
def test_c23_nccl_communicates_on_one_side_of_a_branch():
    for told in found("nccl"):
        assert "before and after a branch or loop" in told["reduces_around_a_branch"]["reasons"]
        assert told["reduces_around_a_branch"]["live"] == ranks.CALLS


@pytest.mark.parametrize("case", REFUSED)
def test_c23_what_nobody_could_repeat_is_refused_by_name_before_it_runs(case):
    for told in found("gloo"):
        assert re.search(rf"{REFUSED[case]}.* at .*tests/ranks.py:", told[case]["reasons"])
        assert told[case]["live"] == ranks.CALLS


def test_c23_a_capture_communicates_with_nobody():
    """One rank captures alone: the other would be waited for."""
    plain, recording = [told["recorded_on_one_rank"] for told in found("gloo")]
    assert (plain["live"], recording["replayed"]) == (ranks.CALLS, ranks.CALLS - 1)
    assert "reads the clock" in found("gloo")[1]["gives_up_late"]["reasons"]


def test_c23_where_a_rank_does_not_come_a_replay_raises_what_eager_does():
    waiting, missing = [told["peer_is_missing"] for told in found("gloo")]
    assert (waiting["live"], missing["live"]) == (1, 1), waiting["reasons"]
    assert "timed out" in waiting["raised"][0].lower()


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["decides_after_data_parallel", "decides_after_sharded"])
def test_c23_what_torchs_wrappers_have_communicated_cannot_be_given_again(case):
    for told in found("nccl"):
        assert "after it has communicated with other ranks in a wrapper of torch's" in told[case]["reasons"]
        assert told[case]["replayed"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_what_would_communicate_twice_runs_live(backend):
    for told in found(backend):
        assert "communicates with other ranks, which verify would do twice" in told["verified"]["reasons"]
        assert told["verified"]["live"] == ranks.CALLS


@pytest.mark.parametrize("case", [*NOT_IN_GRAPHS, "sends_for_the_first_time"])
def test_c23_what_no_graph_can_have_is_recorded_on_the_cpu(case):
    for told in found("gloo"):
        assert told[case]["recorded"] == 1, told[case]["reasons"]
        assert told[case]["replayed"] >= ranks.CALLS - 1


@pytest.mark.cuda
@pytest.mark.parametrize("case", NOT_IN_GRAPHS)
def test_c23_what_a_graph_cannot_have_is_refused_before_anything_is_begun(case):
    for told in found("nccl"):
        reasons = told[case]["reasons"]
        assert re.search(rf"communicates with other ranks \({NOT_IN_GRAPHS[case]}\).* at .*tests/ranks.py:", reasons)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_ranks_may_do_what_they_do_in_different_calls(backend):
    mine, other = [told["differs_by_rank"] for told in found(backend)]
    assert (mine["wrong"], other["wrong"]) == ([], [])
    assert mine["live"] < other["live"] < ranks.CALLS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["is_refused_on_one_rank", "runs_out_of_memory_on_one_rank", "evicts_on_one_rank"])
def test_c23_one_rank_runs_live_where_the_other_replays(case, backend):
    if (backend, case) == ("gloo", "runs_out_of_memory_on_one_rank"):
        pytest.skip("memory of the CPU does not run out in a test")
    mine, other = [told[case] for told in found(backend)]
    assert (mine["wrong"], other["wrong"]) == ([], [])
    assert (mine["recorded"], mine["replayed"]) == (1, ranks.CALLS - 1)
    assert other["replayed"] < mine["replayed"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c13_a_rank_that_raises_does_so_after_it_has_communicated_for_the_other(backend):
    mine, other = [told["raises_on_one_rank"] for told in found(backend)]
    assert (mine["wrong"], other["wrong"]) == ([], [])
    assert mine["replayed"] == ranks.CALLS - 1


def test_c23_a_number_that_is_only_kept_may_come_after_communication():
    for told in found("gloo"):
        assert told["logs_after_reducing"]["recorded"] == 1, told["logs_after_reducing"]["reasons"]
        assert told["logs_after_reducing"]["replayed"] >= ranks.CALLS - 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    ["decides_before_reducing", "decides_after_reducing", "goes_on_after_reducing", "decides_in_training",
     "gives_another_shape", "notes_after_reducing"],
)  # fmt: skip
def test_c23_where_a_rank_begins_a_call_again_it_does_not_communicate_again(case, backend):
    """Each rank by itself goes on otherwise in some calls, after others have had what it has sent."""
    for told in found(backend):
        assert told[case]["wrong"] == []
        assert told[case]["recorded"] >= 1, told[case]["reasons"]
        assert told[case]["replayed"] >= ranks.CALLS - 6, told[case]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c14_what_is_done_beside_a_capture_does_not_disturb_it(backend):
    """Memory is pinned, and work is under way that torch watches."""
    for told in found(backend):
        case = told["pins_memory_beside"]
        assert (case["recorded"], case["replayed"]) == (ranks.CALLS // 2, ranks.CALLS // 2), case["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_a_replay_communicates_as_often_as_eager_and_asks_nobody_else(backend):
    for told in found(backend):
        eager, recorded = told["steady"]["eager"], told["steady"]["recorded"]
        assert eager["operators"] == 4 * 4  # steps, parameters
        assert (recorded["kernels"], recorded["store"]) == (eager["kernels"], 0)
        assert recorded["operators"] == (0 if backend == "nccl" else eager["operators"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_ranks_of_which_one_is_of_another_release_both_say_so(backend):
    mine, other = found(backend) if backend == "gloo" else found("nccl", "is_of_another_release")
    assert f"rank 1 has phonograph 0.0.0, this one {pg.__version__}" in mine["is_of_another_release"]["reasons"]
    assert f"rank 0 has phonograph {pg.__version__}, this one 0.0.0" in other["is_of_another_release"]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_ranks_replay_or_run_live_each_as_it_likes(backend):
    for told in found(backend):
        assert told["skewed"]["wrong"] == []
        assert 0 < told["skewed"]["replayed"] < ranks.CALLS - 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("uses_a_store", "uses a store that it shares with other ranks (add)"),
        ("waits_for_what_began_outside", "can reach a collective that is under way"),
    ],
)
def test_c23_what_goes_on_outside_of_the_call_is_named(case, reason, backend):
    for told in found(backend):
        assert reason in told[case]["reasons"]
        assert told[case]["recorded"] == 0


@pytest.mark.cuda
def test_c19_of_a_recorded_module_that_is_wrapped_it_is_said_that_the_step_had_better_be():
    for told in found("nccl"):
        said = told["data_parallel_of_a_recorded_module"]["reasons"]
        assert said.count("record the whole step, and averaging goes on meanwhile") == 1
        assert "DistributedDataParallel" not in told["pipeline_of_recorded_stages"]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_a_whole_step_of_a_wrapped_model_is_recorded(backend):
    for told in found(backend):
        assert (told["data_parallel"]["live"], told["data_parallel"]["recorded"]) == (2, 1), told["data_parallel"]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["reduces_live", "averages_gradients_live"])
def test_c23_a_marked_function_may_communicate(case, backend):
    for told in found(backend):
        assert told[case]["recorded"] == 1, told[case]["reasons"]
        assert told[case]["replayed"] >= ranks.CALLS // 2, told[case]["reasons"]  # (some calls are live to measure it)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", ["pipeline_of_recorded_stages", "data_parallel_of_a_recorded_module", "column_parallel_module"]
)
def test_c23_a_recorded_module_replays_in_what_communicates_around_it(case, backend):
    for told in found(backend):
        assert told[case]["replayed"] >= ranks.CALLS - 1, told[case]["reasons"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c17_recordings_go_before_their_process_group_and_are_made_anew_for_another(backend):
    for told in found("nccl", "anew") if backend == "nccl" else found("gloo"):
        assert told["status"] == 0, told["log"]
        assert told["anew"]["wrong"] == []
        assert (told["anew"]["live"], told["anew"]["recorded"], told["anew"]["replayed"]) == (1, 1, ranks.CALLS - 1)
        assert "its process group" in told["anew"]["reasons"]


@pytest.mark.cuda
def test_c23_what_two_ranks_alone_share_begins_with_a_live_call():
    """NCCL would fail in a capture, and leave an address in the store at which the next call would wait for ever."""
    for told in found("nccl"):
        first = told["sends_for_the_first_time"]
        assert (first["live"], first["recorded"]) == (1, 1), first["reasons"]
        assert first["replayed"] == ranks.CALLS - 1


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["in_a_cycle", "exits"])
def test_c17_a_process_ends_with_recordings_that_communicate(how):
    for told in found("nccl", how):
        assert told["status"] == 0, told["log"]
        assert "Error" not in told["log"]


@pytest.mark.cuda
def test_c23_expandable_segments_are_recorded_unless_nccl_shall_register_them():
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for told in found("nccl", "all_reduce", "all_gather_into_tensor", "skewed", **expandable):
        for case in ("all_reduce", "all_gather_into_tensor"):
            assert told[case]["wrong"] == []
            assert told[case]["replayed"] == ranks.CALLS - 1
        assert told["skewed"]["wrong"] == []  # which has tensors of 64 MiB
    for told in found("nccl", "all_reduce", **expandable, NCCL_GRAPH_REGISTER="1"):
        assert told["all_reduce"]["wrong"] == []
        assert "set NCCL_GRAPH_REGISTER=0" in told["all_reduce"]["reasons"]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["NCCL_GRAPH_MIXING_SUPPORT", "TORCH_NCCL_BLOCKING_WAIT"])
def test_c23_settings_by_which_a_graph_cannot_communicate_are_named(name):
    for told in found("nccl", "all_reduce", **{name: "0" if name == "NCCL_GRAPH_MIXING_SUPPORT" else "1"}):
        assert told["all_reduce"]["wrong"] == []
        assert f"with {name}=" in told["all_reduce"]["reasons"]
        assert told["all_reduce"]["live"] == ranks.CALLS
