"""Compiled code reads gradients and what optimizers remember as if nobody listened: no graph breaks, no recompilation. And what
a compiled step of an optimizer does between two replays is noticed."""

import inspect
import os

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounter

import phonograph as pg
from phonograph.testing import assert_same
from tests import forked

ALONE = "PHONOGRAPH_TESTED_ALONE"
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:.*lr_scheduler")
alone = pytest.mark.skipif(ALONE not in os.environ, reason="runs in a process of its own")


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run:
    def __init__(self, record, kind=torch.optim.Adam):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = kind(self.model.parameters(), lr=0.1)

        def step(x):
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.step = pg.record(step) if record else step

    def state(self):
        return [p.detach().clone() for p in self.model.parameters()], self.optimizer.state_dict()


@pytest.fixture
def run():
    """One that is played, so that all who come to its gradients and states are heard."""
    run = Run(record=True)
    for _ in range(6):
        run.step(torch.ones(2, 3))
    assert pg.stats(run.step).replayed
    return run


def test_compiled_code_that_reads_a_gradient(run):
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def read(x):
        grad = run.model.bias.grad
        return x if grad is None else x + grad

    for _ in range(3):
        assert_same(read(torch.zeros(3)), run.model.bias.grad)
        run.step(torch.ones(2, 3))
    assert counter.frame_count == 1
    run.model.bias.grad = None
    assert_same(read(torch.zeros(3)), torch.zeros(3))


def test_compiled_code_that_sets_a_gradient_is_heard():
    runs = Run(record=True), Run(record=False)
    for one in runs:
        for _ in range(6):
            one.step(torch.ones(2, 3))

    @torch.compile(backend="eager", fullgraph=True)
    def put(p, grad):
        p.grad = grad * 2
        return grad + 1

    for one in runs:
        put(one.model.bias, torch.ones(3))
        for _ in range(3):
            one.step(torch.ones(2, 3))
    assert_same(runs[0].state(), runs[1].state())


def test_compiled_code_that_reads_a_momentum(run):
    @torch.compile(backend="eager")
    def read(x):
        return x + run.optimizer.state[run.model.bias]["exp_avg"]

    for _ in range(3):
        assert_same(read(torch.zeros(3)), run.optimizer.state[run.model.bias]["exp_avg"])
        run.step(torch.ones(2, 3))


def test_compiled_code_that_reads_a_count(run):
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def read(x):
        return x + run.optimizer.state[run.model.bias]["step"]

    for n in range(6, 9):
        assert_same(read(torch.zeros(3)), torch.full((3,), float(n)))
        run.step(torch.ones(2, 3))
    assert counter.frame_count == 1


def test_compiled_code_that_changes_what_is_remembered():
    runs = Run(record=True), Run(record=False)
    for one in runs:
        for _ in range(6):
            one.step(torch.ones(2, 3))

        @torch.compile(backend="eager", fullgraph=True)
        def put(x, one=one):
            state = one.optimizer.state[one.model.bias]
            state["exp_avg"] = x * 2
            return x + one.optimizer.state[one.model.bias]["exp_avg"]

        assert_same(put(torch.ones(3)), torch.full((3,), 3.0))
        for _ in range(3):
            one.step(torch.ones(2, 3))
    assert_same(runs[0].state(), runs[1].state())


def test_steps_of_optimizers_that_are_compiled():
    """Those below, in a process of their own: Dynamo cannot trace some of them after what other tests have compiled."""
    chosen = ("-q", "-p", "no:cacheprovider", "-k", "made_in or between_replays", __file__)
    done = forked.run(forked.Module("pytest"), *chosen, env={ALONE: "1"})
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


@alone
def test_an_optimizer_made_in_compiled_code(run):
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def step(p):
        optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9)
        optimizer.step()
        return optimizer

    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    assert_same(step(p).state[p]["momentum_buffer"], torch.ones(3))
    assert_same(p.detach(), torch.full((3,), 0.5))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("run")
def test_an_attribute_that_is_heard_is_an_attribute_as_ever():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    assert inspect.getattr_static(optimizer, "state") is optimizer.state is vars(optimizer)["state"]
    with pytest.raises(AttributeError, match="type object 'SGD' has no attribute 'state'"):
        torch.optim.SGD.state
    del optimizer.state
    assert not hasattr(optimizer, "state")
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'state'"):
        del optimizer.state


@alone
@pytest.mark.parametrize("first", [False, True], ids=["compiled later", "compiled before"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD])
def test_a_compiled_step_between_replays(kind, first):
    frames = {}
    runs = Run(True, kind), Run(False, kind)
    for one in runs:
        torch._dynamo.reset()
        counter = CompileCounter()
        live = torch.compile(one.optimizer.step, backend=counter)
        if first:
            one.model(torch.ones(2, 3)).sum().backward()
            live()
            live()
        for _ in range(6):
            one.step(torch.ones(2, 3))
        for _ in range(3):
            live()
            for _ in range(3):
                one.step(torch.ones(2, 3))
        frames[one] = counter.frame_count
    assert_same(runs[0].state(), runs[1].state())
    assert len({*frames.values()}) == 1, frames
