"""C9: values that are new in each call, and what is no effect."""

import contextlib
import cProfile
import datetime
import gc
import os
import pathlib
import random
import secrets
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import assert_settles, counts, may_run_live, plain, ramp, reasons, side_by_side


def from_numpys_new_generator():
    return pytest.importorskip("numpy").random.default_rng().random()


def from_numpys_new_state():
    return pytest.importorskip("numpy").random.RandomState().rand()


ENTROPY = {
    "os.urandom": lambda: os.urandom(8),
    "secrets.token_hex": secrets.token_hex,
    "secrets.randbits": lambda: secrets.randbits(64),
    "uuid4": uuid.uuid4,
    "uuid1": uuid.uuid1,
    "SystemRandom": lambda: random.SystemRandom().random(),
    "a system generator": random.SystemRandom().random,
    "Random()": lambda: random.Random().random(),
    "default_rng()": from_numpys_new_generator,
    "RandomState()": from_numpys_new_state,
    "random.seed()": lambda: (random.seed(), random.random())[1],
    "torch.seed": torch.seed,
}


@may_run_live
@pytest.mark.parametrize("draw", ENTROPY.values(), ids=ENTROPY)
def test_c09_entropy_is_new_in_each_call(device, draw):
    recorded = pg.record(lambda x: (x + 1, draw()), warmup=1)
    drawn = []
    for n in range(6):
        value, new = recorded(ramp(device, 3, start=n))
        assert_same(value, ramp(device, 3, start=n) + 1)
        drawn.append(new)
    assert len(set(drawn)) == 6


def numpys_seed(numpy, state):
    numpy.random.seed(123)
    return float(numpy.random.randn())


def numpys_seed_alone(numpy, state):
    numpy.random.seed(123)
    return 0.0


def numpys_state(numpy, state):
    state.seed(3)
    return float(state.rand())


@may_run_live
@pytest.mark.parametrize("draw", [numpys_seed, numpys_seed_alone, numpys_state])
def test_c09_numpys_generators_are_seeded(device, draw):
    """Also where that leaves them as the last call did."""
    numpy = pytest.importorskip("numpy")
    state = numpy.random.RandomState(0)
    following = state.rand if draw is numpys_state else numpy.random.rand
    recorded = pg.record(lambda x: x + draw(numpy, state), warmup=1)
    for n in range(6):
        if n > 2:
            numpy.random.rand()
            state.rand()
        expected = draw(numpy, state)
        left = following()
        assert_same(recorded(ramp(device, 3)), ramp(device, 3) + expected)
        assert following() == left


@may_run_live
def test_c09_which_thread_runs_the_call(device):
    buffers = {}

    def f(x):
        total = buffers.setdefault(threading.get_ident(), torch.zeros(3, device=device))
        total.add_(x)
        return total.clone()

    recorded = pg.record(f, warmup=1)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for n in range(1, 5):
            for pool in (one, other):
                assert_same(pool.submit(recorded, ramp(device, 3)).result(), n * ramp(device, 3))


@may_run_live
def test_c09_the_seed_that_the_function_reads(device):
    recorded = pg.record(lambda x: (x + 1, torch.initial_seed()), warmup=1)
    for seed in [1, 2, 2, 3, 4]:
        torch.manual_seed(seed)
        assert recorded(ramp(device, 3))[1] == seed


@may_run_live
def test_c09_a_generator_that_the_function_seeds(device):
    def f(x):
        random.seed(7)
        torch.manual_seed(7)
        return x + torch.rand(3, device=x.device) + random.random()

    recorded = pg.record(f, warmup=1)
    first = recorded(ramp(device, 3)).clone()
    for _ in range(5):
        random.random()
        torch.rand(2, device=device)
        assert_same(recorded(ramp(device, 3)), first)


def burns():
    end = time.thread_time_ns() + 20_000
    while time.thread_time_ns() < end:
        pass
    return time.thread_time_ns()


CLOCKS = {
    "clock_gettime": lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
    "clock_gettime_ns": lambda: time.clock_gettime_ns(time.CLOCK_REALTIME),
    "thread_time_ns": burns,
    "datetime.now": lambda: datetime.datetime.now(tz=datetime.timezone.utc),
    "datetime.today": datetime.datetime.today,
}


@may_run_live
@pytest.mark.parametrize("asked", [gc.isenabled, lambda: gc.get_count()[0] >= 0, lambda: len(gc.get_stats())])
def test_c11_a_question_about_the_garbage_collector(device, asked):
    """It is off in a capture."""
    both = plain(lambda x: x + asked())
    for n in range(3):
        both(ramp(device, 3, start=n))
    assert "garbage" in pg.explain(both.recorded)


