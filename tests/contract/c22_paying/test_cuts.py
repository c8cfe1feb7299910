"""C11, C22: with `fallback="auto"` a call is cut where something needs the host, and stays so if that is measured faster than
live. Else it runs live, with the reason that it would have without cuts. What calls take, these tests say themselves."""

import itertools

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.devices import device_for
from phonograph.engine import budget, making
from phonograph.options import Options
from phonograph.testing import SideBySide, assert_same
from tests.contract.c22_paying.test_paying import ENOUGH, LIVE, Ticking, called, still_recorded, takes  # noqa: F401
from tests.helpers import counts, may_run_live, ramp, reasons


def auto(function, **options):
    return pg.record(function, fallback="auto", **options)


@torch.library.custom_op("phonograph_tests::by_its_matches", mutates_args=())
def by_its_matches(x: torch.Tensor) -> torch.Tensor:
    return x * int((x > 0.5).sum())


def by_a_mask(x):
    y = x * 2
    y[x > x[0] + 0.2] = x.new_ones(1).expand(2).clone()
    return y


CUT = {
    "a number looked at": lambda x: x * 2 if (x > 0).all() else x - 1,
    "a number computed with": lambda x: x * x.sign().sum().item(),
    "a number handed on": lambda x: (x * 2, x.sum().item()),
    "two": lambda x: (x * 2 if (x > 0).all().item() else x - 1, x.sum().item()),
    "an operator": by_a_mask,
    "an operator of others": lambda x: by_its_matches(x + 0.2) + 1,
}
by_what = pytest.mark.parametrize("function", CUT.values(), ids=CUT)


def beside(f, function, device):
    for n in range(ENOUGH):
        x = ramp(device, 3, start=1 + n % 3)
        assert_same(f(x), function(x))


@by_what
@pytest.mark.parametrize("times", [(20, 24), (10, 30)], ids=["faster", "much faster"])
def test_c22_a_cut_that_pays_stays_and_is_no_refusal(device, takes, function, times):  # noqa: F811
    takes(*times)
    f = auto(function)  # (a warning would fail this test)
    beside(f, function, device)
    stats = pg.stats(f)
    assert still_recorded(f)
    assert dict(stats.refusals) == {}
    assert stats.recorded == 1
    assert stats.live <= 3 + LIVE
    assert stats.timed == (LIVE if times == (20, 24) else 4)


@by_what
@pytest.mark.parametrize("times", [(31, 24), (24, 24), (90, 24)], ids=["slower", "as fast", "much slower"])
def test_c22_a_cut_that_does_not_pay_goes_and_the_reason_is_that_of_a_live_call(device, takes, function, times):  # noqa: F811
    takes(*times)
    f, live = auto(function), pg.record(function, fallback="live")
    told = []
    for g in (f, live):
        with pytest.warns(pg.RunsLive) as warned:
            beside(g, function, device)
        assert len(warned) == 1
        told.append(dict(pg.stats(g).refusals))
    if device.type == "cpu" or function is not CUT["an operator of others"]:
        assert told[0].keys() == told[1].keys()
    assert not still_recorded(f)
    played, plain = times
    assert f"cut out there, a replay takes {played} us and the function itself {plain} us (medians of " in reasons(f)
    assert 'fallback="split"' not in reasons(f), "it is slower"
    before, made, played = counts(f)
    called(f, ramp(device, 3), 100)
    assert counts(f) == (before + 100, made, played)
    assert pg.stats(f).timed == (4 if times == (90, 24) else LIVE)


def test_c19_explain_says_what_was_cut_and_what_each_cut_costs(device, takes):  # noqa: F811
    takes(played=10, live=30)

    def function(x):
        y = x * 2 if (x > 0).all() else x - 1
        return y.sin() if y.sum() > 0 else y, y.sum().item()

    said = pg.explain(called(auto(function), ramp(device, 3)))
    assert said.count("live between its segments: a look at a number at ") == 2
    assert said.count(" ms of each replay (median of 16)") == 2
    assert "reads 1 numbers at its end, which it hands on" in said
    assert "live 0.03 ms" in said


