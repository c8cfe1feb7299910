"""What stands in the way of collectives in graphs is known by the environment, NCCL's release, and where the ranks are."""

import pytest
import torch

from phonograph._torch import process_groups as torch_process_groups
from phonograph.cli import doctor
from phonograph.distributed import nccl

NEW, OLD = (2, 30, 7), (2, 28, 9)


def names(environment, version=NEW, **where):
    return [one.name for one in nccl.obstacles(environment, version, **where)]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, []),
        ({"NCCL_GRAPH_MIXING_SUPPORT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_GRAPH_REGISTER": "1"}, []),
        ({"NCCL_GRAPH_MIXING_SUPPORT": "0"}, ["NCCL_GRAPH_MIXING_SUPPORT"]),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, ["TORCH_NCCL_BLOCKING_WAIT"]),
    ],
)
def test_settings_by_which_a_graph_cannot_communicate(environment, found):
    assert names(environment) == found


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"NCCL_GRAPH_REGISTER": "0"}, []),
        ({"NCCL_GRAPH_REGISTER": "1"}, ["NCCL_GRAPH_REGISTER"]),
        ({}, ["NCCL_GRAPH_REGISTER"]),
    ],
)
def test_segments_that_expand_must_not_be_registered(environment, found):
    assert names(environment, expandable=True) == found


def test_old_releases_are_for_one_host():
    assert names({}, OLD) == []
    assert names({}, OLD, several_hosts=True) == ["NCCL"]
    assert names({}, NEW, several_hosts=True) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"NCCL_GRAPH_REGISTER": "0"}),
        ({"NCCL_GRAPH_REGISTER": "1"}, {"NCCL_GRAPH_REGISTER": "1"}),
        ({"NCCL_LOCAL_REGISTER": "0"}, {"NCCL_LOCAL_REGISTER": "0"}),
    ],
)
def test_nothing_is_registered_where_nobody_has_decided(before, after):
    nccl.register_nothing(before)
    assert before == after


def test_what_nccls_own_files_set_is_left_alone(monkeypatch):
    monkeypatch.setattr(nccl, "_decided", lambda: True)
    environment = {}
    nccl.register_nothing(environment)
    assert environment == {}


class Store(dict):
    """One that other ranks have written to."""

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return self[key]

    def wait(self, keys, timeout):
        if not all(key in self for key in keys):
            raise RuntimeError("timeout")


@pytest.fixture
def ranks_of_three(monkeypatch):
    store = Store()
    nccl._hosts_of.cache_clear()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch_process_groups, "default_store", lambda: store)
    monkeypatch.setattr(torch_process_groups, "own_rank", lambda: 0)
    yield store
    nccl._hosts_of.cache_clear()


@pytest.mark.parametrize(("local", "several"), [("3", False), ("2", True)])
def test_what_has_started_the_ranks_may_say_where_they_are(ranks_of_three, monkeypatch, local, several):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert nccl.several_hosts() is several
    assert not ranks_of_three


@pytest.mark.parametrize(("others", "several"), [(("here", "here"), False), (("here", "there"), True), (("there",), False)])
def test_otherwise_each_says_where_it_is_once(ranks_of_three, monkeypatch, others, several):
    monkeypatch.setattr(nccl, "_host", lambda: "here")
    ranks_of_three.update({f"phonograph/hosts/{rank}": host for rank, host in enumerate(others, 1)})
    assert nccl.several_hosts() is several
    ranks_of_three.clear()
    assert nccl.several_hosts() is several
    assert not ranks_of_three


def told(environment, version=NEW):
    return {finding.what: finding for finding in doctor.nccl_settings(environment, version)}


def test_doctor_says_so_before_there_is_a_process_group():
    found = told({"NCCL_GRAPH_MIXING_SUPPORT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, OLD)
    assert "on one host" in found["NCCL"].meaning
    assert found["NCCL_GRAPH_MIXING_SUPPORT"].status == "problem"
    assert "unset it" in found["NCCL_GRAPH_MIXING_SUPPORT"].meaning
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"].status == "note"
    assert told({"NCCL_GRAPH_REGISTER": "1"})["NCCL_GRAPH_REGISTER"].status == "note"
    assert {finding.status for finding in told({}).values()} == {"ok"}


def test_doctor_knows_that_segments_that_expand_need_nothing_more():
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert told(expandable)["NCCL_GRAPH_REGISTER"].status == "ok"
    assert told({**expandable, "NCCL_GRAPH_REGISTER": "1"})["NCCL_GRAPH_REGISTER"].status == "problem"
