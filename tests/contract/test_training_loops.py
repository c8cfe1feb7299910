"""C6, C8, C9: training loops as people write them, and everything of torch's that goes with an optimizer.

Each loop is recorded in both ways, beside a twin without phonograph: the whole step, or the model with what the optimizer
does recorded beside it while loss and loop stay live. After each step, losses, weights, gradients and the optimizer's state
are the twin's, bit for bit."""

import copy
import inspect
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

import phonograph as pg
from phonograph.testing import Raised, assert_no_new_recordings, assert_same
from tests.helpers import may_run_live, reasons

WHOLE, PAIR, ALONE = "whole step", "model and optimizer", "optimizer"
both_ways = pytest.mark.parametrize("way", [WHOLE, PAIR])

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FUSED = partial(torch.optim.AdamW, lr=0.01, fused=True)
ADAM = partial(torch.optim.Adam, lr=0.01)  # which keeps its step counts on the host
COMMON = {"sgd": SGD, "adamw, fused": FUSED, "adam": ADAM}
common = pytest.mark.parametrize("optimizer", COMMON.values(), ids=COMMON)


class Net(nn.Module):
    """Two heads, of which a call takes one; only matrices, as Muon wants them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6, bias=False)
        self.heads = nn.ModuleList([nn.Linear(6, 3, bias=False) for _ in range(2)])

    def forward(self, x, head=0):
        return self.heads[head](torch.tanh(self.body(x)))


def same(function):
    return function


class Run:
    """One of the two: a model and its optimizer, and `step(*batch)` as `loop` makes it.

    `loop(run, model, beside)` calls `model`, which may be recorded, and what it gives to `beside` may be recorded as well.
    """

    def __init__(self, device, optimizer, loop, way, make=Net, schedule=None):
        torch.manual_seed(3)
        self.device, self.model, self.recorded = device, make().to(device), []
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = schedule and schedule(self.optimizer)  # before anybody takes `optimizer.step`, which it wraps
        model, beside, whole = [self._record if it in way else same for it in ("model", "optimizer", "whole")]
        self.step = whole(loop(self, model(self.model), beside))

    def _record(self, function):
        self.recorded.append(pg.record(function, warmup=1))
        return self.recorded[-1]

    def outcome(self, batch):
        try:
            return self.step(*batch)
        except Exception as error:
            return Raised(error)


class Twins:
    """A `Run` that is recorded, and its twin in plain PyTorch."""

    def __init__(self, device, way, optimizer, loop=None, **options):
        self.ours, self.live = (Run(device, optimizer, loop or usual, w, **options) for w in (way, "live"))

    def __call__(self, *batch):
        """A step of each, compared; returns what ours gave."""
        torch.manual_seed(5)
        wanted = self.live.outcome(batch)
        torch.manual_seed(5)
        found = self.ours.outcome(batch)
        assert_same(found, wanted, "result")
        self.check()
        return found

    def check(self):
        for name in ("model", "optimizer", "extra"):
            assert_same(getattr(self.ours, name, None), getattr(self.live, name, None), name)

    def train(self, *numbers):
        for n in numbers:
            self(*batch(self.ours.device, n))

    def each(self, change):
        for run in (self.ours, self.live):
            torch.manual_seed(7)
            change(run)

    @property
    def step_stats(self):
        """Of what contains the optimizer's step."""
        return pg.stats(self.ours.recorded[-1])

    def assert_recorded(self, replays=3, *, refusals=False):
        for one in self.ours.recorded:
            stats = pg.stats(one)
            assert stats.replayed >= replays, reasons(one)
            assert refusals or not stats.refusals, reasons(one)

    def assert_live(self, reason):
        """What contains the optimizer's step ran live each time, and says why; the model beside it, if any, did not."""
        assert self.step_stats.replayed == 0
        assert reason in reasons(self.ours.recorded[-1])
        for model in self.ours.recorded[:-1]:
            assert pg.stats(model).replayed >= 3, reasons(model)


def usual(run, model, beside):
    update = beside(run.optimizer.step)

    def step(x, y):
        run.optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update()
        return loss.detach()

    return step


def updating(update_of):
    """A loop whose update, `update_of(run)`, is more than the optimizer's step; a step returns what it returned, too."""

    def loop(run, model, beside):
        update = beside(update_of(run))

        def step(x, y):
            run.optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach(), update()

        return step

    return loop


