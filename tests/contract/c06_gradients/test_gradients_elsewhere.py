"""C6: gradients that a call finds in another place each time, because the one before has dropped them and made new ones, or
another function has: a GAN's discriminator, the critics of an actor, what user code puts into `.grad`."""

import gc
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.slots import gradients
from tests.helpers import ramp, reasons

OPTIMIZERS = {
    "SGD, momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.999)),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "RMSprop, foreach": partial(torch.optim.RMSprop, lr=0.01, foreach=True),
}


class Gan:
    """The generator first, whose backward adds to the gradients of the discriminator, which are looked at and dropped."""

    def __init__(self, device, optimizer, record):
        torch.manual_seed(0)
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 6)
        self.generator = nn.Sequential(*layers).to(device)
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1)).to(device)
        self.of_g, self.of_d = optimizer(self.generator.parameters()), optimizer(self.discriminator.parameters())
        self.step = record(self._step)

    def _step(self, real, noise):
        self.of_g.zero_grad()
        made = self.generator(noise)
        g_loss = F.softplus(-self.discriminator(made)).mean()
        g_loss.backward()
        self.of_g.step()
        found = sum(p.grad.sum() for p in self.discriminator.parameters()).sigmoid()
        self.of_d.zero_grad()
        d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(made.detach())).mean() * found
        d_loss.backward()
        self.of_d.step()
        return g_loss.detach(), d_loss.detach(), made.detach()

    @property
    def parameters(self):
        return [*self.generator.parameters(), *self.discriminator.parameters()]


def copies(tensors):
    return [None if t is None else t.detach().clone() for t in tensors]


def same(a, b):
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert (x is None) == (y is None), i
        assert x is None or torch.equal(x, y), i


def both_ways(run):
    """What a program gives live and recorded, and the recorded functions."""
    live, _ = run(lambda f: f)
    recorded = []

    def record(f):
        recorded.append(pg.record(f))
        return recorded[-1]

    ours, _ = run(record)
    same(live, ours)
    return recorded


def nothing(n, gan):
    return []


def logs(n, gan):
    return [p.grad.norm() for p in gan.parameters] if n % 5 == 0 else []


def drops(n, gan):
    if n % 7 == 3:
        for p in gan.discriminator.parameters():
            p.grad = None
    return []


def puts_others(n, gan):
    if n % 3 == 1:
        for i, p in enumerate(gan.discriminator.parameters()):
            p.grad = torch.full_like(p, n + i)
    return []


def scales(n, gan):
    for p in gan.parameters:
        p.grad.mul_(0.5)
    return []


def reloads(n, gan):
    if n % 6 == 2:
        gan.discriminator.load_state_dict(gan.discriminator.state_dict())
    return []


BETWEEN = {f.__name__: f for f in (nothing, logs, drops, puts_others, scales, reloads)}


def trained(device, optimizer, between, record, steps=34):
    gan, found = Gan(device, optimizer, record), []
    for n in range(steps):
        found += gan.step(ramp(device, 18, start=n).view(3, 6) / 9, ramp(device, 12, start=-n).view(3, 4) / 7)
        found += copies(between(n, gan))
    return [*found, *copies(gan.parameters), *copies(p.grad for p in gan.parameters)], gan


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_c06_c15_a_step_that_adds_to_what_the_one_before_has_left_settles(device, optimizer):
    (step,) = both_ways(partial(trained, device, optimizer, nothing))
    assert pg.stats(step).recorded <= 5, pg.explain(step)
    assert pg.stats(step).replayed >= 24, pg.explain(step)


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_c06_what_becomes_of_gradients_between_such_steps(device, between):
    (step,) = both_ways(partial(trained, device, OPTIMIZERS["Adam"], between))
    assert pg.stats(step).replayed >= 10, pg.explain(step)


