"""C22: a recording is kept only if it pays. What its calls take, these tests say themselves: there is no clock in them."""

import copy
import gc
import itertools
import logging
import pickle
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.compile import graphs
from phonograph.devices import device_for
from phonograph.engine import budget, making
from phonograph.engine import profitability as paying
from phonograph.engine.known_calls import KnownCalls
from phonograph.reasons import reasons as all_reasons
from phonograph.testing import SideBySide, assert_same
from tests.helpers import counts, may_run_live, ramp

ENOUGH = 60  # calls, after which there is a verdict
LIVE = 2 * paying.LIVE  # calls that a trial of two rounds takes to run live, besides the warm-up


class Timed(paying.Clock):
    """Calls take so many microseconds of the host, or of the host and the device: one after the other, if there are several."""

    def __init__(self, played, live):
        self.takes = {False: self._turns(played), True: self._turns(live)}
        self.seen = []

    @staticmethod
    def _turns(times):
        while True:
            for one in times if isinstance(times, list) else [times]:
                yield one if isinstance(one, tuple) else (one, 0)

    def times(self, took):
        if took.host is None:
            return None
        self.seen.append(took.live)
        host, device = next(self.takes[took.live])
        return host * 1e-6, device * 1e-6


@pytest.fixture
def takes(monkeypatch):
    """Sets how long calls take."""

    def set_to(played, live):
        clock = Timed(played, live)
        monkeypatch.setattr(paying, "clock", clock)
        return clock

    return set_to


def tanh(x):
    return x.tanh() + 1


def called(f, x, times=ENOUGH):
    for _ in range(times):
        f(x)
    return f


def still_recorded(f):
    return "recording of" in pg.explain(f)


def test_c22_a_recording_that_does_not_pay_is_dropped_and_explain_says_so_with_both_figures(device, takes):
    takes(played=31, live=24)
    x = ramp(device, 3)
    f = called(pg.record(tanh), x)  # (a warning would fail this test: there is nothing to mend)
    assert_same(f(x), tanh(x))
    assert not still_recorded(f)
    reason = "a replay takes 31 us and the function itself 24 us (medians of 6)"
    assert f"{reason} at " in pg.explain(f)
    assert 'keep="always" keeps the recording' in pg.explain(f)
    stats = pg.stats(f)
    assert dict(stats.refusals) == {reason: ENOUGH + 1 - stats.replayed - 1 - LIVE}
    assert stats.timed == LIVE  # which is no refusal
    assert f"live {LIVE}x: to time it beside its recording" in pg.explain(f)
    assert (stats.recorded, stats.calls) == (1, stats.live + stats.replayed)
    live, made, played = counts(f)
    called(f, x, 200)
    assert counts(f) == (live + 200, made, played)


def test_c22_a_call_that_is_measured_is_counted_and_no_reason_is_told_of_it(device, takes, caplog, tmp_path):
    takes(played=24, live=31)
    caplog.set_level(logging.DEBUG, logger="phonograph")
    f = called(pg.record(tanh), ramp(device, 3))
    pg.report(tmp_path / "page.html")
    assert pg.stats(f).timed == pg.stats(f).live - 1 > 0
    assert not pg.stats(f).refusals
    assert not [line for line in caplog.messages if "live" in line]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"Timed beside its recording: {pg.stats(f).timed} live calls" in page
    assert not [reason for reason in all_reasons() if "beside its recording" in reason.words]


@may_run_live
@pytest.mark.parametrize("every", [2, 3])
def test_c22_calls_of_another_kind_are_no_comparison(device, monkeypatch, every):
    """Two kinds in turns, of one signature: one is recorded, the other takes next to nothing live."""
    monkeypatch.setattr(budget.Budget, "allows", lambda self, behind=0.0: self._first is None)  # one attempt
    cell, seen = types.SimpleNamespace(scale=2), []

    class Kinds(paying.Clock):
        def times(self, took):
            seen.append((took.live, cell.scale))
            return (1e-6 if cell.scale == 2 else 100e-6) if took.live else 50e-6, 0.0

    monkeypatch.setattr(paying, "clock", Kinds())
    f = pg.record(lambda x: x * int(str(cell.scale)))
    for n in range(every * ENOUGH):
        cell.scale = 3 if n % every == 1 else 2
        assert_same(f(ramp(device, 3)), ramp(device, 3) * cell.scale)
    assert pg.stats(f).recorded == 1
    assert {*seen} == {(False, 3), (True, 3)}
    assert seen.count((True, 3)) == LIVE - 2  # the first two do not count
    assert still_recorded(f)


