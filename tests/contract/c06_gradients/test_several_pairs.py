"""C14, C15: several pairs at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import Both, assert_recorded, batch, grads, perceptron
from tests.helpers import may_run_live


def test_c15_modules_in_a_row(device):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device) for _ in range(3)]
    chain = [Both(net) for net in nets]
    for n in range(6):
        x, y = batch(device, n)
        for i in range(2):
            h = x
            for both in chain:
                module = list(both)[i]
                module.zero_grad()
                h = module(h)
            F.mse_loss(h[:, :3], y).backward()
        for both in chain:
            both.check()
    for both in chain:
        assert_recorded(both, 5)


def test_c15_one_module_applied_again_and_again(device):
    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device))
    for n in range(6):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(module(module(x)))[:, :3], y).backward()
        both.check()
    assert_recorded(both, 15)


def test_c14_a_recorded_module_in_a_recorded_step(device):
    both = Both(perceptron(device))
    optimizers = both.optimizers()

    def make(module, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    steps = [make(*each) for each in zip(both, optimizers, strict=True)]
    steps[0] = pg.record(steps[0], warmup=1)
    for n in range(6):
        x, y = batch(device, n)
        assert_same(*[step(x, y) for step in steps])
        both.check()
    assert pg.stats(steps[0]).replayed == 5, pg.explain(steps[0])


def test_c14_the_optimizer_recorded_beside(device):
    both = Both(perceptron(device))
    optimizers = both.optimizers(torch.optim.AdamW, fused=True)
    step = pg.record(optimizers[0].step, warmup=1)
    for n in range(12):
        x, y = batch(device, n)
        for module, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(module(x), y).backward()
            step() if module is both.recorded else optimizer.step()
        both.check()
    assert pg.stats(step).replayed >= 6, pg.explain(step)
    assert pg.stats(step).recorded <= 3, pg.explain(step)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@may_run_live
@pytest.mark.parametrize("inside", [True, False])
def test_c11_distributed_data_parallel(device, one_process, inside):
    """It prepares each backward outside of what can be captured; the module that it wraps can be recorded."""
    nets = [perceptron(device) for _ in range(2)]
    if inside:
        pg.record(nets[0], warmup=1)
    both = [nn.parallel.DistributedDataParallel(net) for net in nets]
    if not inside:
        pg.record(both[0], warmup=1)
    for n in range(6):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        assert_same(grads(nets[0]), grads(nets[1]))
    story = pg.explain(nets[0] if inside else both[0])
    assert ("contains DistributedDataParallel" in story) != inside, story
    assert (pg.stats(nets[0] if inside else both[0]).replayed > 3) == inside, story


@may_run_live
@pytest.mark.parametrize("way", ["recorded", "off", "recorded inside"])
def test_c14_a_replica_that_data_parallel_makes_runs_itself(device, monkeypatch, way):
    """It has all attributes of its module, but other parameters: those that were copied to its device."""
    monkeypatch.setenv("PHONOGRAPH", "off" if way == "off" else "on")
    module, other = pg.record(nn.Linear(3, 2, device=device), warmup=1), nn.Linear(3, 2, device=device)
    call = pg.record(lambda replica, x: replica(x), warmup=1) if way == "recorded inside" else (lambda replica, x: replica(x))
    x, shorter = torch.ones(4, 3, device=device), torch.ones(2, 3, device=device)  # another signature, as on another device
    for _ in range(5):
        assert_same(module(x).detach(), F.linear(x, module.weight, module.bias).detach())
        replica = module._replicate_for_data_parallel()
        replica.weight, replica.bias = other.weight.detach(), other.bias.detach()
        assert_same(call(replica, shorter), F.linear(shorter, other.weight, other.bias).detach())
    if way == "recorded":
        assert pg.stats(module).replayed == 4, pg.explain(module)
        assert any("DataParallel" in reason for reason in pg.stats(module).refusals)


@may_run_live
@pytest.mark.filterwarnings("ignore:Caught UserWarning in replica", "ignore:Attempting to run cuBLAS")
def test_c14_data_parallel_over_two_gpus(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one GPU")
    nets = [perceptron(cuda) for _ in range(2)]
    both = [nn.DataParallel(pg.record(nets[0], warmup=1)), nn.DataParallel(nets[1])]
    for n in range(4):
        x, y = batch(cuda, n)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        assert_same(grads(nets[0]), grads(nets[1]))
