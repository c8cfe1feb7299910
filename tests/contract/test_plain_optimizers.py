"""Optimizers as people make them, neither fused nor capturable: recorded or live, a step is eager's to the bit (C6, C21).

Their step counts lie on the host. Everything here is compared bit by bit, the counts too, with the same program in plain
PyTorch.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phonograph as pg
from tests.helpers import counts, may_run_live, reasons, side_by_side

ADAMS = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adam, default": torch.optim.Adam,
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adamw, foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adam, one by one": functools.partial(torch.optim.Adam, lr=0.01, foreach=False, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "rmsprop": torch.optim.RMSprop,
}
adams = pytest.mark.parametrize("optimizer", ADAMS)
common = pytest.mark.parametrize("optimizer", ["adam", "adamw, foreach"])


class Net(nn.Module):
    """A small classifier with what is usual: normalisation, dropout, a layer that not each step uses."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.LayerNorm(8, dtype=dtype), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.other = (nn.Linear(8, 3, dtype=dtype) for _ in range(2))

    def forward(self, x, other=False):
        return (self.other if other else self.head)(self.body(x))


def trained(device, optimizer="adam", step_of=None, dtype=torch.float32):
    """A `make` for `side_by_side`: a step, and [model, optimizer]."""

    def make():
        torch.manual_seed(3)
        model = Net(dtype).to(device)
        chosen = (ADAMS[optimizer] if isinstance(optimizer, str) else optimizer)(model.parameters())

        def step(x, y, other=False):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x, other).float(), y)
            loss.backward()
            chosen.step()
            return loss.detach()

        return (step if step_of is None else step_of(model, chosen)), [model, chosen]

    return make


def batch(device, n, size=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)
    return x.to(device, dtype), y.to(device)


def assert_counted(both, times):
    """Its counts, and those of the twin, stand at this, on the host; and nobody has switched its mode."""
    for _, optimizer in (both.state, both.live_state):
        assert {float(state["step"]) for state in optimizer.state.values()} - {0.0} == {times}  # Adagrad begins at once
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
        assert not any(group.get("capturable") for group in optimizer.param_groups)


# ---------------------------------------------------------------------------------------------------
# Recorded