@pytest.mark.parametrize("split", [False, True])
def test_c22_what_fits_no_more_while_calls_are_timed_is_recorded_anew(device, takes, monkeypatch, split):
    """Else such calls would run live for ever: none of them is compared with a recording that is not theirs."""
    monkeypatch.setattr(budget.Budget, "allows", lambda self, behind=0.0: True)
    takes(played=24, live=31)
    x, cell = ramp(device, 3), types.SimpleNamespace(scale=2)

    def scaled(x):
        return x * (int(str(cell.scale)) if not split or x.sum().item() > 0 else 0)

    f = pg.record(scaled)
    while not pg.stats(f).timed:
        f(x)
    cell.scale = 3
    before = pg.stats(f)
    for _ in range(ENOUGH):
        assert_same(f(x), x * 3)
    assert pg.stats(f).recorded == before.recorded + 1
    assert pg.stats(f).live - before.live <= (paying.LIVE + 1) + LIVE + 2
    assert still_recorded(f)


@may_run_live
@pytest.mark.parametrize("played", [24, 31])
@pytest.mark.parametrize("before", [4, 12])  # calls: while they are played, and while they run live to be timed
def test_c22_calls_of_another_signature_end_no_trial_of_a_cut(device, takes, before, played):
    """Such a recording has to be measured to be faster, however seldom it is called."""
    takes(played=played, live=27)
    x = ramp(device, 3)
    f = called(pg.record(lambda x: x * (2 if x.sum().item() > 0 else 3)), x, before)
    called(f, ramp(device, 4), 300)
    f = called(f, x)
    assert ("cut out there, a replay takes 31 us" in pg.explain(f)) is (played == 31), pg.explain(f)
    assert_same(f(x), x * 2)
    replayed = pg.stats(f).replayed
    called(f, x, 10)
    assert pg.stats(f).replayed - replayed == (10 if played == 24 else 0)


@pytest.mark.parametrize(
    ("played", "live"),
    [
        (24, 31),
        (24, 24),
        (24.4, 24),  # within noise
        ([24, 24, 24, 24, 9000], 24),  # Python's garbage collector, another process
        (30, [24, 40, 40]),  # slower at its best only
        ([20, 30, 30], 24),  # by its median only
        ((3, 20), (19, 20)),  # the host runs ahead of the device
        ((15, 3), (25, 25)),
    ],
)
def test_c22_a_recording_stays_unless_it_is_slower_without_doubt(device, takes, played, live):
    takes(played, live)
    x = ramp(device, 3)
    f = called(pg.record(tanh), x)
    assert still_recorded(f)
    before, made, _ = counts(f)
    assert before <= 1 + LIVE
    assert made == 1
    called(f, x, 10)
    assert counts(f)[:2] == (before, made)
    assert "function itself" not in pg.explain(f)


@pytest.mark.parametrize(("played", "live"), [((3, 21), (19, 20)), ((21, 3), (8, 20)), ([31, 31, 9000], [24, 24, 9000])])
def test_c22_what_counts_is_the_longer_of_the_hosts_and_the_devices_time(device, takes, played, live):
    takes(played, live)
    assert not still_recorded(called(pg.record(tanh), ramp(device, 3)))


def test_c22_no_call_runs_live_for_what_is_faster_beyond_doubt(device, takes):
    def many(x):
        for _ in range(40):
            x = x.tanh()
        return x

    clock = takes(played=39, live=1)  # in which 40 operators cannot be called
    f = called(pg.record(many), ramp(device, 3))
    assert counts(f) == (1, 1, ENOUGH - 1)
    assert clock.seen == [False] * paying.SAMPLES


