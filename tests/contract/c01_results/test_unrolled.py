"""Several steps in one call, `pg.record(step, steps=k)`: as many plain calls, to the bit."""

import copy
import pickle
from collections import namedtuple
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


@dataclass(eq=False)
class Trainer:
    """A dataclass with a tensor among its fields: as the method's own object it is no batch."""

    total: torch.Tensor
    scale: float = 2.0

    @pg.record(steps=K)
    def step(self, x):
        self.total.add_(x.sum())
        return x * self.scale

    def plain(self, x):
        return x.sum() * self.scale


def test_c16_methods(device):
    trainers = [Trainer(torch.zeros((), device=device)), Trainer(torch.zeros((), device=device), 3.0)]
    for n in range(4):
        for trainer in trainers:
            x = ramp(device, K, 3, start=n)
            before = trainer.total.clone()
            assert_same((trainer.step(x), trainer.total), (x * trainer.scale, before + x.sum()))
    assert pg.stats(Trainer.step).replayed >= 6
    assert pg.stats(trainers[0].step).steps == K
    copied = copy.deepcopy(trainers[0])
    assert_same(copied.step(x), x * 2)
    assert not torch.equal(copied.total, trainers[0].total)
    trainers[1].scale = 5.0
    assert_same(trainers[1].step(x), x * 5)


def test_c16_bound_methods_copies_and_pickles(device):
    trainer = Trainer(torch.zeros((), device=device))
    recorded = pg.record(trainer.plain, steps=K)
    x = ramp(device, K, 3)
    for each in (recorded, copy.deepcopy(recorded), pickle.loads(pickle.dumps(recorded))):
        for _ in range(3):
            assert_same(each(x), x.sum(1) * 2)
        assert pg.stats(each).replayed == 2, reasons(each)
    again = pg.record(recorded)
    assert_same(again(x), x.sum() * 2)  # recorded once more, a call is a step


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


@may_run_live
def test_c13_an_exception_in_a_step(device):
    """What the steps before it did is done, as in a loop."""
    total = torch.zeros(3, device=device)

    def step(x, limit):
        total.add_(x)
        if total.sum() > limit:
            raise OverflowError("too much")
        return x * 2

    recorded = pg.record(step, steps=K)
    x = torch.ones(K, 3, device=device)
    for _ in range(2):
        total.zero_()
        recorded(x, 100)
        total.zero_()
        with pytest.raises(OverflowError, match="too much"):
            recorded(x, 7)
        assert_same(total, torch.full((3,), 3.0, device=device))


SHAPES = {"another": (K + 1, 3), "scalar": (), "none": (0, 3)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_c13_another_leading_dimension(device, shape):
    """The error names the argument, before anything runs, in each phase."""
    ran = torch.zeros(1, device=device)

    def step(x, inner):
        ran.add_(1)
        return x + inner["y"]

    recorded = pg.record(step, steps=K)
    good = torch.ones(K, 3, device=device)
    for n in range(3):
        with pytest.raises(ValueError, match=rf"steps={K}: inner has a tensor of shape .*leading dimension is not {K}"):
            recorded(good, {"y": torch.ones(shape, device=device)})
        assert ran.item() == n * K
        recorded(good, inner={"y": good})


def test_c13_results_that_cannot_be_stacked(device):
    def step(n, x):
        n.append(0)
        return (x,) if len(n) == 2 else x

    with pytest.raises(ValueError, match=r"result of step 1 has another structure than that of step 0 \(results=\"last\""):
        pg.record(step, steps=K)([], ramp(device, K, 3))


WRONG = {
    "no steps": ({"steps": 0}, ValueError, "steps must be at least 1"),
    "carry alone": ({"carry": "x"}, ValueError, "carry needs steps"),
    "unknown": ({"steps": 2, "carry": "z"}, ValueError, "carry names 'z', which is no parameter; there are: x, y"),
    "unknown shared": ({"steps": 2, "shared": ["z"]}, ValueError, "shared names 'z'"),
    "both": ({"steps": 2, "carry": "x", "shared": "x"}, ValueError, "carry and shared both name 'x'"),
    "results": ({"steps": 2, "results": "all"}, ValueError, "results must be 'stack' or 'last'"),
    "kind": ({"steps": 2, "carry": 3}, TypeError, "carry must be the name of a parameter"),
    "shapes": ({"steps": 2, "shapes": {"x": {0: [2]}}}, ValueError, "steps and shapes"),
}


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG)
def test_c13_options_that_are_wrong(options, error, message):
    with pytest.raises(error, match=message):
        pg.record(lambda x, y: x + y, **options)


def test_c13_carry_and_results_that_do_not_fit_the_result(device):
    with pytest.raises(TypeError, match="carry takes item 0 of the result, which is a Tensor"):
        pg.record(lambda x: x * 2, steps=2, carry=["x"])(ramp(device, 3))
    with pytest.raises(TypeError, match="needs a result of 2 items, not Tensor"):
        pg.record(lambda x: x * 2, steps=2, results=("last", "stack"))(ramp(device, 2, 3))
    with pytest.raises(TypeError, match="record the step that calls the module"):
        pg.record(nn.Linear(2, 2), steps=2)


def test_c20_off_is_a_loop(device, monkeypatch):
    recorded = pg.record(lambda x: x * 2, steps=K)
    monkeypatch.setenv("PHONOGRAPH", "off")
    x = ramp(device, K, 3)
    assert_same(recorded(x), x * 2)
    assert pg.stats(recorded).calls == 0
