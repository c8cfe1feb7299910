"""C9: numbers that change from call to call are followed through functions of torch's that work out others with them."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import phonograph as pg
from phonograph.guards.composite_functions import WRITTEN_OUT
from phonograph.testing import assert_same
from tests.contract.shared.following import assert_followed
from tests.helpers import may_run_live

CALLS = 24

FUNCTIONS = {
    "gumbel": lambda y, t, n: F.gumbel_softmax(y, tau=n).square().mean(),
    "hard gumbel": lambda y, t, n: (F.gumbel_softmax(y, tau=n, hard=True) * y).mean(),
    "label smoothing": lambda y, t, n: F.cross_entropy(y, t, label_smoothing=n),
    "summed": lambda y, t, n: F.cross_entropy(y, t, reduction="sum", label_smoothing=n),
    "of each": lambda y, t, n: F.cross_entropy(y, t.clamp(0), ignore_index=1, reduction="none", label_smoothing=n).mean(),
    "of pixels": lambda y, t, n: F.cross_entropy(y.view(2, 4, 3), t.view(2, 3), label_smoothing=n),
    "of one": lambda y, t, n: F.cross_entropy(y[0], t[0], label_smoothing=n),
    "huber": lambda y, t, n: F.huber_loss(y, torch.zeros_like(y), delta=n),
    "huber's sum": lambda y, t, n: F.huber_loss(y, torch.ones_like(y), reduction="sum", delta=n),
    "smooth l1": lambda y, t, n: F.smooth_l1_loss(y, torch.zeros_like(y), beta=n),
    "a tensor of it": lambda y, t, n: (y * torch.tensor(n, device=y.device)).mean(),
    "a leak": lambda y, t, n: F.leaky_relu(y, n).mean(),
    "a module's leak": lambda y, t, n: nn.LeakyReLU(n)(y).mean(),
    "an exponential unit": lambda y, t, n: F.elu(y, n).mean(),
    "hard bounds": lambda y, t, n: F.hardtanh(y, -n, n).mean(),
    "a threshold": lambda y, t, n: F.threshold(y, n, n / 2).mean(),
    "a soft plus": lambda y, t, n: F.softplus(y, n + 1).mean(),
    "shrinking": lambda y, t, n: (F.softshrink(y, n) + F.hardshrink(y, n)).mean(),
    "instead of nan": lambda y, t, n: (y / 0 * 0).nan_to_num(n).mean() + y.mean(),
    "a ranking's margin": lambda y, t, n: F.margin_ranking_loss(y[:, 0], y[:, 1], torch.ones_like(y[:, 0]), margin=n),
    "a hinge's margin": lambda y, t, n: F.hinge_embedding_loss(y, -torch.ones_like(y), margin=n),
    "a cosine's margin": lambda y, t, n: F.cosine_embedding_loss(y, y.roll(1, 1), -torch.ones_like(y[:, 0]), margin=n),
    "a triplet's margin": lambda y, t, n: F.triplet_margin_loss(y, y.roll(1, 0), y.roll(2, 0), margin=n),
    "where": lambda y, t, n: torch.where(y > 0, y, n).mean() + y.where(y < 0, n).mean(),
    "an item": lambda y, t, n: (changed(y, 0, n) * y).mean(),
    "items": lambda y, t, n: (changed(y, (..., slice(1, 3)), n) * y + changed(y, y > 0, n) * y).mean(),
    "a list": lambda y, t, n: (y * torch.tensor([n, 1.0, n * 2, 3], device=y.device)).mean(),
    "as a tensor": lambda y, t, n: (y * torch.as_tensor(n, device=y.device)).mean(),
    "to the power": lambda y, t, n: (n ** y.detach() * y).mean(),
    "bernoulli": lambda y, t, n: (torch.empty_like(y).bernoulli_(n) * y).mean(),
    "normal": lambda y, t, n: (torch.empty_like(y).normal_(n, n) * y).mean(),
    "bounds of many": lambda y, t, n: bounded(y, n),
    "a double": lambda y, t, n: (y * torch.tensor(n, dtype=torch.float64, device=y.device)).mean(),
}


def changed(y, index, number):
    y = y.clone()
    y[index] = number
    return y


def averaged(y, number):
    mean, variance = y.new_zeros(4), y.new_ones(4)
    F.batch_norm(y, mean, variance, training=True, momentum=number)
    return mean * variance


def bounded(y, number):
    many = [y.detach() * 1, y.detach() * 2]
    torch._foreach_minimum_(many, number)
    torch._foreach_maximum_(many, -number)
    torch._foreach_clamp_max_(many, number / 2)
    return (torch.stack(many) * y).mean()


CALLED = {
    "multi margin": lambda y, t, n: F.multi_margin_loss(y, t.clamp(0), margin=n),
    "addmm": lambda y, t, n: torch.addmm(y, y, y.new_ones(4, 4), beta=n, alpha=n * 2).mean(),
    "baddbmm": lambda y, t, n: torch.baddbmm(y[None], y[None], y.new_ones(1, 4, 4), beta=n).mean(),
    "a batch norm's momentum": lambda y, t, n: averaged(y, n).mean() + y.mean(),
    "a batch norm's eps": lambda y, t, n: F.batch_norm(y, None, None, training=True, eps=n).square()[0].mean(),
    "a layer norm's eps": lambda y, t, n: F.layer_norm(y, (4,), eps=n).square()[0].mean(),
    "a group norm's eps": lambda y, t, n: F.group_norm(y, 2, eps=n).square()[0].mean(),
    "attention": lambda y, t, n: F.scaled_dot_product_attention(*[y.view(1, 2, 3, 4)] * 3, scale=n).square().mean(),
}  # fmt: skip
NOT_FOLLOWED = {
    "attention of all": lambda y, t, n: F.scaled_dot_product_attention(*[y.view(1, 2, 3, 4)] * 3, scale=n,
                                                         attn_mask=y.new_zeros(3, 3).requires_grad_()).square().mean(),
    "another exponential unit": lambda y, t, n: F.celu(y, n).mean(),
    "uniform": lambda y, t, n: (torch.empty_like(y).uniform_(-n, n) * y).mean(),
    "a logit": lambda y, t, n: torch.logit(y.sigmoid(), n).mean(),
}  # fmt: skip


def losses(device, function, numbers, record):
    """What a step gives that reads `state.number`, and the gradient that it leaves."""
    torch.manual_seed(0)
    net, state = nn.Linear(3, 4).to(device), SimpleNamespace(number=0.1)
    target = torch.tensor([0, 1, 2, 3, 0, -100], device=device)

    def step(x):
        net.zero_grad()
        loss = function(net(x), target, state.number)
        loss.backward()
        return loss.detach()

    step, found = record(step), []
    for i, number in enumerate(numbers):
        state.number = number
        torch.manual_seed(i)
        found += [step(torch.randn(6, 3, device=device)).clone(), net.weight.grad.clone()]
    return found, step


def compared(device, function, numbers):
    """The recorded function, whose every result was that of the live one."""
    found, step = losses(device, function, numbers, pg.record)
    for ours, live in zip(found, losses(device, function, numbers, lambda step: step)[0], strict=True):
        assert_same(ours, live)
    return step


@pytest.mark.parametrize("how", FUNCTIONS)
def test_c09_functions_of_a_number_are_followed(device, how):
    assert_followed(compared(device, FUNCTIONS[how], [0.1 + n / 64 for n in range(CALLS)]), CALLS)


@may_run_live
@pytest.mark.parametrize("how", CALLED)
def test_c09_numbers_of_operators_that_a_replay_calls_are_followed(device, how):
    """Where it has but what they have launched, it cannot be told what that is made of."""
    step = compared(device, CALLED[how], [0.1 + n / 64 for n in range(CALLS)])
    if device.type == "cpu":
        assert_followed(step, CALLS)


@may_run_live
@pytest.mark.parametrize("how", NOT_FOLLOWED)
def test_c09_a_number_of_which_another_is_made_unseen_is_never_stale(device, how):
    compared(device, NOT_FOLLOWED[how], [0.1 + n / 64 for n in range(CALLS)])


@pytest.mark.parametrize("name", ["sqrt", "pow", "log"])
def test_c09_a_function_of_math_of_a_count_is_followed(device, name):
    function = {"sqrt": lambda n: math.sqrt(n), "pow": lambda n: math.pow(n, -0.75), "log": lambda n: math.log(n + 0.5)}[name]
    held, steps = torch.zeros(3, device=device), SimpleNamespace(n=0)

    @pg.record
    def step(x):
        steps.n += 1
        torch._foreach_lerp_([held], [x], weight=function(steps.n) / 8)
        return held * function(steps.n)

    expected = torch.zeros(3, device=device)
    for n in range(CALLS):
        x = torch.linspace(n, 1, 3, device=device)
        result = step(x)
        torch._foreach_lerp_([expected], [x], weight=function(n + 1) / 8)
        assert_same(result, expected * function(n + 1))
    assert_followed(step, CALLS)


@pytest.mark.parametrize("how", ["foreach", "one by one"])
def test_c09_a_count_bounds_what_a_step_does(device, how):
    """A bound that grows with a count of an optimizer of the user's, in its group; and the count by itself."""

    class Clipped(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"step": 0})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                group["step"] += 1
                grads = [p.grad for p in group["params"]]
                if how == "foreach":
                    torch._foreach_minimum_(grads, group["step"] ** 0.25 / 8)
                    torch._foreach_maximum_(grads, group["step"])
                else:
                    for g in grads:
                        g.clamp_(-group["step"], group["step"] ** 0.25 / 8)
                torch._foreach_add_(group["params"], grads, alpha=-0.01)

    def trained(record):
        torch.manual_seed(0)
        net = nn.Linear(4, 2).to(device)
        optimizer = Clipped(net.parameters())

        def step(x):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()

        step = record(step)
        for _ in range(CALLS):
            step(torch.randn(3, 4, device=device))
        return step, [*net.parameters(), optimizer.param_groups[0]["step"]]

    step, ours = trained(pg.record)
    assert_same(ours, trained(lambda step: step)[1])
    assert_followed(step, CALLS)