def test_c22_no_call_runs_live_where_that_takes_much_memory_besides(device, takes, monkeypatch):
    takes(played=31, live=24)
    f = pg.record(tanh)
    f(ramp(device, 3))
    monkeypatch.setattr(type(device_for(device)), "spare", 0)
    called(f, ramp(device, 3))
    assert counts(f) == (1, 1, ENOUGH)


@pytest.mark.parametrize("options", [{"keep": "always"}, {"fallback": "error"}, {"verify": 50}, {"shapes": {"x": {0: [3]}}}])
def test_c22_who_wants_a_recording_for_more_than_its_speed_keeps_it(device, takes, options):
    clock = takes(played=31, live=24)
    f = called(pg.record(tanh, **options), ramp(device, 3))
    assert counts(f) == (1, 1, ENOUGH - 1)
    assert clock.seen == []


def test_c22_what_is_to_be_kept_is_checked_copied_and_pickled():
    with pytest.raises(ValueError, match="keep must be one of 'pays', 'always', not 'never'"):
        pg.record(tanh, keep="never")
    f = pg.record(tanh, keep="always")
    assert [one.options.keep for one in (f, copy.deepcopy(f), pickle.loads(pickle.dumps(f)))] == ["always"] * 3


def frames(f, x):
    """Which Python functions a call runs."""
    found = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        f(x)
    finally:
        sys.setprofile(None)
    return found[:-1] if found[-1:] == ["frames"] else found


def test_c22_a_call_after_the_verdict_is_what_it_would_be_without_a_trial(device, takes):
    clock = takes(played=24, live=31)
    x = ramp(device, 3)
    f, always = called(pg.record(tanh), x), called(pg.record(tanh, keep="always"), x)
    seen = len(clock.seen)
    assert frames(f, x) == frames(always, x)
    takes(played=31, live=24)
    f = called(pg.record(tanh), x, 100)
    assert min((frames(f, x) for _ in range(40)), key=len)[-1] == "tanh"
    assert not {"_timed", "_see", "times"} & {name for _ in range(40) for name in frames(f, x)}
    assert len(clock.seen) == seen


@pytest.mark.parametrize("pays", [True, False])
def test_c22_each_call_of_a_training_step_happens_once_while_it_is_measured(device, takes, pays):
    takes(*((2300, 2400) if pays else (3100, 2400)))

    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, optimizer)

    both = SideBySide(make, warmup=1)
    for n in range(ENOUGH):
        both(torch.full((2, 3), 1.0 + n % 7, device=device))
    live, made, played = counts(both)
    assert (made, live + played) == (1, ENOUGH)
    assert still_recorded(both.recorded) is pays


def test_c22_a_model_is_measured_with_its_backward_until_the_next_call(device, takes, monkeypatch):
    """By a clock that the loop moves on: its forward is faster when it is played, and its backward slower."""

    class Moved(paying.Clock):
        time = 0

        def now(self):
            return self.time

        def mark(self, device):
            return None

    clock = Moved()
    monkeypatch.setattr(paying, "clock", clock)
    model = pg.record(nn.Linear(3, 2).to(device))
    plain = copy.deepcopy(model)
    x = ramp(device, 2, 3)
    for _ in range(ENOUGH):
        before = pg.stats(model).replayed
        loss = model(x).sum()
        played = pg.stats(model).replayed > before
        clock.time += 5_000 if played else 9_000
        loss.backward()
        clock.time += 26_000 if played else 15_000
        plain(x).sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert "a replay takes 31 us and the function itself 24 us" in pg.explain(model)
    assert not still_recorded(model)


