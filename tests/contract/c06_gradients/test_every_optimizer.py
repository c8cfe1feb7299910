"""C6: training loops with every optimizer, hyper-parameter and scheduler."""

import inspect
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import phonograph as pg
from phonograph.testing import Raised, assert_no_new_recordings, assert_same
from tests.contract.shared.training_loops import (
    ALONE,
    FUSED,
    PAIR,
    SGD,
    WHOLE,
    Twins,
    batch,
    both_ways,
    common,
    taking_a_head,
    updating,
)
from tests.helpers import may_run_live, reasons

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
        assert twins.step_stats.recorded <= recordings + decides, "the rate is followed"


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
@pytest.mark.parametrize("fallback", ["live", "auto"])
def test_c11_lbfgs_decides_on_the_host(device, way, search, fallback):
    lbfgs = partial(torch.optim.LBFGS, max_iter=4, line_search_fn=search)
    twins = Twins(device, way, lbfgs, searching, fallback=fallback)
    twins.train(*range(4 if fallback == "live" else 12))
    if fallback == "live":
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
