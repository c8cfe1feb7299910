"""Several steps in one call, `pg.record(step, steps=k)`: as many plain calls, to the bit."""

import copy
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

K = 4


class Training:
    """A training step with all that keeps state: dropout, batch norm, an optimizer, a counter."""

    def __init__(self, device, optimizer):
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        self.net = nn.Sequential(*layers).to(device)
        self.opt = optimizer(self.net.parameters())
        self.seen = 0

    def step(self, x, y, scale=1.0):
        self.seen += 1
        self.opt.zero_grad()
        loss = F.mse_loss(self.net(x), y) * scale
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        return loss.detach()

    def state(self):
        drawn = torch.rand(2, device=next(self.net.parameters()).device)
        return [copy.deepcopy(self.net.state_dict()), copy.deepcopy(self.opt.state_dict()["state"]), drawn, self.seen]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_c01_training_steps(device, optimizer):
    plain, ours = Training(device, optimizer), Training(device, optimizer)
    recorded = pg.record(ours.step, steps=K, keep="always")
    for n in range(6):
        for each in (plain, ours):
            each.opt.param_groups[0]["lr"] = 0.1 / (n + 1)
        x, y = torch.randn(K, 5, 6, device=device), torch.randn(K, 5, 1, device=device)
        torch.manual_seed(n)
        expected = torch.stack([plain.step(x[i], y[i]) for i in range(K)]), plain.state()
        torch.manual_seed(n)
        assert_same((recorded(x, y), ours.state()), expected)
    stats = pg.stats(recorded)
    assert (stats.live, stats.recorded, stats.replayed, stats.steps) == (1, 1, 5, K), reasons(recorded)
    assert f"a call is {K} steps" in pg.explain(recorded)


def assert_steps(recorded, plain, *calls):
    """Assert that each of the calls gives the same, recorded and plain, and that the last ones are replayed."""
    for args, kwargs in calls:
        assert_same(recorded(*args, **kwargs), plain(*args, **kwargs))
    assert pg.stats(recorded).replayed >= len(calls) - 2, reasons(recorded)


Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    x: torch.Tensor
    name: str


@pytest.mark.parametrize("kind", ["tuple", "namedtuple", "dict", "dataclass", "keyword", "rest"])
def test_c01_tensors_in_arguments_are_unstacked(device, kind):
    def of_pair(pair, scale):
        return pair[0] * scale + pair[1]

    def of_dict(batch, scale):
        return {"sum": batch["x"] * scale + batch["inner"][0]}

    def of_dataclass(batch, *, scale):
        return Batch(batch.x * scale, batch.name)

    def of_rest(*args, scale):
        return args[0] * scale + args[1]

    def keyword(x, *, y, scale=3):
        return x * scale + y

    def call(n):
        x, y = ramp(device, K, 3, start=n), ramp(device, K, 3, start=2 * n)
        return {
            "tuple": (of_pair, ((x, y), 2), {}),
            "namedtuple": (of_pair, (Pair(x, y), 2), {}),
            "dict": (of_dict, ({"x": x, "inner": [y]}, 2), {}),
            "dataclass": (of_dataclass, (Batch(x, "a"),), {"scale": 2}),
            "keyword": (keyword, (x,), {"y": y}),
            "rest": (of_rest, (x, y), {"scale": 2}),
        }[kind]

    def rows(value, i):
        if torch.is_tensor(value):
            return value[i]
        if isinstance(value, dict):
            return {k: rows(v, i) for k, v in value.items()}
        if isinstance(value, Batch):
            return Batch(value.x[i], value.name)
        if isinstance(value, (tuple, list)):
            made = [rows(v, i) for v in value]
            return Pair(*made) if isinstance(value, Pair) else type(value)(made)
        return value

    function = call(0)[0]
    recorded = pg.record(function, steps=K)
    for n in range(4):
        _, args, kwargs = call(n)
        results = [function(*rows(args, i), **rows(kwargs, i)) for i in range(K)]
        first = results[0]
        if isinstance(first, dict):
            expected = {"sum": torch.stack([r["sum"] for r in results])}
        elif isinstance(first, Batch):
            expected = Batch(torch.stack([r.x for r in results]), ["a"] * K)
        else:
            expected = torch.stack(results)
        assert_same(recorded(*args, **kwargs), expected)
    assert pg.stats(recorded).replayed == 3, reasons(recorded)


