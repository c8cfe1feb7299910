"""C8, C9: optimizers, their settings and what they remember."""

import collections
import copy
import functools
import math
import types
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import data, globals_as_before, steps, usual_step  # noqa: F401
from tests.helpers import counts, may_run_live, side_by_side

FACTOR = 2.0


def set_factor(value=3.0):
    globals().update(FACTOR=value)


class _Off(torch.optim.SGD):
    def step(self, closure=None):
        return None


@may_run_live
def test_c08_an_optimizer_becomes_one_of_another_class(device):
    both = steps(device, usual_step)
    for n in range(10):
        both.change(lambda state: setattr(state[1], "__class__", _Off if n in (4, 5, 6) else torch.optim.SGD))
        both(data(device, n))


def multiplies_it_afterwards(net, optimizer, usual):
    def step(x):
        loss = usual(x)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return loss

    return step


def multiplies_it_before(net, optimizer, usual):
    def step(x):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return usual(x)

    return step


def doubles_it_for_the_step(net, optimizer, usual):
    def step(x):
        group = optimizer.param_groups[0]
        group["lr"] *= 2
        loss = usual(x)
        group["lr"] /= 2
        return loss

    return step


def turns_weight_decay_off_for_the_step(net, optimizer, usual):
    def step(x):
        group = optimizer.param_groups[0]
        before, group["weight_decay"] = group["weight_decay"], 0.0
        loss = usual(x)
        group["weight_decay"] = before
        return loss

    return step


@may_run_live
@pytest.mark.parametrize(
    "step_of",
    [multiplies_it_afterwards, multiplies_it_before, doubles_it_for_the_step, turns_weight_decay_off_for_the_step],
)
def test_c09_a_learning_rate_that_the_function_writes_itself(device, step_of):
    both = steps(device, step_of, weight_decay=0.1)
    for n in range(8):
        both(data(device, n))


@may_run_live
def test_c09_a_learning_rate_that_is_an_argument(device):
    def step_of(net, optimizer, usual):
        return lambda x, lr: (optimizer.param_groups[0].update(lr=lr), usual(x))[1]

    both = steps(device, step_of)
    for n, lr in enumerate([0.1, 0.1, 0.1, 0.1, 0.01, 0.02, 0.01, 0.02, 0.1]):
        both(data(device, n), lr)


@may_run_live
def test_c09_a_learning_rate_taken_from_a_setting(device):
    setting = types.SimpleNamespace(lr=0.1)

    def step_of(net, optimizer, usual):
        return lambda x: (optimizer.param_groups[0].update(lr=setting.lr), usual(x))[1]

    both = steps(device, step_of)
    for n in range(8):
        setting.lr = 0.01 if n > 3 else 0.1
        both(data(device, n))


@may_run_live
def test_c09_learning_rates_of_every_type(device):
    numpy = pytest.importorskip("numpy")
    both = steps(device, usual_step)
    for n, lr in enumerate([0.1, 0.1, 0.1, numpy.float64(0.05), torch.tensor(0.02), 1, 0.0, 0.3]):
        both.change(lambda state: state[1].param_groups[0].update(lr=copy.copy(lr)))
        both(data(device, n))
        both(data(device, n))


class OwnOptimizer(torch.optim.SGD):
    factor = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-math.sqrt(group["lr"]) * FACTOR * self.factor)


def test_c09_what_an_optimizer_of_the_users_reads(device, monkeypatch):
    both = steps(device, usual_step, optimizer=OwnOptimizer)
    for n in range(12):
        if n == 3:
            both.change(lambda state: state[1].param_groups[0].update(lr=0.05))
        if n == 6:
            set_factor(0.5)
        if n == 9:
            monkeypatch.setattr(OwnOptimizer, "factor", 0.25)
        both(data(device, n))
    assert counts(both)[2] >= 6


REPLACED_PARTS = {
    "groups": lambda optimizer: setattr(optimizer, "param_groups", [dict(g) for g in optimizer.param_groups]),
    "list of parameters": lambda optimizer: optimizer.param_groups[0].update(params=[*optimizer.param_groups[0]["params"]]),
    "everything, by loading": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "state of one parameter": lambda optimizer: next(reversed(optimizer.state.values())).update(
        momentum_buffer=torch.ones_like(next(reversed(optimizer.state.values()))["momentum_buffer"])
    ),
    "state, dropped": lambda optimizer: optimizer.state.clear(),
}


