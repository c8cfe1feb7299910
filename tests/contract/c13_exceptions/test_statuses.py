"""C13: operators that look at a status, or at indices, on the host only in order to raise. They are recorded, by the part that
computes; each replay looks at the status as well, and the exception is eager's, at that very call."""

import math

import pytest
import torch
from torch.nn import functional as F

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons

L = torch.linalg


def regular(device, n=0):
    """A matrix that is symmetric and positive definite."""
    return torch.eye(3, device=device) * (3 + n) + 0.1


def singular(device):
    return torch.zeros(3, 3, device=device)


def negative(device):
    return -torch.eye(3, device=device)


def of_nans(device):
    return torch.full((3, 3), math.nan, device=device)


def out_of_range(device):
    return torch.full((3, 3), 99.0, device=device)


STATUSES = {
    "cholesky": (L.cholesky, negative),
    "cholesky_ex": (lambda x: L.cholesky_ex(x, check_errors=True).L, negative),
    "cholesky, upper": (lambda x: L.cholesky(x, upper=True), negative),
    "inv": (L.inv, singular),
    "inv_ex": (lambda x: L.inv_ex(x, check_errors=True).inverse, singular),
    "inverse": (torch.inverse, singular),
    "solve": (lambda x: L.solve(x, x + 1), singular),
    "solve_ex": (lambda x: L.solve_ex(x, x + 1, check_errors=True).result, singular),
    "lu_factor": (lambda x: L.lu_factor(x).LU, singular),
    "lu_factor_ex": (lambda x: L.lu_factor_ex(x, check_errors=True).LU, singular),
    "lu_solve": (lambda x: L.lu_solve(*L.lu_factor(x), x + 1), singular),
    "tensorinv": (lambda x: L.tensorinv(x, ind=1), singular),
    "tensorsolve": (lambda x: L.tensorsolve(x, x[0]), singular),
    "matrix_power": (lambda x: L.matrix_power(x, -2), singular),
    "a batch": (lambda x: L.inv(torch.stack([x, regular(x.device)])), singular),
}
"""What the calls look at in a status of their own, and something for which it is bad."""

HERE = {
    "cholesky_inverse": (torch.cholesky_inverse, singular),
    "ldl_factor": (lambda x: L.ldl_factor(x).LD, singular),
    "svd": (lambda x: L.svd(x).S, of_nans),
    "pinv": (L.pinv, of_nans),
    "eigh": (lambda x: L.eigh(x).eigenvalues, of_nans),
    "eig": (lambda x: L.eig(x).eigenvalues, of_nans),
    "multinomial": (lambda x: torch.multinomial(x[0], 1, replacement=True), negative),
    "bernoulli": (lambda x: torch.bernoulli(x / 99), negative),
    "poisson": (torch.poisson, negative),
    "normal": (lambda x: torch.normal(0.0, x), negative),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x / 99, x / 99), negative),
    "embedding": (lambda x: F.embedding(x.long(), x.new_ones(9, 2)), out_of_range),
    "embedding_bag": (lambda x: F.embedding_bag(x.long(), x.new_ones(9, 2)), out_of_range),
    "index": (lambda x: x.flatten()[x.long()], out_of_range),
    "index, written": (lambda x: x.new_zeros(9).index_put((x[0].long(),), x[0]), out_of_range),
    "index_select": (lambda x: x.flatten().index_select(0, x[0].long()), out_of_range),
    "index_add": (lambda x: x.new_zeros(9).index_add(0, x[0].long(), x[0]), out_of_range),
    "index_copy": (lambda x: x.new_zeros(9).index_copy(0, x[0].long(), x[0]), out_of_range),
    "gather": (lambda x: x.flatten().gather(0, x[0].long()), out_of_range),
    "scatter": (lambda x: x.new_zeros(9).scatter(0, x[0].long(), x[0]), out_of_range),
    "take": (lambda x: x.take(x.long()), out_of_range),
    "put": (lambda x: x.put(x.long(), x), out_of_range),
    "one_hot": (lambda x: F.one_hot(x.long(), 9), out_of_range),
    "cross_entropy": (lambda x: F.cross_entropy(x.new_ones(3, 9), x[0].long()), out_of_range),
    "nll_loss": (lambda x: F.nll_loss(x.new_ones(3, 9, 3), x.long()), out_of_range),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x.new_ones(3, 9), x[0].long()), out_of_range),
    "_assert_async": (lambda x: (torch._assert_async(x.trace() > 0, "no trace"), x + 1)[1], negative),
    "a division": (lambda x: x.long() // x.long()[0, 0], singular),
}
"""Those that look on the CPU only, or by themselves. (A GPU stops its process for such an index.)"""


def came_to(call, x):
    """What a call gives or raises, and which random number comes next."""
    torch.manual_seed(3)
    try:
        found = call(x)
    except Exception as e:
        found = type(e), str(e)
    return found, torch.rand((), device=x.device)


def replays_raise_as_eager_does(f, device, make_bad, replayed):
    g = pg.record(f)
    for n in range(4):
        assert_same(came_to(g, regular(device, n)), came_to(f, regular(device, n)))
    assert counts(g) == (1, 1, 3), reasons(g)
    bad = make_bad(device)
    theirs = came_to(f, bad)
    assert issubclass(theirs[0][0], Exception)
    for _ in range(2):
        assert_same(came_to(g, bad), theirs)
        assert_same(came_to(g, regular(device)), came_to(f, regular(device)))
    assert pg.stats(g).recorded == 1, reasons(g)
    assert pg.stats(g).replayed >= replayed, reasons(g)


