"""Tensors that consist of others, as arguments and results; what a replay looks at of them."""

import functools

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import phonograph as pg
from phonograph.testing import assert_same
from phonograph.values.tensor_subclasses import parts
from tests.contract.shared.tensors_of_parts import fixed, two
from tests.helpers import counts, may_run_live, ramp, reasons, side_by_side


def pair(device, n, *shape):
    return two(device, *(shape or (3, 4)), seed=10 * n + 1)


def gives_pairs(x):
    return x * 2 + 1, {"more": [x.a * 3, x.sum()]}


def gives_the_same(x):
    return x, x.a * 2


def assert_recorded(function, *arguments, live=1):
    """With these arguments, one after the other, it gives what it gives in eager, and all but the first calls are replays."""
    both = side_by_side(lambda: function)
    for given in arguments:
        both(given)
    assert counts(both) == (live, live, len(arguments) - live), reasons(both)


@pytest.mark.parametrize("function", [gives_pairs, gives_the_same])
def test_c04_arguments_and_results_of_two_tensors(device, function):
    assert_recorded(function, *(pair(device, n) for n in range(5)))


def test_c03_an_argument_of_two_tensors_is_written(device):
    def function(x):
        x.mul_(2)
        return x.a + 1

    recorded = pg.record(function, warmup=1)
    for n in range(4):
        mine, live = pair(device, n), pair(device, n)
        assert_same(recorded(mine), function(live))
        assert_same(mine, live)
        assert mine._version == live._version == 1
    assert counts(recorded) == (1, 1, 3)


def test_c05_a_result_of_two_tensors_that_is_held_keeps_its_values(device):
    recorded, kept = pg.record(lambda x: x * 2, warmup=1), []
    for n in range(8):
        x = pair(device, n, 200, 200)
        kept.append((recorded(x), x * 2))
    for found, expected in kept:
        assert_same(found, expected)
    assert counts(recorded)[2] >= 4


def test_c07_tensors_that_are_made_otherwise_are_other_signatures(device):
    def function(x):
        return (x * 2).a if isinstance(x, TwoTensor) else x * 2

    recorded = pg.record(function, warmup=1)
    for n in range(8):
        x = pair(device, n) if n % 4 < 2 else fixed(device, 3, 4, seed=n)
        assert_same(recorded(x), function(x))
    assert counts(recorded) == (2, 2, 6)


def test_c01_one_that_is_returned_twice_is_one(device):
    recorded = pg.record(lambda x: [x + 1] * 2, warmup=1)
    for n in range(6):
        found, again = recorded(x := pair(device, n))
        assert found is again
        assert_same(found, x + 1)
    assert counts(recorded) == (1, 1, 5)


@may_run_live
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: ((y := x * 2), y.view(-1)), "consists of parts, and shares memory with another"),
        (
            lambda x: (x * 2).requires_grad_(),
            "two_tensor.TwoTensor that requires a gradient",
        ),
    ],
)
def test_c11_what_a_replay_could_not_make_anew_is_named(device, function, reason):
    recorded = pg.record(function, warmup=1)
    for n in range(4):
        x = pair(device, n)
        expected, found = function(x), recorded(x)
        for a, b in zip(*(one if isinstance(one, (list, tuple)) else [one] for one in (found, expected)), strict=True):
            assert_same(a.detach(), b.detach())
    assert reason in reasons(recorded)


@may_run_live
@pytest.mark.parametrize("outputs", ["keep", "borrow"])
def test_c05_a_result_of_two_tensors_is_not_lent(device, outputs):
    recorded = pg.record(lambda x: x * 2, warmup=1, outputs=outputs)
    kept = []
    for n in range(4):
        x = pair(device, n)
        kept.append((recorded(x), x * 2))
    for found, expected in kept:
        assert_same(found, expected)
    assert ("lends a tensor that consists of parts" in reasons(recorded)) is (outputs == "borrow")


@may_run_live
def test_c07_one_tensor_of_parts_that_is_given_twice_is_one(device):
    recorded = pg.record(lambda x, y: x.a + (1 if x is y else 2), warmup=1)
    for n in range(8):
        x, y = pair(device, n), pair(device, n)
        assert_same(recorded(x, x if n % 2 else y), x.a + (1 if n % 2 else 2))
    assert "takes a tensor that consists of parts twice" in reasons(recorded)


