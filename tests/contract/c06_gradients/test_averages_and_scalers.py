"""C6: averages of the weights, gradient scalers, data loaders."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.training_loops import ADAM, FUSED, PAIR, SGD, Twins, batch, both_ways, common, same, updating
from tests.helpers import may_run_live


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
@pytest.mark.parametrize("fallback", ["live", "auto"])
def test_c09_an_averaged_model_in_what_is_recorded(device, way, fallback):
    """`update_parameters` asks on the host how many there were: a count, which is followed."""

    def update_of(run):
        run.extra = swa_utils.AveragedModel(run.model, run.device, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        return lambda: (run.optimizer.step(), run.extra.update_parameters(run.model))[0]

    twins = Twins(device, way, SGD, updating(update_of), fallback=fallback)
    twins.train(*range(5))
    twins.assert_recorded(3, refusals=True)


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
@pytest.mark.parametrize("fallback", ["live", "auto"])
def test_c11_a_gradient_scaler_that_decides_on_the_host(device, way, clipped, fallback):
    """For those that keep step counts on the host it asks whether something overflowed before it calls `step`."""
    twins = Twins(device, way, ADAM, scaled(clipped), fallback=fallback)
    train_with_overflows(twins)
    if fallback == "live":
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
