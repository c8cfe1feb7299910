"""Steps of training with sharded parameters on two ranks: recorded whole, with the communication in them (under
`fully_shard` on the CPU, with what stands for it). What is kept between steps ends as it has begun, and what has changed there
is noticed."""

import re

import pytest
import torch
import torch.distributed as dist

import phonograph as pg
from phonograph.guards.attribute_epochs import gradients
from tests import sharded
from tests.contract.c23_ranks.two_ranks import BACKENDS, Programs

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
PROGRAMS = Programs("tests.sharded", sharded.CASES, ON_THE_CPU)
found, on_each = PROGRAMS.found, PROGRAMS.on_each


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


@pytest.fixture
def alone(device):
    """A process group of one process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def fixed(device, *shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def sharded_alone(mesh, device, **options):
    """A step of training under `fully_shard`, which has been recorded, and what it trains."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(device)
    for module in (*net, net):
        fully_shard(module, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)

    @pg.record
    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for n in range(4):
        step(fixed(device, 2, 4, seed=n))
    assert pg.stats(step).replayed == 3, pg.explain(step)
    return net, step


def test_c15_live_calls_take_memory_of_other_streams_from_the_pool_too(device, alone, monkeypatch):
    if device.type == "cpu":
        pytest.skip("has no streams")
    monkeypatch.setattr("phonograph.devices.cuda.warm_up._is_only_thread", lambda: True)  # but for those of the tests'
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    net, _step = sharded_alone(alone, device)
    given = [s.cuda_stream for s in vars(net._get_fsdp_state()._comm_ctx).values() if isinstance(s, torch.Stream)]
    outside = [s for s in torch.cuda.memory_snapshot() if s["stream"] in given and tuple(s["segment_pool_id"]) == (0, 0)]
    assert given
    assert outside == [], "a capture takes as much again in the pool"


def parameters_of(net):
    """What `fully_shard` keeps of each parameter."""
    return [p for module in net for p in module._get_fsdp_state()._fsdp_param_group.fsdp_params]


def test_c23_a_replay_asks_no_gathered_parameter_for_its_gradient(device, alone):
    _net, step = sharded_alone(alone, device, reshard_after_forward=False)
    passed = gradients.now()
    for n in range(3):
        step(fixed(device, 2, 4, seed=n))
        assert gradients.now() == passed, "the door was gone through: all behind it is looked at again"


def test_c09_a_gradient_of_a_gathered_parameter_is_noticed(device, alone):
    net, step = sharded_alone(alone, device)
    whole = parameters_of(net)[1]._unsharded_param
    whole.grad = torch.zeros(4, device=device)
    step(fixed(device, 2, 4))
    assert pg.stats(step).replayed == 3, "what is not reduced yet belongs to this step's gradient"
    assert whole.grad is None
