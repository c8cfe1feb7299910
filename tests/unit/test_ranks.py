"""Recordings that communicate go before their process group, whoever ends it and however it was imported."""

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group

import phonograph as pg
from phonograph.engine import process_groups as ranks
from phonograph.statistics import Counters
from tests.helpers import counts, may_run_live, plain, reasons


class Program:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A process group of this process alone."""
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        destroy_process_group()


def recording():
    """As much of one as is looked at."""
    made = type("Recording", (SimpleNamespace,), {"__hash__": object.__hash__})(spoiled=[], program=Program(), name="step")
    ranks.follow(made, Counters())
    return made


def methods():
    return vars(dist.ProcessGroup)["shutdown"], vars(dist.ProcessGroup)["abort"]


@pytest.mark.parametrize("end", [destroy_process_group, lambda: dist.group.WORLD.shutdown(), lambda: dist.group.WORLD.abort()])
def test_they_end_before_the_group_does(world, end):
    before = methods()
    program, made = Program(), recording()
    ranks.follow_program(program)
    end()
    assert program.closed == 1
    assert made.spoiled == ["its process group"]
    assert methods() == before


def test_torch_is_as_it_was_where_nothing_communicates(world):
    before = methods()
    both = plain(lambda x: x * 2)
    both(torch.ones(2))
    both(torch.ones(2))
    assert methods() == before


def test_those_in_cycles_end_as_well(world):
    program = Program()
    program.itself = program
    ranks.follow_program(program)
    gone = weakref.ref(program)
    gc.disable()
    try:
        del program
        destroy_process_group()
    finally:
        gc.enable()
    assert gone() is None


def test_one_group_of_several(world):
    group = dist.new_group([0])
    program = Program()
    ranks.follow_program(program)
    dist.destroy_process_group(group)
    assert program.closed == 1


def test_a_world_of_one_rank_is_recorded_on_the_cpu(world):
    def step(x):
        dist.all_reduce(x)
        return x * 2

    both = plain(step)
    for _ in range(3):
        both(torch.ones(2))
    assert counts(both) == (1, 1, 2)


@may_run_live
def test_a_call_within_a_coalescing_manager_runs_live(world):
    def step(x):
        dist.all_reduce(x)

    recorded = pg.record(step)
    for _ in range(3):
        x = torch.ones(2)
        with dist.distributed_c10d._coalescing_manager():
            recorded(x)
    assert "collected" in reasons(recorded)


@may_run_live
def test_a_group_is_not_made_in_a_capture(world):
    def step(x):
        return x * dist.new_group([0]).size()

    both = plain(step)
    for _ in range(3):
        both(torch.ones(2))
    assert "makes or ends a process group (new_group)" in reasons(both)
