"""C6: writes between forward and backward."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.autograd.function import MANY
from phonograph.engine import recorder
from phonograph.testing import assert_same
from tests.contract.shared.pairs import Both, Tanh, assert_recorded, batch, grads, perceptron
from tests.helpers import may_run_live


def test_c06_a_result_is_written_before_its_backward(device):
    torch.manual_seed(0)
    both = Both(Tanh().to(device))
    for n in range(5):
        x, _ = batch(device, n)
        for module in both:
            out = module(x)
            out.detach().mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_c06_a_result_that_is_not_saved_is_written(device):
    torch.manual_seed(0)
    both = Both(nn.Linear(4, 3).to(device))
    for n in range(5):
        x, y = batch(device, n)
        results = []
        for module in both:
            module.zero_grad()
            out = module(x)
            out.mul_(2)
            F.mse_loss(out, y).backward()
            results.append(out)
        assert_same(*results)
        both.check()
    assert_recorded(both, 4)


def test_c06_a_parameter_is_written_between_forward_and_backward(device):
    both = Both(perceptron(device))
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            loss = F.mse_loss(module(x), y)
            with torch.no_grad():
                module[2].weight.mul_(1.5)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:], lambda x: x.t()[2:].t()], ids=["all", "rows", "columns"])
def test_c06_the_callers_input_is_written_after_the_forward(device, part):
    """What of it was saved is the input itself, as in eager: that raises where it was written, and reads what is there where it
    was written unseen."""
    both = Both(Parted(part).to(device))
    for n in range(8):
        x, found = batch(device, n)[0], []
        for module in both:
            module.zero_grad()
            mine = x.clone()
            loss = module(mine).square().sum()
            if n % 3 == 1:
                mine.zero_()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                if n % 3 == 2:
                    mine.data.mul_(2)
                loss.backward()
            found.append(grads(module))
        assert_same(*found)
    assert_recorded(both, 6)


class Parted(nn.Module):
    """Saves a part of its argument."""

    def __init__(self, part):
        super().__init__()
        self.part, self.weight = part, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.part(x) * self.weight


class KeepsItsArgument(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return None, (grad * ctx.x).sum()


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.data.mul_(2)], ids=["seen", "unseen"])
def test_c06_an_argument_that_code_keeps_is_written_after_the_forward(device, write):
    """Nothing raises: the backward reads what is there then."""
    both = Both(Kept().to(device))
    for n in range(6):
        found = []
        for module in both:
            module.zero_grad()
            x = batch(device, n)[0]
            loss = module(x).sum()
            if n % 2:
                write(x)
            loss.backward()
            found.append(grads(module))
        assert_same(*found)
    assert_recorded(both, 5)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return KeepsItsArgument.apply(x, self.weight)


def test_c05_an_argument_that_was_saved_is_the_result_of_another_recording(device, monkeypatch):
    """Its memory is not written again before the backward has read it, though nobody else holds it."""
    monkeypatch.setattr(recorder, "SMALL", 0)  # the result lies in the memory of the recording
    f, g = pg.record(nn.Tanh().to(device), warmup=1), Both(Parted(lambda y: y[1:]).to(device))
    for n in range(8):
        found = []
        for module in g:
            module.zero_grad()
            z = module(f(batch(device, n)[0]))
            f(batch(device, n + 50)[0])
            z.sum().backward()
            found.append(grads(module))
        assert_same(*found)
        assert_same(found[0][0], batch(device, n)[0].tanh()[1:].sum())
    assert_recorded(g, 7)


def test_c05_an_argument_that_was_saved_is_there_until_the_backward_ends(device):
    """Where a backward is played on a stream of its own, as that of many parameters is: what reads the argument may still be at
    work when autograd goes on."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(MANY))).to(device)
    pg.record(model, warmup=1)
    seen = []
    for n in range(5):
        x = batch(device, n)[0].clone()
        there = weakref.ref(x.untyped_storage())
        loss = model(x).sum()
        del x
        look = model[0].weight.register_post_accumulate_grad_hook(lambda _, there=there: seen.append(there() is not None))
        loss.backward()
        look.remove()
        assert there() is None
    assert pg.stats(model).replayed == 4
    assert seen[1:] == [True] * 4  # (autograd lets a live call's go as soon as it was read)


@pytest.mark.parametrize("retain", [False, True])
def test_c06_an_argument_that_was_saved_goes_with_its_graph(device, retain):
    """It is held as long as eager holds it, and no copy of it is kept."""
    both = Both(Parted(lambda x: x[1:]).to(device))
    for n in range(6):
        x, there = batch(device, n)[0], []
        for module in both:
            module.zero_grad()
            mine = x.clone()
            ref = weakref.ref(mine.untyped_storage())
            y = module(mine)
            del mine
            there.append([ref() is not None])
            y.sum().backward(retain_graph=retain)
            there[-1].append(ref() is not None)
            y.sum().backward() if retain else None
            there[-1].append(ref() is not None)
            del y
            there[-1].append(ref() is not None)
        assert there[0] == there[1] == [True, retain, False, False]
        both.check()
    (recording,) = [p.recording for p in pg.api._recorded(both.recorded)._shelf]
    assert recording.backward.saved.memory == []


@may_run_live
def test_c06_an_argument_that_requires_a_gradient_is_written(device):
    def f(x):
        x.mul_(2)
        return (x * x).sum()

    g = pg.record(f, warmup=1)
    for n in range(5):
        found = []
        for function in (f, g):
            start = torch.full((3,), float(n), device=device, requires_grad=True)
            x = start * 1
            function(x).backward()
            found.append((start.grad, x.detach()))
        assert_same(*found)
