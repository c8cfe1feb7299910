"""Functions with a backward in them, compiled whole: `torch.compile(update, backend="phonograph")`.

Dynamo leaves off where the backward begins, and compiles each function that is called from there on by itself: what autograd
calls of a recording's must not be among them. What it does must be what it does with the inner backend alone, to the last bit
and to the last frame.
"""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call, stack_module_state, vmap

import phonograph as pg
from phonograph.compile import backend, graphs
from phonograph.testing import assert_same
from tests import forked

pytestmark = pytest.mark.filterwarnings(
    "ignore:TensorFloat32", "ignore:The .grad attribute", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning",
    "ignore:Online softmax", "ignore:.*lr_scheduler",
)  # fmt: skip

CALLS = 11


@pytest.fixture(autouse=True)
def forgotten():
    net = pg.record(nn.Linear(2, 2), warmup=0)
    for _ in range(2):  # for which some functions of torch's get other code, by which Dynamo recognises them
        net(torch.ones(1, 2))
    torch._dynamo.reset()
    yield
    pg.reset(net)
    torch._dynamo.reset()


def network(device, inputs=4, outputs=2, dropout=0.0):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, outputs)).to(device)


def backward_only(device):
    net = network(device)

    def update(x, y):
        net.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss.detach()

    return update, lambda: [p.grad for p in net.parameters()]


def chosen_gradients(device):
    net = network(device)
    parameters = list(net.parameters())

    def update(x, y):
        loss = F.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, grad in zip(parameters, grads, strict=True):
                p.sub_(0.01 * grad)
        return loss.detach(), grads

    return update, lambda: parameters


def stepping(adam, *, dropout=0.0, **options):
    def make(device):
        net = network(device, dropout=dropout)
        optimizer = adam(net.parameters(), 1e-2, **options)

        def update(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            return loss.detach(), norm

        return update, lambda: [*net.parameters(), *[x for s in optimizer.state.values() for x in s.values()]]

    return make


def two_networks(device):
    """TD3: a critic with a target network, and an actor."""
    critic, actor = network(device, 6, 1), network(device, 4, 2)
    target = copy.deepcopy(critic).requires_grad_(False)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-2) for net in (critic, actor)]

    def update(state, action):
        with torch.no_grad():
            wanted = state[:, :1] + 0.99 * target(torch.cat([state, actor(state)], 1))
        loss = F.mse_loss(critic(torch.cat([state, action], 1)), wanted)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        gain = -critic(torch.cat([state, actor(state)], 1)).mean()
        optimizers[1].zero_grad()
        gain.backward()
        optimizers[1].step()
        with torch.no_grad():
            for slow, p in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(p, 0.05)
        return loss.detach(), gain.detach()

    return update, lambda: [p for net in (critic, actor, target) for p in net.parameters()]


def ensemble(device):
    nets = [network(device) for _ in range(2)]
    stacked, buffers = stack_module_state(nets)
    parameters = {name: p.detach().requires_grad_() for name, p in stacked.items()}
    optimizer = torch.optim.SGD(parameters.values(), 0.05, momentum=0.9)

    def update(x, y):
        optimizer.zero_grad()
        found = vmap(lambda p, b, x: functional_call(nets[0], (p, b), (x,)), (0, 0, None))(parameters, buffers, x)
        loss = F.mse_loss(found, y.expand_as(found))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return update, lambda: list(parameters.values())


def breaks_and_hooks(device):
    net = network(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net[0].weight.register_hook(lambda grad: grad * 0.5)

    def update(x, y):
        optimizer.zero_grad()
        found = net(x)
        torch._dynamo.graph_break()
        loss = F.mse_loss(found, y)
        torch.autograd.grad(loss, net[0].weight, retain_graph=True)
        (loss * 2).backward()
        torch._dynamo.graph_break()
        optimizer.step()
        return loss.detach(), found.detach()

    return update, lambda: list(net.parameters())


UPDATES = {
    "backward": backward_only, "autograd.grad": chosen_gradients, "adam": stepping(torch.optim.Adam, dropout=0.3),
    "fused": stepping(torch.optim.AdamW, fused=True), "two networks": two_networks, "ensemble": ensemble,
    "breaks and hooks": breaks_and_hooks,
}  # fmt: skip


def run(make, device, **compiled):
    """What the calls give and leave, and after each what Dynamo has counted."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    update, state = make(device)
    update = torch.compile(update, **compiled)
    found, counted = [], []
    for n in range(CALLS):
        torch.manual_seed(n)
        x, y = torch.randn(5, 4, device=device), torch.randn(5, 2, device=device)
        found.append([update(x, y), [t.detach().clone() for t in state() if isinstance(t, torch.Tensor)]])
        stats = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        counted.append((*stats, counters["frames"]["total"]))
    return found, counted


def assert_as_the_inner_backend(make, device, **options):
    expected, frames = run(make, device, backend="aot_eager", **options)
    found, ours = run(make, device, backend=backend, options={"inner": "aot_eager"}, **options)
    assert_same(found, expected)
    assert [graphs for *graphs, _ in ours] == [graphs for *graphs, _ in frames]
    assert all(mine[-1] <= theirs[-1] for mine, theirs in zip(ours, frames, strict=True)), (
        "Dynamo has compiled something of ours"
    )
    tried_anew = frames[-1] != frames[-4]  # by torch 2.15, in each call
    assert (ours[-1] != ours[-4]) is tried_anew
    assert sum(pg.stats(g).replayed for g in graphs()) >= CALLS - 3 or (tried_anew and not frames[-1][0])


@pytest.mark.parametrize("update", UPDATES)
def test_c06_whole_updates(device, update):
    assert_as_the_inner_backend(UPDATES[update], device)


def test_c06_a_capturable_optimizer(cuda):
    assert_as_the_inner_backend(stepping(torch.optim.Adam, capturable=True), cuda)


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="a release without it")
@pytest.mark.parametrize("update", ["backward", "autograd.grad"])
def test_c06_the_backward_in_the_graph(device, update):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert_as_the_inner_backend(UPDATES[update], device, fullgraph=True)


def with_compiled_autograd(device):
    nets = [network(torch.device(device))]
    nets.append(copy.deepcopy(nets[0]))
    recorded = pg.record(nets[0])
    for n in range(4):
        x = torch.full((3, 4), 0.1 * n, device=device)
        for net in nets:
            net.zero_grad()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            recorded(x).square().sum().backward()
        nets[1](x).square().sum().backward()
        assert_same([p.grad for p in nets[0].parameters()], [p.grad for p in nets[1].parameters()])
    assert pg.stats(recorded).replayed == 3


def test_c06_compiled_autograd(device):
    """Its backward is traced as well; what autograd would call of a recording's, it calls in between. (In a process of its own:
    compiled autograd keeps the nodes of its last backward.)"""
    run_it = f"from {__name__} import with_compiled_autograd as run; run({str(device)!r})"
    done = forked.run(run_it)
    assert done.returncode == 0, done.stderr