def batch(device, n, rows=5):
    generator = torch.Generator().manual_seed(100 + n)
    x, y = torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return x.to(device), y.to(device)


# ---------------------------------------------------------------------------------------------------
# C6: every optimizer

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
VARIANTS = {
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "maximize": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "centered": {"centered": True},
    "weight decay": {"weight_decay": 0.1},
    "decoupled weight decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "decay of the rate": {"lr_decay": 0.1},
}
DENSE = [name for name in KINDS if name not in ("LBFGS", "SparseAdam")]


def settings_of(kind):
    return set(inspect.signature(KINDS[kind]).parameters) - {"params"}


def variants():
    for kind in DENSE:
        yield from (pytest.param(kind, {}, way, id=f"{kind}-{way}") for way in (WHOLE, PAIR))
        for name, options in VARIANTS.items():
            if options.keys() <= settings_of(kind):
                yield pytest.param(kind, options, WHOLE, id=f"{kind}, {name}")


def why_live(kind, options):
    """Why an optimizer's step cannot be recorded, if so."""
    reading = {"ASGD": "reads its step count on the host", "Adafactor": "reads norms of weights on the host"}
    return None if options.get("capturable") else reading.get(kind)


@may_run_live
@pytest.mark.parametrize(("kind", "options", "way"), list(variants()))
def test_c06_every_optimizer(device, kind, options, way):
    if options.get("capturable") and device.type == "cpu":
        pytest.skip("torch has no capturable optimizers on the CPU")
    twins = Twins(device, way, partial(KINDS[kind], **options))
    first = twins(*batch(device, 0))
    if isinstance(first, Raised):
        pytest.skip(f"torch cannot: {first.error}")
    twins.train(*range(1, 4))
    recordings = twins.step_stats.recorded
    for n, rate in enumerate([0.05, 0.03, 0.03]):
        twins.each(lambda run, rate=rate: run.optimizer.param_groups[0].update(lr=rate))
        twins.train(4 + n)
    if why_live(kind, options):
        twins.assert_live(why_live(kind, options))
    else:
        twins.assert_recorded()
        decides = 1 if kind == "RAdam" else 0  # in its sixth step, by how many there were
        assert kind == "Rprop" or twins.step_stats.recorded <= recordings + decides, "the rate is followed"


@may_run_live
@pytest.mark.parametrize("way", [WHOLE, ALONE])
@pytest.mark.parametrize("kind", DENSE)
def test_c06_every_optimizer_that_has_stepped_before(device, way, kind):
    """Its state is where plain steps have left it: counts on the host, for most."""
    twins = Twins(device, way, KINDS[kind], taking_a_head)
    twins.each(lambda run: step_plainly(run, 2))
    for n in range(5):
        twins(*batch(device, n), 0, False)
    if not why_live(kind, {}):
        twins.assert_recorded()


def step_plainly(run, times):
    for n in range(times):
        x, y = batch(run.device, 50 + n)
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()


def searching(run, model, beside):
    """A step of LBFGS, which calls its closure as often as it likes."""
    update = beside(run.optimizer.step)

    def step(x, y):
        def closure():
            run.optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return update(closure).detach()

    return step


@may_run_live
@both_ways
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_c11_lbfgs_runs_live(device, way, search):
    twins = Twins(device, way, partial(torch.optim.LBFGS, max_iter=4, line_search_fn=search), searching)
    twins.train(*range(4))
    twins.assert_live("on the host")


@may_run_live
@both_ways
def test_c11_sparse_gradients_run_live(device, way):
    def loop(run, model, beside):
        update = beside(run.optimizer.step)

        def step(rows):
            run.optimizer.zero_grad()
            loss = model(rows).square().sum()
            loss.backward()
            update()
            return loss.detach()

        return step

    twins = Twins(device, way, torch.optim.SparseAdam, loop, make=lambda: nn.Embedding(6, 3, sparse=True))
    for n in range(6):
        twins(torch.tensor([n % 6, 2, 3], device=device))
    assert twins.step_stats.replayed == 0
    assert twins.step_stats.refusals