@may_run_live
def test_c09_attributes_of_a_tensor_of_parts_are_seen(device):
    recorded = pg.record(lambda x: x.a * getattr(x, "factor", 1.0), warmup=1)
    for n in range(8):
        x = pair(device, n)
        if n % 4 > 1:
            x.factor = 1.0 * n
        assert_same(recorded(x), x.a * getattr(x, "factor", 1.0))
    assert counts(recorded)[2] == 3


@may_run_live
@pytest.mark.parametrize("does", ["requires_grad_", "factor"])
def test_c03_what_a_call_does_to_a_tensor_of_parts_itself_the_caller_sees(device, does):
    def function(x):
        if does == "factor":
            x.factor = 3.0
        else:
            x.requires_grad_()
        return x.a.detach() * 2

    recorded = pg.record(function, warmup=1)
    for n in range(4):
        x = pair(device, n)
        assert_same(recorded(x), x.a.detach() * 2)
        assert x.requires_grad if does == "requires_grad_" else x.factor == 3.0


def test_c06_a_parameter_of_two_tensors_as_an_argument(device):
    weights = []

    def make():
        weight = nn.Parameter(two(device, 6, 6))
        weights.append(weight)

        def step(x, weight):
            weight.grad = None
            (TwoTensor(x, x) @ weight).square().mean().backward()
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.1)

        return step, weight

    (step, weight), (live, same) = make(), make()
    recorded = pg.record(step, warmup=1)
    for n in range(6):
        x = ramp(device, 4, 6, start=n) / 10
        recorded(x, weight)
        live(x, same)
        assert_same(weight, same)
    assert counts(recorded)[2] >= 3, reasons(recorded)


