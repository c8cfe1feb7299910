"""`shapes=`: sizes between those that are recorded are padded, where that changes nothing but the size."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.padding import ROWS, check, layer, without_gradients  # noqa: F401

# -- what is padded


def test_c18_many_sizes_few_recordings(device):
    """Each size is tried once, beside a live call; what follows are replays."""
    m, f_of = layer(device), []

    def forward(x):
        return {"y": m(x), "number": 33, "weight": m[0].weight}

    f = pg.record(forward, shapes={"x": {0: [1, 2, 4, 8, 16, 32]}})
    for n in range(1, 33):
        check(f, forward, torch.randn(n, 6, device=device))
    first = pg.stats(f)
    assert (first.live, first.replayed, first.recorded) == (2 + 26, 4, 4)  # 4, 8, 16 and 32 were recorded for what is padded
    for _ in range(2):
        for n in range(1, 33):
            f_of.append(f(torch.randn(n, 6, device=device)))
            assert f_of[-1]["weight"] is m[0].weight
    stats = pg.stats(f)
    assert stats.live == first.live
    assert stats.recorded <= 6 + 6  # two recordings of a declared size take turns while its results are held
    assert not stats.refusals
    assert stats.calls == stats.live + stats.replayed == 96


def test_c05_results_that_are_held_keep_their_values(device):
    m = layer(device)
    f = pg.record(lambda x: m(x), shapes=ROWS)
    held = []
    for n in (3, 5, 7, 3, 5, 7, 3, 8, 4, 6, 3, 5, 7):
        x = torch.randn(n, 6, device=device)
        held.append((f(x), m(x)))
    for ours, theirs in held:
        assert_same(ours, theirs, tolerance=1e-4)
        assert ours._base is None
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        assert ours.is_contiguous()
    assert pg.stats(f).recorded == 2


def test_what_was_there_before_shows_nowhere(device):
    f = pg.record(lambda x: x * 2, shapes=ROWS)
    for n in (4, 3, 3, 4, 3, 2, 1, 3):
        check(f, lambda x: x * 2, torch.full((n, 2), float(n), device=device))


def test_larger_and_empty_ones_are_recorded_as_they_are(device):
    f = pg.record(lambda x: x + 1, shapes=ROWS)
    for n in (9, 9, 9, 0, 0, 0):
        check(f, lambda x: x + 1, torch.randn(n, 2, device=device))
    assert pg.stats(f).recorded == 2
    assert not pg.stats(f).refusals


def test_c04_results_are_laid_out_as_eagers(device, quiet):
    """Strides, and where in its memory a result begins."""
    for function in (
        lambda x: (x * 2).T,
        lambda x: (x * 2)[:, -1],
        lambda x: (x[:, :, None] * torch.ones(3, device=x.device)).transpose(0, 1),
        lambda x: (x * 2, [(x + 1).sum(1)], {"a": None, "b": 3.5}),
        lambda x: (y := x * 2, y),
        lambda x: (x * 2).to(torch.int32).to(torch.float64) if x.dtype is torch.int64 else x.double(),
    ):
        f = pg.record(function, shapes=ROWS)
        for n in (3, 3, 3, 7, 7):
            x = torch.randn(n, 4, device=device)
            ours, theirs = f(x), function(x)
            assert_same(ours, theirs, tolerance=1e-4)
            if isinstance(theirs, torch.Tensor):
                assert ours.storage_offset() == theirs.storage_offset()
                assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            elif theirs[0] is theirs[-1]:
                assert ours[0] is ours[-1]
        assert pg.stats(f).replayed == 3
        assert not pg.stats(f).refusals


def test_other_layouts_of_arguments(device):
    def function(x):
        return F.conv2d(x, torch.ones(2, 3, 3, 3, device=x.device)) * 2

    f = pg.record(function, shapes=ROWS)
    for _ in range(3):
        x, last = torch.randn(6, 3, 5, 5, device=device), torch.randn(3, 5, 5, 3, device=device)
        for each in (x[:3], x[::2], x[:1].expand(3, 3, 5, 5), last.permute(0, 3, 1, 2), last.transpose(1, 3)):
            check(f, function, each)
    assert pg.stats(f).live == 5


def test_several_arguments_and_dimensions(device):
    """Equal lists of sizes, keywords, one tensor given twice."""

    def attend(q, k, scale=1.0, *, bias):
        return torch.softmax(q @ q.mT * scale + bias[:, None, :], -1) @ k * 1.0

    batch = {0: [2, 4]}
    f = pg.record(attend, shapes={"q": batch, "k": batch, "bias": batch, "scale": batch})
    for n in (1, 2, 3, 4) * 3:
        q, k, bias = torch.randn(n, 5, 6, device=device), torch.randn(n, 5, 7, device=device), torch.randn(n, 5, device=device)
        check(f, attend, q, k=k, bias=bias)
        check(f, attend, q, q, 0.5, bias=bias)
    assert pg.stats(f).recorded == 4
    assert not pg.stats(f).refusals


def test_ids_are_padded_with_such_as_there_are(device):
    """Causal in the second dimension; 0 is an index, and so is each that an argument has."""
    table = torch.randn(10, 4, device=device)
    f = pg.record(lambda x: table[x].cumsum(1), shapes={"x": {0: [4], 1: [4, 8]}})
    for length in (3, 5, 8, 3, 5, 8):
        x = torch.randint(3, 10, (3, length), device=device)
        check(f, lambda x: table[x].cumsum(1), x)
    assert pg.stats(f).recorded == 2
    assert not pg.stats(f).refusals


# -- 1: padded arguments never run


def test_c01_the_function_itself_gets_the_users_own_arguments(device, quiet):
    """In warm-ups, where a capture fails, where it is refused; captures are dry."""
    seen = []

    @torch.compiler.disable
    def note(x):
        seen.append(tuple(x.shape))

    for function in (
        lambda x: (note(x), x * 2)[1],
        lambda x: (note(x), x * x.sum().item())[1],
        lambda x: (note(x), x[2] if x.shape[0] == 3 else x[9])[1],
    ):
        for warmup in (0, 1, 2):
            f = pg.record(function, shapes=ROWS, warmup=warmup)
            for _ in range(6):
                seen.clear()
                x = torch.randn(3, 2, device=device)
                assert torch.equal(f(x), function(x))
                assert set(seen) == {(3, 2)}
                assert len(seen) == 2


def test_c01_effects_happen_once(device, quiet):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), device=device))
            self.times = 0

        def forward(self, x):
            self.calls += 1
            self.times += 1
            return x * 2

    ours, theirs = Counter(), Counter()
    pg.record(ours, shapes=ROWS)
    for n in (3, 5, 3, 3, 5, 6):
        check(ours, theirs, torch.randn(n, 4, device=device))
        assert (ours.calls, ours.times) == (theirs.calls, theirs.times)


# -- 2: what a verdict is good for


@pytest.mark.parametrize("when", [1, 2, 3, 5])
@pytest.mark.parametrize("change", ["train", "flag", "weights", "mode"])
def test_c08_what_was_tried_is_tried_again_where_something_has_changed(device, change, when, quiet):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.flag = nn.BatchNorm1d(2).to(device), False

        def forward(self, x):
            return self.norm(x) - (x.mean() if self.flag or torch.is_inference_mode_enabled() else 0)

    ours = Norm().eval()
    theirs = copy.deepcopy(ours)
    pg.record(ours, shapes=ROWS)
    for n in range(9):
        if n == when:
            for m in (ours, theirs):
                if change == "train":
                    m.train()
                elif change == "flag":
                    m.flag = True
                elif change == "weights":
                    m.norm.weight = nn.Parameter(torch.full((2,), 3.0, device=device))
        x = torch.randn(3, 2, device=device) * 4
        with torch.inference_mode(change == "mode" and n >= when), torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-3, atol=1e-3)
    assert bool(pg.stats(ours).refusals) is (change != "weights")


def test_c08_and_padded_again_when_it_is_back(device, quiet):
    m = nn.BatchNorm1d(2).to(device)
    pg.record(m, shapes={"input": {0: [8]}})
    x = torch.randn(3, 2, device=device)
    for train in (True, False, True, False):
        m.train(train)
        for _ in range(4):
            before = pg.stats(m)
            m(x)
    after = pg.stats(m)
    assert after.replayed == before.replayed + 1
    assert "float32[8, 2]" in pg.explain(m)


@pytest.mark.parametrize("second", ["attribute", "alias", "stride", "same"])
def test_c07_the_arguments_as_they_came_decide(device, second, quiet):
    """What padding would hide: that arguments are one, share memory, have other strides, attributes of their own."""

    def function(x, y):
        if x is y:
            return x * 3
        if not x.is_contiguous():
            return x * 5
        if hasattr(x, "mark"):
            return x * 7
        return x + y

    f = pg.record(function, shapes={"x": {0: [4]}, "y": {0: [4]}})
    for n in range(8):
        x, y = torch.randn(3, 2, device=device), torch.randn(3, 2, device=device)
        if n % 2 and second == "attribute":
            x.mark = True
        elif n % 2 and second == "alias":
            both = torch.randn(6, device=device)
            x, y = both[:6].view(3, 2), both[:6].view(3, 2)
        elif n % 2 and second == "stride":
            x = torch.randn(2, 3, device=device).T
        elif n % 2:
            y = x
        check(f, function, x, y)
