"""C5: whatever a caller does with a borrowed output, it reads the right value or raises `StaleOutput`."""

import contextlib
import copy
from collections import namedtuple

import pytest
import torch

import phonograph as pg
from phonograph.devices import device_for
from phonograph.testing import assert_same
from tests.contract.shared.memory import filled, of_storage
from tests.helpers import may_run_live


def borrowing(device, function=lambda x: x * 2):
    f = pg.record(function, warmup=1, outputs="borrow")
    for n in range(3):
        f(filled(device, n))
    return f


def right_or_stale(read, right):
    """Assert that reading gives what it gave before, or raises."""
    with contextlib.suppress(pg.StaleOutput):
        assert_same(read(), right)


Two = namedtuple("Two", "a b")


KEEPS = {
    "copy.copy": (copy.copy, lambda held: held + 0),
    "named tuple": (lambda y: Two(y, y), lambda held: torch.stack(held)[0]),
    "NumPy array": (lambda y: y.numpy(), lambda held: torch.tensor(held)),
    "storage": (lambda y: y.untyped_storage(), lambda held: of_storage(held, 4)),
    "list": (lambda y: [y], torch.cat),
    "dictionary": (lambda y: {"y": y}, lambda held: held["y"] + 0),
    "slice": (lambda y: y[:4], lambda held: held * 1),
    "detached alias": (lambda y: y.detach(), lambda held: held.clone()),
}


@pytest.mark.parametrize(("keep", "read"), KEEPS.values(), ids=KEEPS)
def test_c05_a_borrowed_output_kept_in_another_form(keep, read):
    device = torch.device("cpu")
    f = borrowing(device)
    held = keep(f(filled(device, 1)))
    f(filled(device, 5))
    right_or_stale(lambda: read(held).as_subclass(torch.Tensor), filled(device, 2))


