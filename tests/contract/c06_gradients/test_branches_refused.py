"""C6, C11: steps with branches whose gradients a recording cannot give as eager does. They run live, and say why; what they are
told helps."""

import pytest
import torch

from tests.contract.shared.branches import FLAGS, trains
from tests.helpers import may_run_live, reasons

pytestmark = may_run_live


def mean(m, h):
    return m.head(h).square().mean()


def unused_in_one(by, m, x, flag):
    """A tensor that is no leaf."""
    a, b = m.first(x), m.norm(x)
    return mean(m, by.cond(flag > 0, lambda a, b: m.left(a), lambda a, b: m.left(b), a, b))


def computed_within(by, m, x, flag):
    return mean(m, by.cond(flag > 0, lambda: m.left(m.first(x)), lambda: m.left(m.norm(x))))


def no_gradient_in_one(by, m, x, flag):
    h = m.first(x)
    return mean(m, h + by.cond(flag > 0, m.left, torch.zeros_like, h))


def times_nothing(by, m, x, flag):
    h = m.first(x)
    return mean(m, h + by.cond(flag > 0, m.left, lambda h: h * 0, h))


def in_a_list(by, m, x, flag):
    given = [m.first(x)]
    return mean(m, by.cond(flag > 0, lambda: m.left(given[0]), lambda: m.right(given[0])))


def as_an_operand(by, m, x, flag):
    given = [m.first(x)]
    return mean(m, by.cond(flag > 0, lambda g: m.left(g[0]), lambda g: m.right(g[0]), given))


def written(by, m, x, flag):
    h = m.first(x) * 1
    return mean(m, by.cond(flag > 0, lambda h: m.left(h.mul_(2)), lambda h: m.right(h), h) + h)


def not_written(by, m, x, flag):
    h = m.first(x) * 1
    y, h = by.cond(flag > 0, lambda h: (m.left(h * 2), h * 2), lambda h: (m.right(h), h), h)
    return mean(m, y + h)


def hooked(by, m, x, flag):
    heard = []

    def body(h):
        y = m.left(h)
        y.register_hook(lambda g: heard.append(1))
        return y * h

    loss = mean(m, by.cond(flag > 0, body, lambda h: m.right(h) * h, m.first(x)))
    loss.backward(retain_graph=True)
    return loss * (1 + len(heard))


def hooked_outside(by, m, x, flag):
    heard = []
    y = by.cond(flag > 0, lambda h: m.left(h), lambda h: m.right(h) * h, m.first(x))
    y.register_hook(lambda g: heard.append(1))
    loss = mean(m, y)
    loss.backward(retain_graph=True)
    return loss * (1 + len(heard))


def twice_differentiated(by, m, x, flag):
    x = x.clone().requires_grad_()
    y = by.cond(flag > 0, lambda x: torch.tanh(m.first(x)), lambda x: torch.sin(m.first(x)), x * 1)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return mean(m, g)


