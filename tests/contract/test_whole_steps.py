"""C6 inside whole steps: forward, backward and optimizer in one recorded function. Weights, gradients and optimizer
state are compared with eager's after each step; learning rates change without a new recording."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import Pair, assert_no_new_recordings, assert_same
from tests.helpers import assert_replays, counts, may_run_live, ramp, side_by_side


class Net(nn.Module):
    """Two layers, a part that no loss depends on, and one weight that is used twice."""

    def __init__(self, device, *, dropout=0.0, norm=False):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.to(device)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.second(self.dropout(self.first(x)))


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd, weight decay": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd, foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adam, foreach": functools.partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adam, amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adamw, fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
}
# Those that everybody uses must be recorded; the others must be right.
RECORDED = ["sgd", "sgd, weight decay", "momentum", "nesterov", "sgd, foreach", "adam", "adamw", "adamw, fused"]
COMMON = ["sgd", "momentum", "adamw", "adamw, fused"]


def train(device, optimizer="sgd", *, step_of=None, **net_options):
    """A `make` for `side_by_side`: (a training step, [model, optimizer])."""

    def make():
        model = Net(device, **net_options)
        chosen = OPTIMIZERS[optimizer](model.parameters())

        def step(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            chosen.step()
            return loss.detach()

        return (step if step_of is None else step_of(model, chosen)), [model, chosen]

    return make


def steps(device, optimizer="sgd", *, hold=False, **options):
    """A recorded training step beside a live one."""
    return side_by_side(train(device, optimizer, **options), hold=hold)


def batch(device, size=5):
    return torch.randn(size, 4, device=device), torch.randint(0, 3, (size,), device=device)


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


# ---------------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["before", "after"])
def test_c06_zero_grad_either_way_at_either_end(device, set_to_none, where):
    def step_of(model, optimizer):
        def step(x, y):
            if where == "before":
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if where == "after":
                optimizer.zero_grad(set_to_none=set_to_none)
            return loss.detach()

        return step

    both = steps(device, "momentum", step_of=step_of)
    for _ in range(8):
        both(*batch(device))
    assert counts(both)[2] >= 5


@pytest.mark.parametrize("k", [2, 4])
def test_c06_accumulation_over_micro_batches_within_the_step(device, k):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            losses = []
            for xs, ys in zip(x.chunk(k), y.chunk(k), strict=True):
                loss = F.cross_entropy(model(xs), ys) / k
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            return torch.stack(losses).sum()

        return step

    both = steps(device, "adamw, fused", step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device, 8))


def backward_only(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def test_c06_gradients_accumulate_over_calls(device):
    """Nobody zeroes them in the recorded function: the first call makes them, the others add."""
    both = steps(device, step_of=backward_only)
    for _ in range(8):
        both(*batch(device))
    assert counts(both)[2] >= 4


@may_run_live
@pytest.mark.parametrize("set_to_none", [True, False])
def test_c06_the_optimizer_steps_on_the_gradients_of_the_call_before(device, set_to_none):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return step

    both = steps(device, "momentum", step_of=step_of)
    for _ in range(8):
        both(*batch(device))


@may_run_live
@pytest.mark.parametrize("set_to_none", [True, False])
def test_c06_the_caller_zeroes_the_gradients_between_calls(device, set_to_none):
    both = steps(device, step_of=backward_only)
    for n in range(12):
        both(*batch(device))
        if n % 2:
            both.change(lambda state: (state[1].step(), state[1].zero_grad(set_to_none=set_to_none)))


def test_c06_the_caller_clips_replaces_and_removes_gradients(device):
    both = steps(device, step_of=backward_only)

    def replace(state):
        state[0].first.weight.grad = torch.ones(4, 4, device=device)

    for change in [
        lambda state: None,
        lambda state: None,
        lambda state: nn.utils.clip_grad_norm_(state[0].parameters(), 0.1),
        replace,
        lambda state: state[0].second.bias.grad.mul_(3),
        lambda state: setattr(state[0].second.weight, "grad", None),
        lambda state: None,
        replace,
        lambda state: None,
    ]:
        both(*batch(device))
        both.change(change)
    both(*batch(device))


@may_run_live
def test_c06_gradients_that_the_caller_keeps(device):
    """References to p.grad after a step, and clones: eager replaces p.grad where it was None, and adds where not."""
    both = steps(device)
    kept = []
    for n in range(10):
        both(*batch(device))
        pair = Pair(both.state[0].first.weight.grad, both.live_state[0].first.weight.grad)
        kept.append((pair, pair.each(torch.clone)))
        for held, value in kept:
            held.check(f"gradient kept from step {n}")
            value.check()


def test_c06_gradients_of_unused_parameters_stay_none(device):
    both = steps(device, "adamw, fused")
    for _ in range(6):
        both(*batch(device))
        assert both.state[0].unused.weight.grad is None
        assert both.state[0].unused.weight not in both.state[1].state


def test_c06_a_shared_parameter_gets_the_sum(device):
    def make():
        embedding = nn.Embedding(6, 4, device=device)
        head = nn.Linear(4, 6, bias=False, device=device)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens):
            optimizer.zero_grad()
            # A look-up by matrix product: the backward of an embedding is not deterministic on CUDA.
            hidden = torch.eye(6, device=device)[tokens] @ embedding.weight
            loss = F.cross_entropy(head(hidden), tokens.roll(1))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [model, optimizer]

    both = side_by_side(make)
    for _ in range(6):
        both(torch.randint(0, 6, (7,), device=device))
    assert both.state[0][0].weight is both.state[0][1].weight


def clip_gradient(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def test_c06_hooks_on_tensors_parameters_and_modules(device):
    def step_of(model, optimizer):
        model.first.weight.register_hook(lambda grad: grad * 0.5)
        model.second.weight.register_post_accumulate_grad_hook(clip_gradient)
        model.first.register_forward_hook(lambda module, inputs, output: output + 0.1)
        model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        model.second.register_full_backward_hook(lambda module, gi, go: (gi[0] * 3,))

        def step(x, y):
            optimizer.zero_grad()
            hidden = model(x)
            hidden.register_hook(lambda grad: grad.clamp(-0.2, 0.2))
            loss = F.cross_entropy(hidden, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = steps(device, "momentum", step_of=step_of)
    for _ in range(7):
        both(*batch(device))
    assert counts(both)[2] >= 4


@may_run_live
def test_c06_hooks_that_come_and_go_between_steps(device):
    both = steps(device)
    handles = []
    for n in range(12):
        if n == 4:
            both.change(lambda state: handles.append(state[0].first.weight.register_hook(lambda grad: grad * 10)))
        if n == 8:
            for handle in handles:
                handle.remove()
        both(*batch(device))


@may_run_live
def test_c06_a_hook_that_counts_runs_once_a_step(device):
    def make():
        (step, (model, optimizer)), calls = train(device)(), []
        model.first.weight.register_hook(lambda grad: calls.append(grad.norm()))
        return step, [model, optimizer, calls]

    both = side_by_side(make)
    for n in range(1, 7):
        both(*batch(device))
        assert len(both.state[2]) == n


def test_c06_gradient_clipping_within_the_step(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach(), norm

        return step

    both = steps(device, "adamw, fused", step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device))


def test_c06_dropout_and_batch_norm_in_a_step(device):
    both = steps(device, "momentum", dropout=0.5, norm=True)
    for n in range(1, 9):
        both(*batch(device))
        assert both.state[0].norm.num_batches_tracked.item() == n
    assert counts(both)[2] >= 5


def test_c06_training_and_evaluation_in_turn(device):
    both = steps(device, "momentum", dropout=0.5, norm=True)
    model = both.state[0]
    evaluate = pg.record(lambda x: model(x), warmup=1)
    for _ in range(10):
        both(*batch(device))
        both.change(lambda state: state[0].eval())
        x = torch.randn(3, 4, device=device)
        with torch.no_grad():
            assert_same(evaluate(x), both.live_state[0](x))
        both.change(lambda state: state[0].train())


def test_c06_two_forwards_before_their_backwards(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            one, other = F.cross_entropy(model(x), y), model(x * 2).square().mean()
            other.backward()
            one.backward()
            optimizer.step()
            return one.detach(), other.detach()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(7):
        both(*batch(device))


def test_c06_retain_graph_and_several_backwards(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            hidden = model(x)
            F.cross_entropy(hidden, y).backward(retain_graph=True)
            hidden.square().mean().backward()
            optimizer.step()
            return hidden.detach()

        return step

    both = steps(device, step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device))


def test_c06_autograd_grad_within_the_step(device):
    def step_of(model, optimizer):
        parameters = [*model.first.parameters(), *model.second.parameters()]

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p.sub_(g, alpha=0.1)
            return loss.detach(), gradients[0]

        return step

    both = steps(device, step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device))


@may_run_live
def test_c06_a_gradient_penalty_within_the_step(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            loss = F.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
            return loss.detach(), slope.detach()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(7):
        both(*batch(device))


@may_run_live
def test_c06_an_argument_that_requires_grad_gets_its_gradient(device):
    def step_of(model, optimizer):
        def step(x, y):
            F.cross_entropy(model(x), y).backward()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(6):
        x, y = batch(device)
        given = Pair.of(x.requires_grad_())
        both(given, y)
        given.each(lambda t: t.grad).check("gradient of the argument")


@pytest.mark.parametrize("reentrant", [False, True])
def test_c06_recompute_within_the_step(device, reentrant):
    from torch.utils.checkpoint import checkpoint

    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            hidden = checkpoint(lambda h: model.dropout(torch.tanh(h)), model.first(x), use_reentrant=reentrant)
            loss = F.cross_entropy(model.second(hidden), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = steps(device, dropout=0.5, step_of=step_of)
    for _ in range(7):
        both(*batch(device))
    assert counts(both)[2] > 3, pg.explain(both.recorded)


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