@may_run_live
@both_ways
@pytest.mark.parametrize("kind", ["SparseAdam", "Adam, differentiable"])
def test_c13_optimizers_that_refuse_ordinary_weights(device, way, kind):
    make = torch.optim.SparseAdam if kind == "SparseAdam" else partial(torch.optim.Adam, differentiable=True)
    twins = Twins(device, way, make)
    for n in range(4):
        assert isinstance(twins(*batch(device, n)), Raised)


# ---------------------------------------------------------------------------------------------------
# C9: every hyper-parameter

CHANGED = {
    "lr": 0.05, "betas": (0.5, 0.7), "eps": 1e-2, "weight_decay": 0.2, "momentum": 0.5, "dampening": 0.25, "rho": 0.5,
    "lr_decay": 0.5, "initial_accumulator_value": 1.0, "alpha": 0.5, "lambd": 0.1, "t0": 2.0, "etas": (0.25, 2.0),
    "step_sizes": (1e-3, 1e-2), "momentum_decay": 0.5, "beta2_decay": -0.5, "d": 0.5, "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 2, "adjust_lr_fn": "match_rms_adamw", "nesterov": True, "amsgrad": True, "maximize": True, "centered": True,
    "foreach": True, "fused": True, "capturable": True, "differentiable": True, "decoupled_weight_decay": True,
}  # fmt: skip


def hyper_parameters():
    """(class, options, key) for each class and key: fused as well where there is such a kernel."""
    for kind in DENSE:
        for options in ({}, {"fused": True}) if "fused" in settings_of(kind) else ({},):
            for key in sorted(settings_of(kind) - options.keys()):
                yield pytest.param(kind, options, key, id=" ".join([kind, *options, key]))


@may_run_live
@pytest.mark.parametrize(("kind", "options", "key"), list(hyper_parameters()))
def test_c09_every_hyper_parameter_there_and_back(device, kind, options, key):
    """Followed or noticed: set to another value between two steps, and set back later."""

    def make(_):
        torch.manual_seed(3)
        weights = [nn.Parameter(torch.randn(3, 2, device=device)) for _ in range(2)]
        for p in weights:
            p.grad = torch.zeros_like(p)
        used = {"momentum": 0.9} if key in ("dampening", "nesterov") and "momentum" in settings_of(kind) else {}
        return weights, KINDS[kind](weights, **options, **used)

    (weights, optimizer), (twins_weights, twin) = map(make, range(2))
    step, before = pg.record(optimizer.step, warmup=1), optimizer.param_groups[0][key]
    for n in range(9):
        if n in (4, 6):
            for one in (optimizer, twin):
                one.param_groups[0][key] = CHANGED[key] if n == 4 else before
        for p, q in zip(weights, twins_weights, strict=True):
            p.grad.normal_()
            q.grad.copy_(p.grad)
        wanted = attempt(twin.step)
        if isinstance(wanted, Raised) and n == 0:
            pytest.skip(f"torch cannot: {wanted.error}")
        assert_same(attempt(step), wanted)
        assert_same([weights, optimizer], [twins_weights, twin])
    if why_live(kind, options) is None:
        assert pg.stats(step).replayed >= 2, reasons(step)


