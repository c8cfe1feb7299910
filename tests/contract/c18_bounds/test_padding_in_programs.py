"""`shapes=`: gradients of what is padded, what padding would change, and everything around."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.shapes import trial
from phonograph.testing import assert_same
from tests.contract.shared.padding import ROWS, SIZES, check, layer, without_gradients  # noqa: F401


def refused(f):
    (reason,) = pg.stats(f).refusals
    return reason


@pytest.mark.parametrize("needs", ["parameter", "argument"])
def test_c06_where_gradients_are_wanted_nothing_is_padded(device, needs):
    ours = layer(device).requires_grad_(needs == "parameter")
    theirs = copy.deepcopy(ours)
    pg.record(ours, shapes={"input": {0: [4, 8]}})
    x = torch.randn(3, 6, device=device)
    for _ in range(3):
        check(ours, theirs, x)  # padded
    assert not pg.stats(ours).refusals

    def train(n):
        found = []
        x = torch.randn(n, 6, device=device)
        for m in (ours, theirs):
            m.zero_grad()
            given = x.clone().requires_grad_(needs == "argument")
            m(given * 1).square().sum().backward()
            found.append([given.grad, *(p.grad for p in m.parameters())])
        assert_same(*found, tolerance=1e-4)

    with torch.enable_grad():
        with pytest.warns(pg.RunsLive, match="works with gradients"):
            train(3)
        for n in (5, 3, 5, 3, 5, 3):
            train(n)  # a further warning is an error
    assert pg.explain(ours).count("not padded 1x: works with gradients") == 1


def test_c06_nor_where_only_a_parameter_in_reach_could_have_one(device):
    m = layer(device)

    def function(x):
        with torch.no_grad():
            return m(x)

    f = pg.record(function, shapes=ROWS)
    with torch.enable_grad():
        with pytest.warns(pg.RunsLive, match="works with gradients"):
            check(f, function, torch.randn(3, 6, device=device))
        for _ in range(3):
            check(f, function, torch.randn(3, 6, device=device))
    assert "float32[3, 6]" in pg.explain(f)
    assert "float32[4, 6]" not in pg.explain(f)


def test_c06_a_result_with_a_gradient_is_not_padded(device, quiet):
    def function(x):
        return (x * torch.ones(2, device=x.device, requires_grad=True)).exp()

    f = pg.record(function, shapes=ROWS)
    with torch.enable_grad():
        for _ in range(4):
            check(f, function, torch.randn(3, 2, device=device))
    assert "(3, 2)" not in refused(f)
    assert "gradient" in pg.explain(f) or "no plain tensor" in pg.explain(f)


# -- 4 to 7, 9: what padding would change


TABLE = torch.arange(12.0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.mean(0), "gives another result 0 where x is padded"),
        (lambda x: x / x.shape[0], "gives another result 0"),
        (lambda x: x - x.amax(), "gives another result"),
        (lambda x: x + 0 * x.sum(0), "with other values"),
        (lambda x: x.sum(0), "with other values"),
        (lambda x: (x.abs() + 1).sort(0, descending=True).values, "gives another result"),
        (lambda x: (-x.abs() - 1).sort(0, descending=True).values, "gives another result"),
        (lambda x: x.flip(0), "gives another result 0"),
        (lambda x: F.batch_norm(x, None, None, training=True), "gives another result"),
        (lambda x: torch.cat([x, x]), "of which it is not known what to cut"),
        (lambda x: x.shape[0], "gives another result 0"),
        (lambda x: x.shape, "gives another result 0"),
        (lambda x: (x * 2, x.shape[0] / 2), "gives another result 1"),
        (lambda x: [x * 2] * x.shape[0], "of another structure"),
        (lambda x: [x * i for i in range(x.shape[0])], "of another structure"),
        (lambda x: F.dropout(x), "draws random numbers"),
        (lambda x: x + torch.randn(x.shape, device=x.device), "draws random numbers"),
        (lambda x: x.add_(1).sum(1), "writes argument 0"),
        (lambda x: x[:, :1], "returns an argument, or a view of one"),
        (lambda x: x, "returns an argument, or a view of one"),
        (lambda x: (x * 2).chunk(2, 1), "returns an argument, or a view of one or of another result"),
        (lambda x: x.sum().expand(x.shape[0]), "gives a result 0 that shares memory"),
        (lambda x: x[2] * 2 if x.shape[0] == 3 else x[9], "cannot be recorded with padding: "),
        (lambda x: x * (x.abs().long() % 3), "makes integers of floating-point numbers"),
    ],
)
def test_c02_what_padding_would_change_is_not_padded(device, function, said):
    f = pg.record(function, shapes=ROWS)

    def call(n):
        x = torch.randn(3, 4, device=device) + n
        theirs = x.clone()
        results = []
        for called, given in ((f, x), (function, theirs)):
            torch.manual_seed(n)
            results.append(called(given))
        assert_same(*results)
        assert torch.equal(x, theirs)

    with pytest.warns(pg.RunsLive, match="is not padded") as warned:
        [call(n) for n in range(6)]
    assert any(said in reason for reason in pg.stats(f).refusals)
    assert f"not padded 1x: {next(r for r in pg.stats(f).refusals if said in r)}" in pg.explain(f)
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda x: x.all(0), lambda n: torch.tensor([[n > 3, True], [False, True], [True, False]])),
        (lambda x: x - x.max(), lambda n: torch.tensor([3, 0, 2]) - (7 if n > 3 else 0)),
        (lambda x: x.nan_to_num().amax(0), lambda n: torch.tensor([[3.0], [1.0], [2.0]]) - (7 if n > 3 else 0)),
        (lambda x: (-x).sort(0).values, lambda n: torch.tensor([[3.0], [1.0], [2.0]]) - (7 if n > 3 else 0)),
    ],
)
def test_rows_that_do_not_show_at_first_that_they_depend_on_others(device, quiet, function, make):
    f = pg.record(function, shapes=ROWS)
    for n in range(8):
        check(f, function, make(n).to(device))


def test_a_row_counts_by_itself(device, quiet):
    """An error in a row of small numbers does not hide behind a row of large ones."""

    def function(x):
        return x + 1e-3 * x.shape[0]

    f = pg.record(function, shapes=ROWS)
    for _ in range(4):
        x = torch.tensor([[1e6, 2e6], [1.0, 2.0], [1e-3, 1e-2]], device=device)
        assert torch.equal(f(x), function(x))
    assert "gives another result 0" in refused(f)


def test_rounding_does_not_hide_a_division_by_the_size(device, quiet):
    """In bfloat16 each single number of these is one that rounding might have given."""

    def function(x):
        return x / x.shape[0]

    f = pg.record(function, shapes={"x": {0: [128]}})
    for _ in range(4):
        x = torch.randn(127, 16, device=device).bfloat16()
        assert torch.equal(f(x), function(x))
    assert "gives another result 0" in refused(f)


def test_each_size_is_tried(device, quiet):
    def best(x):
        return x * 2 if x.shape[0] < 5 else x * 2 - x.shape[0] // 7

    f = pg.record(best, shapes={"x": {0: [8]}})
    for n in (5, 6, 2, 7, 5, 6, 2, 7, 5, 6, 2, 1):
        check(f, best, torch.randn(n, 2, device=device))
    assert "gives another result 0" in refused(f)


def test_c18_sizes_that_fail_are_not_tried_for_ever(device, quiet):
    f = pg.record(lambda x: x.mean(0), shapes={"x": {0: [64]}}, max_recordings=2)
    for _ in range(2):
        for n in range(1, 40):
            check(f, lambda x: x.mean(0), torch.randn(n, 2, device=device))
    assert f"float32[{64}, 2]" not in pg.explain(f)
    assert len(pg.stats(f).refusals) <= 2


# -- 8: verify


def test_c10_verify_tries_again(device):
    """What is noticed by no other means: rows begin to depend on each other by a value in memory."""
    mixed = torch.zeros((), dtype=torch.bool, device=device)
    f = pg.record(lambda x: torch.where(mixed, x - x.mean(), x), shapes=ROWS, verify=4)
    x = torch.randn(3, 2, device=device)
    for _ in range(10):
        assert torch.equal(f(x), x)
    assert pg.stats(f).live == 3  # the first, the fourth, the eighth
    mixed.fill_(True)
    f(x)  # the eleventh: padded, and wrong
    with pytest.warns(pg.RunsLive, match="is not padded"), pytest.raises(pg.Mismatch, match="gives another result"):
        f(x)
    for _ in range(9):
        assert torch.equal(f(x), x - x.mean())


# -- 10, 12: everything around


def test_what_is_no_such_tensor_is_left_as_it_is(device):
    def function(x, y=None):
        return (x if y is None else y) * 2

    f = pg.record(function, shapes={"x": {0: [4]}, "y": {2: [4]}})
    for _ in range(3):
        check(f, function, torch.ones(3, 2, device=device))
        check(f, function, 3, torch.ones(3, 2, device=device))
        check(f, function, torch.tensor(2.0, device=device))
        check(f, function, torch.ones(3, device=device), torch.ones(2, 3, 3, device=device))
    assert not pg.stats(f).refusals


def test_methods_have_recordings_of_their_own(device):
    class Scale:
        def __init__(self, by):
            self.by = torch.tensor(by, device=device)

        @pg.record(shapes=ROWS)
        def __call__(self, x):
            return x * self.by

        run = pg.record(shapes=ROWS)(lambda self, x: x + self.by)

    class Slotted:
        __slots__ = ()

        @pg.record(shapes=ROWS)
        def run(self, x):
            return x * 2

    twice, thrice = Scale(2.0), Scale(3.0)
    for n in (4, 4, 3, 3, 3):
        x = torch.randn(n, 2, device=device)
        for s, by in ((twice, 2), (thrice, 3)):
            assert torch.equal(s(x), x * by)
            assert torch.equal(s.run(x), x + by)
    assert pg.stats(twice.run).recorded == 1
    pg.prepare(Scale(2.0).run, torch.zeros(3, 2, device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)  # an object that has no value to compare
        assert torch.equal(Slotted().run(x), x * 2)
    again = copy.deepcopy(twice)
    assert torch.equal(again.run(x), x + 2)
    pg.reset(Scale.run)
    assert torch.equal(twice.run(x), x + 2)


def test_c16_modules_and_copies_of_them(device):
    m = layer(device)
    theirs = copy.deepcopy(m)
    assert pg.record(m, shapes={"input": {0: SIZES}}) is m
    for again in (m, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        for _ in range(3):
            check(again, theirs, torch.randn(3, 6, device=device))
    assert pg.stats(m).recorded == 1
    pg.reset(m)
    with pytest.raises(TypeError, match=r"is not recorded: call pg\.record"):
        pg.stats(m)


def twice(x):
    """Twice as much."""
    return x * 2


def test_c16_it_is_still_the_function(device):
    f = pg.record(twice, shapes=ROWS)
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("twice", "Twice as much.", twice)
    x = torch.ones(3, 2, device=device)
    for again in (copy.deepcopy(f), pickle.loads(pickle.dumps(f)), pg.record(f, shapes=ROWS)):
        for _ in range(2):
            assert torch.equal(again(x), x * 2)
        assert pg.stats(again).recorded == 1
        assert "padded: x, dimension 0, to 1, 2, 4, 8" in pg.explain(again)


def test_c14_inside_of_others(device):
    m = layer(device)
    inner = pg.record(lambda x: m(x), shapes=ROWS)
    outer = pg.record(lambda x: inner(x) * 2)
    padded_too = pg.record(lambda x: inner(x) * 2, shapes=ROWS)
    for n in (3, 3, 3, 5, 5):
        x = torch.randn(n, 6, device=device)
        check(outer, lambda x: m(x) * 2, x)
        check(padded_too, lambda x: m(x) * 2, x)
    assert pg.stats(inner).calls == 0
    assert pg.stats(padded_too).recorded == 2


def test_c20_switched_off(device, monkeypatch):
    f = pg.record(twice, shapes=ROWS)
    monkeypatch.setenv("PHONOGRAPH", "off")
    pg.prepare(f, torch.ones(3, 2, device=device))
    for _ in range(3):
        check(f, twice, torch.ones(3, 2, device=device))
    assert pg.stats(f).calls == 0


def test_c14_chains_and_borrowed_results(device):
    m = layer(device)
    first = pg.record(lambda x: m[0](x), shapes=ROWS)
    second = pg.record(lambda x: m[2](torch.tanh(x)), shapes=ROWS, outputs="borrow")
    for n in (3, 4, 5, 3, 4, 5, 3, 4, 5):
        x = torch.randn(n, 6, device=device)
        assert_same(second(first(x)) + 0, m(x), tolerance=1e-4)


def test_c14_threads(device):
    m = layer(device)
    f = pg.record(lambda x: m(x), shapes=ROWS)
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(30):
                n = int(torch.randint(1, 9, (), generator=generator))
                x = torch.randn(n, 6, generator=generator).to(device)
                try:
                    torch.testing.assert_close(f(x), m(x), rtol=1e-4, atol=1e-4)
                except BaseException as e:
                    wrong.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_options_are_checked():
    for wrong, error in [
        ({"x": [1]}, TypeError), ({"x": {0: [0]}}, ValueError), ({"x": {0: []}}, ValueError), ({"x": {0: 3}}, TypeError),
        ({"x": {-1: [1]}}, ValueError), ({"x": {"0": [1]}}, TypeError), ({3: {0: [1]}}, TypeError), (3, TypeError),
    ]:  # fmt: skip
        with pytest.raises(error):
            pg.record(twice, shapes=wrong)
    with pytest.raises(ValueError, match="'y', which is no parameter; there are: x"):
        pg.record(twice, shapes={"y": {0: [1]}})
    with pytest.raises(ValueError, match="there are: input"):
        pg.record(nn.Linear(1, 1), shapes={"x": {0: [1]}})
    assert isinstance(pg.record(twice, shapes=None), pg.Recorded)


def test_prepare_records_the_largest_first(device):
    sizes = []

    def f(x, y):
        sizes.append(x.shape[0])
        return x * 2 + y if len(sizes) < 99 else x

    shapes = {"x": {0: SIZES}, "y": {0: SIZES}}
    recorded = pg.record(lambda x, y: x * 2 + y, shapes=shapes)
    pg.prepare(recorded, torch.ones(3, 2, device=device), y=torch.ones(3, 2, device=device))
    assert (pg.stats(recorded).recorded, pg.stats(recorded).live) == (4, 1)
    for n in range(1, 9):
        x, y = torch.randn(2, n, 2, device=device)
        for _ in range(2):
            assert torch.equal(recorded(x, y=y.clone()), x * 2 + y)
    assert (pg.stats(recorded).recorded, pg.stats(recorded).live) == (4, 1 + 4)
    listed = pg.record(f, shapes=shapes, warmup=0)
    with pytest.warns(pg.RunsLive):  # it looks at a list of sizes, to which it appends
        pg.prepare(listed, torch.ones(3, 2, device=device), torch.ones(3, 2, device=device))
    assert sizes == []
    with pytest.raises(TypeError, match="shapes"):
        pg.prepare(pg.record(f), torch.ones(3, 2))
    with pytest.raises(ValueError, match="no tensor with the dimensions"):
        pg.prepare(recorded, 3, 4)
    with pytest.raises(ValueError, match="max_recordings=2"):
        pg.prepare(pg.record(f, shapes=shapes, max_recordings=2), torch.ones(3, 2), torch.ones(3, 2))


def test_prepare_records_what_gradients_go_through(device):
    ours = layer(device)
    theirs = copy.deepcopy(ours)
    pg.record(ours, shapes={"input": {0: SIZES}})
    with torch.enable_grad():
        pg.prepare(ours, torch.zeros(8, 6, device=device))
        assert pg.stats(ours).recorded == 4
        x = torch.randn(4, 6, device=device)
        for m in (ours, theirs):
            m(x).sum().backward()
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()], tolerance=1e-4)
    assert pg.stats(ours).live == 1


def test_a_failure_of_our_own_is_no_answer(device, monkeypatch, caplog):
    monkeypatch.setattr(trial, "_moulds", lambda *_: 1 / 0)
    f = pg.record(twice, shapes=ROWS)
    with pytest.warns(pg.RunsLive, match="phonograph itself failed"):
        [check(f, twice, torch.ones(3, 2, device=device)) for _ in range(4)]
    caplog.clear()


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
@pytest.mark.parametrize("first", [0.0, float("nan"), float("inf")])
def test_c02_a_result_of_zeros_or_no_numbers_says_nothing(device, first):
    """Whether rows depend on each other, or on how many there are, is told by other calls."""
    for function in (lambda x: x * x.shape[0], lambda x: x - x.amax(0)):
        f = pg.record(function, shapes=ROWS)
        for n in range(8):
            x = torch.full((3, 4), first, device=device) if n < 4 else torch.randn(3, 4, device=device)
            assert_same(f(x), function(x))


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c02_truth_values_that_were_all_the_same(device):
    def function(x, mask):
        return torch.where(mask.all(), x * 2, x)

    f = pg.record(function, shapes=ROWS | {"mask": {0: SIZES}})
    for n in range(8):
        x, mask = torch.randn(3, 4, device=device), torch.full((3, 4), n >= 4, device=device)
        assert_same(f(x, mask), function(x, mask))


ZEROS = {
    "softmax over all": lambda table: lambda x: torch.softmax(table[x] @ table[x].T, -1) @ table[x],
    "the mean of all": lambda table: lambda x: table[x].mean(0, keepdim=True),
    "the order": lambda table: lambda x: table[x].flip(0),
}


@pytest.mark.parametrize("make", ZEROS.values(), ids=ZEROS)
def test_c18_indices_that_are_all_zero_show_nothing(device, quiet, make):
    """The usual dummy call: what is in the padding, and in other rows, can only be zero as well."""
    torch.manual_seed(0)
    function = make(torch.randn(10, 4, device=device))
    f = pg.record(function, shapes={"x": {0: [4, 8]}})
    for ids in ([0, 0, 0], [0, 0, 0], [1, 5, 7], [1, 5, 7], [2, 3], [2, 3, 4, 5, 6], [1, 0, 2]):
        x = torch.tensor(ids, device=device)
        check(f, function, x)


def test_c18_numbers_that_are_all_zero_show_nothing(device, quiet):
    b = torch.ones((), device=device)
    f = pg.record(lambda x: x / x.shape[0] + b, shapes={"x": {0: [4, 8]}})
    for n in range(8):
        x = torch.full((3,), float(n // 3), device=device)
        check(f, lambda x: x / x.shape[0] + b, x)


def test_c18_an_argument_that_is_zero_each_time_is_padded_no_more(device, quiet):
    f = pg.record(lambda x, kind: x * 2 + kind, shapes={"x": {0: [4, 8]}, "kind": {0: [4, 8]}})
    for n in range(30):
        x = torch.arange(3.0, device=device) + n
        check(f, lambda x, kind: x * 2 + kind, x, torch.zeros(3, dtype=torch.long, device=device))
    assert pg.stats(f).replayed > 10
    assert "zero" in pg.explain(f)