@pytest.mark.parametrize("there", ["itself", "view", "detach", "data", "slice"])
def test_c05_a_borrowed_output_saved_by_autograd(device, there):
    on = {"itself": lambda b: b, "view": lambda b: b.view(2, 2), "detach": lambda b: b.detach(), "data": lambda b: b.data,
          "slice": lambda b: b[1:]}[there]  # fmt: skip
    f = borrowing(device)
    w = torch.ones((), device=device, requires_grad=True)
    loss = (w * on(f(filled(device, 1)))).sum()  # which alone has the tensor now
    f(filled(device, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_c05_a_borrowed_output_unpacked(device):
    f = borrowing(device)
    a, b, c, d = f(filled(device, 1))
    f(filled(device, 5))
    for part in (a, b, c, d):
        right_or_stale(lambda: part.clone(), torch.tensor(2.0, device=device))


def test_c05_a_borrowed_output_is_the_first_argument_of_another_function(device):
    f, g = borrowing(device), pg.record(lambda y: y + 1, warmup=1)
    for n in range(5):
        assert_same(g(f(filled(device, n))), filled(device, 2 * n + 1))


def test_c05_a_borrowed_output_that_is_the_argument_itself(device):
    f = pg.record(lambda x: (x, x + 1), warmup=1, outputs="borrow")
    y = filled(device, 0)
    for n in range(6):
        given, y = f(y)
        right_or_stale(lambda: given.clone(), filled(device, n))


def test_c05_a_borrowed_output_while_another_function_is_filled(device):
    size = 40_000
    f, g = pg.record(lambda x: x * 2, warmup=1), pg.record(lambda y: (y * 3).sum(), warmup=1)
    h = pg.record(lambda z: z + 5, warmup=1, outputs="borrow")
    large = pg.record(lambda x: (x @ x).sum(), warmup=1)
    for _ in range(3):
        large(torch.ones(300, 300, device=device))
    for _ in range(3):
        g(f(filled(device, 1, size)))
    for _ in range(3):
        h(filled(device, 1, size))
    borrowed = h(filled(device, 1, size))
    g(filled(device, 100, size))
    right_or_stale(lambda: borrowed.clone(), filled(device, 6, size))


def test_c05_a_borrowed_argument_lies_where_another_one_goes(device, monkeypatch):
    monkeypatch.setattr(device_for(device), "roomy", 0, raising=False)  # the memory of recordings is shared
    f, g = pg.record(lambda x: x * 2, outputs="borrow"), pg.record(lambda z, w, y: y - w)
    for n in range(6):
        given = [filled(device, v, 1 << 16) for v in (100, 0, n)]
        assert_same(g(*given[:2], f(given[2])), given[2] * 2)


def test_c05_a_borrowed_argument_lies_where_another_ones_place_is(device, monkeypatch):
    """A place in the memory of a third function, whose results are passed on without a copy."""
    monkeypatch.setattr(device_for(device), "roomy", 0, raising=False)
    f, g = pg.record(lambda x: x * 2), pg.record(lambda a, b: a - b)
    lending = pg.record(lambda x: x * 3, outputs="borrow")
    large = [filled(device, n, 1 << 16) for n in range(5)]
    for x in large:
        g(f(x), large[1])
    for x in large:
        lending(x)
    for x in large:
        assert_same(g(large[4], lending(x)), large[4] - x * 3)


@pytest.mark.parametrize("gradients", [torch.no_grad, torch.enable_grad])
def test_c07_a_borrowed_argument_that_requires_a_gradient(device, gradients):
    f, g = borrowing(device), pg.record(lambda y: (y * 2, y.requires_grad))
    for n in range(5):
        y = f(filled(device, n)).requires_grad_()
        with gradients():
            found, required = g(y)
        assert required
        assert_same(found.detach().clone(), filled(device, 4 * n))


def test_c05_a_borrowed_argument_is_written_that_lies_where_results_go(device, monkeypatch):
    monkeypatch.setattr(device_for(device), "roomy", 0, raising=False)

    def several(y):
        a = y * 3
        b = a + 1
        c = b + 1
        y.add_(1)
        return a, b, c

    f, g = pg.record(lambda x: x * 2, outputs="borrow"), pg.record(several, outputs="borrow")
    for n in range(6):
        x = filled(device, n, 1 << 16)
        y = f(x)
        assert_same([t.clone() for t in g(y)], [x * 6, x * 6 + 1, x * 6 + 2])
        right_or_stale(lambda: y + 0, x * 2 + 1)


def test_c05_a_borrowed_output_is_written_by_the_function_that_gave_it(device):
    def function(a):
        a.mul_(0.5)
        return a + 1

    f, y, expected = pg.record(function, outputs="borrow"), filled(device, 1), filled(device, 1)
    for _ in range(6):
        y, expected = f(y), function(expected)
        assert_same(y.clone(), expected)


def test_c05_a_borrowed_output_whose_backward_has_run(device):
    w = torch.ones(4, device=device, requires_grad=True)

    def step(x):
        w.grad = None
        y = (w * x).tanh()
        y.sum().backward()
        return y[1:], y

    f = pg.record(step, outputs="borrow")
    kept = []
    for n in range(5):
        x = filled(device, 1 + n / 4)
        found, expected = f(x), step(x)
        assert_same([t.detach().clone() for t in found], [t.detach() for t in expected])
        with pytest.raises(RuntimeError, match="second time"):
            found[0].sum().backward()
        kept.append((found[0], expected[0].detach()))
    for held, right in kept:
        right_or_stale(lambda held=held: held.detach().clone(), right)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, z: (a + b, z)[1],
        lambda a, b, z: (z.add_(a), a * b)[1],
        lambda a, b, z: (a.add_(z), b[1:] * 2)[1],
        lambda a, b, z: (a.view(2, 2), b)[0],
        lambda a, b, z: a.sum().item() + z,
    ],
    ids=["returned", "written", "both written", "view", "live"],
)
@pytest.mark.parametrize("second", [lambda y: y, lambda y: y[:], lambda y: y.clone()], ids=["twice", "overlapping", "apart"])
@may_run_live
def test_c05_borrowed_arguments_together(device, function, second):
    f, g = borrowing(device), pg.record(function)
    for n in range(5):
        x = filled(device, n)
        y, z, right, other = f(x), filled(device, 7), x * 2, filled(device, 7)
        found, expected = g(y, second(y), z), function(right, second(right), other)
        assert_same((found.clone(), z), (expected.clone(), other))
        right_or_stale(lambda y=y: y + 0, right)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("late", [False, True])
def test_c05_a_borrowed_output_in_an_autograd_function(device, late):
    f = borrowing(device)
    for n in range(3):
        y = f(filled(device, n)).requires_grad_()
        assert y.mul(1).requires_grad
        loss = (Squared.apply(y) + y).sum()
        if late:
            f(filled(device, 5))
            with pytest.raises((pg.StaleOutput, RuntimeError)):
                loss.backward()
        else:
            loss.backward()
            assert_same(y.grad, filled(device, 4 * n + 1))


def test_c05_a_borrowed_output_that_a_recorded_function_differentiates(device):
    f, g = borrowing(device), pg.record(lambda y: (y * y * 3).sum())
    for n in range(5):
        y, given = f(filled(device, n)).requires_grad_(), []
        y.register_hook(given.append)
        g(y).backward()
        assert_same(given, [filled(device, 12 * n)])