@pytest.mark.parametrize("first", ["has one", "has none"])
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1), FUSED], ids=["sgd", "adamw"])
def test_c08_the_gradient_of_a_frozen_parameter_comes_and_goes(device, optimizer, first):
    """An optimizer steps wherever there is a gradient."""
    weights, twins = ([nn.Parameter(torch.ones(3, device=device)) for _ in range(2)] for _ in range(2))
    ours, theirs = optimizer(weights), optimizer(twins)
    step = pg.record(ours.step, warmup=1)
    for n in range(12):
        for some in (weights, twins):
            some[0].requires_grad_(False)
            there = (n // 4 % 2 == 0) is (first == "has one")
            for p, wanted in zip(some, (there, True), strict=True):
                p.grad = (torch.full_like(p, 0.5) if p.grad is None else p.grad) if wanted else None
        theirs.step()
        step()
        assert_same([weights, ours], [twins, theirs])
    assert pg.stats(step).replayed >= 4, reasons(step)


def attempt(function):
    try:
        return function()
    except Exception as error:
        return Raised(error)


@both_ways
@common
def test_c09_groups_of_parameters_each_with_its_own_settings(device, way, optimizer):
    def in_groups(parameters):
        body, *heads = parameters
        return optimizer([{"params": [body], "weight_decay": 0.1}, {"params": heads, "lr": 0.02, "weight_decay": 0.0}])

    twins = Twins(device, way, in_groups)
    twins.train(*range(4))
    with assert_no_new_recordings(*twins.ours.recorded):
        for n in range(4):
            twins.each(lambda run, n=n: run.optimizer.param_groups[n % 2].update(lr=0.05 / (n + 1)))
            twins.train(n)
    twins.assert_recorded(5)


@both_ways
@pytest.mark.parametrize("optimizer", [
    partial(torch.optim.AdamW, fused=True), partial(torch.optim.SGD, fused=True),
], ids=["adamw, fused", "sgd, fused"])  # fmt: skip
def test_c09_a_rate_that_is_a_tensor_on_the_device(device, way, optimizer):
    """It is read where it lies: filled by hand or by a scheduler, replaced, and replaced by a number."""
    twins = Twins(device, way, lambda parameters: optimizer(parameters, lr=torch.tensor(0.1, device=device)),
                  schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.5))  # fmt: skip
    twins.train(*range(5))
    with assert_no_new_recordings(*twins.ours.recorded):
        twins.each(lambda run: run.optimizer.param_groups[0]["lr"].fill_(0.02))
        twins.train(5)
        for n in range(4):
            twins.train(n)
            twins.each(lambda run: run.scheduler.step())
    twins.each(lambda run: run.optimizer.param_groups[0].update(lr=torch.tensor(0.3, device=device)))
    twins.train(*range(3))
    twins.each(lambda run: run.optimizer.param_groups[0].update(lr=0.03))
    twins.train(*range(3))
    twins.assert_recorded(8)


# ---------------------------------------------------------------------------------------------------
# C9: every scheduler

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 6)], [3]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 12, cycle_momentum=False),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=4),
}


def test_c09_the_schedulers_tested_are_all_that_torch_has():
    bases = {"LRScheduler"}
    assert set(lr_scheduler.__all__) - bases <= SCHEDULERS.keys()


def stepping(scheduler, loss):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_c09_every_scheduler_beside_the_step(device, make):
    """A replay follows the rate: nothing is recorded again."""
    twins = Twins(device, PAIR, FUSED, schedule=make)
    for n in range(9):
        recordings = [pg.stats(one).recorded for one in twins.ours.recorded]
        loss = twins(*batch(device, n)).item()
        assert n < 4 or recordings == [pg.stats(one).recorded for one in twins.ours.recorded], "recorded again"
        twins.each(lambda run: stepping(run.scheduler, loss))
    twins.assert_recorded(5)


@pytest.mark.parametrize("optimizer", [FUSED, torch.optim.LBFGS], ids=["recorded", "live"])
def test_c09_a_scheduler_made_after_the_step_was_recorded(device, optimizer):
    """It has `optimizer.step` note that it was called, and warns where nothing was noted."""
    weight = nn.Parameter(torch.ones(3, device=device))
    made = optimizer([weight])
    step = pg.record(made.step)
    scheduler = lr_scheduler.StepLR(made, 2)
    weight.grad = torch.ones(3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        for _ in range(4):
            step(lambda: 0.0) if optimizer is torch.optim.LBFGS else step()
            scheduler.step()


CYCLED = {
    name: partial(getattr(torch.optim, name), **options)
    for name, options in {
        "SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}, "Muon": {}, "Adam": {}, "AdamW": {"fused": True}, "Adamax": {},
        "NAdam": {}, "RAdam": {},
    }.items() if name in KINDS
}  # fmt: skip


@both_ways
@pytest.mark.parametrize("optimizer", CYCLED.values(), ids=CYCLED)
def test_c09_a_scheduler_that_cycles_momentum(device, way, optimizer):
    """Momentum, or the first beta, is another one in each step; followed like the rate."""
    twins = Twins(device, way, optimizer, schedule=lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20))
    decides = optimizer is CYCLED["RAdam"]  # by its beta and how often it has stepped
    for n in range(10):
        recordings = twins.step_stats.recorded
        twins(*batch(device, n))
        assert n < 4 or decides or recordings == twins.step_stats.recorded, "recorded again"
        twins.each(lambda run: run.scheduler.step())
    twins.assert_recorded(5)


