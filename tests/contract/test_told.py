"""C5, C6, C8, C9: what belongs to torch's objects is not looked at one by one before each replay, as whoever comes to it is
heard; and whatever is done to it between two replays is noticed before the next, as by looking at all of it.

Each change happens to a recorded training step and to its twin without phonograph. After each step, losses, weights, gradients
and the optimizer's state are the twin's, bit for bit, and what somebody has kept is what the twin has kept."""

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph import reliance
from phonograph.testing import Raised, assert_same
from tests.helpers import may_run_live

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {"adam": ADAM, "sgd": SGD, "fused": partial(torch.optim.AdamW, lr=0.01, fused=True)}


class Run:
    """A model, its optimizer and a training step. `kept` is what somebody keeps beside them."""

    def __init__(self, device, make, record, accumulates=False, layers=2):
        torch.manual_seed(1)
        self.model = nn.Sequential(*[nn.Linear(4, 4, device=device) for _ in range(layers)])
        self.optimizer, self.make, self.kept = make(self.model.parameters()), make, []

        def step(x):
            if not accumulates:
                self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.step = pg.record(step) if record else step

    @property
    def parameters(self):
        return list(self.model.parameters())

    def outcome(self, x):
        try:
            return self.step(x)
        except Exception as error:
            return Raised(error)

    def state(self):
        return (
            [p.detach().clone() for p in self.parameters],
            [None if p.grad is None else p.grad.clone() for p in self.parameters],
            copy.deepcopy(self.optimizer.state_dict()),
            [x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x) for x in self.kept],
        )


class Twins:
    """First the one takes some steps, then the other: what the twin does would be heard as well."""

    def __init__(self, device, make, **options):
        self.device = device
        self.ours, self.live = (Run(device, make, record, **options) for record in (True, False))
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, steps=1):
        batches = [torch.randn(2, 4, generator=self.generator).to(self.device) for _ in range(steps)]
        assert_same([self.ours.outcome(x) for x in batches], [self.live.outcome(x) for x in batches])

    def compare(self):
        assert_same(self.ours.state(), self.live.state())

    def do(self, change):
        change(self.ours), change(self.live)

    def settle(self):
        """Until replays look at nothing."""
        self(8)
        assert pg.stats(self.ours.step).replayed >= 4, pg.explain(self.ours.step)


CHANGES = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


@change
def gradient_is_none(run):
    run.parameters[1].grad = None


@change
def gradient_is_another(run):
    p = run.parameters[0]
    p.grad = torch.ones_like(p)


@change
def gradient_is_zeros(run):
    p = run.parameters[0]
    p.grad = torch.zeros_like(p)


@change
def gradient_is_deleted(run):
    del run.parameters[0].grad


@change
def gradient_is_set_by_name(run):
    setattr(run.parameters[0], "grad", None)  # noqa: B010


@change
def zero_grad_to_none(run):
    run.optimizer.zero_grad(set_to_none=True)


@change
def zero_grad_to_zeros(run):
    run.optimizer.zero_grad(set_to_none=False)


@change
def modules_zero_grad(run):
    run.model.zero_grad()


@change
def live_step(run):
    run.optimizer.step()


@change
def live_backward(run):
    run.model(torch.ones(2, 4, device=run.parameters[0].device)).sum().backward()


@change
def live_backward_without_gradients_before(run):
    run.optimizer.zero_grad()
    live_backward(run)


@change
def live_backward_that_makes_new_gradients(run):
    loss = run.model(torch.ones(2, 4, device=run.parameters[0].device)).square().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)


@change
def live_backward_on_another_thread(run):
    thread = threading.Thread(target=live_backward_without_gradients_before, args=(run,))
    thread.start()
    thread.join()


@change
def gradients_are_clipped(run):
    torch.nn.utils.clip_grad_norm_(run.parameters, 0.01)


@change
def gradient_is_scaled_in_place(run):
    for p in run.parameters:
        p.grad.mul_(3)


@change
def gradient_has_other_memory(run):
    p = run.parameters[0]
    p.grad.data = torch.full_like(p, 2.0)


