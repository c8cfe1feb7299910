"""How long a replay may wait for other ranks, and what is said of it. Devices here are lists of marks, clocks are numbers."""

import gc
import os
import sys
import threading
import time

import pytest

from phonograph._torch import process_groups as torch_process_groups
from phonograph.distributed import store as shared
from phonograph.distributed import watchdog
from phonograph.distributed.watchdog import Launches, Watched
from phonograph.statistics import Counters


class Mark:
    """Reached from the beginning, until it is put somewhere."""

    def __init__(self):
        self.there = True

    def put(self):
        self.there = False

    def reached(self):
        return self.there


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


@pytest.fixture
def device(monkeypatch):
    """One that launches what communicates among ranks 0, 1 and 2, of which this is rank 0; they have ten seconds."""
    launches = Launches(Mark)
    monkeypatch.setattr(watchdog, "_launches", {"cpu": launches})
    monkeypatch.setattr(watchdog, "_GRACE", 0)
    monkeypatch.setattr(torch_process_groups, "timeout_of", lambda name, device: 10.0)
    monkeypatch.setattr(torch_process_groups, "ranks_of", lambda name: [0, 1, 2])
    return launches


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(torch_process_groups, "default_store", lambda: found)
    return found


@pytest.fixture
def ended(monkeypatch):
    """When something took too long: for how many seconds."""
    times = []
    monkeypatch.setattr(watchdog, "_time_out", lambda one, waited, timeout: times.append(waited))
    return times


@pytest.fixture
def clock():
    watch = watchdog._Watch()
    watch._last = 0.0

    def run(start, end):
        for second in range(start, end):
            watch.tick(float(second))

    return run


def step():
    return Watched("cpu", {"all_reduce at train.py:3": 2}, ["0"], "step", made=2, counters=Counters(calls=7))


SAID = "replay 1 of step (recorded in call 2, called 7 times so far): all_reduce at train.py:3 (2 times)"


def mark_of(launches, n):
    return launches._ring[n].mark


def test_a_replay_that_ends_is_nobodys_business(device, clock, ended, monkeypatch):
    monkeypatch.setattr(torch_process_groups, "default_store", lambda: pytest.fail("the store was asked"))
    what = step()
    for n in range(200):
        device.note(what)
        clock(n, n + 1)
        mark_of(device, n % 64).there = True
    assert ended == []


def test_a_replay_that_waits_for_longer_than_the_timeout_is_told_of(device, store, clock, ended):
    device.note(step())
    clock(0, 11)
    assert ended == []
    clock(11, 12)
    assert ended == [11.0]


def test_it_is_not_timed_from_its_launch_but_from_when_the_one_before_was_done(device, store, clock, ended):
    what = step()
    device.note(what)
    device.note(what)
    clock(0, 9)
    mark_of(device, 0).there = True
    clock(9, 20)
    assert ended == []
    clock(20, 21)
    assert ended == [11.0]


def test_a_process_that_was_stopped_is_not_taken_for_one_that_waits(device, store, clock, ended):
    device.note(step())
    clock(0, 5)
    clock(500, 511)
    assert ended == []


def test_a_rank_says_that_it_waits_and_takes_it_back(device, store, clock, ended):
    device.note(step())
    clock(0, 6)
    assert not store
    clock(6, 7)
    assert store == {"phonograph/waits/0": SAID.encode()}
    mark_of(device, 0).there = True
    clock(7, 8)
    assert store == {"phonograph/waits/0": b""}


def time_out(device, capsys):
    device.note(step())
    watchdog._time_out(device.under_way(), 11.0, 10.0)
    return capsys.readouterr().err


@pytest.fixture
def aborts(monkeypatch):
    """How often the process would have ended."""
    times = []
    monkeypatch.setattr(os, "abort", lambda: times.append(1))
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda file: None)
    monkeypatch.setattr(watchdog, "_stderr", lambda: sys.stderr)
    return times


def test_what_is_said_names_the_function_the_replay_the_collectives_and_who_is_missing(device, store, aborts, capsys):
    store.set("phonograph/waits/1", SAID)
    assert time_out(device, capsys).startswith(
        f"phonograph: rank 0 has waited for 11 s (timeout: 10 s) for ranks 1, 2 in {SAID}. "
        f"Missing, as they are in no replay: 2. Rank 1 waits in {SAID}."
    )
    assert aborts == [1]


def test_of_many_collectives_the_first_are_named():
    what = Watched("cpu", {f"all_reduce at train.py:{n}": 1 for n in range(10)}, ["0"])
    assert str(what).endswith("all_reduce at train.py:5 and 4 other places")


@pytest.mark.parametrize(("value", "times"), [("0", 0), ("1", 1), ("2", 0), ("3", 1), ("", 1)])
def test_the_process_ends_where_torch_would_end_it(device, store, aborts, capsys, monkeypatch, value, times):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    aborted = []
    monkeypatch.setattr(torch_process_groups, "abort", lambda name, device: aborted.append(name))
    assert ("ended now" in time_out(device, capsys)) == bool(times)
    assert len(aborts) == times
    assert aborted == (["0"] if value == "2" else [])


def test_without_a_store_nobody_knows_who_is_missing(device, aborts, capsys, monkeypatch):
    monkeypatch.setattr(torch_process_groups, "default_store", lambda: None)  # asking it anything raises
    assert "Who is missing is not known" in time_out(device, capsys)


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch, store):
    monkeypatch.setattr(shared, "_PATIENCE", 0.05)
    lasting = threading.Event()
    assert shared.ask(lambda store, rank: lasting.wait(20)) is None
    lasting.set()


class Program:
    """As much of one as is looked at."""


def thread():
    return next((t for t in threading.enumerate() if t.name == "phonograph: replays"), None)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)


def gone(patience=5.0):
    until = time.monotonic() + patience
    while thread() is not None and time.monotonic() < until:
        time.sleep(0.01)
    return thread() is None


@pytest.mark.parametrize("how", ["closed", "garbage"])
def test_the_thread_is_there_as_long_as_what_it_watches(quick, device, how):
    assert thread() is None
    program, another = Program(), Program()
    watchdog.watch(program, step())
    watchdog.watch(another, step())
    assert thread() is not None
    watchdog.unwatch(another)
    if how == "closed":
        watchdog.unwatch(program)
    else:
        del program
        gc.collect()
    assert gone()
    again = Program()
    watchdog.watch(again, step())
    assert thread() is not None
    watchdog.unwatch(again)
    assert gone()


def test_what_is_under_way_is_watched_when_its_recording_has_gone(quick, device, ended):
    program, what = Program(), step()
    watchdog.watch(program, what)
    device.note(what)
    watchdog.unwatch(program)
    assert not gone(patience=0.2)
    mark_of(device, 0).there = True
    assert gone()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_nothing_to_watch(quick, device):
    program = Program()
    watchdog.watch(program, step())
    child = os.fork()
    if not child:
        os._exit(0 if thread() is None and not watchdog._launches and not len(watchdog._programs) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    watchdog.unwatch(program)
    assert gone()