@adams
def test_c06_many_recorded_steps_are_plain_eagers(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(40):
        both(*batch(device, n))
    live, recorded, replayed = counts(both)
    assert recorded <= (2 if optimizer == "radam" else 1), reasons(both)  # RAdam's sixth step takes another branch
    assert replayed == 40 - live, reasons(both)
    assert live <= 2
    assert_counted(both, 40)


@common
@pytest.mark.parametrize("schedule", ["cosine", "one cycle", "warmup"])
def test_c09_schedules_of_plain_optimizers_are_followed(device, optimizer, schedule):
    schedulers = []

    def make():
        step, state = trained(device, optimizer)()
        kind = {
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
            "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
            "warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 4),  # from 0
        }[schedule]
        schedulers.append(kind(state[1]))
        return step, state

    both = side_by_side(make)
    for n in range(16):
        both(*batch(device, n))
        for one in schedulers:
            one.step()
    assert counts(both) == (1, 1, 15), reasons(both)


@common
def test_c06_several_steps_in_a_call(device, optimizer):
    def step_of(model, chosen):
        def update(x, y):
            losses = []
            for rows in (slice(0, 2), slice(2, 4), slice(1, 5)):
                chosen.zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                chosen.step()
                losses.append(loss.detach())
            return torch.stack(losses)

        return update

    both = side_by_side(trained(device, optimizer, step_of))
    for n in range(8):
        both(*batch(device, n))
    assert counts(both)[1:] == (1, 7), reasons(both)
    assert {float(s["step"]) for s in both.state[1].state.values()} == {24.0}


def test_c06_two_optimizers_of_which_one_steps_twice_as_often(device):
    """As in a GAN. Their counts are equal to begin with, and part."""

    def make():
        torch.manual_seed(3)
        makes, judges = nn.Linear(2, 4).to(device), nn.Linear(4, 1).to(device)
        first, second = torch.optim.Adam(makes.parameters()), torch.optim.Adam(judges.parameters(), betas=(0.5, 0.9))

        def step(noise, real):
            for _ in range(2):
                second.zero_grad()
                (judges(makes(noise).detach()).mean() - judges(real).mean()).backward()
                second.step()
            first.zero_grad()
            loss = -judges(makes(noise)).mean()
            loss.backward()
            first.step()
            return loss.detach()

        return step, [makes, judges, first, second]

    both = side_by_side(make)
    for _ in range(9):
        both(torch.randn(3, 2, device=device), torch.randn(3, 4, device=device))
    assert counts(both) == (1, 1, 8), reasons(both)


@may_run_live
@common
def test_c08_parameters_that_not_each_step_uses_have_counts_of_their_own(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(24):
        both(*batch(device, n), n % 4 == 3)
    assert counts(both)[2] >= 12, reasons(both)


@common
def test_c07_two_shapes_in_turn(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(16):
        both(*batch(device, n, 5 if n % 2 else 3))
    assert counts(both) == (2, 2, 14), reasons(both)
    assert_counted(both, 16)


def set_counts(state):
    for i, one in enumerate(state[1].state.values()):
        one["step"].fill_(100 + i % 2)


def add_to_counts(state):
    for one in state[1].state.values():
        one["step"] += 7


def new_counts(state):
    for one in state[1].state.values():
        one["step"] = torch.tensor(3.0)


def load(state):
    state[1].load_state_dict(copy.deepcopy(state[1].state_dict()))


def other_memory(state):
    for one in state[1].state.values():
        one["step"].data = one["step"].data.clone() + 5


@may_run_live
@common
@pytest.mark.parametrize("change", [set_counts, add_to_counts, new_counts, load, other_memory])
def test_c08_counts_that_somebody_sets(device, optimizer, change):
    both = side_by_side(trained(device, optimizer))
    for n in range(14):
        if n in (4, 9):
            both.change(change)
        both(*batch(device, n))
    assert counts(both)[2] >= 8, reasons(both)
    if change is add_to_counts:
        assert counts(both) == (1, 1, 13), "a count is read at each replay"


@adams
def test_c06_counts_that_lie_on_the_device(device, optimizer):
    """As those that are loaded from there, or made under `torch.device(...)` in some releases. Eager waits for each."""

    def moved(state):
        for one in state[1].state.values():
            one.update({name: one[name].to(device) for name in ("step", "mu_product") if name in one})

    def behind_versions(state):
        for one in state[1].state.values():
            one["step"].data.add_(2)

    both = side_by_side(trained(device, optimizer))
    for n in range(24):
        if n in (1, 12, 16):
            both.change({1: moved, 12: add_to_counts, 16: behind_versions}[n])
        both(*batch(device, n))
    assert counts(both)[1] <= (3 if optimizer == "radam" else 2), reasons(both)
    assert counts(both)[2] >= 20, reasons(both)
    for _, chosen in (both.state, both.live_state):
        assert max(float(state["step"]) for state in chosen.state.values()) == 24 + 7 + 2
        assert {state["step"].device.type for state in chosen.state.values()} == {device.type}


def test_c06_a_step_under_a_device(device):
    def make():
        step, state = trained(device)()

        def under(x, y):
            with torch.device(device):
                return step(x, y)

        return under, state

    both = side_by_side(make)
    for n in range(8):
        both(*batch(device, n))
    assert counts(both) == (1, 1, 7), reasons(both)


@common
def test_c06_live_steps_between_recorded_ones(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(12):
        if n in (5, 6, 9):
            both.change(lambda state, n=n: plain_step(state, *batch(device, 50 + n)))
        both(*batch(device, n))
    assert counts(both)[1] <= 2, reasons(both)
    assert_counted(both, 15)


def plain_step(state, x, y):
    F.cross_entropy(state[0].eval()(x), y).backward()
    state[0].train()
    state[1].step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@common
def test_c06_parameters_of_other_types(device, optimizer, dtype):
    both = side_by_side(trained(device, optimizer, dtype=dtype))
    for n in range(6):
        both(*batch(device, n, dtype=dtype))
    assert counts(both) == (1, 1, 5), reasons(both)


def test_c06_counts_of_double_precision(device):
    torch.set_default_dtype(torch.float64)  # in which optimizers then count
    try:
        both = side_by_side(trained(device, "adam", dtype=torch.float64))
        for n in range(6):
            both(*batch(device, n, dtype=torch.float64))
        assert counts(both) == (1, 1, 5), reasons(both)
    finally:
        torch.set_default_dtype(torch.float32)


@common
def test_c10_verified_steps(device, optimizer):
    both = side_by_side(trained(device, optimizer), verify=2)
    for n in range(9):
        both(*batch(device, n))
    assert counts(both)[1] == 1, reasons(both)
    assert_counted(both, 9)


class Halving(torch.optim.Adam):
    """Somebody's own, on top of torch's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


class ByHand(torch.optim.Adam):
    """Somebody's own arithmetic, with the count as a tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["average"] = torch.zeros(()), torch.zeros_like(p)
                state["step"] += 1
                state["average"].lerp_(p.grad, 0.1)
                p.add_(state["average"] / (1 - 0.9 ** state["step"]).to(p.device), alpha=-group["lr"])


@may_run_live
@pytest.mark.parametrize("kind", [Halving, ByHand])
def test_c06_optimizers_made_of_torchs(device, kind):
    both = side_by_side(trained(device, kind))
    for n in range(8):
        both(*batch(device, n))
    assert kind is ByHand or counts(both)[2] >= 6, reasons(both)


def test_c06_each_parameter_steps_in_the_backward(device):
    """As in training with little memory: an optimizer for each parameter, stepped by a hook."""

    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        own = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def stepped(p):
            own[p].step()
            own[p].zero_grad()

        for p in own:
            p.register_post_accumulate_grad_hook(stepped)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return step, [model, *own.values()]

    both = side_by_side(make)
    for n in range(8):
        both(*batch(device, n))
    assert counts(both)[2] >= 6, reasons(both)


def test_c13_a_call_that_raises_before_the_step_counts_nothing(device):
    def step_of(model, chosen):
        def step(x, y, fails=False):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if fails:
                raise KeyError("before the step")
            chosen.step()
            return loss.detach()

        return step

    both = side_by_side(trained(device, "adam", step_of))
    for n in range(8):
        both(*batch(device, n))
        if n in (2, 5):
            both.outcome(*batch(device, n), fails=True)
    assert counts(both)[2] >= 7, reasons(both)
    assert_counted(both, 8)


# ---------------------------------------------------------------------------------------------------
# In segments


def test_c11_what_runs_live_after_the_step_sees_the_counts(device):
    """A checkpoint that is written, or a log line, in the middle of the call."""
    seen = {True: [], False: []}

    def make(recorded):
        def step_of(model, chosen):
            @pg.live
            def log(loss):
                seen[recorded].append([float(s["step"]) for s in chosen.state_dict()["state"].values()])

            def step(x, y):
                losses = []
                for rows in (slice(0, 3), slice(2, 5)):
                    chosen.zero_grad(set_to_none=False)  # a live part could see that they go
                    loss = F.cross_entropy(model(x[rows]), y[rows])
                    loss.backward()
                    chosen.step()
                    losses.append(loss.detach())
                    log(losses[-1])
                return torch.stack(losses)

            return step

        return trained(device, "adam", step_of)

    sides = iter([True, False])
    both = side_by_side(lambda: make(next(sides))())
    for n in range(6):
        both(*batch(device, n))
    assert counts(both)[2] >= 4, reasons(both)
    assert seen[True] == seen[False]
    assert_counted(both, 12)


@may_run_live
def test_c11_a_live_part_that_steps_the_same_optimizer(device):
    def step_of(model, chosen):
        @pg.live
        def more():
            chosen.step()

        def step(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            chosen.step()
            more()
            return loss.detach()

        return step

    def outcome():
        torch.manual_seed(0)
        (step, state), taken = trained(device, "adam", step_of)(), []
        recorded = pg.record(step, warmup=1)
        for n in range(8):
            try:
                taken.append(recorded(*batch(device, n)))
            except RuntimeError as e:  # the segments before cannot be taken back for what the live part has done
                assert "steps an optimizer" in str(e)  # noqa: PT017
                return None
        return [*taken, *state[0].parameters(), *(s["step"] for s in state[1].state.values())]

    def plainly():
        torch.manual_seed(0)
        step, state = trained(device, "adam", step_of)()
        taken = [step(*batch(device, n)) for n in range(8)]
        return [*taken, *state[0].parameters(), *(s["step"] for s in state[1].state.values())]

    found = outcome()
    assert found is None or all(map(torch.equal, found, plainly()))


# ---------------------------------------------------------------------------------------------------
# C21: live is plain eager


def with_a_host_check(model, chosen):
    def step(x, y):
        chosen.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not torch.isfinite(loss).item():
            raise ValueError("diverged")
        chosen.step()
        return loss.detach()

    return step


@may_run_live
@adams
def test_c21_a_refused_step_is_plain_eagers(device, optimizer):
    both = side_by_side(trained(device, optimizer, with_a_host_check))
    for n in range(20):
        both(*batch(device, n))
    assert counts(both)[1:] == (0, 0)
    assert_counted(both, 20)


@may_run_live
@common
def test_c21_recorded_for_a_while_and_live_for_a_while(device, optimizer):
    """A loss that is printed in each tenth step, say: each way, the same numbers."""

    def step_of(model, chosen):
        def step(x, y, log=False):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            chosen.step()
            return loss.item() if log else loss.detach()

        return step

    both = side_by_side(trained(device, optimizer, step_of))
    for n in range(24):
        both(*batch(device, n), log=n % 6 == 5)
    assert counts(both)[2] >= 14, reasons(both)
    assert_counted(both, 24)


@may_run_live
def test_c21_nothing_of_an_optimizer_is_switched(device):
    """What its own code and its settings show, in each phase, is what eager shows."""
    shown = []

    def step_of(model, chosen):
        def step(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            chosen.step()
            shown.append([group["capturable"] for group in chosen.state_dict()["param_groups"]])
            return loss.detach()

        return step

    both = side_by_side(trained(device, "adam", step_of))
    for n in range(5):
        both.outcome(*batch(device, n))
    assert [False] in shown
    assert [True] not in shown


@may_run_live
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_c11_a_learning_rate_that_is_a_tensor_runs_live_as_in_eager(device, kind):
    both = side_by_side(trained(device, lambda p: getattr(torch.optim, kind)(p, lr=torch.tensor(0.01))))
    for n in range(6):
        both(*batch(device, n))
    assert "learning rate that is a tensor" in reasons(both)


# ---------------------------------------------------------------------------------------------------
# Larger programs


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.then = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x, mask):
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.then(x))


class Gpt(nn.Module):
    def __init__(self, words=16, width=16, length=8, blocks=2):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight  # tied, as in GPT-2
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


def gpt(device, way):
    def make():
        torch.manual_seed(3)
        model = Gpt().to(device)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        chosen = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95))
        chosen_rate = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 20)
        forward = pg.record(model, warmup=1) if way == "pair" else model

        def step(tokens):
            loss = F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            chosen.step()
            chosen.zero_grad()
            return loss.detach()

        return step, model, chosen, chosen_rate

    return make


def ppo(device, way):
    """An update of PPO: four minibatches, a clipped objective, one Adam for actor and critic."""

    def make():
        torch.manual_seed(3)
        actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        both = nn.ModuleDict({"actor": actor, "critic": critic})
        chosen = torch.optim.Adam(both.parameters(), lr=3e-3, eps=1e-5)
        rate = torch.optim.lr_scheduler.LinearLR(chosen, 1.0, 0.1, 20)
        acts, values = (pg.record(m, warmup=1) if way == "pair" else m for m in (actor, critic))

        def step(seen):
            losses = []
            for part in seen.chunk(4):
                logits, value = acts(part), values(part).squeeze(1)
                chances = F.log_softmax(logits, 1)[:, 0]
                ratio = (chances - chances.detach() + 0.05 * part[:, 0]).exp()
                gain = part[:, 1]
                objective = -torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean()
                loss = objective + 0.5 * F.mse_loss(value, part[:, 2]) + 0.01 * (chances * chances.exp()).mean()
                chosen.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(both.parameters(), 0.5)
                chosen.step()
                losses.append(loss.detach())
            return torch.stack(losses)

        return step, both, chosen, rate

    return make


@pytest.mark.parametrize("way", ["whole step", "pair"])
@pytest.mark.parametrize("program", [gpt, ppo])
def test_c21_programs_with_plain_adam(device, program, way):
    found = []
    for used in (way, "live"):
        step, model, chosen, schedule = program(device, used)()
        recorded = pg.record(step, warmup=1) if used == "whole step" else step
        torch.manual_seed(5)
        losses = []
        for n in range(12):
            generator = torch.Generator().manual_seed(n)
            given = (
                torch.randint(0, 16, (3, 9), generator=generator) if program is gpt else torch.randn(16, 6, generator=generator)
            )
            losses.append(recorded(given.to(device)))
            schedule.step()
        found.append([*losses, *model.parameters(), *(v for s in chosen.state.values() for v in s.values())])
        if used == "whole step":
            assert pg.stats(recorded).replayed == 11, pg.explain(recorded)
    assert all(map(torch.equal, *found))


class Together(torch.optim.Optimizer):
    """As trainers have it: several optimizers as one, which has no groups of its own."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def test_c06_an_optimizer_that_holds_others_and_has_no_groups(device):
    def make():
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to(device)
        optimizer = Together(*[torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in layers])

        def step(x):
            optimizer.zero_grad()
            loss = layers[1](layers[0](x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, layers

    both = side_by_side(make)
    for n in range(6):
        torch.manual_seed(n)
        both(torch.randn(3, 4, device=device))
    assert counts(both)[2] >= 4, reasons(both)


@may_run_live
@pytest.mark.parametrize("lists", [True, False], ids=["lists", "single tensors"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fallback", ["live", "split"])
def test_c08_a_backward_through_weights_that_a_call_has_written_raises_as_in_eager(device, kind, lists, fallback):
    """`foreach=True` moves versions on the CPU, where torch takes the tensors one by one, and leaves them on a GPU."""

    def raises(wrap):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to(device)
        optimizer = kind(layer.parameters(), lr=0.1, foreach=lists)

        @wrap
        def step(x):
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = []
        for _ in range(7):  # live calls of each kind, and replays
            result = layer(torch.randn(3, 4, device=device, requires_grad=True)).square().sum()
            step(torch.randn(3, 4, device=device))
            try:
                result.backward()
            except RuntimeError as e:
                found.append("modified by an inplace operation" in str(e))
            else:
                found.append(False)
        return found

    assert raises(functools.partial(pg.record, keep="always", fallback=fallback)) == raises(lambda f: f)
