"""C8, C9, C11: numbers that the host reads of tensors which hold the same in each replay: made of numbers alone, or of what is
outside and the call does not write. Such a read is none: the call is recorded as it is, and no replay waits. Where what is
outside does change, that is noticed, whoever has written it."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons

pytestmark = may_run_live


class Holds(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("flag", torch.tensor(True, device=device))
        self.register_buffer("times", torch.linspace(0, 1, 4, device=device))
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0], device=device))
        self.alias = self.flag.data


def positions(x):
    return torch.arange(3, device=x.device)[None]


def counted(x):
    number = torch.zeros(3, dtype=torch.int64, device=x.device)
    number[1:] += 2
    number.mul_(3).view(3, 1)[0] = 1
    return x * int(number.sum())


def drawn_over(x):
    """What was drawn is none; what it was made of, is."""
    ones = torch.ones(2, device=x.device)
    noise = torch.rand(2, device=x.device) * ones
    return (x if ones.all() else -x) + noise.sum()


def layers(x, rate, *, of=torch.rand):
    """As transformers drops some of them."""
    for scale in (2.0, 3.0):
        if of([]) < rate:
            continue
        x = x * scale
    return x


def times_rise(h):
    return all(a < b for a, b in zip(h.times[:-1], h.times[1:], strict=True))


READS = {
    "a flag": lambda x, h: x * 2 if h.flag.item() else x - 1,
    "a flag's truth": lambda x, h: x * 2 if h.flag else x - 1,
    "a list": lambda x, h: x.sum(torch.arange(x.dim(), device=x.device).tolist()),
    "bounds": lambda x, h: x * (2 if (torch.full((), 1.0, device=x.device) != 1.0).any() else 3),
    "times": lambda x, h: x * 2 if times_rise(h) else x,
    "a number to fill with": lambda x, h: x + torch.full((3,), h.times[1], device=x.device),
    "positions": lambda x, h: x if (torch.diff(positions(x), prepend=positions(x)[:, :1] - 1) == 1).all() else -x,
    "ones like it": lambda x, h: x * 2 if (torch.ones_like(x) == 1).all() else -x,
    "a mask": lambda x, h: x[torch.arange(3, device=x.device) > 0],
    "a mask of what is there": lambda x, h: x[(h.times[:3] > 0.5).nonzero()[:, 0]],
    "another comparison": lambda x, h: x * 2 if torch.equal(h.times, torch.linspace(0, 1, 4, device=x.device)) else -x,
    "one of other shapes": lambda x, h: x * 2 if torch.equal(x, x[:2]) or x.equal(x[None]) else -x,
    "a float": lambda x, h: x * float((h.times.sin() / 3)[1]),
    "an index": lambda x, h: x[torch.arange(3, device=x.device)[1]],
    "a size": lambda x, h: x.new_ones(int(torch.arange(4, device=x.device).sum())),
    "an array": lambda x, h: x * float(torch.arange(3, device=x.device).cpu().numpy()[1]),
    "written before": lambda x, h: counted(x),
    "a parameter": lambda x, h: x * h.scale[1].item(),
    "beside what is drawn": lambda x, h: drawn_over(x),
    "on its own device": lambda x, h: x * h.times.to("cpu")[1].item(),
}


@pytest.mark.parametrize("fallback", ["live", "split"])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_c11_a_number_of_what_holds_the_same_in_each_replay(device, read, inference, fallback):
    h, results = Holds(device), []
    for f in (lambda x: read(x, h), pg.record(lambda x: read(x, h), fallback=fallback)):
        torch.manual_seed(0)
        with torch.inference_mode(inference):
            results.append([f(ramp(device, 3, start=i)) for i in range(6)])
    assert_same(results[1], results[0])
    assert counts(f) == (1, 1, 5), reasons(f)
    assert not pg.stats(f).refusals
    assert pg.stats(f).steps == 1


def load(h, to):
    h.load_state_dict(h.state_dict() | {"flag": torch.tensor(to)})


def by_another_recording(h, to):
    set_flag = pg.record(lambda x: h.flag.copy_(x > 0))
    for _ in range(3):
        set_flag(torch.ones((), device=h.flag.device))
    assert pg.stats(set_flag).replayed
    set_flag(torch.tensor(1.0 if to else -1.0, device=h.flag.device))


def by_an_optimizer(h, to):
    """On the CPU, a fused step leaves the version."""
    h.scale.grad = torch.ones_like(h.scale)
    torch.optim.SGD([h.scale], lr=1.0, maximize=to, fused=True).step()
    h.scale.grad = None


CHANGES = {
    "in place": lambda h, to: h.flag.fill_(to),
    "loaded": load,
    "another": lambda h, to: setattr(h, "flag", torch.tensor(to, device=h.flag.device)),
    "another's memory": lambda h, to: setattr(h.flag, "data", torch.tensor(to, device=h.flag.device)),
    "by a recording": by_another_recording,
    "by a view": lambda h, to: h.flag.view(1).fill_(to),
    "detached": lambda h, to: h.flag.detach().fill_(to),
    "by an optimizer": by_an_optimizer,
    "by data": lambda h, to: h.flag.data.fill_(to),
    "by its data of before": lambda h, to: h.alias.fill_(to),
    "through numpy": lambda h, to: h.flag.numpy().fill(to) if h.flag.is_cpu else h.flag.fill_(to),
}


def goes_on(x, h):
    return (x * 2 if h.flag else x - 1) * (3 if h.scale[1].item() > 2 else 5)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_c08_what_such_a_number_was_read_of_is_another_now(device, change):
    h = Holds(device)
    f = pg.record(lambda x: goes_on(x, h))
    for n in range(24):
        if n in (6, 12, 18):
            change(h, n == 12)
        x = ramp(device, 3, start=n)
        assert_same(f(x), goes_on(x, h))
    assert 2 <= pg.stats(f).recorded <= 4, reasons(f)  # the one from before plays again, but where other tensors are there
    assert pg.stats(f).replayed >= 18, reasons(f)


class Quantizer(nn.Module):
    """Initializes itself in the first call, as many a package's layers do."""

    def __init__(self):
        super().__init__()
        self.book = nn.Parameter(torch.zeros(4, 3))
        self.register_buffer("initted", torch.tensor(False))

    def forward(self, x):
        if not self.initted.item():
            with torch.no_grad():
                self.book.data.copy_(x[:4])
            self.initted.data.copy_(torch.tensor(True))
        return self.book[torch.cdist(x, self.book).argmin(1)]


