"""A gradient scaler skips steps of an optimizer where a gradient is infinite: without the host, and as in eager."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, reasons

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
STEPS = 3
INFINITE = (6, 9, 10)


class Recipe:
    """Mixed precision with a scaler, after PyTorch's recipe."""

    def __init__(self, device, optimizer, clips=True, scale=2.0**8):
        torch.manual_seed(0)
        self.device, self.clips = device, clips
        self.dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3)).to(device)
        self.opt = optimizer(self.net.parameters())
        self.scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=4)

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast(self.device.type, dtype=self.dtype):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        if self.clips:
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.detach()

    def state(self):
        states = [copy.deepcopy(x.state_dict()) for x in (self.net, self.opt)]
        return states, self.scaler.state_dict(), torch.rand(2, device=self.device)


@contextmanager
def no_host_reads(device):
    """Whoever waits for the GPU in the block gets an error."""
    try:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def trained(recipe, step, infinite, between, rows, waits):
    """The losses and states of a training loop, in which some batches have infinite gradients. Once warm, nobody `waits`."""
    torch.manual_seed(1)
    found = []
    for n in range(14):
        x, y = torch.randn(*rows, 6, device=recipe.device), torch.randint(0, 3, rows, device=recipe.device)
        if n in infinite:
            x.view(-1)[0] = float("inf")
        with nullcontext() if waits or n < 4 else no_host_reads(recipe.device):
            found.append(step(x, y))
        between(recipe, n)
        found.append(recipe.state() if n in (7, 11) else None)
    return found, recipe.state()


def side_by_side(make, replays, infinite=INFINITE, between=lambda recipe, n: None, waits=True, steps=None, **options):
    """Assert that a recorded loop gives what the plain one gives, and how many calls are replays."""
    plain, ours = make(), make()
    recorded = pg.record(ours.step, keep="always", steps=steps, **options)
    rows = (8,) if steps is None else (steps, 8)

    def loop(x, y):
        return plain.step(x, y) if steps is None else torch.stack([plain.step(x[i], y[i]) for i in range(steps)])

    live = trained(plain, loop, infinite, between, rows, waits=True)
    found = trained(ours, recorded, infinite, between, rows, waits)
    assert repr(found[0]) == repr(live[0])  # losses of infinite batches are NaN
    assert_same(found[1], live[1])
    assert pg.stats(recorded).replayed == replays, reasons(recorded)
    return recorded, plain, ours


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd, loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
ON_THE_DEVICE = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, capturable=True),
}