@pytest.mark.parametrize("every", [1, 4])
def test_c06_gradients_that_somebody_keeps(device, every):
    """In eager, those that the next step finds are added to; and then they are dropped, and stay what they are."""

    def run(record):
        gan, found, kept = Gan(device, OPTIMIZERS["Adam"], record), [], []
        for n in range(34):
            found += gan.step(ramp(device, 18, start=n).view(3, 6) / 9, ramp(device, 12, start=-n).view(3, 4) / 7)
            if n % every == 0:
                kept += [p.grad for p in gan.discriminator.parameters()][: 1 + n % 3]
            if n % 11 == 5:
                found += copies(kept)
                del kept[n % 2 :]
        return [*found, *copies(kept), *copies(gan.parameters)], gan

    with pytest.warns(pg.RunsLive):
        both_ways(run)


@pytest.mark.parametrize("keeps", [False, True])
def test_c06_gradients_as_arguments_and_by_other_names(device, keeps):
    def run(record):
        torch.manual_seed(1)
        net = nn.Linear(4, 3).to(device)
        other, found = [], []

        @record
        def step(x, grads):
            net(x).square().sum().backward()
            total = torch.stack([(g * 2).sum() for g in grads] + [(g * 3).sum() for g in other]).sum()
            net.zero_grad()
            (net(x) * total * 0.01).sum().backward()
            return total

        net(torch.ones(1, 4, device=device)).sum().backward()
        for n in range(30):
            grads = [p.grad for p in net.parameters()]
            other[:] = grads if keeps else []
            found.append(step(ramp(device, 8, start=n).view(2, 4) / 8, grads if n % 2 else [g.clone() for g in grads]))
        return [*copies(found), *copies(p.grad for p in net.parameters())], net

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        both_ways(run)


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_c06_c15_updates_in_turns_that_drop_only_their_own_gradients_settle(device, optimizer, turns):
    """Which is next, the step counts itself. Each backward adds to what the others have left."""
    calls = 60

    def run(record):
        torch.manual_seed(0)
        nets = [nn.Linear(4, 4).to(device) for _ in range(turns)]
        updates = [optimizer(net.parameters()) for net in nets]

        class Trainer:
            count = 0

            def step(self, x):
                self.count += 1
                mine = updates[self.count % turns]
                mine.zero_grad()
                for net in nets:
                    x = net(x).tanh()
                loss = x.square().mean()
                loss.backward()
                mine.step()
                return loss.detach()

        step = record(Trainer().step)
        losses = [step(ramp(device, 3, 4, start=n)) for n in range(calls)]
        return [*losses, *copies(p for net in nets for p in net.parameters())], None

    (recorded,) = both_ways(run)
    stats = pg.stats(recorded)
    assert stats.recorded <= 6 * turns, pg.explain(recorded)
    assert stats.replayed >= calls - 6 * turns, pg.explain(recorded)


