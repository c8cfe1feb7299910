"""C6: gradients through branches and loops in recorded steps. The twin has Python's `if` in their place, and no phonograph:
losses, weights, gradients and what the optimizer keeps are the same, bit for bit, whichever body a call takes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.contract.shared.branches import trains
from tests.contract.shared.training_loops import common


def skipped(by, m, x, flag):
    h = m.first(x)
    h = by.cond(flag > 0, lambda h: h + m.left(m.norm(h)), lambda h: h, h)
    h = by.cond(flag < 1, lambda h: h + m.right(F.gelu(h)) * h, lambda h: h * 2, h)
    return m.head(h).square().mean()


def one_of_two(by, m, x, flag):
    h = torch.tanh(m.first(x))
    return m.head(by.cond(flag > 0, lambda: m.left(h), lambda: m.right(h) * h) + h).square().mean()


def used_often(by, m, x, flag):
    """The order in which gradients are added up is seen in their last bits."""
    h = m.first(x)
    before = (h * 0.3).sin()
    y = by.cond(flag > 0, lambda h: h * h.exp() / 3 + h.cos() * h, lambda h: h * 0.7, h)
    return (m.head(y) * m.head(h) + m.head(before + h / 3)).square().mean() + (y * h).mean()


def shared_weights(by, m, x, flag):
    h = m.first(m.first(x))
    h = by.cond(flag > 0, lambda h: m.first(m.first(h)) + m.left(h), lambda h: m.first(h), h)
    return m.head(m.left(m.first(h))).square().mean()


def nested(by, m, x, flag):
    def inner(h):
        return by.cond(h.sum() > 0, lambda h: m.left(h) + h, lambda h: m.right(h), h)

    h = by.cond(flag > 0, lambda h: inner(h) * h, lambda h: h.sin(), torch.tanh(m.first(x)))
    return m.head(h).square().mean()


def with_dropout(by, m, x, flag):
    h = by.cond(flag > 0, lambda h: F.dropout(m.left(h), 0.4), lambda h: F.dropout(h, 0.2), m.first(x))
    return m.head(F.dropout(h, 0.1)).square().mean()


def several_results(by, m, x, flag):
    def one(h):
        return {"y": m.left(h), "n": (h > 0).sum(), "unused": h * 2, "none": None}

    def other(h):
        return {"y": m.right(h), "n": (h < 0).sum(), "unused": h * 3, "none": None}

    found = by.cond(flag > 0, one, other, m.first(x))
    return m.head(found["y"]).square().mean() * found["n"]


def without_gradients(by, m, x, flag):
    with torch.no_grad():
        scale = by.cond(flag > 0, lambda: m.left(x).mean(), lambda: m.right(x).amax())
    h = by.cond(scale > 0, lambda h, c: h * c, lambda h, c: h - c, m.first(x), scale)
    frozen = by.cond(flag > 0, lambda x: x * 2, lambda x: x + 1, x)
    return m.head(h * frozen).square().mean()


def early_exit(by, m, x, flag):
    h = F.relu(m.first(x))
    sure = m.head(h).softmax(-1).amax(-1).mean() > 0.62
    return by.cond(sure, lambda h: m.head(h), lambda h: m.head(F.relu(m.left(h)) + m.right(h)), h).logsumexp(-1).mean()


def written_in_place(by, m, x, flag):
    h = by.cond(flag > 0, lambda h: m.left(h), lambda h: m.right(h).clone(), m.first(x))
    return m.head(F.relu(h.add_(1).mul_(2), inplace=True)).square().mean()


def expanded(by, m, x, flag):
    """The gradient of a sum has one number in memory, and is handed on."""
    h = by.cond(flag > 0, lambda h: h + 2, lambda h: h - 1, m.first(x))
    return h.sum() / 50


def penalty(by, m, x, flag):
    def of(x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(m.head(torch.tanh(m.first(x))).sum(), x, create_graph=True)
        return (g.norm(dim=-1) - 1).square().mean()

    more = by.cond(flag > 0, of, lambda x: m.head.weight.sum() * 0, x)
    return m.head(torch.tanh(m.first(x))).square().mean() + 10 * more


def recomputed(by, m, x, flag):
    def part(h):
        h = torch.tanh(m.left(h))
        return by.cond(flag > 0, lambda h: m.right(h).exp(), lambda h: m.norm(h) * h, h).sin()

    return m.head(checkpoint(part, m.first(x), use_reentrant=False)).square().mean()


def recomputed_inside(by, m, x, flag):
    def part(h):
        return torch.tanh(m.left(h)).exp()

    again = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    h = by.cond(flag > 0, again, lambda h: h * 2, m.first(x))
    return m.head(h).square().mean()


def cast(by, m, x, flag):
    with torch.autocast(x.device.type, torch.bfloat16):
        h = by.cond(flag > 0, lambda h: m.left(m.left(h)), lambda h: m.right(h), m.first(x))
        return m.head(h).float().square().mean()


def experts(by, m, x, flag):
    layers = [m.left, m.right, m.norm, lambda h: h]
    return m.head(by.switch(flag + 1, layers, m.first(x))).square().mean()


def twice_as_deep(by, m, x, flag):
    h = m.first(x)
    for layer in (m.left, m.right):
        gate = (layer.weight.sum() + h.sum()) > flag
        h = by.cond(gate, lambda h, layer=layer: h + layer(m.norm(h)), lambda h: h, h)
    return m.head(h).square().mean()


PROGRAMS = (
    skipped,
    one_of_two,
    used_often,
    shared_weights,
    nested,
    with_dropout,
    several_results,
    without_gradients,
    early_exit,
    written_in_place,
    expanded,
    penalty,
    recomputed,
    recomputed_inside,
    cast,
    experts,
    twice_as_deep,
)
NAMED = {loss.__name__: loss for loss in PROGRAMS}


@pytest.mark.parametrize("loss", NAMED.values(), ids=NAMED)
def test_c06_a_branch_in_a_step(device, loss):
    trains(device, loss)


@common
def test_c06_any_optimizer_after_a_branch(device, optimizer):
    trains(device, skipped, optimizer)


# -- loops


def halving(by, m, x, flag):
    """As often as the values say, and not at all."""
    h, n = by.while_loop(
        lambda h, n: h.square().mean() > 0.02 * flag, lambda h, n: (h - m.left(h) * 0.3 - h / 3, n + 1), (m.first(x), flag * 0),
        max_iterations=4,
    )  # fmt: skip
    return m.head(h).square().mean() * (n + 1)


def newton(by, m, x, flag):
    """Its state begins without a gradient."""

    def turn(r):
        return ((r + (m.first(x).square() + 1) / r) / 2,)

    start = torch.ones_like(x).requires_grad_()
    (r,) = by.while_loop(lambda r: (r - r.mean()).square().mean() < 0.01 * flag, turn, (start,), max_iterations=3)
    return m.head(r).square().mean()


def repeated(by, m, x, flag):
    h = by.repeat(3, lambda h: torch.tanh(m.left(h)) + h, m.first(x))
    n = by.repeat(5, lambda n: n + flag, flag)
    return m.head(h).square().mean() * n


LOOPS = {loss.__name__: loss for loss in (halving, newton, repeated)}


@pytest.mark.parametrize("loss", LOOPS.values(), ids=LOOPS)
def test_c06_a_loop_in_a_step(device, loss):
    trains(device, loss)