@pytest.mark.parametrize("fallback", ["live", "split"])
@pytest.mark.parametrize("clips", [True, False], ids=["unscaled", "as it is"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_c06_steps_are_skipped_on_the_device(device, optimizer, clips, fallback):
    recorded, _, _ = side_by_side(lambda: Recipe(device, optimizer, clips), replays=13, waits=False, fallback=fallback)
    assert pg.stats(recorded).recorded == 1


@pytest.mark.parametrize("optimizer", ON_THE_DEVICE.values(), ids=ON_THE_DEVICE)
def test_c06_counts_on_the_device_are_those_of_steps_taken(device, optimizer):
    if device.type == "cpu":
        pytest.skip("capturable optimizers are for GPUs")
    _, _, ours = side_by_side(lambda: Recipe(device, optimizer), replays=13, waits=False)
    assert {s["step"].item() for s in ours.opt.state.values()} == {14.0 - len(INFINITE)}


@may_run_live
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_c11_counts_on_the_host_make_the_call_run_live(device, kind):
    """They have to be right when the call returns, and only the device knows."""
    recorded, plain, ours = side_by_side(lambda: Recipe(device, lambda p: kind(p, lr=0.01)), replays=0, fallback="live")
    assert "it keeps its step count on the host" in reasons(recorded)
    for each in (plain, ours):
        assert {s["step"].item() for s in each.opt.state.values()} == {14.0 - len(INFINITE)}


@pytest.mark.parametrize("of", ["lr", "weight_decay", "momentum"])
def test_c09_hyperparameters_of_steps_that_may_be_skipped(device, of):
    def between(recipe, n):
        recipe.opt.param_groups[0][of] = 0.5 / (n // 6 + 2)

    side_by_side(lambda: Recipe(device, OPTIMIZERS["sgd, foreach"]), replays=pytest.approx(12, abs=2), between=between)


def test_c08_a_scaler_and_an_optimizer_are_loaded(device):
    def between(recipe, n):
        if n == 5:
            recipe.opt.load_state_dict(copy.deepcopy(recipe.opt.state_dict()))
        if n == 8:
            recipe.scaler.load_state_dict({**recipe.scaler.state_dict(), "scale": 4.0})

    side_by_side(lambda: Recipe(device, OPTIMIZERS["nesterov"]), replays=pytest.approx(10, abs=2), between=between)


def test_c06_several_steps_in_a_call(device):
    side_by_side(lambda: Recipe(device, OPTIMIZERS["nesterov"]), replays=13, waits=False, steps=STEPS)


@pytest.mark.parametrize("options", [{"verify": 2}, {"audit": 1}], ids=["verified", "audited"])
def test_c10_skipped_steps_are_looked_at(device, options):
    side_by_side(lambda: Recipe(device, OPTIMIZERS["nesterov"]), replays=13, **options)


@may_run_live
def test_c06_the_first_step_is_skipped(device):
    """A momentum begins with the first step that is taken: such a call runs live."""
    side_by_side(lambda: Recipe(device, OPTIMIZERS["nesterov"]), replays=11, infinite=(0, 1, 8))


class Scheduled(Recipe):
    """A scheduler notes that the optimizer has stepped."""

    def __init__(self, device, optimizer):
        super().__init__(device, optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 3, 0.5)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("infinite", [INFINITE, (0, 5)], ids=["later", "first"])
def test_c09_a_scheduler(device, infinite):
    make = lambda: Scheduled(device, OPTIMIZERS["sgd"])  # noqa: E731
    side_by_side(make, pytest.approx(12, abs=1), infinite=infinite, between=lambda recipe, n: recipe.scheduler.step())


class Two(Recipe):
    """Two optimizers, of which each is skipped for itself."""

    def __init__(self, device):
        super().__init__(device, OPTIMIZERS["sgd"])
        first, *others = self.net.parameters()
        self.opt, self.other = torch.optim.SGD(others, lr=0.1, momentum=0.9), torch.optim.SGD([first], lr=0.05)

    def step(self, x, y):
        self.opt.zero_grad()
        self.other.zero_grad()
        with torch.autocast(self.device.type, dtype=self.dtype):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss + x[0, 0] * 0).backward()
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.step(self.other)
        self.scaler.update()
        return loss.detach()


def test_c06_two_optimizers(device):
    side_by_side(lambda: Two(device), replays=13, waits=False)


class Counting(torch.optim.SGD):
    """An optimizer that counts on the host."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.taken = 0

    def step(self):
        self.taken += 1
        super().step()


class Telling(torch.optim.SGD):
    def step(self):
        super().step()
        return 1.0


def hooked(parameters):
    opt, taken = torch.optim.SGD(parameters, lr=0.1), []
    opt.register_step_post_hook(lambda *_: taken.append(1))
    return opt


@may_run_live
@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [(Counting, "changes optimizer.taken"), (lambda p: Telling(p, lr=0.1), "that returns a value"), (hooked, "changes taken")],
    ids=["counts", "returns", "hook"],
)
def test_c11_steps_with_effects_run_live(device, optimizer, reason):
    recorded, plain, ours = side_by_side(lambda: Recipe(device, optimizer), replays=0)
    assert reason in reasons(recorded)
    assert getattr(plain.opt, "taken", 0) == getattr(ours.opt, "taken", 0)


@may_run_live
def test_c11_with_split_other_steps_are_decided_by_the_host(device):
    make = lambda: Recipe(device, lambda p: Telling(p, lr=0.1))  # noqa: E731
    side_by_side(make, replays=pytest.approx(10, abs=3), fallback="split")


def test_c12_scalers_are_torchs_own_after_a_capture(device):
    plain = torch.amp.GradScaler._maybe_opt_step
    side_by_side(lambda: Recipe(device, OPTIMIZERS["sgd"]), replays=13)
    assert torch.amp.GradScaler._maybe_opt_step is plain