def test_c01_a_result_that_is_fed_back(device):
    table = torch.randn(7, 7, device=device)

    def decode(token):
        return table[token].argmax(-1)

    recorded = pg.record(decode, steps=K, carry="token")

    def plain(token):
        tokens = [token]
        for _ in range(K):
            tokens.append(decode(tokens[-1]))
        return torch.stack(tokens[1:])

    assert_steps(recorded, plain, *(((torch.tensor([n], device=device),), {}) for n in range(5)))


@pytest.mark.parametrize("carry", [("state",), {"state": 0}, {"state": "after"}], ids=["sequence", "item", "attribute"])
@pytest.mark.parametrize("results", ["stack", "last", ("last", "stack")], ids=["stack", "last", "each"])
def test_c01_items_of_a_result_are_fed_back(device, carry, results):
    Result = namedtuple("Result", "after seen")

    def step(state, x):
        state = state * 0.5 + x
        return Result(state, state.sum())

    def plain(state, x):
        found = []
        for i in range(K):
            found.append(step(state, x[i]))
            state = found[-1].after
        states, sums = torch.stack([r.after for r in found]), torch.stack([r.seen for r in found])
        return {"stack": Result(states, sums), "last": found[-1]}.get(results, Result(state, sums))

    recorded = pg.record(step, steps=K, carry=carry, results=results)
    assert_steps(recorded, plain, *(((ramp(device, 3, start=n), ramp(device, K, 3)), {}) for n in range(5)))


def test_c01_one_step(device):
    recorded = pg.record(lambda h, x: (h + x, x), steps=1, carry=("h",), results=("last", "stack"))
    for n in range(4):
        h, x = ramp(device, 3), ramp(device, 1, 3, start=n)
        assert_same(recorded(h, x), (h + x[0], x))
    assert pg.stats(recorded).replayed == 3


def test_c03_shared_tensors_are_the_callers_own(device):
    def step(token, position):
        position.add_(1)
        return token + position

    recorded = pg.record(step, steps=K, carry="token", shared="position")
    position, token = torch.zeros(1, device=device), torch.zeros(1, device=device)
    for n in range(5):
        found = recorded(token, position=position)
        expected = torch.cumsum(torch.arange(K * n + 1, K * n + K + 1, device=device), 0)[:, None].float()
        assert_same((found, position), (expected, torch.full((1,), K * (n + 1.0), device=device)))
    assert pg.stats(recorded).replayed == 4, reasons(recorded)


def test_c05_results_are_kept_as_they_were_after_each_step(device):
    total = torch.zeros(2, device=device)

    def step(x):
        total.add_(x)
        return total

    recorded = pg.record(step, steps=K)
    held = []
    for _ in range(4):
        before = total.clone()
        held.append((recorded(torch.ones(K, 2, device=device)), before + torch.arange(1, K + 1, device=device)[:, None]))
    assert_same([found for found, _ in held], [expected for _, expected in held])
    assert pg.stats(recorded).replayed == 3, reasons(recorded)


def test_c06_gradients_through_all_steps(device):
    def step(h, x, weight):
        h = torch.tanh(h @ weight + x)
        return h, h.square().mean()

    def plain(h, x, weight):
        losses = []
        for i in range(K):
            h, loss = step(h, x[i], weight)
            losses.append(loss)
        return h, torch.stack(losses)

    recorded = pg.record(step, steps=K, carry=["h"], shared=["weight"], results=("last", "stack"))
    for n in range(4):
        torch.manual_seed(n)
        h, x = torch.randn(2, 3, device=device), torch.randn(K, 2, 3, device=device)
        weights = [torch.randn(3, 3, device=device).requires_grad_() for _ in range(2)]
        with torch.no_grad():
            weights[1].copy_(weights[0])
        found = []
        for f, weight in zip((recorded, plain), weights, strict=True):
            last, losses = f(h, x, weight)
            (losses.sum() + last.sum()).backward()
            found.append((last.detach(), losses.detach(), weight.grad))
        assert_same(found[0], found[1])
    assert pg.stats(recorded).replayed == 3, reasons(recorded)


