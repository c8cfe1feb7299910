"""C11, C13: `one_hot` with a number of classes is recorded on both devices. On the CPU torch looks at the values, in order to
raise; so does each replay."""

import pytest
import torch
from torch import distributions as D
from torch.nn import functional as F

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, reasons

PROGRAMS = {
    "by position": lambda x: F.one_hot(x, 4) * 2,
    "by name": lambda x: F.one_hot(x, num_classes=4).float().sum(0),
    "of no dimensions": lambda x: F.one_hot(x[0], 4),
    "of two": lambda x: torch.nn.functional.one_hot(x.view(-1, 1), 4),
    "of some": lambda x: F.one_hot(x[1:], 4) + F.one_hot(x[:1], 4),
    "a batch": lambda x: torch.vmap(lambda one: F.one_hot(one, 4))(x),
    "a loss": lambda x: F.mse_loss(x[:, None] / 4, F.one_hot(x, 4)[:, :1].float()),
}
programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def classes(device, *values):
    return torch.tensor(values, device=device)


@programs
def test_c11_a_known_number_of_classes_is_recorded(device, program):
    f = pg.record(program, keep="always")
    for values in ((0, 1, 2), (3, 3, 0), (1, 0, 3), (2, 2, 2)):
        assert_same(f(classes(device, *values)), program(classes(device, *values)))
    assert counts(f) == (1, 1, 3), reasons(f)


@programs
def test_c11_a_known_number_of_classes_is_recorded_where_the_call_may_be_split(device, program):
    """The checks are torch's: the call does not go on by what they read."""
    f = pg.record(program, fallback="split", keep="always")
    for values in ((0, 1, 2), (3, 3, 0), (1, 0, 3), (2, 2, 2)):
        assert_same(f(classes(device, *values)), program(classes(device, *values)))
    assert counts(f) == (1, 1, 3), reasons(f)


def test_c11_a_number_of_classes_after_a_number_by_which_the_call_goes_on(device):
    flag, book = torch.tensor(True, device=device), torch.randn(4, 2, device=device)

    def program(x):
        if not flag.item():
            return x
        return F.one_hot(x, 4).float() @ book

    f = pg.record(program, fallback="split", keep="always")
    for n in range(12):
        x = classes(device, n % 4, 1, (n * 3) % 4)
        assert_same(f(x), program(x))
    assert pg.stats(f).replayed >= 8, reasons(f)
    assert pg.stats(f).recorded <= 2, reasons(f)


def test_c11_a_distribution_over_classes_is_recorded(device):
    logits = torch.zeros(3, 4, device=device)

    def program(x):
        return D.OneHotCategorical(logits=logits + x).sample()

    f = pg.record(program, keep="always")
    for n in range(4):
        x = torch.full((4,), float(n), device=device)
        torch.manual_seed(n)
        ours = f(x)
        torch.manual_seed(n)
        assert_same(ours, program(x))
    assert counts(f) == (1, 1, 3), reasons(f)


@pytest.mark.parametrize(("values", "said"), [((0, -1, 2), "non-negative"), ((0, 1, 4), "smaller than num_classes")])
def test_c13_a_class_that_is_none_raises_in_a_replay(values, said):  # on a GPU an assertion of the device's ends the process
    def program(x):
        return F.one_hot(x, 4) * 2

    f, good = pg.record(program, keep="always"), torch.tensor([0, 1, 2])
    for _ in range(3):
        f(good)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=said) as ours:
            f(torch.tensor(values))
        with pytest.raises(RuntimeError, match=said) as theirs:
            program(torch.tensor(values))
        assert str(ours.value) == str(theirs.value)
        assert_same(f(good), program(good))
    assert pg.stats(f).recorded == 1, reasons(f)
    assert pg.stats(f).replayed >= 4


@may_run_live
@pytest.mark.parametrize("values", [(0, -1, 2), (0, 1, 4)])
def test_c13_a_class_that_is_none_raises_at_once(values):
    f = pg.record(lambda x: F.one_hot(x, 4), keep="always")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Class values"):
            f(torch.tensor(values))
    assert_same(f(torch.tensor([1])), F.one_hot(torch.tensor([1]), 4))


@may_run_live
def test_c13_who_catches_it_goes_on():
    def program(x):
        try:
            return F.one_hot(x, 4)
        except RuntimeError:
            return x * 0 - 1

    f = pg.record(program, keep="always")
    for values in ((0, 1, 2), (3, 3, 0), (0, 4, 1), (1, 0, 3), (0, -1, 1)):
        assert_same(f(torch.tensor(values)), program(torch.tensor(values)))
    assert pg.stats(f).replayed >= 2


@may_run_live
def test_c11_an_unknown_number_of_classes_runs_live(device):
    f = pg.record(lambda x: F.one_hot(x), keep="always")
    for values in ((0, 1, 2), (3, 3, 0), (1, 0, 1)):
        assert_same(f(classes(device, *values)), F.one_hot(classes(device, *values)))
    assert pg.stats(f).recorded == 0
    assert any("one_hot" in reason for reason in pg.stats(f).refusals)


def test_c19_a_check_finds_nothing_in_the_way(device):
    found = pg.check(lambda x: F.one_hot(x, 4) * 2, classes(device, 0, 1, 2))
    assert found.records, found
    assert F.one_hot is torch._C._nn.one_hot
