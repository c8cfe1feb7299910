"""C6: what else autograd does where a step has branches: hooks, several backwards, chosen inputs, writes of what was saved."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import Raised, assert_same
from tests.contract.shared.branches import Net, trains
from tests.helpers import may_run_live, reasons, side_by_side


def either(by, m, flag, h):
    return by.cond(flag > 0, lambda h: m.left(h) * h, lambda h: m.right(h) * h.sin(), h)


def mean(m, h):
    return m.head(h).square().mean()


def hooks_outside(by, m, x, flag):
    """They hear what autograd has added up, once."""
    seen = []
    h = m.first(x)
    h.register_hook(lambda g: seen.append(g) or g * 2)
    handle = m.left.weight.register_hook(lambda g: g * 3)
    loss = mean(m, by.cond(flag > 0, lambda h: m.left(h) * h, lambda h: m.left(h.sin()), h) + h)
    loss.backward(retain_graph=True)
    handle.remove()
    return loss * seen[0].sum()


def hooks_of_results(by, m, x, flag):
    y = either(by, m, flag, m.first(x))
    y.register_hook(lambda g: g.clamp(-0.01, 0.01))
    y.retain_grad()
    loss = mean(m, y)
    loss.backward(retain_graph=True)
    return loss * y.grad.sum()


def after_accumulation(by, m, x, flag):
    def clamp(p):
        p.grad.clamp_(-0.01, 0.01)

    handle = m.first.weight.register_post_accumulate_grad_hook(clamp)
    loss = mean(m, either(by, m, flag, m.first(x)))
    loss.backward(retain_graph=True)
    handle.remove()
    return loss


def twice(by, m, x, flag):
    loss = mean(m, either(by, m, flag, m.first(x)))
    loss.backward(retain_graph=True)
    return loss * 0.5


def several_micro_batches(by, m, x, flag):
    for part in x.split(2)[:-1]:
        mean(m, either(by, m, flag, m.first(part))).backward()
    return mean(m, either(by, m, 1 - flag, m.first(x)))


def chosen_inputs(by, m, x, flag):
    h = m.first(x)
    loss = mean(m, by.cond(flag > 0, lambda h: m.left(h) * h, lambda h: m.left(h.sin()), h))
    a, b = torch.autograd.grad(loss, [h, m.left.weight], retain_graph=True)
    loss.backward(inputs=[m.first.weight], retain_graph=True)
    return loss + a.detach().sum() + b.detach().sum()


def clipped(by, m, x, flag):
    loss = mean(m, either(by, m, flag, m.first(x)))
    loss.backward(retain_graph=True)
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    return loss


def backward_within(by, m, x, flag):
    """A loss that is no number adds to no gradient."""
    loss = mean(m, m.first(x)) / flag

    def learn():
        loss.backward()
        return loss.detach() * 1

    seen = by.cond(loss.isfinite(), learn, lambda: torch.zeros_like(loss, requires_grad=False))
    return mean(m, m.left(x)) + seen


def predicate_overwritten(by, m, x, flag):
    taken = flag > 0
    y = by.cond(taken, lambda h: m.left(h) * h, lambda h: m.right(h), m.first(x))
    index = flag * 1
    y = by.switch(index, [lambda y: m.left(y), lambda y: m.right(y) * y], y)
    taken.logical_not_()
    index.fill_(1)
    return mean(m, y)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return h * h * w.sum()

    @staticmethod
    def backward(ctx, g):
        h, w = ctx.saved_tensors
        return 2 * g * h * w.sum(), (g * h * h).sum().expand_as(w)


def own_functions(by, m, x, flag):
    return mean(m, by.cond(flag > 0, lambda h: Squared.apply(h, m.left.weight), lambda h: m.right(h), m.first(x)))


def views_and_trees(by, m, x, flag):
    h = m.first(x)
    parts = {"a": h[:2], "b": [h[2:4]]}
    y = by.cond(flag > 0, lambda p: m.left(p["a"]) + p["b"][0], lambda p: p["a"] * p["b"][0], parts)
    return mean(m, y) + h.mean()


def recomputed_by_itself(by, m, x, flag):
    return mean(m, checkpoint(lambda h: either(by, m, flag, torch.tanh(h)).exp(), m.first(x), use_reentrant=True))


def results_that_depend(by, m, x, flag):
    def of(layer):
        def both(h):
            y = layer(h)
            return y, y.exp() * y

        return both

    a, b = by.cond(flag > 0, of(m.left), of(m.right), m.first(x))
    return (m.head(a) * m.head(b) + m.head(a * b)).square().mean()


def torchs_own(by, m, x, flag):
    h = m.first(x)
    return mean(m, torch.cond(flag > 0, lambda h: m.left(h) * h, lambda h: m.right(h) * h.sin(), (h,)))


PROGRAMS = (hooks_outside, hooks_of_results, after_accumulation, twice, several_micro_batches, chosen_inputs, clipped,
            backward_within, predicate_overwritten, own_functions, views_and_trees, recomputed_by_itself,
            results_that_depend)  # fmt: skip
NAMED = {loss.__name__: loss for loss in PROGRAMS}


@pytest.mark.parametrize("loss", NAMED.values(), ids=NAMED)
def test_c06_autograd_around_a_branch(device, loss):
    trains(device, loss)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@may_run_live
def test_c06_gradients_through_torchs_own_branch(device):
    """Torch makes graphs of it, and logs them where pytest listens: then it runs live."""
    trains(device, torchs_own, replays=0)


class Layers(Net):
    def __init__(self):
        super().__init__()
        self.batch_norm, self.words = nn.BatchNorm1d(6), nn.Embedding(8, 6)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)


def normed(by, m, x, flag):
    return mean(m, by.cond(flag > 0, lambda h: m.batch_norm(m.left(h)), lambda h: m.batch_norm(h) * h, m.first(x)))


def looked_up(by, m, x, flag):
    words = (x[:, 0].abs() * 3).long().clamp(0, 7)
    return mean(m, by.cond(flag > 0, lambda h: m.words(words) + h, lambda h: h * m.words(words.flip(0)), m.first(x)))


def attended(by, m, x, flag):
    return mean(m, by.cond(flag > 0, lambda h: m.encoder(h[None])[0], lambda h: h * 2, m.first(x)))


LAYERS = {loss.__name__: loss for loss in (normed, looked_up, attended)}


@pytest.mark.parametrize("loss", LAYERS.values(), ids=LAYERS)
def test_c06_layers_in_a_branch(device, loss):
    trains(device, loss, partial(torch.optim.AdamW, lr=0.01), make=Layers)


def every_weight(by, m, x, flag):
    def one(h):
        return m.left(m.right(h))

    def other(h):
        return m.right(m.left(h).sin())

    return mean(m, m.norm(by.cond(flag > 0, one, other, m.first(x))))


def test_c06_gradients_that_go_each_time(device):
    """As by default: each body uses the same weights."""
    trains(device, every_weight, to_none=True)


def test_c06_negative_zeros_of_a_branch(device):
    """A gradient of -0.0 stays one where another body uses the tensor more often."""

    def make():
        w = nn.Parameter(torch.ones(3, device=device))

        def step(flag):
            w.grad = None
            y = pg.cond(flag > 0, lambda h: h * -0.0, lambda h: h.sin() + h.cos() + h, w * 1)
            y.mul(1).sum().backward()
            return 1 / w.grad

        return step, w

    both = side_by_side(make)
    for flag in (1, 0, 1, 1, 0, 1):
        assert_same(both(torch.tensor(flag, device=device)).recorded.isneginf().all().item(), flag == 1)
    assert pg.stats(both.recorded).replayed >= 3, reasons(both.recorded)


@may_run_live
@pytest.mark.parametrize("writes", ["left", "right"])
def test_c06_a_saved_result_that_is_written(device, writes):
    """Eager raises where the body that was taken has saved it."""

    def step(w, x, flag):
        def saves(h):
            return h.exp()

        def saves_none(h):
            return h * 2

        bodies = (saves, saves_none) if writes == "left" else (saves_none, saves)
        y = pg.cond(flag > 0, *bodies, w * x)
        y.add_(1)
        y.sum().backward()
        return y.detach()

    recorded = pg.record(step, warmup=1)
    for flag in (0, 1, 1, 0, 1):
        w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
        given = torch.arange(3.0, device=device), torch.tensor(flag, device=device)
        assert_same(outcome(recorded, w, *given), outcome(step, v, *given))


def outcome(function, *args):
    try:
        return function(*args)
    except RuntimeError as error:
        return Raised(error)