@pytest.mark.parametrize("warmup", [0, 1])
def test_c11_a_flag_that_the_first_call_sets(device, warmup):
    torch.manual_seed(0)
    plain, ours = Quantizer().to(device), Quantizer().to(device)
    recorded = pg.record(ours, warmup=warmup)
    for n in range(16):
        x = torch.randn(6, 3, device=device)
        assert_same(recorded(x), plain(x))
        if n in (5, 9):
            plain.initted.fill_(False)
            ours.initted.fill_(False)
    assert_same(ours.book.detach(), plain.book.detach())
    assert pg.stats(ours).replayed >= 7, reasons(ours)


def reads_then_writes(x, h):
    y = x * 2 if h.times[0] < 3 else -x
    h.times.add_(1)
    return y


def reads_what_it_has_written(x, h):
    twice = h.times * 2
    h.times.add_(1)
    return x if twice[0] < 4 else -x


def reads_of_its_argument(x, h):
    ones = torch.ones_like(x)
    ones[1:] = x[1:]
    return x if (ones > 0).all() else -x


def shows_an_array(x, h):
    here = torch.zeros(3, device=x.device)
    array = here.cpu().numpy()
    here += 1
    return x + float(array[0])


def reads_in_a_loop(x, h):
    turns = torch.zeros((), device=x.device)
    _, y = pg.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (turns, x))
    return y + turns.item()


def writes_in_a_live_part(x, h):
    y = x * 2
    set_live(h)
    return y if h.flag else -y


@pg.live
def set_live(h):
    h.count = getattr(h, "count", 0) + 1
    h.flag.fill_(h.count % 3 > 0)