@both_ways
def test_c09_momentum_off_and_on(device, way):
    """Whether there is any decides which operators run."""
    twins = Twins(device, way, SGD)
    for n in range(14):
        if n >= 4:
            twins.each(lambda run, n=n: run.optimizer.param_groups[0].update(momentum=[0.9, 0.0, 0.5][n % 3]))
        twins.train(n)
    twins.assert_recorded(8)


@both_ways
def test_c09_betas_in_a_list_and_in_a_tuple(device, way):
    twins = Twins(device, way, FUSED)
    for n in range(10):
        if n >= 4:
            betas = (tuple, list)[n // 3 % 2]([0.9, 0.9 + n / 100])
            twins.each(lambda run, betas=betas: run.optimizer.param_groups[0].update(betas=betas))
        twins.train(n)
    twins.assert_recorded(5)


def by_the_group(run):
    (group,) = run.optimizer.param_groups
    return lambda: group["momentum"]


def by_the_optimizer(run):
    return lambda: run.optimizer.param_groups[0]["momentum"]


@may_run_live
@both_ways
@pytest.mark.parametrize("reading", [by_the_group, by_the_optimizer])
def test_c09_momentum_that_the_function_reads_itself(device, way, reading):
    def update_of(run):
        read = reading(run)

        def update():
            run.optimizer.step()
            with torch.no_grad():
                run.model.body.weight.mul_(1 - 0.01 * read())

        return update

    twins = Twins(device, way, SGD, updating(update_of))
    for n in range(9):
        if n in (4, 7):
            twins.each(lambda run, n=n: run.optimizer.param_groups[0].update(momentum=2 / n))
        twins.train(n)


@may_run_live
@both_ways
def test_c09_momentum_that_the_function_sets_itself(device, way):
    """With the rate given up as well, or followed still: whichever, it is eager's."""

    def update_of(run):
        (group,) = run.optimizer.param_groups

        def update():
            group["momentum"] = 0.5
            run.optimizer.step()
            group["momentum"] = 0.9

        return update

    twins = Twins(device, way, SGD, updating(update_of))
    for n in range(9):
        twins.each(lambda run, n=n: run.optimizer.param_groups[0].update(lr=0.1 / (1 + n // 3)))
        twins.train(n)


# ---------------------------------------------------------------------------------------------------
# C8: what is replaced between two steps


@both_ways
@common
def test_c08_resuming_from_a_checkpoint(device, way, optimizer):
    """Model and optimizer, saved and loaded into the same objects, twice."""
    twins, saved = Twins(device, way, optimizer), {}
    for n in range(14):
        if n == 3:
            twins.each(lambda run: saved.update({run: copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])}))
        if n in (6, 10):
            twins.each(lambda run: (run.model.load_state_dict(saved[run][0]), run.optimizer.load_state_dict(saved[run][1])))
        twins.train(n)
    twins.assert_recorded(5)


@both_ways
@common
def test_c08_a_group_added_later(device, way, optimizer):
    """The body is thawed after some steps: its weights come to the optimizer in a group of their own."""
    twins = Twins(device, way, lambda parameters: optimizer(list(parameters)[1:]))
    twins.train(*range(4))
    twins.each(lambda run: run.optimizer.add_param_group({"params": [run.model.body.weight], "lr": 0.5}))
    twins.train(*range(4, 9))
    twins.each(lambda run: run.optimizer.param_groups[1].update(lr=0.05))
    twins.train(*range(9, 12))
    twins.assert_recorded(5)


@both_ways
@common
def test_c08_another_optimizer_state_for_the_same_weights(device, way, optimizer):
    """The moments are multiplied in place, dropped, and moved to new memory."""
    twins = Twins(device, way, optimizer)
    twins.train(*range(4))
    for change in (halve, lambda run: run.optimizer.state.clear(), move):
        twins.each(change)
        twins.train(*range(3))
    twins.assert_recorded(5)


def halve(run):
    for state in run.optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                value.mul_(0.5)


def move(run):
    for state in run.optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items() if value is not None})


# ---------------------------------------------------------------------------------------------------
# C6: gradients between backward and step