@may_run_live
@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS)
def test_c09_every_clock_moves_on(device, clock):
    recorded = pg.record(lambda x: (x + 1, clock()), warmup=1)
    readings = [recorded(ramp(device, 3))[1] for _ in range(6) if time.sleep(0.001) is None]
    assert len(set(readings)) == 6
    assert readings == sorted(readings)


@may_run_live
@pytest.mark.parametrize("clock", [time.gmtime, time.localtime, time.ctime, lambda: time.strftime("%S"), datetime.date.today])
def test_c09_a_clock_of_whole_seconds_is_not_recorded(device, clock):
    recorded = pg.record(lambda x: (x + 1, clock()), warmup=1)
    for _ in range(4):
        recorded(ramp(device, 3))
    assert counts(recorded) == (4, 0, 0)
    assert "reads the clock" in reasons(recorded)


# ---------------------------------------------------------------------------------------------------
# What is no effect is recorded


class Cache:
    """A class with a method of the user's own that is called like one of a file."""

    def __init__(self, device):
        self.memory = torch.zeros(4, 3, device=device)

    def write(self, row, x):
        self.memory[row] = x
        return self.memory.sum(0)


HARMLESS = {
    "a list of its own": lambda x: ([].append(x), sum([x, x]))[1],
    "a dictionary's get": lambda x: x * {"a": 2}.get("a", 3),
    "sets and strings": lambda x: x * len({1, 2}.union([3])) + len(x.shape) + "abc".replace("a", "b").count("b"),
    "a seeded generator": lambda x: x + random.Random(3).random(),
    "an iterator of its own": lambda x: x * next(iter([2, 3])),
    "deque": lambda x: x * sorted([3, 1, 2])[0],
    "paths": lambda x: x + len(str(pathlib.Path("a") / "b")),
    "a date": lambda x: x + datetime.date(2020, 1, 2).toordinal() % 7,
    "a context": lambda x: (contextlib.nullcontext().__enter__(), x + 1)[1],
    "a uuid of a name": lambda x: x + uuid.uuid5(uuid.NAMESPACE_DNS, "a").int % 7,
}


@pytest.mark.parametrize("function", HARMLESS.values(), ids=HARMLESS)
def test_c09_what_is_no_effect_is_recorded(device, function):
    assert_settles(plain(function), ramp(device, 3), within=2)


def test_c09_the_users_own_method_called_write(device):
    def make():
        cache = Cache(device)
        return lambda x: cache.write(1, x) + cache.write(2, x + 1), cache.memory

    both = side_by_side(make)
    assert_settles(both, ramp(device, 3), within=2)


def test_c09_an_import_within_the_function(device, tmp_path, monkeypatch):
    """Reading the module's file is the import system's doing."""
    (tmp_path / "imported_late.py").write_text("two = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def f(x):
        import imported_late

        return x * imported_late.two

    recorded = pg.record(f, warmup=0)
    for n in range(4):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    del sys.modules["imported_late"]


def test_c14_what_other_threads_do_meanwhile_is_no_effect(device, tmp_path):
    stop, turns = threading.Event(), []

    def work():
        while not stop.is_set():
            (tmp_path / "log").write_text(str(time.time()))
            turns.append(random.Random().random())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        recorded = pg.record(lambda x: [x * k for k in range(50)][-1], warmup=1)
        for n in range(4):
            assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 49)
    finally:
        stop.set()
        thread.join()
    assert turns
    assert counts(recorded) == (1, 1, 3)


# ---------------------------------------------------------------------------------------------------
# A profiler of the user's


class Profile:
    """A profile function that counts the starts of the user's functions."""

    def __init__(self):
        self.starts = 0

    def __call__(self, frame, event, arg):
        self.starts += event == "call" and frame.f_code.co_name == "watched_by_two"

    def __enter__(self):
        sys.setprofile(self)

    def __exit__(self, *_):
        assert sys.getprofile() is self
        sys.setprofile(None)


@may_run_live
@pytest.mark.parametrize("profiler", [Profile, cProfile.Profile])
def test_c09_an_effect_under_a_profiler(device, capsys, profiler):
    def watched_by_two(x):
        print("called")
        return x + 1

    recorded = pg.record(watched_by_two, warmup=1)
    with profiler() as profiling:
        for n in range(5):
            recorded(ramp(device, 3, start=n))
    assert capsys.readouterr().out.count("called") == 5
    assert sys.getprofile() is None
    if profiling is not None:
        profiling.create_stats()
        assert any(name == "watched_by_two" for _, _, name in profiling.stats)


def test_c09_a_function_is_recorded_under_a_profiler(device):
    profile = Profile()

    def watched_by_two(x):
        return x + 1

    recorded = pg.record(watched_by_two, warmup=1)
    with profile:
        for n in range(5):
            assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert counts(recorded) == (1, 1, 4)
    assert profile.starts == 2