def test_c07_numbers_are_the_same_for_all_steps(device):
    recorded = pg.record(lambda x, by, names: x * by + len(names), steps=K)
    for by in (1.0, 2.0, 2.0, 3.0, 4.0):
        x = ramp(device, K, 3)
        assert_same(recorded(x, by, ["a", "b"]), x * by + 2)


def test_c09_effects_happen_in_each_step(device):
    class Counting:
        def __init__(self):
            self.steps = 0

        def step(self, x):
            self.steps += 1
            return x * 2 if self.steps % 5 else x

    plain, ours = Counting(), Counting()
    recorded = pg.record(ours.step, steps=K)
    for n in range(16):
        x = ramp(device, K, 3, start=n)
        assert_same(recorded(x), torch.stack([plain.step(x[i]) for i in range(K)]))
        assert plain.steps == ours.steps
    assert pg.stats(recorded).replayed >= 8, reasons(recorded)


@may_run_live
def test_c11_what_cannot_be_recorded_is_a_loop(device):
    def step(x):
        return x / x.max().item()

    recorded = pg.record(step, steps=K)
    for n in range(4):
        x = ramp(device, K, 3, start=n + 1)
        assert_same(recorded(x), torch.stack([step(x[i]) for i in range(K)]))
    assert pg.stats(recorded).replayed == 0
    assert "`x.max().item()`" in reasons(recorded)


def test_c11_numbers_handed_on_come_as_a_list(device):
    recorded = pg.record(lambda x: (x * 2, x.sum().item(), None), steps=K, fallback="split")
    for n in range(4):
        x = ramp(device, K, 3, start=n)
        assert_same(recorded(x), (x * 2, x.sum(1).tolist(), None))
    assert pg.stats(recorded).replayed >= 2, reasons(recorded)


def test_c20_off_is_a_loop(device, monkeypatch):
    recorded = pg.record(lambda x: x * 2, steps=K)
    monkeypatch.setenv("PHONOGRAPH", "off")
    x = ramp(device, K, 3)
    assert_same(recorded(x), x * 2)
    assert pg.stats(recorded).calls == 0


def test_c03_what_a_step_writes_into_its_slice_is_written_for_the_caller(device):
    def step(x, h):
        x.mul_(2)
        h.add_(x)
        return h

    recorded = pg.record(step, steps=K, carry="h", results="last")
    for n in range(4):
        x, h = ramp(device, K, 3, start=n), torch.zeros(3, device=device)
        last = recorded(x, h)
        expected = ramp(device, K, 3, start=n) * 2
        assert_same((x, h, last), (expected, expected.sum(0), expected.sum(0)))
        assert last.data_ptr() == h.data_ptr()
    assert pg.stats(recorded).replayed == 3, reasons(recorded)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "in compiled code"])
def test_c14_recorded_steps_within_others(device, compiled):
    inner = pg.record(lambda h, x: torch.tanh(h + x), steps=K, carry="h")

    def outer(h, x):
        return inner(h, x).sum(0)

    plain = [outer(ramp(device, 3, start=n) / 9, ramp(device, K, 3) / 9) for n in range(4)]
    called = torch.compile(outer, backend="eager") if compiled else pg.record(outer)
    with pytest.warns(pg.RunsLive, match="torch.compile") if compiled else nullcontext():
        found = [called(ramp(device, 3, start=n) / 9, ramp(device, K, 3) / 9) for n in range(4)]
    assert_same(found, plain)