@pytest.mark.parametrize("name", STATUSES)
def test_c13_a_status_that_is_looked_at_in_order_to_raise(device, name):
    replays_raise_as_eager_does(STATUSES[name][0], device, STATUSES[name][1], 5)


@pytest.mark.parametrize("name", HERE)
def test_c13_what_the_cpu_looks_at_in_order_to_raise(name):
    replays_raise_as_eager_does(HERE[name][0], torch.device("cpu"), HERE[name][1], 5)


def test_c13_a_step_with_a_status_in_the_middle(device):
    """What comes before it is written, and nothing that comes after: parameters, gradients, an optimizer's state, counts."""

    def made():
        w = torch.nn.Parameter(torch.ones(3, device=device))
        opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        before, after = torch.zeros(2, device=device).unbind()

        def step(x):
            before.add_(1)
            root = L.cholesky(x)
            loss = (root @ w).square().sum() + torch.rand((), device=device)
            opt.zero_grad()
            loss.backward()
            opt.step()
            after.add_(1)
            return loss.detach()

        return step, lambda: (w, w.grad, opt.state[w]["momentum_buffer"], before, after)

    (plain, theirs), (function, ours) = made(), made()
    f = pg.record(function)
    for n, bad in enumerate([0, 0, 0, 0, 1, 0, 1, 1, 0]):
        x = negative(device) if bad else regular(device, n)
        assert_same(came_to(f, x), came_to(plain, x))
        assert_same(ours(), theirs())
    assert pg.stats(f).recorded == 1, reasons(f)
    assert pg.stats(f).replayed == 5, reasons(f)


def test_c13_a_gradient_from_before_a_status_is_kept(device):
    """A replay would have written another where that lies."""
    w = torch.nn.Parameter(torch.ones(3, device=device))

    def step(x):
        y = L.solve(x, w)
        w.grad = None
        y.sum().backward()
        return y.detach()

    f = pg.record(step)
    for n in range(4):
        f(regular(device, n))
    kept = w.grad.clone()
    (kind, _), _ = came_to(f, singular(device))
    assert kind is L.LinAlgError
    assert_same(w.grad, kept)
    f(regular(device, 7))
    assert_same(w.grad, L.inv(regular(device, 7)).T.sum(1), tolerance=1e-5)
    assert pg.stats(f).recorded == 1, reasons(f)


def test_c13_a_status_of_a_recorded_model(device):
    """Its backward runs outside."""

    class Solves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return L.solve(x, self.w)

    def ran(net, x):
        net.zero_grad()
        y = net(x)
        y.square().sum().backward()
        return y.detach(), net.w.grad

    plain, net = Solves().to(device), pg.record(Solves().to(device))
    for n, bad in enumerate([0, 0, 0, 0, 1, 0, 0]):
        x = singular(device) if bad else regular(device, n)
        assert_same(came_to(lambda x: ran(net, x), x), came_to(lambda x: ran(plain, x), x))


@may_run_live
def test_c13_a_status_whose_exception_is_caught_within(device):
    """Where the call itself catches the exception, it is a way to go on."""

    def f(x):
        try:
            return L.cholesky(x)
        except L.LinAlgError:
            return L.cholesky(x + 2 * torch.eye(3, device=device))

    g = pg.record(f)
    for bad in (0, 0, 0, 1, 0, 1, 0):
        x = negative(device) if bad else regular(device)
        assert_same(came_to(g, x), came_to(f, x))


def of_a_tensor(values, device):
    return torch.ones((), device=device).new_tensor(values)


@pytest.mark.parametrize("written", [torch.tensor, torch.as_tensor, of_a_tensor])
def test_c01_tensors_that_are_written_out_are_constants(device, written):
    """What they are made of is guarded by its values, as any Python value is."""
    mean = [0.25, 0.5, 0.75]

    def f(x):
        scaled = (x - written(mean, device=device)) / written([2.0, 4.0, 8.0], device=device)
        return scaled, scaled @ written([[1.0, 2.0]] * 3, device=device)

    g = pg.record(f)
    for n in range(4):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert counts(g) == (1, 1, 3), reasons(g)
    mean[0] = 2.0
    for n in range(3):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert pg.stats(g).replayed > 3, reasons(g)


def test_c01_indices_from_lists_are_constants(device):
    rows, mask = [0, 2], [True, False, True]

    def f(x):
        y = x.clone()
        y[rows] = 5
        y[1, [0, 1]] += 1
        return x[rows], x[rows, [1, 1]], x[mask], x[:, torch.tensor(rows)], x[torch.tensor(mask)], y

    g = pg.record(f)
    for n in range(4):
        assert_same(g(ramp(device, 3, 3, start=n)), f(ramp(device, 3, 3, start=n)))
    assert counts(g) == (1, 1, 3), reasons(g)
    rows[1], mask[1] = 1, True
    for n in range(3):
        assert_same(g(ramp(device, 3, 3, start=n)), f(ramp(device, 3, 3, start=n)))
    assert pg.stats(g).replayed > 3, reasons(g)


def test_c01_arrays_and_host_tensors_are_constants(device):
    """They are copied from the host to where the call works: what they hold is compared before each replay."""
    np = pytest.importorskip("numpy")
    array, host = np.ones(3, dtype=np.float32), torch.full((3,), 2.0)

    def f(x):
        return x * torch.as_tensor(array, device=device) + host.to(device), x + torch.tensor(array, device=device)

    g = pg.record(f)
    for n in range(4):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert counts(g) == (1, 1, 3), reasons(g)
    array[0], host[1] = 7, 9
    for n in range(3):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert pg.stats(g).replayed > 3, reasons(g)
