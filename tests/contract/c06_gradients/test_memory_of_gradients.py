"""C6: gradients and the memory in which they lie."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.memory import filled, of_storage
from tests.helpers import may_run_live, side_by_side


def steps(make_net, *, zero=True, **options):
    """A backward beside a live one; the state is (net, optimizer)."""

    def make():
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            if zero:
                net.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        return step, [net, optimizer]

    return side_by_side(make, **options)


def linear(device):
    return lambda: nn.Linear(4, 2, device=device)


@may_run_live
@pytest.mark.parametrize("zero", [True, False], ids=["made anew", "accumulated"])
def test_c06_the_data_of_a_gradient_is_replaced_after_each_step(device, zero):
    both = steps(linear(device), zero=zero)
    for _ in range(8):
        both(torch.randn(3, 4, device=device))
        both.change(lambda state: halve_the_data_of_gradients(state[0]))
        both.change(lambda state: state[1].step())


def halve_the_data_of_gradients(net):
    for p in net.parameters():
        p.grad.data = p.grad.data / 2


@may_run_live
@pytest.mark.parametrize("zero", [True, False], ids=["made anew", "accumulated"])
def test_c06_the_data_of_a_gradient_is_replaced_once(device, zero):
    both = steps(lambda: nn.Linear(64, 64, device=device), zero=zero)
    for n in range(9):
        if n == 5:
            both.change(lambda state: setattr(state[0].weight.grad, "data", torch.zeros(64, 64, device=device)))
        both(torch.randn(2, 64, device=device))


@may_run_live
def test_c06_gradients_set_by_hand_between_the_steps(device):
    def set_weight(value):
        return lambda state: setattr(state[0].weight, "grad", None if value is None else filled(device, value, 8).view(2, 4))

    both = steps(linear(device), zero=False)
    changes = {
        4: set_weight(None),
        6: set_weight(1),
        8: lambda state: setattr(state[0].bias, "grad", torch.zeros(2, device=device)),
        10: lambda state: setattr(state[0].weight, "grad", state[0].weight.grad.clone()),
        12: lambda state: state.append(state[0].weight.grad) or setattr(state[0].weight, "grad", None),
        14: lambda state: setattr(state[0].weight, "grad", state.pop()),
    }
    for n in range(18):
        both.change(changes.get(n, lambda state: None))
        both(torch.randn(3, 4, device=device))
        both.change(lambda state: state[1].step())


KEPT_GRADIENTS = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "a view": lambda grad: grad.view(-1)[1:],
    "its storage": lambda grad: grad.untyped_storage(),
    "a NumPy array": lambda grad: grad.numpy() if grad.device.type == "cpu" else grad,
    "a tensor on a NumPy array": lambda grad: torch.from_numpy(grad.numpy()) if grad.device.type == "cpu" else grad,
}


@may_run_live
@pytest.mark.parametrize("keep", KEPT_GRADIENTS.values(), ids=KEPT_GRADIENTS)
@pytest.mark.parametrize("all_of_them", [True, False])
def test_c06_a_gradient_that_is_kept_keeps_its_value(device, keep, all_of_them):
    w = torch.ones(2, device=device, requires_grad=True)

    def f(x):
        w.grad = None
        (w * x).sum().backward()

    f, kept = pg.record(f, warmup=1), []
    for n in range(7):
        f(filled(device, n, 2))
        kept = [*kept[0 if all_of_them else -1 :], (n, keep(w.grad))]
        for n_then, grad in kept:
            values = of_storage(grad, 2) if isinstance(grad, torch.UntypedStorage) else grad
            assert set(values.tolist()) == {float(n_then)}


@may_run_live
def test_c06_a_gradient_that_is_returned_keeps_its_value(device):
    w = torch.ones(2, device=device, requires_grad=True)

    def f(x):
        w.grad = None
        (w * x).sum().backward()
        return w.grad

    f, last = pg.record(f, warmup=1), None
    for n in range(7):
        before, last = last, f(filled(device, n, 2))
        assert last is w.grad
        assert before is None or before.tolist() == [n - 1.0] * 2


def test_c06_a_gradient_retained_in_the_middle(device):
    def make():
        net = nn.Linear(4, 2, device=device)

        def step(x):
            net.zero_grad()
            h = net(x)
            h.retain_grad()
            h.pow(2).mean().backward()
            return h.grad, h.detach()

        return step, net

    both = side_by_side(make, hold=True)
    for _ in range(6):
        both(torch.randn(3, 4, device=device))


def test_c06_two_functions_add_to_the_same_gradients(device):
    net = nn.Linear(4, 2, device=device)
    twin = copy.deepcopy(net)

    def backward_of(net, loss):
        return lambda x: loss(net(x)).backward()

    losses = [lambda y: y.pow(2).mean(), lambda y: y.abs().mean()]
    recorded = [pg.record(backward_of(net, loss), warmup=1) for loss in losses]
    live = [backward_of(twin, loss) for loss in losses]
    for n in range(14):
        x = torch.randn(3 - n % 2, 4, device=device)
        for f in (recorded[n % 2], recorded[0]):
            f(x)
        for f in (live[n % 2], live[0]):
            f(x)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        if n % 4 == 3:
            net.zero_grad(set_to_none=n > 8)
            twin.zero_grad(set_to_none=n > 8)


def test_c06_parameters_that_are_used_in_some_calls_only(device):
    def make():
        nets = nn.ModuleList([nn.Linear(4, 2, device=device) for _ in range(2)])
        optimizer = torch.optim.SGD(nets.parameters(), lr=0.1, momentum=0.9)

        def step(x, which):
            optimizer.zero_grad()
            loss = nets[which](x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [nets, optimizer]

    both = side_by_side(make)
    for n in range(15):
        both(torch.randn(3, 4, device=device), int(n % 3 == 0))


def test_c06_signatures_share_the_gradients_that_they_make(device):
    both = steps(linear(device))
    for n in range(14):
        both(torch.randn(3 + 2 * n % 3, 4, device=device))
        if n % 5 == 4:
            both.change(lambda state: state[0].zero_grad())


@may_run_live
def test_c06_sparse_gradients(device):
    def make():
        table = nn.Embedding(10, 4, sparse=True, device=device)
        return lambda i: table(i).sum().backward(), table

    both = side_by_side(make)
    for _ in range(4):
        both(torch.tensor([1, 2], device=device))


@may_run_live
def test_c06_autograd_notices_a_gradient_that_a_replay_adds_to(device):
    w, u = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    f = pg.record(lambda x: (w * x).sum().backward(), warmup=1)
    for n in range(5):
        f(filled(device, n, 2))
        product = (w.grad * u).sum()
        f(filled(device, n, 2))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@may_run_live
def test_c06_backward_reaches_an_earlier_result_that_requires_grad_now(device):
    f = pg.record(lambda x: x + 1, warmup=1)
    w = torch.ones(2, device=device, requires_grad=True)
    g = pg.record(lambda y: (w * y).sum().backward(), warmup=1)
    for n in range(5):
        w.grad = None
        y = f(filled(device, n, 2)).requires_grad_()
        g(y)
        assert w.grad.tolist() == [n + 1.0] * 2
        assert y.grad.tolist() == [1.0] * 2


@may_run_live
def test_c06_backward_reaches_what_an_earlier_result_was_multiplied_with(device):
    f = pg.record(lambda x: x + 1, warmup=1)
    w, u = torch.ones(2, device=device, requires_grad=True), torch.tensor(3.0, device=device, requires_grad=True)
    g = pg.record(lambda y: (w * y).sum().backward(), warmup=1)
    for n in range(5):
        w.grad = u.grad = None
        g(f(filled(device, n, 2)).mul_(u))
        assert w.grad.tolist() == [3 * (n + 1.0)] * 2
        assert u.grad.item() == 2 * (n + 1.0)


def test_c06_a_gradient_that_comes_past_python_where_one_was_that_has_gone(device):
    """As an extension puts it there, which is found when its turn comes. The object may be at the old one's place."""
    give, get = torch._C.TensorBase.grad.__set__, torch._C.TensorBase.grad.__get__

    def run(record):
        p, found = nn.Parameter(torch.ones(3, device=device)), []
        p.grad = torch.ones(3, device=device)
        step = record(lambda x: p.grad * x)
        for n in range(20):
            if n in (8, 12, 16):
                new, old, others = torch.full((3,), float(n), device=device), id(get(p)), []
                give(p, None)
                for _ in range(50):
                    made = torch.empty(0, device=device)
                    if id(made) == old:
                        break
                    others.append(made)
                made.data = new
                give(p, made)
                del made, new, others
            found.append(step(torch.full((3,), 1.0 + n, device=device)).clone())
        return found, step

    (live, _), (ours, step) = run(lambda f: f), run(partial(pg.record, keep="always"))
    for was, now in zip(live, ours, strict=True):
        assert_same(was, now)
    assert pg.stats(step).replayed >= 10, pg.explain(step)
