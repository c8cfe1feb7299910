"""C6, C21: optimizers as people make them, in segments, live, and in larger programs."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phonograph as pg
from tests.contract.shared.plain_optimizers import adams, assert_counted, batch, common, trained
from tests.helpers import counts, may_run_live, reasons, side_by_side


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
    both = side_by_side(trained(device, optimizer, with_a_host_check), fallback="live")
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
