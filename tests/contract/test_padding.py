"""`shapes=`: sizes between those that are recorded are padded, where that changes nothing but the size."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg

SIZES = [1, 2, 4, 8]
ROWS = {"x": {0: SIZES}}


def layer(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)


def refused(f):
    (reason,) = pg.stats(f).refusals
    return reason


def test_one_recording_for_each_size_that_is_declared(device):
    m = layer(device)

    @pg.record(shapes=ROWS)
    def f(x):
        return {"y": m(x), "n": 3, "w": m[0].weight}

    for _ in range(3):
        for n in (8, 3, 5, 1, 7, 2, 6, 4):
            x = torch.randn(n, 6, device=device)
            result = f(x)
            torch.testing.assert_close(result["y"], m(x), rtol=1e-3, atol=1e-3)
            assert result["y"].shape == (n, 3)
            assert result["n"] == 3
            assert result["w"] is m[0].weight
    stats = pg.stats(f)
    assert stats.recorded == 4
    assert stats.replayed == 24 - 4 - 4  # one live call for each recording, and one for each of 3, 5, 6, 7
    assert not stats.refusals


def test_what_is_padded_shows_nowhere(device):
    """Not even what earlier calls have left behind it."""
    f = pg.record(lambda x: x * 2, shapes=ROWS)
    for n in (4, 3, 3, 4, 3, 2, 1, 3):
        x = torch.full((n, 2), float(n), device=device)
        assert torch.equal(f(x), x * 2)


def test_larger_and_empty_ones_are_recorded_as_they_are(device):
    f = pg.record(lambda x: x + 1, shapes=ROWS)
    for n in (9, 9, 9, 0, 0, 0):
        x = torch.randn(n, 2, device=device)
        assert torch.equal(f(x), x + 1)
    assert pg.stats(f).recorded == 2


def test_two_arguments_and_two_dimensions(device):
    """Keys of masked attention: how much is padded shows in no result."""

    def attend(q, k, mask):
        scores = (q @ k.mT).masked_fill(~mask[:, None, :], float("-inf"))
        return scores.softmax(-1) @ k

    sizes = {0: [2, 4], 1: [4, 8]}
    f = pg.record(attend, shapes={"q": {0: [2, 4]}, "k": sizes, "mask": sizes})
    for n in range(1, 5):
        for length in (4, 8, 3, 6, 3, 6):
            q, k = torch.randn(n, 2, 6, device=device), torch.randn(n, length, 6, device=device)
            mask = torch.ones(n, length, dtype=torch.bool, device=device)
            if n == 1 or n == 3:  # a row of padding attends to nothing, which gives NaN there
                continue
            torch.testing.assert_close(f(q, mask=mask, k=k), attend(q, k, mask), rtol=1e-3, atol=1e-3)
    assert pg.stats(f).recorded == 4
    assert not pg.stats(f).refusals


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.mean(0), "gives another result 0 where x is padded from 3 to 4"),
        (lambda x: x / x.shape[0], "gives another result 0"),
        (lambda x: x - x.amax(), "gives another result 0"),
        (lambda x: F.batch_norm(x, None, None, training=True), "gives another result 0"),
        (lambda x: torch.cat([x, x]), "gives a result 0 of size 8 instead of 6"),
        (lambda x: x.shape[0], "gives another result 0"),
        (lambda x: [x] * x.shape[0], "of another structure"),
        (lambda x: x * torch.rand(x.shape[0], 1 << 20, device=x.device).mean(1, keepdim=True), "the state of generator"),
        (lambda x: x.add_(1).sum(1), "leaves argument 0 another"),
        (lambda x: x[:, :1], "returns an argument, or a view of one"),
        (lambda x: x[2] * 2 if x.shape[0] == 3 else x[4], "raises IndexError"),
    ],
)
def test_c02_what_padding_would_change_is_not_padded(device, function, said):
    f = pg.record(function, shapes=ROWS)
    for n in range(6):
        x = torch.randn(3, 4, device=device) + n
        theirs = x.clone()
        results = []
        for call, given in ((f, x), (function, theirs)):
            torch.manual_seed(n)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", pg.RunsLive)
                results.append(call(given))
        torch.testing.assert_close(*results, rtol=0, atol=0)
        assert torch.equal(x, theirs)
    assert said in refused(f)


def test_a_size_that_saturates_is_tried_for_each_size(device):
    def best(x):
        return x.topk(min(3, x.shape[0]), 0).values * 1 if x.shape[0] < 3 else x * 2

    f = pg.record(best, shapes={"x": {0: [8]}})
    results = []
    with pytest.warns(pg.RunsLive, match="is not padded"):
        results += [(f(x), best(x)) for n in (5, 6, 2, 5, 6, 2, 1) if (x := torch.randn(n, 2, device=device)) is not None]
    assert all(torch.equal(a, b) for a, b in results)


def test_trying_leaves_nothing_behind(device):
    """What the two padded calls do to state, gradients, generators and objects is taken back; the live one's stays."""

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device=device))
            self.register_buffer("calls", torch.zeros((), device=device))
            self.seen = []

        def forward(self, x):
            self.calls += 1
            self.seen.append(1)
            return x * self.weight

    ours, theirs = Counter(), Counter()
    pg.record(ours, shapes=ROWS)
    before = torch.get_rng_state()
    for n in (3, 5, 6):
        x = torch.randn(n, 4, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pg.RunsLive)
            assert torch.equal(ours(x), theirs(x))
        assert ours.calls == theirs.calls
        assert ours.seen == theirs.seen
    assert (torch.equal(before, torch.get_rng_state())) == (device.type == "cuda")