def test_c06_c15_functions_that_add_to_each_others_gradients_settle(device):
    """As WGAN-GP's do: the critic's backward goes on into the generator, and the generator's into the critic."""

    def run(record):
        torch.manual_seed(2)
        generator, critic = nn.Linear(4, 6).to(device), nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 1)).to(device)
        of_g, of_c = OPTIMIZERS["Adam"](generator.parameters()), OPTIMIZERS["Adam"](critic.parameters())

        @record
        def train_critic(real, noise):
            of_c.zero_grad()
            fake = generator(noise)
            mixed = (real.detach() + fake.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            of_c.step()
            return loss.detach()

        @record
        def train_generator(noise):
            of_g.zero_grad()
            loss = -critic(generator(noise)).mean()
            loss.backward()
            of_g.step()
            return loss.detach()

        found = []
        for n in range(45):
            noise = ramp(device, 12, start=-n).view(3, 4) / 7
            found.append(train_critic(ramp(device, 18, start=n).view(3, 6) / 9, noise))
            if n % 3 == 0:
                found.append(train_generator(noise))
        weights = [*generator.parameters(), *critic.parameters()]
        return [*copies(found), *copies(weights), *copies(p.grad for p in weights)], None

    for function in both_ways(run):
        assert pg.stats(function).recorded <= 6, pg.explain(function)
        assert pg.stats(function).live <= 8, pg.explain(function)


@pytest.mark.parametrize("does", ["drops", "drops what it has added to", "adds", "zeros"])
@pytest.mark.parametrize("every", [1, 2, 9])
def test_c06_a_gradient_that_another_parameter_has_as_well(device, does, every):
    """As that of a shared model (A3C), or of master weights: no object of Python's has it."""

    def run(record):
        torch.manual_seed(5)
        net, shared, found = nn.Linear(4, 3).to(device), nn.Linear(4, 3).to(device), []

        @record
        def step(x):
            if does == "drops":
                net.zero_grad()
            if does == "zeros":
                net.zero_grad(set_to_none=False)
            loss = net(x).square().sum()
            loss.backward()
            if does == "drops what it has added to":
                scale = net.weight.grad.norm()
                net.zero_grad()
                (net(x) * scale * 0.01).sum().backward()
            return loss.detach()

        for n in range(36):
            found.append(step(ramp(device, 8, start=n).view(2, 4) / 50))
            if n % every == 0:
                for p, q in zip(net.parameters(), shared.parameters(), strict=True):
                    q.grad = p.grad
            if n % 13 == 12:
                net.zero_grad()
            found += copies(p.grad for p in (*net.parameters(), *shared.parameters()))
        return copies(found), net

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        both_ways(run)


@pytest.mark.parametrize("returns", ["nothing", "the gradient", "a view of it"])
def test_c06_gradients_that_stay_where_others_have_put_them(device, returns):
    """Each time in another tensor, to which the call adds: whoever has that sees it."""

    def run(record):
        torch.manual_seed(3)
        net, found = nn.Linear(4, 3).to(device), []

        @record
        def accumulate(x):
            net(x).square().sum().backward()
            return {"nothing": None, "the gradient": net.weight.grad, "a view of it": net.weight.grad[0]}[returns]

        for n in range(30):
            for p in net.parameters():
                p.grad = torch.full_like(p, n)
            versions = [p.grad._version for p in net.parameters()]
            result = accumulate(ramp(device, 8, start=n).view(2, 4) / 8)
            assert all(p.grad._version > v for p, v in zip(net.parameters(), versions, strict=True))
            found += copies(p.grad for p in net.parameters())
            if result is not None:
                net.weight.grad.add_(1)
                found += copies([result])
        return found, net

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        (function,) = both_ways(run)
    if returns == "nothing":
        assert pg.stats(function).replayed >= 20, pg.explain(function)
    else:
        assert "hands on a gradient that an earlier call has left" in reasons(function)


@pytest.mark.parametrize("options", [{"audit": 1}, {"verify": 3}, {"fallback": "split"}], ids=str)
def test_c06_c10_such_steps_audited_verified_and_split(device, options):
    live, _ = trained(device, OPTIMIZERS["Adam"], logs, lambda f: f)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pg.Stale)
        warnings.simplefilter("ignore", pg.RunsLive)
        ours, gan = trained(device, OPTIMIZERS["Adam"], logs, partial(pg.record, **options))
    same(live, ours)
    assert "split" in options.values() or pg.stats(gan.step).replayed >= 20, pg.explain(gan.step)


@pytest.mark.parametrize("bad", range(4, 14))
def test_c12_a_first_replay_that_is_taken_back(bad):
    """An operator raises on the CPU before it has written: the call runs live, and the next replay finds other gradients."""

    def run(record):
        torch.manual_seed(4)
        words, found = nn.Embedding(5, 3), []

        @record
        def step(index):
            words(index).square().sum().backward()
            scale = words.weight.grad.norm()
            words.zero_grad()
            (words(index) * scale * 0.1).sum().backward()
            return scale

        for n in range(24):
            try:
                found += copies([step(torch.tensor([9 if n == bad else n % 5, 1]))])
            except IndexError:
                words.weight.grad = torch.full_like(words.weight, n)
            found += copies([words.weight.grad])
        return found, words

    both_ways(run)


def test_c17_slots_go_with_the_recording(device):
    _, gan = trained(device, OPTIMIZERS["Adam"], nothing, pg.record)
    fed = [p.recording.table.gradients.fed for p in gan.step._shelf]
    slots = [weakref.ref(t) for one in fed if one is not None for t in one._slots.values()]
    del fed
    assert slots
    pg.reset(gan.step)
    gc.collect()
    assert not any(ref() is not None for ref in slots)