def reads_what_is_not_filled(x, h):
    here = torch.empty_like(x)
    here[1:] = x[1:]
    here[:1].zero_()
    return x if (here > 0).any() else -x


OTHERS = {f.__name__: f for f in (
    reads_then_writes, reads_what_it_has_written, reads_of_its_argument, shows_an_array, reads_in_a_loop, writes_in_a_live_part,
    reads_what_is_not_filled,
)}  # fmt: skip


@pytest.mark.parametrize("fallback", ["live", "split"])
@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_c11_what_is_not_the_same_in_each_replay(device, function, fallback):
    h, theirs = Holds(device), Holds(device)
    f = pg.record(lambda x: function(x, h), fallback=fallback)
    for n in range(10):
        x = ramp(device, 3, start=1) * (1 if n % 4 else -1)
        assert_same(f(x), function(x, theirs))
    assert_same(h.times, theirs.times)


@pytest.mark.parametrize("fallback", ["live", "split"])
def test_c11_who_reads_before_it_writes_is_told_where_it_reads(device, fallback):
    h = Holds(device)
    f = pg.record(lambda x: reads_then_writes(x, h), fallback=fallback)
    for n in range(8):
        f(ramp(device, 3, start=n))
    assert "h.times[0] < 3" in reasons(f)
    assert pg.stats(f).recorded == (0 if fallback == "live" else 2)  # for each truth


def test_c11_a_model_alone_that_reads_a_parameter_settles(device):
    """An optimizer outside writes it after each call."""
    h = Holds(device)
    f = pg.record(lambda x: x * h.scale[1].item())
    for n in range(60):
        x = ramp(device, 3, start=n)
        assert_same(f(x), x * h.scale[1].item())
        with torch.no_grad():
            h.scale.add_(1)
    assert pg.stats(f).recorded <= 9, reasons(f)  # as with all else that changes from call to call


def test_c11_a_rate_that_is_followed_is_none(device):
    net = nn.Linear(3, 1, device=device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        opt.step()
        return x * torch.tensor(opt.param_groups[0]["lr"], device=x.device).item()

    f = pg.record(step)
    for n in range(12):
        opt.param_groups[0]["lr"] = 0.1 / (n + 1)
        x = ramp(device, 3)
        assert_same(f(x), x * torch.tensor(0.1 / (n + 1), device=device).item())


def test_c19_a_look_finds_no_such_read(device):
    h = Holds(device)
    found = pg.check(lambda x: x * 2 if h.flag.item() else x, ramp(device, 3))
    assert not found.obstacles, found


class Dropping(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return layers(x, self.rate) + torch.rand([])


@pytest.mark.parametrize("rate", [0.0, -1, 0])
def test_c11_whether_what_was_drawn_is_below_zero_takes_no_look(rate):
    """And it is drawn in each replay. (A call of a GPU's may not draw on the host.)"""
    results = []
    for f in (Dropping(rate), pg.record(Dropping(rate), fallback="live")):
        torch.manual_seed(0)
        results.append([f(ramp("cpu", 3, start=i)) for i in range(6)] + [torch.get_rng_state()])
    assert_same(results[1], results[0])
    assert counts(f) == (1, 1, 5), reasons(f)


def written_over(x, rate):
    drawn = torch.rand([])
    drawn -= 1
    return x * 2 if drawn < rate else x - 1


@pytest.mark.parametrize(("function", "rate"), [
    (layers, 0.5), (lambda x, rate: layers(x, rate, of=torch.randn), 0.0), (written_over, 0.0),
    (lambda x, rate: layers(x, torch.tensor(rate)), 0.0), (lambda x, rate: layers(x, rate) if rate else x, 1e-9),
], ids=["more often", "not evenly", "written since", "a tensor", "seldom"])  # fmt: skip
def test_c11_what_was_drawn_is_looked_at(function, rate):
    results = []
    for f in (function, pg.record(lambda x: function(x, rate), fallback="live")):
        torch.manual_seed(0)
        results.append([f(ramp("cpu", 3, start=i), *[rate][: f is function]) for i in range(6)] + [torch.get_rng_state()])
    assert_same(results[1], results[0])
    assert pg.stats(f).replayed == 0