@pytest.mark.parametrize("behind", [0, 3, 20])
@pytest.mark.parametrize("times", [(31, 24), (24, 31), (24, 24), (60, 24), (24, 60)])
def test_c22_few_calls_run_live_for_a_trial_also_where_the_device_is_behind(device, takes, times, behind):
    """By so many calls. Four, where one way takes twice as long, and eight else."""
    clock = takes(*times)
    whole, waits, asked = clock.times, {}, itertools.count()
    clock.times = lambda took: whole(took) if waits.setdefault(took, next(asked)) + behind * 20 < next(asked) else None
    f = pg.record(tanh)
    for n in range(400):
        assert_same(f(ramp(device, 3, start=n)), tanh(ramp(device, 3, start=n)))
    far = max(times) > 2 * min(times)
    assert pg.stats(f).timed <= (4 if far and not behind else LIVE)
    assert still_recorded(f) is (times[0] <= times[1])


def test_c22_what_was_dropped_is_recorded_again_when_something_else_is_to_be_done(device, takes):
    clock = takes(played=31, live=24)
    layer = nn.Linear(3, 3).to(device)
    layer.power = 1

    def function(x):
        for _ in range(layer.power):
            x = layer(x)
        return x.detach()

    x = ramp(device, 2, 3)
    with torch.no_grad():
        f = called(pg.record(function), x, 200)
        assert counts(f)[1] == 1
        clock.takes = Timed(played=24, live=31).takes
        layer.power = 9
        called(f, x, 200)
        assert counts(f)[1] == 2
        assert still_recorded(f)
        assert_same(f(x), function(x))


def test_c22_each_signature_has_its_own_verdict(device, monkeypatch):
    class BySize(paying.Clock):
        def times(self, took):
            return (24e-6 if took.live is (took.marks == ("large",)) else 31e-6), 0.0

        def mark(self, device):
            return None

    monkeypatch.setattr(paying, "clock", BySize())
    until = paying.Trial.see
    monkeypatch.setattr(paying.Trial, "see", lambda trial, took, live: (
        setattr(took, "marks", ("large",) if trial.key in small else ()), until(trial, took, live)))  # fmt: skip
    small = set()
    f = pg.record(tanh)
    for _ in range(2):
        f(ramp(device, 3))
    small.update(trial.key for trial in f._trials)
    for n in range(3 * ENOUGH):
        assert_same(f(ramp(device, 3 + n % 2)), tanh(ramp(device, 3 + n % 2)))
    assert pg.explain(f).count("recording of") == 1
    assert "float32[4]" in pg.explain(f)


@pytest.mark.parametrize("at", [5, 12, 25, 50])
def test_c22_a_reset_ends_a_trial(device, takes, at):
    takes(played=31, live=24)
    f = called(pg.record(tanh), ramp(device, 3), at)
    players = [weakref.ref(p) for p in [*f._shelf, *f._trials.aside]]
    pg.reset(f)
    gc.collect()
    assert [ref() for ref in players] == [None] * len(players)
    called(f, ramp(device, 3), 3)
    assert counts(f)[1] == 2


def test_c22_a_recording_on_trial_whose_calls_stop_coming_stays(device, takes):
    takes(played=31, live=24)
    f = called(pg.record(tanh), ramp(device, 3), 12)
    assert pg.stats(f).live > 1
    called(f, ramp(device, 4), 600)
    before = counts(f)
    f(ramp(device, 3))
    assert counts(f) == (before[0], before[1], before[2] + 1)


def test_c22_the_memory_of_a_dropped_recording_is_free(device, takes):
    takes(played=31, live=24)
    f = pg.record(lambda x: x.tanh().cos())
    called(f, torch.ones(1 << 20, device=device), 3)
    there = pg.stats(f).pool_bytes  # that of other tests, too
    called(f, torch.ones(1 << 20, device=device))
    assert pg.stats(f).pool_bytes <= there - (4 << 20)


def test_c22_a_compiled_graph_is_measured_and_its_option_keeps_it(device, takes):
    takes(played=31, live=24)
    for options, kept in (({}, False), ({"keep": "always"}, True)):
        torch._dynamo.reset()
        fast = torch.compile(tanh, backend="phonograph", options={"inner": "aot_eager", **options})
        called(fast, ramp(device, 3))
        assert [still_recorded(graph) for graph in graphs()] == [kept]
        torch._dynamo.reset()


