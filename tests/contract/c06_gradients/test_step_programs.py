"""C6 inside whole steps: random states, scalers, averages, and live steps between."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.whole_steps import Net, batch, steps
from tests.helpers import counts, may_run_live, ramp, side_by_side


def test_c02_a_random_state_put_back_inside(device):
    """What is drawn in `fork_rng` is drawn again after it."""
    devices = [device] if device.type == "cuda" else []

    def f(x):
        with torch.random.fork_rng(devices):
            first = torch.rand_like(x)
        second = torch.rand_like(x)
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        third = torch.rand_like(x)
        set_state = torch.set_rng_state if device.type == "cpu" else lambda s: torch.cuda.set_rng_state(s, device)
        set_state(state)
        return x * first, second, third, torch.rand_like(x)

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        results = []
        for g in (recorded, f):
            torch.manual_seed(n)
            torch.rand(n, device=device)
            results.append((g(torch.ones(5, device=device)), torch.rand(1, device=device)))
        assert_same(*results)
    assert pg.stats(recorded).replayed == 5, pg.explain(recorded)


def test_c02_a_call_that_leaves_the_random_state_as_it_was(device):
    def f(x):
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return F.dropout(x, 0.5)

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        results = []
        for g in (recorded, f):
            torch.manual_seed(n)
            results.append(
                [g(torch.ones(64, device=device)), torch.rand(n + 1, device=device), g(torch.ones(64, device=device))]
            )
        assert_same(*results)
    assert pg.stats(recorded).replayed > 8, pg.explain(recorded)


@may_run_live
def test_c02_a_random_state_from_outside(device):
    torch.manual_seed(7)
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)

    def f(x):
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
        return torch.rand_like(x)

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        results = []
        for g in (recorded, f):
            torch.manual_seed(n)
            results.append((g(torch.ones(5, device=device)), torch.rand(1, device=device)))
        assert_same(*results)


@may_run_live
def test_c06_an_autograd_function_of_the_users(device):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x * x

    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(Cube.apply(model(x)), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(7):
        both(*batch(device))


def test_c06_autocast_within_the_step(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = steps(device, "momentum", step_of=step_of)
    for _ in range(7):
        both(*batch(device))
    assert counts(both)[2] >= 5


@may_run_live
def test_c06_a_gradient_scaler_within_the_step(device):
    def make():
        model = Net(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=2)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step, [model, optimizer]

    both = side_by_side(make)
    for n in range(8):
        x, y = batch(device)
        both(x * (float("inf") if n == 5 else 1.0), y)


def test_c06_a_moving_average_of_the_weights(device):
    def make():
        model, average = Net(device), Net(device).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.1)
            return loss.detach()

        return step, [model, average, optimizer]

    both = side_by_side(make)
    for _ in range(7):
        both(*batch(device))
    assert counts(both)[2] >= 5


@may_run_live
def test_c04_the_loss_of_a_whole_step_is_returned_as_eager_returns_it(device):
    """With requires_grad and a grad_fn: its graph is used up, and a second backward through it says so."""

    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    both = steps(device, step_of=step_of, hold=True)
    for _ in range(8):
        result = both(*batch(device)).recorded
        with pytest.raises(RuntimeError):
            result.backward()


@may_run_live
def test_c05_losses_of_whole_steps_keep_their_values(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    both = steps(device, step_of=step_of)
    losses = []
    for n in range(12):
        if n == 7:
            recordings = pg.stats(both.recorded).recorded
        losses.append(both(*batch(device)))
        for pair in losses:
            assert_same(pair.recorded.detach(), pair.live.detach())
    assert pg.stats(both.recorded).recorded == recordings


@may_run_live
def test_c06_backward_outside_of_the_recorded_forward(device):
    def make():
        model = Net(device, dropout=0.5)
        return lambda x: model(x), model

    both = side_by_side(make)
    for n in range(8):
        pairs = [both(torch.randn(3, 4, device=device)) for _ in range(1 + n % 2)]
        for pair in pairs:
            pair.each(lambda y: y.square().sum().backward())
        both.check()


def test_c06_a_step_whose_batch_size_changes(device):
    both = steps(device, "adamw, fused")
    for size in [5, 5, 5, 2, 2, 2, 5, 2, 5]:
        both(*batch(device, size))


def test_c06_eager_steps_in_between(device):
    """The same model and optimizer, sometimes stepped by plain code: both see each other's changes."""
    both = steps(device, "adamw, fused")

    def eager_step(state):
        model, optimizer = state
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=device)).square().sum().backward()
        optimizer.step()

    for n in range(10):
        both(*batch(device))
        if n % 3 == 2:
            both.change(eager_step)


def test_c06_two_recorded_parts_of_one_step(device):
    """Backward in one recorded function, the optimizer in another; p.grad is what goes between them."""

    def make(part):
        def inner():
            model = Net(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def backward(x, y):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss.detach()

            def update():
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

            wrap = pg.record if part == "recorded" else lambda f, **options: f
            return wrap(backward, warmup=1), wrap(update, warmup=1), model, optimizer

        return inner

    torch.manual_seed(1)
    backward, update, model, optimizer = make("recorded")()
    torch.manual_seed(1)
    live_backward, live_update, live_model, live_optimizer = make("live")()
    for n in range(9):
        x, y = batch(device)
        assert_same(backward(x, y), live_backward(x, y))
        if n % 2:
            update()
            live_update()
        assert_same([model, optimizer], [live_model, live_optimizer])


def test_c06_a_reinforcement_style_update_with_advantages(device):
    """Several epochs over slices of a roll-out in one recorded function, with a target that is held."""

    def make():
        policy, value = nn.Linear(4, 3, device=device), nn.Linear(4, 1, device=device)
        model = nn.ModuleList([policy, value])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

        def update(states, actions, returns):
            with torch.no_grad():
                old = policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
                advantages = returns - value(states)[:, 0]
            for _ in range(2):
                ratio = (policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0] - old).exp()
                loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
                loss = loss + F.mse_loss(value(states)[:, 0], returns)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            return loss.detach(), advantages

        return update, [model, optimizer]

    both = side_by_side(make, hold=True)
    for n in range(7):
        both(torch.randn(8, 4, device=device), torch.randint(0, 3, (8,), device=device), ramp(device, 8, start=n) / 8)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_c06_gradients_of_many_calls_are_added_up_and_dropped(device, warmup):
    """A call that finds gradients and one that finds none are two recordings, which take turns."""

    def run(record):
        torch.manual_seed(0)
        net = nn.Linear(3, 2, device=device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        step = record(lambda x: net(x).pow(2).mean().backward())
        found = []
        for n in range(40):
            step(torch.full((4, 3), n / 40, device=device))
            found.append(net.weight.grad.tolist())
            if n % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return found, step

    (recorded, step), (live, _) = run(lambda f: pg.record(f, warmup=warmup)), run(lambda f: f)
    assert recorded == live
    assert pg.stats(step).recorded <= 3
    assert pg.stats(step).live <= warmup + 1
