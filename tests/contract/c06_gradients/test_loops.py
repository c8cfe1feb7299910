"""C6, C8: what is replaced between two steps, and what happens to gradients between backward and step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import Raised, assert_same
from tests.contract.shared.training_loops import ALONE, FUSED, SGD, Twins, batch, both_ways, common, taking_a_head, updating
from tests.helpers import may_run_live, reasons


@both_ways
@common
def test_c08_resuming_from_a_checkpoint(device, way, optimizer):
    """Model and optimizer, saved and loaded into the same objects, twice."""
    twins, saved = Twins(device, way, optimizer), {}
    for n in range(14):
        if n == 3:
            twins.each(lambda run: saved.update({run: copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])}))
        if n in (6, 10):
            twins.each(lambda run: (run.model.load_state_dict(saved[run][0]), run.optimizer.load_state_dict(saved[run][1])))
        twins.train(n)
    twins.assert_recorded(5)


@both_ways
@common
def test_c08_a_group_added_later(device, way, optimizer):
    """The body is thawed after some steps: its weights come to the optimizer in a group of their own."""
    twins = Twins(device, way, lambda parameters: optimizer(list(parameters)[1:]))
    twins.train(*range(4))
    twins.each(lambda run: run.optimizer.add_param_group({"params": [run.model.body.weight], "lr": 0.5}))
    twins.train(*range(4, 9))
    twins.each(lambda run: run.optimizer.param_groups[1].update(lr=0.05))
    twins.train(*range(9, 12))
    twins.assert_recorded(5)


@both_ways
@common
def test_c08_another_optimizer_state_for_the_same_weights(device, way, optimizer):
    """The moments are multiplied in place, dropped, and moved to new memory."""
    twins = Twins(device, way, optimizer)
    twins.train(*range(4))
    for change in (halve, lambda run: run.optimizer.state.clear(), move):
        twins.each(change)
        twins.train(*range(3))
    twins.assert_recorded(5)


def halve(run):
    for state in run.optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                value.mul_(0.5)


def move(run):
    for state in run.optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items() if value is not None})


@may_run_live
@both_ways
@common
@pytest.mark.parametrize("to_none", [True, False])
def test_c06_weights_without_a_gradient(device, way, optimizer, to_none):
    """A step takes one of two heads; the optimizer leaves the weights of the other alone, or decays them by zeros. It makes its
    state for them when it meets them: a call that does so may have to run live."""
    twins = Twins(device, way, optimizer, taking_a_head)
    for n, head in enumerate([0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0]):
        twins(*batch(device, n), head, to_none)
    twins.assert_recorded(3, refusals=True)


@both_ways
@common
def test_c06_zero_grad_one_way_and_the_other(device, way, optimizer):
    twins = Twins(device, way, optimizer, taking_a_head)
    for n, to_none in enumerate([True, True, True, False, False, False, True, False, True, False]):
        twins(*batch(device, n), 0, to_none)
    twins.assert_recorded(3)


@common
def test_c06_only_the_optimizer_recorded(device, optimizer):
    """The gradients of a live model stay in their place where they are zeroed."""
    twins = Twins(device, ALONE, optimizer, taking_a_head)
    for n in range(8):
        twins(*batch(device, n), 0, False)
    twins.assert_recorded()


@common
def test_c06_c15_only_the_optimizer_recorded_and_gradients_in_new_places(device, optimizer):
    """Where they are dropped, new ones may lie anywhere; there they are fetched."""
    twins, held = Twins(device, ALONE, optimizer, taking_a_head), []
    for n in range(24):
        held.append(twins.ours.model.body.weight.grad)
        twins(*batch(device, n), 0, True)
    stats = pg.stats(twins.ours.recorded[-1])
    assert stats.recorded <= 5, pg.explain(twins.ours.recorded[-1])
    assert stats.replayed >= 16, pg.explain(twins.ours.recorded[-1])


@may_run_live
def test_c11_gradients_that_share_memory_in_new_places(device):
    """What a graph is to be told of one of them, it would not know of the others."""
    net = nn.Linear(3, 2).to(device)
    step = pg.record(torch.optim.SGD(net.parameters(), lr=0.1).step)
    held = []
    for n in range(24):
        held.append(torch.full((8,), float(n), device=device))
        net.weight.grad, net.bias.grad = held[-1][:6].view(2, 3), held[-1][6:]
        step()
    assert "a .grad attribute changes from call to call" in reasons(step)
    assert "read at" not in pg.explain(step)  # no line would be the one
    assert "zero_grad(set_to_none=False)" in reasons(step)


@both_ways
@common
def test_c06_accumulation_over_several_calls(device, way, optimizer):
    """The optimizer steps after each third batch; the last of an epoch after one."""

    def loop(run, model, beside):
        def learn(x, y):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            return loss.detach()

        update = beside(run.optimizer.step)

        def step(x, y, now):
            loss = learn(x, y)
            if now:
                update()
                run.optimizer.zero_grad()
            return loss

        return step

    twins = Twins(device, way, optimizer, loop)
    for n in range(24):
        twins(*batch(device, n), n % 3 == 2 or n % 8 == 7)
    twins.assert_recorded(4)


CLIPS = {
    "norm": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1),
    "norm, one by one": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, foreach=False),
    "largest": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, norm_type=float("inf")),
    "value": lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 0.01),
    "in two parts": lambda run: in_two_parts(list(run.model.parameters())),
}


def in_two_parts(parameters):
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return norm


@both_ways
@pytest.mark.parametrize("where", ["recorded", "live"])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_c06_clipping(device, way, clip, where):
    """In what is recorded beside the model, or in the loop; the norm of each step keeps its value."""
    if where == "live":

        def loop(run, model, beside):
            update = beside(run.optimizer.step)

            def step(x, y):
                run.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                norm = clip(run)
                update()
                return norm

            return step
    else:

        def loop(run, model, beside):
            update = beside(lambda: (clip(run), run.optimizer.step())[0])

            def step(x, y):
                run.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                return update()

            return step

    twins = Twins(device, way, FUSED, loop)
    kept = [(norm, copy.deepcopy(norm)) for norm in (twins(*batch(device, n)) for n in range(8))]
    for norm, then in kept:
        assert_same(norm, then)
    twins.assert_recorded(5)


@may_run_live
@both_ways
def test_c11_clipping_that_raises_where_the_norm_is_not_finite(device, way):
    """It asks for the norm on the host."""

    def update_of(run):
        def update():
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, error_if_nonfinite=True)
            run.optimizer.step()

        return update

    twins = Twins(device, way, FUSED, updating(update_of))
    twins.train(*range(4))
    x, y = batch(device, 4)
    assert isinstance(twins(x * float("nan"), y), Raised)
    twins.train(5, 6)
    if device.type == "cuda":  # there it is cut: else the error would come when the optimizer has made its step
        assert twins.step_stats.replayed
    else:
        twins.assert_recorded(5)


@both_ways
def test_c06_an_optimizer_for_each_weight_that_steps_in_the_backward(device, way):
    """torch's tutorial on it: a hook steps as soon as the gradient is there, and drops it."""

    def loop(run, model, beside):
        optimizers = {p: torch.optim.AdamW([p], lr=0.01, fused=True) for p in run.model.parameters()}
        run.extra = list(optimizers.values())

        def in_backward(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in run.model.parameters():
            p.register_post_accumulate_grad_hook(in_backward)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return step

    twins = Twins(device, way, SGD, loop)
    twins.train(*range(8))
    twins.assert_recorded(5)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # L-BFGS does
@pytest.mark.parametrize("kind", ["L-BFGS", "Adam"])
def test_c09_c15_a_closure_that_zeroes_gradients_does_not_read_the_optimizers_state(device, kind):
    """Of which L-BFGS puts new tensors and lists into it in each step, and may have others loaded."""

    def losses(record):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        x = torch.linspace(-1, 1, 30, device=device)
        made = {"L-BFGS": lambda w: torch.optim.LBFGS(w, lr=0.5, max_iter=4), "Adam": lambda w: torch.optim.Adam(w, lr=0.01)}
        optimizer, found = made[kind](net.parameters()), []

        @record
        def closure():
            optimizer.zero_grad()
            loss = (net(x.view(10, 3)) - 1).square().mean()
            loss.backward()
            return loss

        for n in range(30):
            found.append(float(optimizer.step(closure)))
            if n % 10 == 5:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return found, closure

    (live, _), (found, closure) = losses(lambda f: f), losses(lambda f: pg.record(f, keep="always"))
    assert found == live
    assert pg.stats(closure).recorded <= 4, pg.explain(closure)  # other groups are loaded as well
    assert pg.stats(closure).replayed >= 25, pg.explain(closure)


@pytest.mark.parametrize("way", ["named", "computed", "in a table", "in a closure", "of one parameter"])
def test_c09_a_closure_that_reads_the_optimizers_state_is_told_of_another(device, way):
    """Also where no code that ran names it."""

    class Scaled(nn.Module):  # of whose attributes those count that are read: so what ran is gone through once more
        def __init__(self):
            super().__init__()
            self.weight, self.unread = nn.Parameter(torch.ones(3, device=device)), 0

        def forward(self, x):
            return self.weight * x

    net = Scaled()
    weight = net.weight
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.state[weight]["scale"] = 2.0
    table, momenta, inner, attribute = {"momenta": optimizer.state}, optimizer.state, optimizer.state[weight], "state"
    ways = {
        "named": lambda: optimizer.state[weight],
        "computed": lambda: getattr(optimizer, attribute)[weight],
        "in a table": lambda: table["momenta"][weight],
        "in a closure": lambda: momenta[weight],
        "of one parameter": lambda: inner,
    }
    of_weight = ways[way]

    def closure(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        return x * of_weight()["momentum_buffer"].sum() * of_weight()["scale"]

    recorded = pg.record(closure, keep="always", audit=0)
    for n in range(24):
        if n % 6 == 5:
            inner["momentum_buffer"] = torch.full_like(weight, n)
        if n % 6 == 2:
            inner["scale"] = float(n)
        x = torch.full((3,), float(n), device=device)
        assert torch.equal(recorded(x), x * inner["momentum_buffer"].sum() * inner["scale"])
    assert pg.stats(recorded).replayed >= 6, pg.explain(recorded)