def test_c22_threads_that_call_what_is_measured_get_its_results(device, takes):
    takes(played=31, live=24)
    f, wrong = pg.record(tanh), []

    def work(n):
        x = ramp(device, 3, start=n)
        expected = tanh(x)
        for _ in range(ENOUGH):
            if not torch.equal(f(x), expected):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    called(f, ramp(device, 3), 2 * ENOUGH)
    assert wrong == []
    assert not still_recorded(f)


def test_c23_where_there_are_other_ranks_a_backward_may_communicate_and_is_not_measured(device, takes):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    clock = takes(played=31, live=24)
    model = pg.record(nn.Linear(3, 2).to(device))
    f = pg.record(tanh)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for _ in range(ENOUGH):
            model(ramp(device, 2, 3)).sum().backward()
        assert clock.seen == []
        assert not still_recorded(called(f, ramp(device, 3)))
    finally:
        torch.distributed.destroy_process_group()
    assert counts(model)[0] == 1


def test_c22_a_step_that_is_recorded_beside_a_model_on_trial_is_not_recorded_anew(device, takes):
    """While the model runs live, gradients lie elsewhere. Afterwards they are where they were."""
    takes(played=24, live=25)
    torch.manual_seed(0)
    nets = [nn.Linear(4, 4).to(device)]
    nets.append(copy.deepcopy(nets[0]))
    losses = []
    for net, record in zip(nets, (pg.record, lambda f: f), strict=True):
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model, step = record(net), record(opt.step)
        for n in range(ENOUGH):
            opt.zero_grad()
            loss = model(ramp(device, 2, 4, start=n) / 9).square().mean()
            loss.backward()
            step()
            losses.append(loss.detach())
        if net is nets[0]:
            recorded = step
    assert_same(losses[:ENOUGH], losses[ENOUGH:])
    assert_same([*nets[0].parameters()], [*nets[1].parameters()])
    assert pg.stats(recorded).recorded <= 3, pg.explain(recorded)
    assert "changes from call to call" not in pg.explain(recorded)


@pytest.mark.parametrize("calls", [0, 12, 16, 28, 40])
def test_c22_a_trial_that_nobody_goes_on_with_keeps_no_other_function_from_recording(device, takes, calls):
    takes(played=31, live=24)
    weights = [nn.Parameter(ramp(device, 3)) for _ in range(2)]
    kept = nn.Parameter(ramp(device, 3))
    evaluate = pg.record(lambda x: (x * kept).detach())
    called(evaluate, ramp(device, 3), calls)

    def micro(x, w):
        (w * x).sum().backward()

    ours = pg.record(micro, keep="always")
    for n in range(60):
        for w, f in zip(weights, (ours, micro), strict=True):
            f(ramp(device, 3, start=n), w)
        assert_same(weights[0].grad, weights[1].grad)
        if n % 2:
            weights[0].grad = weights[1].grad = None
    assert pg.stats(ours).live <= 3, pg.explain(ours)


class Ticking:
    """A clock that moves on by one whenever somebody looks at it, and by more for a capture."""

    def __init__(self, monkeypatch, capture):
        self.time, self.captures = 0, 0
        self._record, self._capture = making.record, capture
        monkeypatch.setattr(budget, "now", self.now)
        monkeypatch.setattr(making, "record", self.record)

    def now(self):
        self.time += 1
        return float(self.time)

    def record(self, *args):
        self.time += self._capture
        self.captures += 1
        return self._record(*args)


CALLS = 400  # that take one each


def _another_value(device):
    cell = types.SimpleNamespace(t="0")

    def f(x):
        return x + int(cell.t)

    return f, lambda n: vars(cell).update(t=f"{n}"), lambda n: ramp(device, 3)


def _another_weight(device):
    """As an optimizer does that makes what it keeps anew in each fourth step."""
    cell = types.SimpleNamespace(w=ramp(device, 3))

    def f(x):
        return x * cell.w

    return f, lambda n: n % 4 or vars(cell).update(w=ramp(device, 3, start=n)), lambda n: ramp(device, 3)