def pair(device):
    return [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]


def numbers(device, n):
    return (ramp(device, 3, start=n) % 7 - 3) / 4


def gives_another_its_gradient(record, device):
    """As A3C does, and master weights of the same type."""
    (a, b), found = pair(device), []
    b.grad = torch.zeros_like(b)

    @record
    def step():
        s = (a.grad * b.grad).sum()
        b.grad = a.grad
        return s

    for n in range(30):
        a.grad = numbers(device, n)
        found.append(step())
        a.grad.mul_(0.5)
        found += copies([b.grad])
    return found


def exchanges(record, device):
    (a, b), found = pair(device), []
    optimizer = torch.optim.SGD([a, b], lr=0.1)

    @record
    def step():
        optimizer.step()
        a.grad, b.grad = b.grad, a.grad

    for n in range(30):
        a.grad, b.grad = numbers(device, n), numbers(device, 3 * n)
        step()
        found += copies([a, b, a.grad, b.grad])
    return found


def gives_a_view(record, device):
    (a, b), found = pair(device), []

    @record
    def step():
        a.grad.mul_(2)
        b.grad = a.grad.view(3)

    for n in range(30):
        a.grad = numbers(device, n)
        step()
        a.grad.add_(1)
        found += copies([a.grad, b.grad])
    return found


def lies_in_a_buffer(record, device):
    (p, _), found, buffer = pair(device), [], torch.zeros(3, device=device)

    @record
    def makes(x):
        p.grad = None
        (p * x).sum().backward()

    @record
    def adds(x):
        (p * x).sum().backward()
        return buffer.norm()

    for n in range(60):
        if n < 14:
            p.grad = torch.full_like(p, 0.1 * n)
        else:
            makes(numbers(device, n))
            if n % 3 == 0:
                p.grad.data = buffer
        found.append(adds(numbers(device, 2 * n)))
    return found


def puts_a_view_of_a_buffer(record, device):
    (p, _), found, flat = pair(device), [], torch.zeros(3, device=device)

    @record
    def prepare():
        flat.zero_()
        p.grad = flat.view(3)

    @record
    def step(x):
        (p * x).sum().backward()
        return flat.norm()

    for n in range(60):
        if n < 14 or n % 7 == 3:
            p.grad = torch.full_like(p, 0.1 * n)
        elif n % 2:
            prepare()
        found.append(step(numbers(device, n)))
    return found


def gives_it_other_memory(record, device):
    (p, q), found = pair(device), []

    @record
    def step():
        p.grad.data = p.grad.data * 2

    @record
    def of_another():
        p.grad.mul_(2)
        q.grad.data = p.grad

    for n in range(30):
        p.grad, q.grad = numbers(device, n), numbers(device, 2 * n)
        step()
        found += copies([p.grad])
        of_another()
        found += copies([p.grad, q.grad])
    return found


def only_returns_it(record, device):
    (p, q), found = pair(device), []

    @record
    def gradients():
        return [t.grad for t in (p, q)]

    for n in range(30):
        p.grad, q.grad = numbers(device, n), numbers(device, 2 * n)
        found += copies(gradients())
    return found


NAMES = [gives_another_its_gradient, exchanges, gives_a_view, lies_in_a_buffer, puts_a_view_of_a_buffer, gives_it_other_memory,
         only_returns_it]  # fmt: skip


