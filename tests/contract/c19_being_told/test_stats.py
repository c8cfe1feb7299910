"""C19: `stats`, `explain`, the logger, and one warning a reason."""

import copy
import inspect
import logging
import warnings

import pytest
import torch

import phonograph as pg
from phonograph.fx import record_graph
from tests.helpers import may_run_live, ramp, reasons


def test_c19_each_call_is_counted_as_live_or_replayed(device):
    f = pg.record(lambda x: x * 2, warmup=2)
    for n in range(1, 9):
        f(torch.ones(3, device=device))
        stats = pg.stats(f)
        assert stats.calls == n == stats.live + stats.replayed
    assert (stats.live, stats.recorded, stats.replayed) == (2, 1, 6)
    assert not stats.refusals


def test_c19_copied_bytes_are_counted(device):
    f = pg.record(lambda x, y: x + y, warmup=1)
    for _ in range(4):
        f(torch.ones(100, device=device), torch.ones(100, device=device))
    assert 0 <= pg.stats(f).bytes_copied <= 3 * 2 * 400


@may_run_live
def test_c19_refusals_are_counted_by_reason(device):
    f = pg.record(lambda x: x * x.sum().item(), warmup=1, fallback="live")
    for _ in range(5):
        f(ramp(device, 3))
    refusals = pg.stats(f).refusals
    assert sum(refusals.values()) == 4
    assert all(isinstance(reason, str) and reason for reason in refusals)


@may_run_live
def test_c19_explain_says_what_and_why(device):
    def named_function(x):
        return x * x.sum().item()

    f = pg.record(named_function, warmup=1, fallback="live")
    g = pg.record(lambda x: x * 2, warmup=1, name="my step", fallback="live")
    for _ in range(3):
        f(ramp(device, 3))
        g(ramp(device, 3))
    assert "named_function" in pg.explain(f)
    assert "item()" in reasons(f)
    assert "my step" in pg.explain(g)
    assert __file__ not in pg.explain(g)


@may_run_live
def test_c19_the_phonograph_logger_is_told(device, caplog):
    with caplog.at_level(logging.DEBUG, "phonograph"):
        f = pg.record(lambda x: x * x.sum().item(), warmup=1, fallback="live")
        g = pg.record(lambda x: x * 2, warmup=1, fallback="live")
        for _ in range(4):
            f(ramp(device, 3))
            g(ramp(device, 3))
    ours = [r.getMessage() for r in caplog.records if r.name.split(".")[0] == "phonograph"]
    assert sum("runs live" in message for message in ours) == 1
    assert any("runs live" not in message for message in ours), "the recording of g"


@may_run_live
def test_c19_a_reason_is_one_message(device, caplog):
    """Who has a logger that shows what happens is not told in a warning and there."""
    f = pg.record(lambda x: x * x.sum().item(), warmup=1, fallback="live")
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            f(ramp(device, 3))
    assert len([w for w in said if issubclass(w.category, pg.RunsLive)]) == 1
    assert "runs live" not in caplog.text


def test_c19_a_second_reason_of_one_function_is_warned_too(device):
    f = pg.record(lambda x, how: x * x.sum().item() if how else x.nonzero(), warmup=1, fallback="live")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            f(ramp(device, 3), True)
            f(ramp(device, 3), False)
    assert len([w for w in said if issubclass(w.category, pg.RunsLive)]) == 2


def test_c19_statistics_survive_a_reset_of_the_recordings(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for _ in range(3):
        f(ramp(device, 3))
    calls = pg.stats(f).calls
    pg.reset(f)
    assert pg.stats(f).calls in (0, calls)
    f(ramp(device, 3))


@pytest.mark.parametrize("function", [pg.stats, pg.explain, pg.reset])
def test_c19_asking_about_what_is_not_recorded_is_a_type_error(function):
    with pytest.raises(TypeError, match="record"):
        function(lambda x: x)


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": -1},
        {"fallback": "maybe"},
        {"outputs": "mine"},
        {"verify": -2},
        {"max_recordings": 0},
        {"unknown": 1},
        {"max_bytes": -1},
        {"max_bytes": 1.5},
    ],
    ids=str,
)
def test_c19_wrong_options_are_refused_at_once(options):
    with pytest.raises((TypeError, ValueError)):
        pg.record(lambda x: x, **options)


@pytest.mark.parametrize(
    "options",
    [{"name": 3}, {"name": b"x"}, {"takes_turns": True}, {"shapes": (1, 2)}, {"split_at": None}, {"split_at": "aten::sort"}],
    ids=str,
)
def test_c19_options_of_a_wrong_type_are_named(options):
    (name,) = options
    with pytest.raises(TypeError, match=name):
        pg.record(lambda x: x, fallback="split" if name == "split_at" else "live", **options)


@pytest.mark.parametrize(
    ("take", "name"),
    [
        (lambda **o: pg.record(lambda x: x, **o), "record"),
        (lambda **o: pg.record(**o), "record"),
        (lambda **o: record_graph(lambda x: x, (torch.ones(1),), **o), "record_graph"),
        (lambda **o: pg.make_graphed_callables(torch.nn.Tanh(), (torch.ones(1),), **o), "make_graphed_callables"),
    ],
    ids=["record", "decorator", "graph", "callables"],
)
def test_c19_unknown_options_are_told_by_name(take, name):
    """As Python tells it of the function that was called, with the option that was meant; none of ours is one."""
    with pytest.raises(TypeError) as told:
        take(warm_up=2)
    assert str(told.value) == f"{name}() got an unexpected keyword argument 'warm_up'. Did you mean 'warmup'?"
    with pytest.raises(TypeError) as told:
        take(zzz=2)
    assert str(told.value).startswith(f"{name}() got an unexpected keyword argument 'zzz'; there are: warmup, fallback, ")
    for ours in ("takes_turns", "is_part", "live_backward"):
        assert ours not in str(told.value)
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{ours}'"):
            take(**{ours: True})


def test_c19_the_backend_names_what_was_meant():
    with pytest.raises(Exception, match="Did you mean 'warmup'"):
        torch.compile(lambda x: x + 1, backend="phonograph", options={"warm_up": 1})(torch.ones(2))


def test_c19_help_shows_the_options():
    """Those that the overloads have, which are for type checkers; with their defaults."""
    shown = inspect.signature(pg.record)
    assert list(shown.parameters) == [
        "fn", "warmup", "fallback", "outputs", "verify", "audit", "max_recordings", "max_bytes", "name", "keep", "split_at",
        "shapes", "steps", "carry", "shared", "results", "edges",
    ]  # fmt: skip
    assert "warmup: int = 1" in str(shown)
    assert "outputs: Literal['keep', 'borrow'] = 'keep'" in str(shown)


def test_c19_a_module_that_is_not_recorded_is_told_plainly():
    model = pg.record(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^this Linear is not recorded: call pg\.record on it \(copies"):
        pg.stats(copy.deepcopy(model))