def differentiated_within(by, m, x, flag):
    def of(f):
        def body(x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(f(m.first(x)).sum(), x, create_graph=True)[0]

        return body

    return mean(m, by.cond(flag > 0, of(torch.tanh), of(torch.sin), x))


def learn(loss):
    loss.backward()


def backward_elsewhere(by, m, x, flag):
    def body(loss):
        learn(loss)
        return loss.detach() * 1

    return mean(m, m.left(x)) + by.cond(flag > 0, body, lambda loss: loss.detach() * 2, mean(m, m.first(x)))


def backward_here(by, m, x, flag):
    def body(loss):
        loss.backward()
        return loss.detach() * 1

    return mean(m, m.left(x)) + by.cond(flag > 0, body, lambda loss: loss.detach() * 2, mean(m, m.first(x)))


def cast_twice(by, m, x, flag):
    with torch.autocast(x.device.type, torch.bfloat16):
        h = by.cond(flag > 0, lambda h: m.left(h), lambda h: m.right(h), m.left(m.first(x)))
        return mean(m, h.float())


def cast_each_time(by, m, x, flag):
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        h = by.cond(flag > 0, lambda h: m.left(h), lambda h: m.right(h), m.left(m.first(x)))
        return mean(m, h.float())


def expanded(by, m, x, flag):
    return by.cond(flag > 0, lambda h: h + m.left(h), lambda h: h + 1, m.first(x)).sum() / 50


def times_one(by, m, x, flag):
    return by.cond(flag > 0, lambda h: h * 1 + m.left(h), lambda h: h * 1 + 1, m.first(x)).sum() / 50


def summed(by, m, x, flag):
    return by.cond(flag > 0, torch.sum, torch.mean, m.first(x)) / 50


def summed_times_one(by, m, x, flag):
    return by.cond(flag > 0, lambda h: (h * 1).sum(), torch.mean, m.first(x)) / 50


def recurrent(by, m, x, flag, **start):
    def turn(i, h):
        return i + 1, torch.tanh(m.left(h) + x)

    state = torch.zeros((), device=x.device), torch.zeros(5, 6, device=x.device, **start)
    return mean(m, by.while_loop(lambda i, h: i <= flag, turn, state, max_iterations=3)[1])


def recurrent_from_what_requires_a_gradient(by, m, x, flag):
    return recurrent(by, m, x, flag, requires_grad=True)


def through_hooks(by, m, x, flag):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return mean(m, by.cond(flag > 0, m.left, m.right, m.first(x)))


def without_hooks(by, m, x, flag):
    h = by.cond(flag > 0, m.left, m.right, m.first(x))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return mean(m, h)


def counted(by, m, x, flag):
    """An operand is changed, of which the body has a copy."""
    given = {"h": m.first(x), "n": 0}

    def body(given):
        given["n"] += 1
        return m.left(given["h"])

    return mean(m, by.cond(flag > 0, body, lambda given: m.right(given["h"]), given)) * (1 + given["n"])


def not_counted(by, m, x, flag):
    given = {"h": m.first(x), "n": 0}
    y, n = by.cond(flag > 0, lambda g: (m.left(g["h"]), flag + 1), lambda g: (m.right(g["h"]), flag * 1), given)
    return mean(m, y) * (1 + n)


def started(by, m, x, flag):
    """A leaf has its gradient in eager, beside what is computed with it or not."""

    def start(noise):
        d = noise.requires_grad_()
        return d, m.left(d)

    d, y = by.cond(flag > 0, lambda x: start(x * 0), lambda x: start(x * 0.1), x)
    mean(m, y + m.first(d)).backward(retain_graph=True)
    return mean(m, y) if d.grad is None else mean(m, m.first(x + d.grad.sign()))


def started_outside(by, m, x, flag):
    d = by.cond(flag > 0, lambda x: x * 0, lambda x: x * 0.1, x).requires_grad_()
    mean(m, m.left(d) + m.first(d)).backward()
    return mean(m, m.first(x + d.grad.sign()))


def looked_at(m, loss, *tensors):
    loss.backward(retain_graph=True)
    return loss * (1 + sum(t.grad.norm().detach() for t in tensors if t.retains_grad))


def retained(by, m, x, flag):
    def body(h):
        y = m.left(h)
        y.retain_grad()
        return y

    y = by.cond(flag > 0, body, lambda h: m.right(h) * 1, m.first(x))
    return looked_at(m, mean(m, y), y)


def retained_before(by, m, x, flag):
    def body(h):
        h.retain_grad()
        return m.left(h)

    h = m.first(x)
    return looked_at(m, mean(m, by.cond(flag > 0, body, m.right, h)), h)


def retained_outside(by, m, x, flag):
    h = m.first(x)
    h.retain_grad()
    y = by.cond(flag > 0, m.left, m.right, h)
    y.retain_grad()
    return looked_at(m, mean(m, y), y, h)


REFUSED = [
    ("which keeps its gradient", started, started_outside),
    ("which keeps its gradient", retained, retained_outside),
    ("changes a tensor in place in a branch", retained_before, retained_outside),
    ("changes operands in a branch", counted, not_counted),
    ("gives a tensor a gradient in one body of a branch and none in another", unused_in_one, computed_within),
    ("requires a gradient in one body and none in another", no_gradient_in_one, times_nothing),
    ("requires a gradient in one body and none in another", recurrent, recurrent_from_what_requires_a_gradient),
    ("differentiates in a branch through a tensor from before it", in_a_list, as_an_operand),
    ("changes a tensor in place in a branch", written, not_written),
    ("sets a hook on a tensor in a branch or loop", hooked, hooked_outside),
    ("differentiates the gradient of a branch (create_graph)", twice_differentiated, differentiated_within),
    ("runs a backward in a branch through a tensor from before it", backward_elsewhere, backward_here),
    ("casts a weight in a branch and elsewhere", cast_twice, cast_each_time),
    ("gives a gradient in a branch of other strides", expanded, times_one),
    ("gives a gradient in a branch of other strides", summed, summed_times_one),
    ("saves tensors through hooks in a branch", through_hooks, without_hooks),
]


@pytest.mark.parametrize(("reason", "loss"), [(reason, loss) for reason, loss, _ in REFUSED])
def test_c06_refused_gradients_of_branches(device, reason, loss):
    both = trains(device, loss, replays=0)
    assert reason in reasons(both.recorded)


@pytest.mark.parametrize("loss", [mended for *_, mended in REFUSED], ids=lambda loss: loss.__name__)
def test_c06_what_helps_where_they_are_refused(device, loss):
    trains(device, loss)


def from_a_leaf_within(by, m, x, flag):
    """It is no leaf, and gets no gradient of its own."""
    d = by.cond(flag > 0, lambda: torch.zeros_like(x).requires_grad_() * 2, lambda: torch.ones_like(x).requires_grad_() * 2)
    return mean(m, m.first(x + d)) * (1 if d.is_leaf else 2)


def test_c06_a_result_from_a_leaf_within(device):
    trains(device, from_a_leaf_within)


def skipped(by, m, x, flag):
    return mean(m, by.cond(flag > 0, lambda h: m.left(h) * h, lambda h: h * 2, m.first(x)) + m.right(x) + m.norm(x))


def test_c06_weights_of_one_body_have_to_keep_gradients(device):
    """Eager leaves them without one where they are not used, and the optimizer leaves them alone."""
    both = trains(device, skipped, replays=0, to_none=True)
    assert "gives a parameter its first gradient in one body" in reasons(both.recorded)
    trains(device, skipped)


def test_c06_gradients_that_are_kept_from_some_call_on(device):
    """Each body has been taken by then."""
    both = trains(device, skipped, flags=(0,) * 6 + FLAGS * 3, given=False)
    assert "zero_grad(set_to_none=False)" in reasons(both.recorded)
