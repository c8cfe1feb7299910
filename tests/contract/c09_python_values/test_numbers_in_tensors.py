"""C9: counts in buffers, which a call reads on the host and writes: each replay goes by what lies there before it, whoever has
written it, and is like eager to the bit. Where another value is read than a formula of counts, the call runs live."""

import copy
import ctypes
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live

pytestmark = may_run_live
CALLS = 30


class Counting(nn.Module):
    def __init__(self, first, dtype=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("n", torch.tensor(first, dtype=dtype))
        self.register_buffer("other", torch.tensor(0))


def both(make, device):
    """The same made twice: (function, module), the first one recorded."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make(device))
    (function, module), live = made
    return (pg.record(function, keep="always"), module), live


def tensors(module):
    return [t.detach() for t in (*module.parameters(), *module.buffers())]


def alongside(make, device, between=lambda module, n: None, calls=CALLS):
    """Both called, call by call; between calls something is done to both modules. Returns the recorded function."""
    sides = both(make, device)
    for n in range(calls):
        torch.manual_seed(100 + n)
        x = torch.randn(8, 4, device=device)
        found = []
        for function, module in sides:
            between(module, n)
            torch.manual_seed(n)
            try:
                found.append([function(x.clone()), *tensors(module)])
            except OverflowError as e:
                found.append([str(e), *tensors(module)])
        assert_same(*found, f"call {n}")
    return sides[0][0]


def counting(body, first=0, dtype=None):
    def make(device):
        module = Counting(first, dtype).to(device)
        return lambda x: body(module, x), module

    return make


def advanced(read, first=0, dtype=None):
    """A call that reads after it has added 1."""

    def body(m, x):
        m.n += 1
        return read(m.n, x)

    return counting(body, first, dtype)


def followed(recorded, live=6):
    assert pg.stats(recorded).live <= live, pg.explain(recorded)


def item_before(m, x):
    n = m.n.item()
    m.n += 1
    return x * n, n


READ = {
    "before it is written": counting(item_before),
    "after": advanced(lambda n, x: x * n.item()),
    "as a float": advanced(lambda n, x: x / float(n)),
    "as a whole number": advanced(lambda n, x: x * (int(n) // 20)),
    "as a truth": advanced(lambda n, x: x * 2 if n > 15 else x),
    "each third time": advanced(lambda n, x: x * 2 if n % 3 == 0 else x),
    "what is worked out": advanced(lambda n, x: x.lerp(x.relu(), (1 - (1 + n / 5) ** -0.75).clamp(max=0.9).item())),
    "of float32": advanced(lambda n, x: x * n.sqrt().item(), 0.5, torch.float32),
    "of float64": advanced(lambda n, x: x * math.cos(n.item()), 0.5, torch.float64),
    "of int32": advanced(lambda n, x: x * n.item(), 3, torch.int32),
    "together with a constant": advanced(lambda n, x: x * (n + torch.arange(3, device=n.device)).sum().item()),
    "that decays": counting(lambda m, x: x * m.n.mul_(0.97).item(), 1.0),
    "that turns round": counting(lambda m, x: x * m.n.copy_((m.n + 1) % 4).item()),
    "a flag": counting(lambda m, x: x * 2 if m.n.logical_not_() else x, False),
    "that another sets": counting(lambda m, x: x * (m.n.add_(1).item() + m.other.copy_(m.n * 2).item())),
    "twice": counting(lambda m, x: x * m.n.item() + x * m.n.add_(1).item() - m.n.add_(2).item()),
    "by foreach": counting(lambda m, x: (torch._foreach_add_([m.n, m.other], 1), x * m.other.item())[1]),
    "of its data": counting(lambda m, x: x * m.n.data.add_(1).item()),
    "of a view": counting(lambda m, x: x * m.n.view(1)[0].add_(1).item()),
    "that is handed out": advanced(lambda n, x: (x, n.item(), n.item() % 4)),
}


@pytest.mark.parametrize("how", READ)
def test_c09_a_count_in_a_buffer_is_followed(device, how):
    followed(alongside(READ[how], device))


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_c09_batch_norm_that_averages_over_all_batches(device, momentum):
    def make(device):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)).to(device)
        return lambda x: module(x).detach(), module

    followed(alongside(make, device), live=4 if device.type == "cpu" else CALLS)


AVERAGES = {
    "SWA": {},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "one's own": {"avg_fn": lambda a, p, n: a + (p - a) / (n + 1)},
}


@pytest.mark.parametrize("how", AVERAGES)
def test_c09_an_averaged_model_within_the_step(device, how):
    def make(device):
        net = nn.Linear(4, 4).to(device)
        averaged = AveragedModel(net, device=device, **AVERAGES[how])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), x)
            loss.backward()
            optimizer.step()
            averaged.update_parameters(net)
            return loss.detach()

        return step, averaged

    # Where torch averages by itself on a GPU, it reads the count as what it gives to its kernels.
    followed(alongside(make, device), live=CALLS if device.type == "cuda" and how == "SWA" else 6)


def write_unseen(t, value):
    if t.is_cpu:
        ctypes.c_int64.from_address(t.data_ptr()).value = value
    else:
        t.data.fill_(value)


CHANGES = {
    "in place": lambda m, n: m.n.fill_(n * n),
    "its data": lambda m, n: m.n.data.fill_(n * n),
    "another in its place": lambda m, n: setattr(m.n, "data", torch.tensor(n * n, device=m.n.device)) if n % 7 == 0 else None,
    "another buffer": lambda m, n: setattr(m, "n", torch.tensor(n * n, device=m.n.device)) if n % 7 == 0 else None,
    "from a file": lambda m, n: m.load_state_dict({**m.state_dict(), "n": torch.tensor(n * n)}),
    "around torch": lambda m, n: write_unseen(m.n, n * n),
    "a copy is made": lambda m, n: copy.deepcopy(m).n.add_(100),
    "set": lambda m, n: m.n.set_(torch.tensor(n * n, device=m.n.device)) if n % 7 == 0 else None,
}


@pytest.mark.parametrize("how", CHANGES)
def test_c09_a_count_that_is_changed_between_calls(device, how):
    alongside(READ["before it is written"], device, CHANGES[how])


WRITES = {
    "random": lambda m, x: m.n.copy_(torch.randint(0, 9, (), device=x.device)),
    "of the argument": lambda m, x: m.n.copy_((x.sum() * 3).long()),
    "of an argument's number": lambda m, x: m.n.fill_(m.n.item() + 1),
    "of a larger one": lambda m, x: m.n.copy_(m.linear.weight.argmax()),
    "and not itself": lambda m, x: m.n.zero_(),
}


@pytest.mark.parametrize("how", WRITES)
def test_c09_a_count_that_is_written_otherwise(device, how):
    def body(m, x):
        before = m.n.item()
        WRITES[how](m, x)
        return x * before + (0 if before > 5 else 1)

    def after(m, x):
        m.n += 1
        WRITES[how](m, x)
        return x * m.n.item()

    alongside(counting(body), device, lambda m, n: m.n.add_(n % 2))
    alongside(counting(after), device, lambda m, n: m.n.add_(n % 2))


def test_c09_two_functions_share_a_count(device):
    def make(device):
        module = Counting(0).to(device)

        def a(x):
            module.n += 1
            return x * module.n.item()

        def b(x):
            return x + module.n.item()

        return a, b, module

    (a, b, module), (c, d, other) = make(device), make(device)
    other.load_state_dict(module.state_dict())
    a, b = pg.record(a, keep="always"), pg.record(b, keep="always")
    for n in range(CALLS):
        x = torch.randn(4, 4, device=device)
        assert_same([a(x), b(x), module.n], [c(x), d(x), other.n], f"call {n}")
        if n % 5 == 0:
            module.n += 1
            other.n += 1
    followed(a)
    followed(b, live=8)


@pytest.mark.parametrize("wrapped", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_c09_a_count_in_each_mode(device, wrapped):
    def body(m, x):
        with wrapped():
            m.n += 1
            return x * m.n.item()

    followed(alongside(counting(body), device))


def test_c13_a_call_that_raises_by_a_count(device):
    def body(m, x):
        m.n += 1
        y = m.linear(x)
        if m.n.item() % 8 == 5:
            raise OverflowError("too many")
        m.other += 1
        return y.detach() * m.n.item()

    followed(alongside(counting(body), device), live=10)


def test_c09_a_live_part_may_write_a_count(device):
    def make(device):
        module = Counting(0).to(device)

        @pg.live
        def moves_on(x):
            module.n += 2
            return x + 1

        def step(x):
            module.n += 1
            y = moves_on(x)
            return y * module.n.item()

        return step, module

    alongside(make, device)


def test_c10_verified_replays_of_a_count(device):
    (function, module), (live, other) = READ["after"](device), READ["after"](device)
    other.load_state_dict(module.state_dict())
    recorded = pg.record(function, verify=3, keep="always")
    for _ in range(12):
        x = torch.randn(8, 4, device=device)
        assert_same([recorded(x), *tensors(module)], [live(x), *tensors(other)])
    followed(recorded)