def test_a_model_is_trained(device):
    ours = layer(device)
    theirs = copy.deepcopy(ours)
    pg.record(ours, shapes={"input": {0: [4, 8]}})
    for n in (4, 8, 3, 5, 7, 3, 5, 7, 4, 3, 6, 6):
        x, found = torch.randn(n, 6, device=device), []
        for m in (ours, theirs):
            m.zero_grad()
            m(x).square().mean().backward()
            found.append([p.grad for p in m.parameters()])
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert pg.stats(ours).recorded == 2
    assert not pg.stats(ours).refusals
    pg.reset(ours)
    assert torch.equal(ours(x), theirs(x))
    with pytest.raises(TypeError, match=r"pg\.record was called on"):
        pg.stats(ours)


def test_methods_have_recordings_of_their_own(device):
    class Scale:
        def __init__(self, by):
            self.by = torch.tensor(by, device=device)

        @pg.record(shapes=ROWS)
        def __call__(self, x):
            return x * self.by

        run = pg.record(shapes=ROWS)(lambda self, x: x + self.by)

    twice, thrice = Scale(2.0), Scale(3.0)
    for n in (4, 4, 3, 3, 3):
        x = torch.randn(n, 2, device=device)
        for s, by in ((twice, 2), (thrice, 3)):
            assert torch.equal(s(x), x * by)
            assert torch.equal(s.run(x), x + by)
    assert pg.stats(twice.run).recorded == 1


def test_prepare_records_the_largest_first(device):
    sizes = []

    def f(x, y):
        sizes.append(x.shape[0])
        return x * 2 + y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)  # it keeps a list of its sizes
        recorded = pg.record(lambda x, y: x * 2 + y, shapes={"x": {0: SIZES}, "y": {0: SIZES}})
        pg.prepare(recorded, torch.ones(3, 2, device=device), y=torch.ones(3, 2, device=device))
        assert pg.stats(recorded).recorded == 4
        assert "padded: x, dimension 0: 1, 2, 4, 8" in pg.explain(recorded)
        listed = pg.record(f, shapes={"x": {0: SIZES}, "y": {0: SIZES}})
        pg.prepare(listed, torch.ones(3, 2, device=device), torch.ones(3, 2, device=device))
        assert sizes[0] == 8
        assert sizes == sorted(sizes, reverse=True)
    before = pg.stats(recorded).recorded
    for n in range(1, 9):
        x, y = torch.randn(2, n, 2, device=device)
        for _ in range(2):
            assert torch.equal(recorded(x, y=y.clone()), x * 2 + y)
    assert pg.stats(recorded).recorded == before
    with pytest.raises(TypeError, match="shapes"):
        pg.prepare(pg.record(f), torch.ones(3, 2))


def twice(x):
    """Twice as much."""
    return x * 2


def test_c16_it_is_still_the_function(device):
    f = pg.record(twice, shapes=ROWS)
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("twice", "Twice as much.", twice)
    x = torch.ones(3, 2, device=device)
    for again in (copy.deepcopy(f), pickle.loads(pickle.dumps(f)), pg.record(f, shapes=ROWS)):
        assert torch.equal(again(x), x * 2)


def test_options_are_checked():
    for wrong, error in [
        ({"y": {0: [1]}}, ValueError), ({"x": [1]}, TypeError), ({"x": {0: [0]}}, ValueError), ({"x": {0: []}}, ValueError),
        ({"x": {-1: [1]}}, ValueError), ({"x": {"0": [1]}}, TypeError), ({3: {0: [1]}}, TypeError), (3, TypeError),
    ]:  # fmt: skip
        with pytest.raises(error):
            pg.record(twice, shapes=wrong)


def test_fallback_error(device):
    f = pg.record(lambda x: x.mean(0), shapes=ROWS, fallback="error")
    with pytest.raises(pg.Unrecordable, match="cannot be padded"):
        f(torch.ones(3, device=device))