def taking_a_head(run, model, beside):
    update = beside(run.optimizer.step)

    def step(x, y, head, to_none=True):
        run.optimizer.zero_grad(set_to_none=to_none)
        loss = F.cross_entropy(model(x, head), y)
        loss.backward()
        update()
        return loss.detach()

    return step


@may_run_live
@both_ways
@common
@pytest.mark.parametrize("to_none", [True, False])
def test_c06_weights_without_a_gradient(device, way, optimizer, to_none):
    """A step takes one of two heads; the optimizer leaves the weights of the other alone, or decays them by zeros. It makes its
    state for them when it meets them: a call that does so may have to run live."""
    twins = Twins(device, way, optimizer, taking_a_head)
    for n, head in enumerate([0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0]):
        twins(*batch(device, n), head, to_none)
    twins.assert_recorded(3, refusals=True)


@both_ways
@common
def test_c06_zero_grad_one_way_and_the_other(device, way, optimizer):
    twins = Twins(device, way, optimizer, taking_a_head)
    for n, to_none in enumerate([True, True, True, False, False, False, True, False, True, False]):
        twins(*batch(device, n), 0, to_none)
    twins.assert_recorded(3)


@common
def test_c06_only_the_optimizer_recorded(device, optimizer):
    """The gradients of a live model stay in their place where they are zeroed."""
    twins = Twins(device, ALONE, optimizer, taking_a_head)
    for n in range(8):
        twins(*batch(device, n), 0, False)
    twins.assert_recorded()


@may_run_live
def test_c11_only_the_optimizer_recorded_and_gradients_in_new_places(device):
    """Where they are dropped, new ones may lie anywhere."""
    twins, held = Twins(device, ALONE, SGD, taking_a_head), []
    for n in range(24):
        held.append(twins.ours.model.body.weight.grad)
        twins(*batch(device, n), 0, True)
    assert "a .grad attribute changes from call to call" in reasons(twins.ours.recorded[-1])
    assert "read at" not in pg.explain(twins.ours.recorded[-1])  # no line would be the one
    assert "zero_grad(set_to_none=False)" in reasons(twins.ours.recorded[-1])


@both_ways
@common
def test_c06_accumulation_over_several_calls(device, way, optimizer):
    """The optimizer steps after each third batch; the last of an epoch after one."""

    def loop(run, model, beside):
        def learn(x, y):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            return loss.detach()

        update = beside(run.optimizer.step)

        def step(x, y, now):
            loss = learn(x, y)
            if now:
                update()
                run.optimizer.zero_grad()
            return loss

        return step

    twins = Twins(device, way, optimizer, loop)
    for n in range(24):
        twins(*batch(device, n), n % 3 == 2 or n % 8 == 7)
    twins.assert_recorded(4)


CLIPS = {
    "norm": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1),
    "norm, one by one": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, foreach=False),
    "largest": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, norm_type=float("inf")),
    "value": lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 0.01),
    "in two parts": lambda run: in_two_parts(list(run.model.parameters())),
}


def in_two_parts(parameters):
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return norm


@both_ways
@pytest.mark.parametrize("where", ["recorded", "live"])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_c06_clipping(device, way, clip, where):
    """In what is recorded beside the model, or in the loop; the norm of each step keeps its value."""
    if where == "live":

        def loop(run, model, beside):
            update = beside(run.optimizer.step)

            def step(x, y):
                run.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                norm = clip(run)
                update()
                return norm

            return step
    else:

        def loop(run, model, beside):
            update = beside(lambda: (clip(run), run.optimizer.step())[0])

            def step(x, y):
                run.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                return update()

            return step

    twins = Twins(device, way, FUSED, loop)
    kept = [(norm, copy.deepcopy(norm)) for norm in (twins(*batch(device, n)) for n in range(8))]
    for norm, then in kept:
        assert_same(norm, then)
    twins.assert_recorded(5)


@may_run_live
@both_ways
def test_c11_clipping_that_raises_where_the_norm_is_not_finite(device, way):
    """It asks for the norm on the host."""

    def update_of(run):
        def update():
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, error_if_nonfinite=True)
            run.optimizer.step()

        return update

    twins = Twins(device, way, FUSED, updating(update_of))
    twins.train(*range(4))
    x, y = batch(device, 4)
    assert isinstance(twins(x * float("nan"), y), Raised)
    twins.train(5, 6)
    if device.type == "cuda":  # there it would come when the optimizer has made its step
        twins.assert_live("on the host")
    else:
        twins.assert_recorded(5)


