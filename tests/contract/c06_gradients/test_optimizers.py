"""C6 inside whole steps: optimizers."""

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.testing import assert_no_new_recordings
from tests.contract.shared.whole_steps import OPTIMIZERS, Net, batch, steps, train
from tests.helpers import assert_replays, counts, may_run_live, side_by_side

# Those that everybody uses must be recorded; the others must be right.
RECORDED = ["sgd", "sgd, weight decay", "momentum", "nesterov", "sgd, foreach", "adam", "adamw", "adamw, fused"]


COMMON = ["sgd", "momentum", "adamw", "adamw, fused"]


# ---------------------------------------------------------------------------------------------------
# Optimizers


@may_run_live
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c06_a_training_step_is_eagers_with_every_optimizer(device, optimizer):
    both = steps(device, optimizer)
    for _ in range(6):
        both(*batch(device))


@pytest.mark.parametrize("optimizer", RECORDED)
def test_c06_a_training_step_is_replayed(device, optimizer):
    both = steps(device, optimizer)
    for _ in range(8):
        both(*batch(device))
    live, recorded, replayed = counts(both)
    assert recorded == 1, pg.explain(both.recorded)
    assert live <= 2, "a warm-up call, and perhaps one more in which the optimizer makes its state"
    assert replayed == 8 - live


def test_c06_a_step_recorded_at_once_that_has_run_live_before(device):
    """Its step counts are where the live steps left them: on the host, for most optimizers."""

    def make():
        function, state = train(device, "adam")()
        for _ in range(3):
            function(*batch(device))
        return function, state

    both = side_by_side(make, warmup=0)
    for _ in range(4):
        both(*batch(device))
    assert counts(both) == (0, 1, 4), pg.explain(both.recorded)


@may_run_live
def test_c06_a_capturable_optimizer(cuda):
    def make():
        model = Net(cuda)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [model, optimizer]

    both = side_by_side(make)
    for _ in range(6):
        both(*batch(cuda))


CHANGES_WITHOUT_RECORDING = {
    "lr": lambda group, n: group.update(lr=0.1 / (n + 1)),
    "weight decay": lambda group, n: group.update(weight_decay=0.01 * (n + 1)),
    "both": lambda group, n: group.update(lr=0.01 * (n + 1), weight_decay=0.1 / (n + 1)),
}


@pytest.mark.parametrize("optimizer", COMMON)
@pytest.mark.parametrize("change", CHANGES_WITHOUT_RECORDING.values(), ids=CHANGES_WITHOUT_RECORDING)
def test_c09_learning_rate_and_weight_decay_change_without_a_new_recording(device, optimizer, change):
    both = steps(device, optimizer)
    both.change(lambda state: state[1].param_groups[0].update(weight_decay=0.05))
    for _ in range(4):
        both(*batch(device))
    with assert_no_new_recordings(both.recorded):
        for n in range(6):
            both.change(lambda state, n=n: change(state[1].param_groups[0], n))
            assert_replays(both, *batch(device))


@may_run_live
@pytest.mark.parametrize("optimizer", COMMON)
@pytest.mark.parametrize(("name", "value"), [("weight_decay", 0.0), ("lr", 0.0), ("maximize", True), ("momentum", 0.0),
                                             ("betas", (0.5, 0.9)), ("eps", 1e-3), ("nesterov", True)])  # fmt: skip
def test_c09_other_hyper_parameters_are_noticed(device, optimizer, name, value):
    both = steps(device, optimizer)
    both.change(lambda state: state[1].param_groups[0].update(weight_decay=0.05))
    for _ in range(4):
        both.outcome(*batch(device))
    both.change(lambda state: state[1].param_groups[0].update({name: value}))
    for _ in range(4):
        both.outcome(*batch(device))


@may_run_live
@pytest.mark.parametrize("optimizer", COMMON)
def test_c09_a_learning_rate_that_is_a_tensor(device, optimizer):
    both = steps(device, optimizer)
    both.change(lambda state: state[1].param_groups[0].update(lr=torch.tensor(0.1)))
    for n in range(8):
        both.change(lambda state, n=n: state[1].param_groups[0]["lr"].fill_(0.1 / (1 + n // 2)))
        both.outcome(*batch(device))


@pytest.mark.parametrize("optimizer", COMMON)
def test_c06_a_scheduler_outside_of_the_step(device, optimizer):
    schedulers = {}

    def make():
        function, (model, chosen) = train(device, optimizer)()
        schedulers[id(chosen)] = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 10)
        return function, [model, chosen]

    both = side_by_side(make)
    for _ in range(10):
        both(*batch(device))
        both.change(lambda state: schedulers[id(state[1])].step())
    assert counts(both)[1] == 1, pg.explain(both.recorded)


@may_run_live
def test_c06_a_scheduler_inside_of_the_step(device):
    def step_of(model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

        def step(x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(8):
        both(*batch(device))


@may_run_live
@pytest.mark.parametrize("optimizer", COMMON)
def test_c08_optimizer_load_state_dict(device, optimizer):
    both = steps(device, optimizer)
    saved = []
    for n in range(10):
        if n == 3:
            both.change(lambda state: saved.append(clone_of(state[1].state_dict())))
        if n == 6:
            # `change` runs the live side first, and so did the saving.
            both.change(lambda state: state[1].load_state_dict(saved.pop(0)))
        both(*batch(device))


def clone_of(state_dict):
    return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, state_dict)


@may_run_live
@pytest.mark.parametrize("optimizer", COMMON)
def test_c08_add_param_group(device, optimizer):
    def make():
        model = Net(device)
        chosen = OPTIMIZERS[optimizer](model.second.parameters())

        def step(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            chosen.step()
            return loss.detach()

        return step, [model, chosen]

    def add_a_group(state):
        state[1].add_param_group({"params": list(state[0].first.parameters()), "lr": 0.5})

    both = side_by_side(make)
    for n in range(9):
        if n == 4:
            both.change(add_a_group)
        both(*batch(device))


@may_run_live
@pytest.mark.parametrize("optimizer", COMMON)
def test_c08_optimizer_state_that_is_dropped(device, optimizer):
    both = steps(device, optimizer)
    for n in range(9):
        if n == 4:
            both.change(lambda state: state[1].state.clear())
        both(*batch(device))


@may_run_live
@pytest.mark.parametrize("optimizer", COMMON)
def test_c08_a_weight_is_replaced_between_steps(device, optimizer):
    both = steps(device, optimizer)
    for n in range(9):
        if n == 4:
            both.change(lambda state: setattr(state[0].first.weight, "data", torch.randn(4, 4, device=device)))
        both(*batch(device))


@may_run_live
def test_c08_a_part_of_the_model_is_frozen_and_thawed(device):
    both = steps(device, "momentum")
    for n in range(12):
        if n in (4, 8):
            both.change(lambda state, n=n: state[0].first.requires_grad_(n == 8))
        both(*batch(device))


@may_run_live
def test_c06_two_optimizers_in_one_step(device):
    def make():
        one, other = Net(device), Net(device)
        optimizers = [
            torch.optim.SGD(one.parameters(), lr=0.1),
            torch.optim.AdamW(other.parameters(), lr=0.01, fused=True),
        ]

        def step(x, y):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first = F.cross_entropy(one(x), y)
            first.backward()
            optimizers[0].step()
            second = F.mse_loss(other(x), one(x).detach())
            second.backward()
            optimizers[1].step()
            return first.detach(), second.detach()

        return step, [one, other, *optimizers]

    both = side_by_side(make, hold=True)
    for _ in range(7):
        both(*batch(device))