@may_run_live
@pytest.mark.parametrize("replace", REPLACED_PARTS.values(), ids=REPLACED_PARTS)
def test_c08_parts_of_an_optimizer_replaced_by_equal_ones_that_change_later(device, replace):
    both = steps(device, usual_step, momentum=0.9)
    for n in range(12):
        if n == 4:
            both.change(lambda state: replace(state[1]))
        if n == 7:
            both.change(lambda state: state[1].param_groups[0].update(lr=1.0))
        both(data(device, n))


@pytest.mark.parametrize("when", [4, 5, 6])
def test_c08_the_momentum_of_one_of_many_parameters_is_replaced(device, when):
    """At once, and not when a turn comes to it."""

    def make():
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(1, 1) for _ in range(70)]).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step():
            optimizer.zero_grad()
            (net(torch.ones(1, 1, device=device)).sum() + sum(p.sum() for p in net.parameters())).backward()
            optimizer.step()

        return step, [net, optimizer]

    both = side_by_side(make)
    for n in range(8):
        if n == when:
            both.change(lambda s: s[1].state[s[0][69].weight].update(momentum_buffer=torch.zeros(1, 1, device=device)))
        both()


@may_run_live
@pytest.mark.parametrize("count", [2, 80])
@pytest.mark.parametrize("kind", ["transposed", "strided", "negated", "conjugated", "sparse", "another key"])
def test_c08_what_a_recorded_optimizer_finds_is_something_else(device, kind, count):
    dtype = torch.complex64 if kind == "conjugated" else torch.float32
    changes = {
        "transposed": lambda p: p.grad.t_(),
        "strided": lambda p: p.grad.as_strided_((3, 3), (1, 3)),
        "negated": lambda p: setattr(p, "grad", torch._neg_view(p.grad)),
        "conjugated": lambda p: setattr(p, "grad", p.grad.conj()),
        "sparse": lambda p: setattr(p, "grad", p.grad.to_sparse()),
    }

    def weights(recorded):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 3, device=device, dtype=dtype)) for _ in range(count)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.0 if kind == "sparse" else 0.9, foreach=False)
        step = pg.record(optimizer.step) if recorded else optimizer.step
        for p in parameters:
            p.grad = torch.randn(3, 3, device=device, dtype=dtype)
        for n in range(9):
            if n == 5 and kind in changes:
                changes[kind](parameters[1])
            elif n == 5:
                state = optimizer.state[parameters[1]]
                state["old"] = state.pop("momentum_buffer")
            step()
        return parameters

    assert_same(weights(recorded=True), weights(recorded=False))