@both_ways
def test_c06_an_optimizer_for_each_weight_that_steps_in_the_backward(device, way):
    """torch's tutorial on it: a hook steps as soon as the gradient is there, and drops it."""

    def loop(run, model, beside):
        optimizers = {p: torch.optim.AdamW([p], lr=0.01, fused=True) for p in run.model.parameters()}
        run.extra = list(optimizers.values())

        def in_backward(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in run.model.parameters():
            p.register_post_accumulate_grad_hook(in_backward)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return step

    twins = Twins(device, way, SGD, loop)
    twins.train(*range(8))
    twins.assert_recorded(5)


# ---------------------------------------------------------------------------------------------------
# C6: averages of the weights


def by_hand(run):
    run.extra = copy.deepcopy(run.model).requires_grad_(False)
    averages, weights = list(run.extra.parameters()), list(run.model.parameters())

    def average():
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 0.1)

    return average


@both_ways
@common
def test_c06_an_average_by_hand(device, way, optimizer):
    def update_of(run):
        average = by_hand(run)
        return lambda: (run.optimizer.step(), average())[0]

    twins = Twins(device, way, optimizer, updating(update_of))
    twins.train(*range(8))
    twins.assert_recorded(5)


AVERAGES = {
    "equal weights": {},
    "exponential": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "buffers as well": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


def normed():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


@both_ways
@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
def test_c06_an_averaged_model_in_the_loop(device, way, options):
    """Outside of what is recorded; in between, it is evaluated."""
    twins = Twins(device, way, SGD, make=normed)
    twins.each(lambda run: setattr(run, "extra", swa_utils.AveragedModel(run.model, **options)))
    for n in range(8):
        twins.train(n)
        twins.each(lambda run: run.extra.update_parameters(run.model))
        if n > 4:
            x, _ = batch(device, n)
            assert_same(twins.ours.extra.eval()(x), twins.live.extra.eval()(x))
    twins.assert_recorded(5)


@may_run_live
@both_ways
def test_c06_statistics_of_batch_norm_taken_anew(device, way):
    """`update_bn` sets momentum to None meanwhile, and calls the very model that is recorded."""
    twins = Twins(device, way, SGD, make=normed)
    for n in range(10):
        if n in (4, 7):
            twins.each(lambda run: swa_utils.update_bn([batch(run.device, i)[0] for i in range(3)], run.model))
        twins.train(n)
    twins.assert_recorded(4, refusals=True)


@may_run_live
@both_ways
def test_c11_an_averaged_model_in_what_is_recorded(device, way):
    """`update_parameters` asks on the host how many there were."""

    def update_of(run):
        run.extra = swa_utils.AveragedModel(run.model, run.device, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        return lambda: (run.optimizer.step(), run.extra.update_parameters(run.model))[0]

    twins = Twins(device, way, SGD, updating(update_of))
    twins.train(*range(5))
    twins.assert_live("on the host")


# ---------------------------------------------------------------------------------------------------
# C6: gradient scalers. Gradients overflow in some steps: those are skipped, the scale backs off, and grows again.


def scaled(clipped=False, update_too=True):
    def loop(run, model, beside):
        run.scaler = torch.amp.GradScaler(run.device.type, init_scale=16.0, growth_interval=3)

        def update():
            if clipped:
                run.scaler.unscale_(run.optimizer)
                nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.scaler.step(run.optimizer)
            if update_too:
                run.scaler.update()

        update = beside(update)

        def step(x, y):
            run.optimizer.zero_grad()
            with torch.autocast(run.device.type, torch.float16):
                loss = F.cross_entropy(model(x).float(), y)
            run.scaler.scale(loss).backward()
            update()
            if not update_too:
                run.scaler.update()
            return loss.detach()

        return step

    return loop


def train_with_overflows(twins, steps=16):
    scales = []
    for n in range(steps):
        x, y = batch(twins.ours.device, n)
        twins(x * (float("inf") if n in (5, 9, 10) else 1.0), y)
        twins.each(lambda run: scales.append(run.scaler.get_scale()))
        assert scales[-1] == scales[-2]
    assert len(set(scales)) > 2, "it has grown and backed off"


@both_ways
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("optimizer", [FUSED, partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)],
                         ids=["adamw, fused", "sgd, fused"])  # fmt: skip
def test_c06_a_gradient_scaler_without_a_look_at_the_host(device, way, optimizer, clipped):
    """A fused optimizer skips on the device: the whole of it is recorded, unscaling, skipping, growing and backing off."""
    twins = Twins(device, way, optimizer, scaled(clipped))
    train_with_overflows(twins)
    twins.assert_recorded(8)


SCALER_CHANGES = {
    4: lambda scaler: scaler.set_growth_interval(2),
    8: lambda scaler: scaler.set_backoff_factor(0.25),
    11: lambda scaler: scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0, "growth_factor": 4.0}),
}