def test_c09_label_smoothing_of_a_module_is_followed(device):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)

    def smoothed(y, target, number):
        criterion.label_smoothing = number
        return criterion(y, target)

    assert_followed(compared(device, smoothed, [0.2 - n / 256 for n in range(CALLS)]), CALLS)


@pytest.mark.parametrize("how", ["label smoothing", "smooth l1"])
def test_c09_a_number_comes_to_nought(device, how):
    """Then another operator is called."""
    step = compared(device, FUNCTIONS[how], [max(0.0, 0.2 - n / 64) for n in range(CALLS)])
    assert pg.stats(step).recorded <= 4, pg.explain(step)


def test_c09_a_number_out_of_range_raises(device):
    numbers = [0.1, 0.2, 0.3, 0.4, 0.5]
    with pytest.raises(RuntimeError, match="delta"):
        losses(device, FUNCTIONS["huber"], [*numbers, -0.5], pg.record)
    with pytest.raises(RuntimeError, match="label_smoothing"):
        losses(device, FUNCTIONS["label smoothing"], [*numbers, 1.5], pg.record)


class Names(TorchDispatchMode):
    """Notes what is called, but for `mul.Scalar`, which is `mul.Tensor` where Python multiplies."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        self.names.append((str(func).replace("mul.Scalar", "mul.Tensor"), shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3), (4,)], ids=str)
def test_c09_what_is_written_out_calls_the_same_operators(device, shape, reduction):
    logits = torch.randn(shape, device=device, requires_grad=True)
    target = torch.zeros((*shape[:-2], shape[-1]) if len(shape) > 2 else shape[:-1], dtype=torch.long, device=device)
    found = []
    for function in (F.cross_entropy, WRITTEN_OUT[F.cross_entropy]):
        with Names() as mode:
            function(logits, target, reduction=reduction, label_smoothing=0.3).sum().backward()
        found.append(mode.names)
        logits.grad = None
    assert found[0] == found[1]