def test_c07_distributed_tensors_of_other_placements_are_other_signatures(device, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def function(x):
        return x * 2, (x @ x).to_local()

    recorded = pg.record(function, warmup=1)
    for n in range(8):
        x = distribute_tensor(fixed(device, 4, 4, seed=n), mesh, [Shard(0) if n % 4 < 2 else Replicate()])
        found, expected = recorded(x), function(x)
        assert found[0].placements == expected[0].placements
        assert_same(found, expected)
    assert counts(recorded) == (2, 2, 6)


def test_c07_a_mesh_that_is_made_anew_is_another(device, mesh):
    """It equals the one before, whose process group is gone."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    recorded = pg.record(lambda x: x * 2, warmup=1)
    for n in range(3):
        recorded(distribute_tensor(fixed(device, 4, 4, seed=n), mesh, [Shard(0)]))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    again = init_device_mesh(device.type, (1,))
    assert again == mesh
    for n in range(3):
        x = distribute_tensor(fixed(device, 4, 4, seed=n), again, [Shard(0)])
        found = recorded(x)
        assert_same(found.to_local(), x.to_local() * 2)
        assert found.device_mesh is again or found.device_mesh.get_group() is again.get_group()
    assert counts(recorded) == (2, 2, 4)


# ---------------------------------------------------------------------------------------------------
# What a replay looks at


def spread(device, mesh, layers=2):
    """A network of weights that are DTensors, and a step."""
    from torch.distributed.tensor import distribute_module

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(6, 6, device=device) for _ in range(layers)))
    distribute_module(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)

    def step(x):
        from torch.distributed.tensor import DTensor, Replicate

        optimizer.zero_grad()
        loss = net(DTensor.from_local(x, mesh, [Replicate()])).to_local().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [net, optimizer]


def test_c08_many_tensors_of_parts_are_no_more_places(device, mesh):
    places = []
    for layers in (3, 12):
        step, _ = spread(device, mesh, layers)
        recorded = pg.record(step, warmup=1)
        for n in range(5):
            recorded(fixed(device, 4, 6, seed=n))
        (player,) = recorded._shelf
        places.append(len(player.recording.table.constants._read))
    assert places[1] <= places[0]


@may_run_live
@pytest.mark.parametrize("held", ["grad", "to_local"])
def test_c05_a_gradient_of_a_distributed_parameter_that_is_held_keeps_its_values(device, mesh, held):
    step, (net, _) = spread(device, mesh)
    recorded, kept = pg.record(step, warmup=1), []
    for n in range(9):
        recorded(fixed(device, 4, 6, seed=n))
        if n in (4, 6):
            found = net[0].weight.grad
            kept.append((found if held == "grad" else found.to_local(), found.to_local().clone()))
            del found
    assert "a gradient of an earlier call is held" in reasons(recorded)
    for found, was in kept:
        assert_same(found if held == "to_local" else found.to_local(), was)


def test_c08_a_gradient_of_a_distributed_parameter_is_replaced_and_noticed(device, mesh):
    nets = []

    def make():
        step, state = spread(device, mesh)
        nets.append(state[0])

        def accumulating(x):
            with torch.no_grad():
                before = [p.grad.to_local().sum() for p in state[0].parameters() if p.grad is not None]
            return step(x), before

        return accumulating, state

    both = side_by_side(make)
    for n in range(10):
        both(fixed(device, 4, 6, seed=n))
        if n == 6:
            for net in nets:
                net[0].weight.grad = None
        if n == 7:
            for net in nets:
                net[0].weight.grad = net[1].weight.grad.clone()
    assert counts(both)[2] >= 4, reasons(both)


def test_c08_a_part_of_a_gradient_that_somebody_has_is_given_other_memory(device, mesh):
    """Nothing is heard of that: whoever has the part does not come by the gradient."""
    from torch.distributed.tensor import DTensor, Replicate

    def run(record):
        _, (net, optimizer) = spread(device, mesh)

        def step(x):
            net(DTensor.from_local(x, mesh, [Replicate()])).to_local().square().mean().backward()
            optimizer.step()
            return x + 1

        called = record(step)
        for n in range(3):
            called(fixed(device, 4, 6, seed=n))
        had = parts(net[0].weight.grad)
        for n in range(3, 14):
            if n in (7, 11):
                for part in had:
                    part.data = part.detach() * 0.5
            called(fixed(device, 4, 6, seed=n))
        return called, [p.to_local() for p in net.parameters()]

    recorded, found = run(functools.partial(pg.record, keep="always"))
    assert_same(found, run(lambda step: step)[1])
    assert counts(recorded)[2] >= 3, reasons(recorded)


def test_c08_a_distributed_parameter_is_exchanged_and_noticed(device, mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    nets = []

    def make():
        step, state = spread(device, mesh, 12)
        nets.append(state[0])
        return step, state

    both = side_by_side(make)
    for n in range(4):
        both(fixed(device, 4, 6, seed=n))
    for net in nets:
        other = nn.Parameter(distribute_tensor(fixed(device, 6, 6, seed=77), mesh, [Replicate()]))
        torch.utils.swap_tensors(net[3].weight, other)
    for n in range(5):
        both(fixed(device, 4, 6, seed=n))
    assert counts(both)[2] >= 5, reasons(both)


def test_c08_a_part_of_what_a_forward_has_saved_is_replaced_before_the_backward(device, mesh):
    """Autograd has saved the parameter, and would read what it consists of then. A recorded backward reads what was there: it
    says that it cannot."""
    from torch.distributed.tensor import DTensor, Replicate

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            _, (net, _) = spread(device, mesh, 1)
            self.first, self.scale = net[0], nn.Parameter(DTensor.from_local(fixed(device, 6), mesh, [Replicate()]))

        def forward(self, x):
            return (self.first(DTensor.from_local(x, mesh, [Replicate()])) * self.scale).to_local()

    net = pg.record(Scaled(), keep="always")
    for n in range(5):
        net.zero_grad()
        net(fixed(device, 4, 6, seed=n)).square().mean().backward()
    assert pg.stats(net).replayed >= 3, pg.explain(net)
    net.zero_grad()
    result = net(fixed(device, 4, 6)).square().mean()
    net.scale._local_tensor = fixed(device, 6, seed=50)
    with pytest.raises(RuntimeError, match="between the forward of a recorded function and its backward"):
        result.backward()