@change
def gradients_are_kept(run):
    run.kept += [p.grad for p in run.parameters]


@change
def view_of_a_gradient_is_kept(run):
    run.kept.append(run.parameters[0].grad.view(-1)[1:])


@change
def gradient_is_swapped(run):
    a, b = run.parameters[0], nn.Parameter(torch.ones_like(run.parameters[0]))
    torch.utils.swap_tensors(a, b)
    run.model[0].weight.data = run.model[0].weight.data.clone()


@change
def module_goes_to_double_and_back(run):
    run.model.double().float()


@may_run_live
@pytest.mark.parametrize("accumulates", [False, True], ids=["zeroes", "accumulates"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("done", CHANGES.values(), ids=CHANGES)
def test_c08_a_change_between_two_replays_is_noticed(device, done, optimizer, accumulates):
    twins = Twins(device, optimizer, accumulates=accumulates)
    twins.settle()
    twins.do(done)
    twins(3)
    twins.compare()
    twins(6)
    twins.do(done)
    twins(1)
    twins.compare()


@may_run_live
def test_c05_a_gradient_that_was_kept_long_ago_keeps_its_value(device):
    """Nobody comes to gradients any more while it is kept."""
    twins = Twins(device, SGD)
    twins.settle()
    twins.do(gradients_are_kept)
    twins(6)
    twins.compare()
    twins.do(lambda run: run.kept.clear())
    before = pg.stats(twins.ours.step).replayed
    twins(4)
    twins.compare()
    assert pg.stats(twins.ours.step).replayed > before


def test_c06_a_kept_gradient_that_a_step_adds_to_may_get_other_memory_later(device):
    twins = Twins(device, SGD, accumulates=True)
    twins.settle()
    twins.do(gradients_are_kept)
    twins(4)

    def elsewhere(run):
        run.kept[0].data = torch.full_like(run.kept[0], 2.0)

    twins.do(elsewhere)
    twins(3)
    twins.compare()


@may_run_live
def test_c06_a_result_that_is_a_gradient_is_held_by_whoever_keeps_it(device):
    """It comes to them by no attribute."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.ones(3, device=device))

    @pg.record
    def step(x):
        p.grad = None
        (p * x).sum().backward()
        return p.grad

    kept = [step(torch.full((3,), float(i), device=device)) for i in range(8)]
    assert [k.tolist() for k in kept] == [[float(i)] * 3 for i in range(8)]


@may_run_live
def test_c06_a_plain_tensor_that_is_optimized_has_no_attribute_that_tells(device):
    """`torch.Tensor.grad` is torch's own: gradients of such leaves are looked at each time."""

    def make(record):
        w = torch.ones(3, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            (w * x).square().sum().backward()
            optimizer.step()

        return w, pg.record(step) if record else step

    (ours, recorded), (theirs, live) = make(True), make(False)
    kept = []
    for i in range(12):
        x = torch.full((3,), 0.1 * i, device=device)
        recorded(x), live(x)
        assert_same(ours.grad, theirs.grad)
        if i == 7:
            kept.append((ours.grad, ours.grad.clone()))
        if i == 9:
            ours.grad = theirs.grad = None
    assert_same(*kept[0])
    assert_same(ours.detach(), theirs.detach())
    assert pg.stats(recorded).replayed > 5


class Looks:
    """Counts how many values replays look at."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("gradient", "use_count"):
            monkeypatch.setattr(reliance, name, self._counting(getattr(reliance, name)))

    def _counting(self, function):
        def counting(*args):
            self.count += 1
            return function(*args)

        return counting

    def of(self, call):
        self.count = 0
        call()
        return self.count


def test_c08_how_much_a_replay_looks_at_does_not_grow_with_parameters(device, monkeypatch):
    found = {}
    for layers in (1, 10, 40):
        with monkeypatch.context() as patched:
            looks = Looks(patched)
            twins = Twins(device, SGD, layers=layers)
            twins.settle()
            x = torch.ones(2, 4, device=device)
            for _ in range(3):
                twins.ours.step(x)
            found[layers] = looks.of(lambda: twins.ours.step(x))
    assert len({*found.values()}) == 1, found