@both_ways
def test_c09_settings_of_a_gradient_scaler(device, way):
    twins = Twins(device, way, FUSED, scaled(clipped=True))
    for n in range(15):
        if n in SCALER_CHANGES:
            twins.each(lambda run, n=n: SCALER_CHANGES[n](run.scaler))
        x, y = batch(device, n)
        twins(x * (float("inf") if n in (5, 9) else 1.0), y)
        assert_same(twins.ours.scaler.state_dict(), twins.live.scaler.state_dict())
    twins.assert_recorded(8)


@both_ways
def test_c06_a_gradient_scaler_for_two_optimizers(device, way):
    """The gradients of one overflow: that one skips its step, and the scale backs off."""

    def loop(run, model, beside):
        scaler = torch.amp.GradScaler(run.device.type, init_scale=8.0, growth_interval=3)
        run.extra = [FUSED([run.model.heads[0].weight]), FUSED([run.model.body.weight])]
        update = beside(lambda: ([scaler.step(o) for o in run.extra], scaler.update())[1])

        def step(x, y, factor):
            for optimizer in run.extra:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            run.model.body.weight.grad.mul_(factor)
            update()
            return loss.detach()

        return step

    twins = Twins(device, way, SGD, loop)
    for n in range(12):
        twins(*batch(device, n), torch.tensor(float("inf") if n in (4, 8, 9) else 1.0, device=device))
    twins.assert_recorded(8)


@may_run_live
@both_ways
@pytest.mark.parametrize("clipped", [False, True])
def test_c11_a_gradient_scaler_that_decides_on_the_host(device, way, clipped):
    """For other optimizers it asks whether something overflowed before it calls `step`."""
    twins = Twins(device, way, SGD, scaled(clipped))
    train_with_overflows(twins)
    twins.assert_live("on the host")


@may_run_live
@common
def test_c06_a_gradient_scaler_in_the_loop(device, optimizer):
    """The model is recorded, and so is the step that the scaler calls, or skips."""

    def loop(run, model, beside):
        run.optimizer.step = beside(run.optimizer.step)
        return scaled()(run, model, same)

    twins = Twins(device, PAIR, optimizer, loop)
    train_with_overflows(twins)
    assert pg.stats(twins.ours.model).replayed >= 8
    fused = twins.ours.optimizer.defaults.get("fused")  # then the scaler gives it new tensors each time
    assert fused or twins.step_stats.replayed >= 5


# ---------------------------------------------------------------------------------------------------
# C14: data loaders


def loader(device, workers):
    generator = torch.Generator().manual_seed(11)
    data = TensorDataset(torch.randn(26, 4, generator=generator), torch.randint(0, 3, (26,), generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator, num_workers=workers,
                      pin_memory=device.type == "cuda", persistent_workers=workers > 0)  # fmt: skip


@both_ways
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_c14_a_loader_with_workers_and_pinned_memory(device, way, workers):
    """Each epoch shuffled, the last batch of it smaller; copies to the device overlap with recorded calls."""
    twins, losses = Twins(device, way, FUSED), []
    for _ in range(2):
        for x, y in loader(device, workers):
            loss = twins(x.to(device, non_blocking=True), y.to(device, non_blocking=True))
            losses.append((loss, loss.clone()))
    for loss, then in losses:
        assert_same(loss, then)
    twins.assert_recorded(8)