def _each_reads(device):
    return lambda x: x * x.sum().item(), lambda n: None, lambda n: ramp(device, 2 + n // 3)


def _each_is_new_twice(device):
    return lambda x: x * 2, lambda n: None, lambda n: ramp(device, 2 + n // 2 * 7 % 101)


@may_run_live
@pytest.mark.parametrize("program", [_another_value, _another_weight, _each_reads, _each_is_new_twice])
def test_c22_attempts_take_a_twentieth_of_the_time_of_the_calls_and_the_first_is_free(device, monkeypatch, program):
    clock = Ticking(monkeypatch, capture=10)
    f, change, argument = program(device)
    recorded = pg.record(f, max_recordings=4, fallback="live")
    for n in range(CALLS):
        change(n)
        assert_same(recorded(argument(n)), f(argument(n)))
    there = len(recorded._shelf)  # which may still pay
    assert 1 <= clock.captures <= there + 1 + CALLS / 20 / 10, pg.explain(recorded)
    stats = pg.stats(recorded)
    assert sum(stats.refusals.values()) > CALLS / 2, "calls run live, and nobody is told why"


def test_c22_what_pays_is_recorded_as_often_as_it_must_be(device, monkeypatch):
    """Many sizes, of which each is played, and a flag that changes now and then."""
    clock = Ticking(monkeypatch, capture=10)
    cell = types.SimpleNamespace(scale="2")

    def f(x):
        return x * int(cell.scale)

    recorded = pg.record(f)
    for n in range(CALLS):
        cell.scale = str(2 + n // 100)
        x = ramp(device, (3, 7, 4, 9)[n % 4])
        assert_same(recorded(x), x * int(cell.scale))
    assert pg.stats(recorded).live <= 32, pg.explain(recorded)
    assert clock.captures >= 16


@may_run_live
def test_c22_recordings_that_fit_no_more_are_seldom_looked_at(device, monkeypatch):
    clock = Ticking(monkeypatch, capture=1000)
    cell = types.SimpleNamespace(w=ramp(device, 3))
    recorded = pg.record(lambda x: x * cell.w)
    looks, find = [], recorded._shelf.find
    monkeypatch.setattr(recorded._shelf, "find", lambda call: looks.append(call) or find(call))
    for n in range(100):
        cell.w = ramp(device, 3, start=n)
        assert_same(recorded(ramp(device, 3)), ramp(device, 3) * cell.w)
    before = len(looks)
    for n in range(100):
        cell.w = ramp(device, 3, start=n)
        assert_same(recorded(ramp(device, 3)), ramp(device, 3) * cell.w)
    assert len(looks) - before <= 12, pg.explain(recorded)
    assert clock.captures <= 2


def test_c17_recordings_go_with_their_function_and_wait_for_no_garbage_collector(device):
    f = called(pg.record(tanh, keep="always"), ramp(device, 3), 5)
    player = weakref.ref(next(iter(f._shelf)))
    gc.collect()
    gc.disable()
    try:
        del f
        assert player() is None
    finally:
        gc.enable()


class Stands(paying.Clock):
    """Stands still, but for what a test says."""

    def __init__(self):
        self.at = 0

    def now(self):
        return self.at

    def mark(self, device):
        return None


@pytest.mark.parametrize(("outside", "replay"), [(False, 34), (True, 44)])
def test_c22_that_a_live_call_is_looked_at_during_a_trial_is_not_counted(device, monkeypatch, outside, replay):
    """Later, most are let pass. (A replay takes what the function has added to the clock, and to be recognised.)"""
    clock, find = Stands(), KnownCalls.find
    monkeypatch.setattr(paying, "clock", clock)

    def function(x):
        clock.at += 24_000
        return (x * weight).tanh()

    def found(*args):
        clock.at += 10_000
        return find(*args)

    monkeypatch.setattr(KnownCalls, "find", found)
    weight = torch.ones(3, device=device, requires_grad=outside)
    f, x = pg.record(function), ramp(device, 3)
    for _ in range(ENOUGH):
        result = f(x)
        if outside:
            result.sum().backward()
    assert f"a replay takes {replay} us and the function itself 24 us" in pg.explain(f)