@may_run_live
def test_c22_only_what_can_be_measured_is_cut(device, takes, monkeypatch):  # noqa: F811
    takes(played=10, live=30)
    function, x = CUT["a number looked at"], ramp(device, 3)
    for options in ({"verify": 50}, {"shapes": {"x": {0: [3]}}}):
        f = called(auto(function, **options), x)
        assert counts(f) == (ENOUGH, 0, 0)
        assert 'fallback="split"' in reasons(f)
    monkeypatch.setattr(making, "several", lambda: True)  # ranks have to decide alike
    f = called(auto(function), x)
    assert counts(f) == (ENOUGH, 0, 0)


@may_run_live
def test_c22_a_cut_goes_where_there_is_no_memory_to_measure_it(device, takes, monkeypatch):  # noqa: F811
    takes(played=10, live=30)
    function, x = CUT["a number looked at"], ramp(device, 3)
    f = auto(function)
    f(x)
    monkeypatch.setattr(type(device_for(device)), "spare", 0)
    called(f, x)
    assert not still_recorded(f)
    assert "cut out there, it could not be timed" in reasons(f)


def test_c22_who_keeps_all_recordings_keeps_those_with_cuts(device, takes):  # noqa: F811
    clock = takes(played=31, live=24)
    f = called(auto(CUT["a number looked at"], keep="always"), ramp(device, 3))
    assert counts(f) == (2, 1, ENOUGH - 2)
    assert clock.seen == []


@by_what
@pytest.mark.parametrize("every", [2, 5, 11])
def test_c11_numbers_that_change_now_and_then(device, takes, function, every):  # noqa: F811
    takes(played=10, live=30)
    f = auto(function)  # (a warning would fail this test: there is nothing to mend)
    for n in range(ENOUGH):
        x = ramp(device, 3, start=1) * (-1 if n % every == every - 1 else 1)
        if function is not by_a_mask:
            assert_same(f(x), function(x))
    stats = pg.stats(f)
    assert stats.calls == stats.live + stats.replayed


def test_c11_shapes_that_change_now_and_then(device, takes):  # noqa: F811
    takes(played=10, live=30)
    f = auto(lambda x: x.nonzero().sum() + x)  # (a warning would fail this test)
    for n in range(ENOUGH):
        x = ramp(device, 3, start=0 if n % 12 == 11 else 1)
        assert_same(f(x), x.nonzero().sum() + x)
    assert pg.stats(f).replayed > ENOUGH / 2, pg.explain(f)


@may_run_live
def test_c11_shapes_that_change_from_call_to_call(device, takes):  # noqa: F811
    takes(played=10, live=30)
    f = auto(lambda x: x.nonzero().sum() + x)
    for n in range(ENOUGH):
        x = torch.arange(8, device=device) % (n % 8 + 1)
        assert_same(f(x), x.nonzero().sum() + x)
    assert "depends on" in reasons(f), reasons(f)


class Costly:
    """A clock of the budget: a call takes ten, and one that begins again twice as much."""

    def __init__(self, monkeypatch):
        self._time = itertools.count(0.0, 10.0)
        monkeypatch.setattr(budget, "now", lambda: next(self._time))


@may_run_live
def test_c22_what_begins_again_too_often_runs_live(device, takes, monkeypatch):  # noqa: F811
    """A number that is another in each second call: never four times in a row."""
    function = CUT["a number looked at"]
    takes(played=24, live=25)
    Costly(monkeypatch)
    f = auto(function)
    for n in range(200):
        x = (ramp(device, 3) + 1) * (-1 if n % 2 else 1)
        assert_same(f(x), function(x))
    stats = pg.stats(f)
    assert stats.live > 150, pg.explain(f)
    assert any("reads a tensor's value on the host" in reason for reason in stats.refusals)