def test_c05_a_borrowed_output_that_is_saved_and_stale_at_the_backward(device):
    """What a recorded backward reads of it is as it was. (That of a live call raises: autograd has saved what is stale.)"""
    f, g = borrowing(device), pg.record(lambda y, w: (y[1:] * w).sum())
    for n in range(6):
        w = torch.full((3,), 2.0, device=device, requires_grad=True)
        y = f(filled(device, n))
        z = g(y, w)
        expected = y.clone()[1:]
        if n:
            f(filled(device, n + 7))
        z.backward()
        assert_same(w.grad, expected)
    assert pg.stats(g).replayed >= 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_c05_a_borrowed_output_in_compiled_code(device, backend):
    def h(t):
        t.add_(1)
        return t * 2

    f, compiled = borrowing(device), torch.compile(h, backend=backend)
    for n in range(5):
        y = f(filled(device, n))
        assert_same(compiled(y), filled(device, 4 * n + 2))
        assert_same(y.clone(), filled(device, 2 * n + 1))
        f(filled(device, 9))
        with pytest.raises(pg.StaleOutput):
            compiled(y)


@may_run_live
@pytest.mark.parametrize("options", [{}, {"shapes": {"x": {0: [4, 8]}}}], ids=["plain", "padded"])
@pytest.mark.parametrize("stale", [False, True])
def test_c05_a_borrowed_output_in_reach(device, options, stale):
    f, kept = borrowing(device), {"y": None}

    def function(x):
        return x * 3 if kept["y"] is None or stale else x + kept["y"]

    g = pg.record(function, **options)
    for n in range(6):
        if n % 3:
            kept["y"] = f(filled(device, n))
            if stale:
                f(filled(device, 9))
        else:
            kept["y"] = None
        x = filled(device, n)
        assert_same(g(x), x + x * 2)


UNUSUAL = {
    "out=": lambda y: torch.max(torch.full((1, 4), 6.0, device=y.device), 0, out=(y, y.new_empty(4, dtype=torch.long))).values,
    "nested": lambda y: torch.nested.nested_tensor_from_jagged(y[:, None], torch.tensor([0, 1, 4], device=y.device)),
}


@pytest.mark.parametrize("keep", UNUSUAL.values(), ids=UNUSUAL)
def test_c05_a_borrowed_output_in_an_unusual_tensor(device, keep):
    f = borrowing(device)
    held = keep(f(filled(device, 3)))
    f(filled(device, 50))
    right_or_stale(lambda: (held.values() if held.is_nested else held + 0).flatten(),
                   filled(device, 6))  # fmt: skip


@pytest.mark.parametrize("which", ["view written", "base written", "base requires"])
def test_c06_views_of_a_borrowed_output_and_their_base(device, which):
    def run(f):
        found = []
        for n in range(4):
            w = torch.ones(4, device=device, requires_grad=True)
            y = f(filled(device, n + 1, 12).view(3, 4))
            view = y[0]
            if which == "view written":
                view.mul_(w * 3)
                (y.sum() + 0 * w.sum()).backward()
            elif which == "base written":
                y.mul_(w * 3)
                (view.sum() + 0 * w.sum()).backward()
            else:
                y.requires_grad_()
                found.append(view.requires_grad)
            found += [y.requires_grad, None if w.grad is None else w.grad.clone()]
        return found

    assert_same(run(borrowing(device)), run(lambda x: x * 2))


@pytest.mark.parametrize("function", [lambda x: (x + 1, x * 2), lambda x: x.view(2, 2).max(0), lambda x: (y := x + 1, y[1:])])
def test_c10_verify_of_borrowed_outputs(device, function):
    f = pg.record(function, outputs="borrow", verify=1)
    for n in range(6):
        x = filled(device, n)
        assert_same([t.clone() for t in f(x)], [t.clone() for t in function(x)])


def test_c10_verify_of_a_borrowed_output_fed_back(device):
    f, y = pg.record(lambda x: x * 2, outputs="borrow", verify=1), filled(device, 1)
    for _ in range(6):
        y = f(y)
    assert_same(y.clone(), filled(device, 64))


def test_c16_a_copy_of_a_borrowed_output_has_its_gradient(device):
    y = borrowing(device)(filled(device, 1)).requires_grad_()
    y.grad = filled(device, 3)
    copied = copy.deepcopy(y)
    assert type(copied) is torch.Tensor
    assert_same((copied.clone().detach(), copied.grad), (filled(device, 2), filled(device, 3)))


def test_c05_the_storage_of_a_part_of_a_borrowed_output(device):
    f = borrowing(device)
    y = f(torch.arange(4.0, device=device))
    part = y[2:]
    other = torch.empty(0, device=device).set_(part.untyped_storage(), part.storage_offset(), part.size(), part.stride())
    assert_same(other, torch.tensor([4.0, 6.0], device=device))