@may_run_live
@pytest.mark.parametrize("count", [2, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_c08_one_parameter_is_lazily_negated_or_conjugated(device, count, dtype):
    def results(recorded):
        torch.manual_seed(0)
        parameters = nn.ParameterList([nn.Parameter(torch.randn(4, device=device, dtype=dtype)) for _ in range(count)])
        f = pg.record(lambda x: sum(parameters, x), warmup=1) if recorded else lambda x: sum(parameters, x)
        found = []
        with torch.no_grad():
            for n in range(9):
                if n == 5:
                    one = parameters[1].data
                    parameters[1].data = one.conj() if dtype.is_complex else torch._neg_view(one)
                found.append(f(torch.full((4,), 1.0 * n, device=device)).resolve_conj().resolve_neg())
        return found

    assert_same(results(recorded=True), results(recorded=False))


@may_run_live
def test_c08_one_of_many_parameters_is_given_to_other_processes(device):
    torch.manual_seed(0)
    parameters = nn.ParameterList([nn.Parameter(torch.randn(2, device=device)) for _ in range(200)])
    f = pg.record(lambda x: sum(parameters, x), warmup=1)
    with torch.no_grad():
        for n in range(9):
            if n == 5:
                parameters[150].share_memory_()
                parameters[150].add_(1)
            x = torch.full((2,), 1.0 * n, device=device)
            assert_same(f(x), sum(parameters, x))


def tripled(p):
    p.grad.mul_(3)


@pytest.mark.parametrize("count", [1, 80])
@pytest.mark.parametrize("way", ["cleared", "None", "after accumulation"])
def test_c08_hooks_of_a_parameter_are_taken_by_hand(device, count, way):
    def gradients(recorded):
        weights = [nn.Parameter(torch.ones(2, device=device)) for _ in range(count)]
        if way == "after accumulation":
            weights[0].register_post_accumulate_grad_hook(tripled)
        else:
            weights[0].register_hook(lambda grad: grad * 3)

        def step(x):
            for w in weights:
                w.grad = None
            sum((w * x).sum() for w in weights).backward()
            return weights[0].grad.clone()

        found, called = [], pg.record(step) if recorded else step
        for n in range(8):
            if n == 5 and way == "cleared":
                weights[0]._backward_hooks.clear()
            elif n == 5 and way == "None":
                weights[0]._backward_hooks = None
            elif n == 5:
                weights[0]._post_accumulate_grad_hooks.clear()
            found.append(called(torch.full((2,), 1.0 + n, device=device)))
        return found

    assert_same(gradients(recorded=True), gradients(recorded=False))


@may_run_live
def test_c08_a_gradient_that_a_function_of_torch_looks_for(device):
    """Nothing in the user's own code names one."""
    afterwards = functools.partial(nn.utils.clip_grad_norm_, max_norm=1.0)

    def norms(recorded):
        weights = [nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
        called = pg.record(lambda scale: afterwards(weights) * scale) if recorded else lambda scale: afterwards(weights) * scale
        found = []
        for n in range(9):
            if n >= 4:
                weights[0].grad = torch.full((2,), 1.0 * n, device=device)
            found += [called(torch.ones((), device=device) * n).clone(), None if n < 4 else weights[0].grad.clone()]
        return found

    assert_same(norms(recorded=True), norms(recorded=False))


def test_c08_a_parameter_that_a_step_writes_is_swapped(device):
    """torch refuses that where somebody refers to it weakly."""
    both = steps(device, usual_step)
    for n in range(8):
        if n == 4:
            both.change(
                lambda state: [torch.utils.swap_tensors(p, nn.Parameter(torch.ones_like(p))) for p in state[0].parameters()]
            )
        both(data(device, n))
    assert pg.stats(both.recorded).replayed >= 4, pg.explain(both.recorded)


def at_old_place(make, old):
    """What this makes, where something lay that has gone by now, if it comes to lie there."""
    others = []
    for _ in range(100):
        made = make()
        if id(made) == old:
            break
        others.append(made)
    return made


def test_c08_another_state_of_an_optimizer_lies_where_the_old_one_did(device):
    """It came there by no method, and the number of an object that has gone may be that of another."""

    def run(record):
        p, found = nn.Parameter(torch.ones(2, device=device)), []
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

        @record
        def step(x):
            p.grad = x * 1.0
            optimizer.step()

        for n in range(34):
            if n in (8, 13, 19, 26):  # at each turn of what is looked at besides
                own, remembered = vars(optimizer), {"momentum_buffer": torch.full((2,), float(n), device=device)}
                old = id(own.pop("state"))
                own["state"] = at_old_place(lambda: collections.defaultdict(dict), old)
                own["state"][p] = remembered
                del own, remembered
            step(torch.ones(2, device=device))
            found.append(p.detach().clone())
        return found, step

    (live, _), (ours, step) = run(lambda f: f), run(pg.record)
    for was, now in zip(live, ours, strict=True):
        assert_same(was, now)
    assert pg.stats(step).replayed >= 16, pg.explain(step)


def test_c08_memory_of_an_optimizers_state_that_a_replay_may_still_write_is_nobodys(device):
    """Of many tensors a few are looked at in each replay: it may be that one which has got other memory is seen late."""
    weights = [nn.Parameter(torch.ones(2, device=device)) for _ in range(100)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)

    @pg.record
    def step(x):
        for w in weights:
            w.grad = x * 1.0
        optimizer.step()

    for _ in range(6):
        step(torch.ones(2, device=device))
    assert pg.stats(step).replayed >= 2, pg.explain(step)
    kept = optimizer.state[weights[50]]["momentum_buffer"]
    step(torch.ones(2, device=device))
    before = weakref.ref(kept.untyped_storage())
    kept.data = torch.zeros(2, device=device)
    assert before() is not None
    pg.reset(step)


def test_c08_a_hook_of_all_optimizers(device):
    both = steps(device, usual_step)
    for n in range(8):
        if n == 4:
            handle = register_optimizer_step_post_hook(lambda chosen, a, k: zeroed(chosen))
        if n == 6:
            handle.remove()
        both(data(device, n))


@torch.no_grad()
def zeroed(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.zero_()