@pytest.mark.parametrize("program", NAMES, ids=lambda f: f.__name__)
def test_c06_gradients_by_two_names_and_on_other_memory(device, program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        live, ours = program(lambda f: f, device), program(partial(pg.record, keep="always"), device)
    same(live, ours)


@pytest.mark.parametrize("lets_go", [True, False])
def test_c06_c15_a_gradient_that_another_thread_lets_go_of_meanwhile(device, monkeypatch, lets_go):
    """As autograd's may, which has just added to it: the call gives it the time, and is replayed."""
    net, hands = nn.Linear(3, 2).to(device), []

    @pg.record
    def step(x):
        net.zero_grad()
        net(x).sum().backward()

    for n in range(4):
        step(ramp(device, 3, start=n).view(1, 3))
    pauses = []
    monkeypatch.setattr(gradients.time, "sleep", lambda _: (pauses.append(1), hands.clear() if lets_go else None))
    hands.append(net.weight.grad)
    with nullcontext() if lets_go else pytest.warns(pg.RunsLive, match="a gradient of an earlier call is held"):
        step(ramp(device, 3).view(1, 3))
    assert pg.stats(step).live == (1 if lets_go else 2)
    paused = len(pauses)
    net.weight.grad = hands[0] if hands else net.weight.grad
    step(ramp(device, 3).view(1, 3))
    assert len(pauses) == paused > 0, "a call that runs live waits for nobody again"


@pytest.mark.parametrize("layers", [3, 30])
def test_c15_who_has_made_the_gradients_is_asked_once_a_replay(device, monkeypatch, layers):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)]).to(device)

    @partial(pg.record, keep="always")
    def step(x):
        net(x).square().mean().backward()
        scale = net[0].weight.grad.norm()
        net.zero_grad()
        (net(x) * scale).mean().backward()

    for n in range(12):
        step(ramp(device, 3, start=n).view(1, 3))
    asked, replayed, alone = [], pg.stats(step).replayed, gradients._Some.alone
    monkeypatch.setattr(gradients._Some, "alone", lambda made: (asked.append(made), alone(made))[1])
    for n in range(6):
        step(ramp(device, 3, start=n).view(1, 3))
    assert pg.stats(step).replayed == replayed + 6
    assert 6 <= len(asked) <= 12


def puts_a_view_of_a_new_one(device, between, record, zeroes=True):
    """As optimizers of private training do: what the step found was zeroed and added to, and gives way to a view."""
    torch.manual_seed(6)
    net, found, kept = nn.Linear(4, 3).to(device), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @record
    def step(x):
        optimizer.zero_grad(set_to_none=not zeroes)
        loss = net(x).square().mean()
        loss.backward()
        for p in net.parameters():
            p.grad = (p.grad * 0.5 + 1).view_as(p)
        optimizer.step()
        return loss.detach()

    for n in range(30):
        found.append(step(ramp(device, 8, start=n).view(2, 4) / 8))
        kept += between(n, net)
    return [*copies(found), *copies(kept), *copies(net.parameters()), *copies(p.grad for p in net.parameters())], step


def test_c06_c15_a_gradient_that_is_a_view_of_a_new_tensor_settles(device):
    (step,) = both_ways(partial(puts_a_view_of_a_new_one, device, lambda n, net: []))
    assert pg.stats(step).recorded <= 5, pg.explain(step)
    assert pg.stats(step).replayed >= 24, pg.explain(step)


@pytest.mark.parametrize("of", ["the view", "what it is a view of"])
@pytest.mark.parametrize("zeroes", [True, False])
def test_c05_who_has_a_view_among_gradients_keeps_its_value(device, of, zeroes):
    def keeps(n, net):
        if n % 7 != 6:
            return []
        grads = [p.grad for p in net.parameters()]
        return [g if of == "the view" else g._base for g in grads]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        both_ways(partial(puts_a_view_of_a_new_one, device, keeps, zeroes=zeroes))


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c06_c17_a_refused_capture_holds_no_gradient_of_others(device):
    """Two functions train one model. One draws on the host, and runs live: what its capture began with goes at once, without
    the collector of garbage."""
    np = pytest.importorskip("numpy")
    net = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def update(x):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def draws(x):
        np.random.rand()
        return update(x)

    live, step = pg.record(draws, keep="always"), pg.record(update, keep="always")
    gc.collect()
    gc.disable()
    try:
        for n in range(12):
            live(ramp(device, 4, 3, start=n))
            step(ramp(device, 4, 3, start=n))
    finally:
        gc.enable()
    assert pg.stats(live).replayed == 0
    assert pg.stats(step).replayed >= 10, pg.explain(step)