@may_run_live
def test_c22_captures_that_only_show_where_to_cut_are_paid_for(device, monkeypatch):
    """Each of eight places costs a capture, of which three are free."""
    clock = Ticking(monkeypatch, capture=1000)

    def function(x):
        for i in range(8):
            if (x > i - 9).all():
                x = eval("x + 1 if (x > -9).all() else x")
        return x

    f = auto(function)
    for n in range(ENOUGH):
        assert_same(f(ramp(device, 3, start=n)), function(ramp(device, 3, start=n)))
    assert clock.captures <= 4
    assert "reads a tensor's value on the host" in reasons(f)


@may_run_live
def test_c22_many_sizes_that_are_cut_are_paid_for_as_others(device, monkeypatch):
    """Where one is cut, the next one is as well: that costs no capture."""
    clock = Ticking(monkeypatch, capture=10)
    f, kept = auto(lambda x: x * x.sum().item(), max_recordings=4), 4
    for n in range(400):
        x = ramp(device, 2 + n // 3)
        assert_same(f(x), x * x.sum().item())
    assert pg.stats(f).recorded >= kept
    assert clock.captures <= pg.stats(f).recorded + 1
    assert clock.captures <= 1 + kept + 1 + 400 / 20 / 10, pg.explain(f)


@may_run_live
def test_c11_an_operator_that_has_raised_once_is_not_cut_out(device, takes):  # noqa: F811
    takes(played=10, live=30)
    x, w = ramp(device, 3, 3), ramp(device, 3, 3)
    names = {"w": w}
    f = auto(lambda x: x @ names["w"] + 1)
    f(x)
    names["w"] = ramp(device, 2, 3)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            f(x)
    names["w"] = w
    for _ in range(ENOUGH):
        assert_same(f(x), x @ w + 1)
    assert "live between its segments" not in pg.explain(f)
    assert pg.stats(f).replayed > 0, pg.explain(f)


@may_run_live
def test_c11_what_cannot_be_cut_is_told_as_what_would_run_live(device):
    """That it cannot is nothing that the user has to mend."""

    def function(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            try:
                return by_its_matches(x + 0.2) + 1
            except RuntimeError:
                return x

    f, live = auto(function), pg.record(function, fallback="live")
    for g in (f, live):
        called(g, ramp(device, 3), 12)
        assert pg.stats(g).replayed == 0
    if device.type == "cpu":  # a GPU's capture fails in the operator; with cuts, what it reads is told
        assert [*pg.stats(f).refusals] == [*pg.stats(live).refusals], reasons(f)
    assert "is not cut, because it runs" in pg.explain(f)


@may_run_live
@pytest.mark.parametrize("pays", [True, False])
def test_c22_each_step_happens_once_while_its_cuts_are_measured(device, takes, pays):  # noqa: F811
    takes(*((20, 24) if pays else (31, 24)))

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
            return loss.detach(), loss.item()

        return step, (model, optimizer)

    both = SideBySide(make, warmup=1, fallback="auto")
    for n in range(ENOUGH):
        x = torch.full((2, 3), 1.0 + n % 7, device=device)
        if n in (20, 47):
            x[0, 0] = float("nan")
        both(x)
    assert still_recorded(both.recorded) is pays


def test_c11_auto_is_an_option():
    assert Options(fallback="auto").cuts(measured=True)
    assert not Options(fallback="auto").cuts(measured=False)
    assert Options(fallback="split", verify=3).cuts(measured=False)
    assert not Options(fallback="live").cuts(measured=True)
    with pytest.raises(ValueError, match='split_at needs fallback="split"'):
        auto(lambda x: x, split_at=["aten::sort"])


@may_run_live
@pytest.mark.parametrize("fallback", ["auto", "split"])
def test_c01_an_operator_with_another_gradient_where_it_is_watched_is_not_cut_out(device, fallback):
    def gradient(x):
        leaf = x.clone().requires_grad_()
        leaf.prod().backward()
        return leaf.grad

    f = pg.record(gradient, fallback=fallback, keep="always")
    for n in range(6):
        x = torch.randn(7, generator=torch.Generator().manual_seed(n)).to(device)
        assert_same(f(x), gradient(x))
    assert "live between its segments" not in pg.explain(f)
