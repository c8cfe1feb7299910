"""C9, C11, C12: effects on the world outside Python's own objects, and values that are new in each call. A recording could
not repeat them: the function is right all the same, and has each effect exactly once a call, also in the call that was to
be recorded."""

import asyncio
import contextlib
import cProfile
import csv
import datetime
import gc
import io
import itertools
import logging
import multiprocessing
import os
import pathlib
import pprint
import queue
import random
import secrets
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import assert_settles, counts, may_run_live, plain, ramp, reasons, side_by_side

# ---------------------------------------------------------------------------------------------------
# Effects: `make(tmp_path)` gives what the function does, and how often that has happened so far.


at_the_end = contextlib.ExitStack()


def files(folder):
    return len(list(folder.iterdir()))


def prints_to_a_file_of_its_own(tmp):
    (tmp / "log").touch()

    def effect():
        with open(tmp / "log", "a") as log:
            log.write("x")

    return effect, lambda: len((tmp / "log").read_text())


def writes_text(tmp):
    (tmp / "log").touch()
    log = tmp / "log"
    return lambda: log.write_text(log.read_text() + "x"), lambda: len(log.read_text())


def writes_to_a_database(tmp):
    base = at_the_end.enter_context(contextlib.closing(sqlite3.connect(tmp / "log")))
    base.execute("create table log (n)")
    return lambda: base.execute("insert into log values (1)"), lambda: base.execute("select count(*) from log").fetchone()[0]


def puts_into_a_queue_of_tasks(tmp):
    tasks = asyncio.Queue()
    return lambda: tasks.put_nowait(1), tasks.qsize


def takes_a_semaphore_of_processes(tmp):
    places = multiprocessing.Semaphore(50)
    return places.acquire, lambda: 50 - places.get_value()


def writes_bytes(tmp):
    number = itertools.count()
    return lambda: (tmp / f"{files(tmp)}").write_bytes(b"x" * next(number)), lambda: files(tmp)


def to_a_descriptor(tmp):
    out = os.open(tmp / "log", os.O_CREAT | os.O_WRONLY)
    at_the_end.callback(os.close, out)
    return lambda: os.write(out, b"x"), lambda: os.fstat(out).st_size


def renames(tmp):
    (tmp / "x").touch()
    return lambda: os.rename(tmp / os.listdir(tmp)[0], tmp / (os.listdir(tmp)[0] + "x")), lambda: len(os.listdir(tmp)[0]) - 1


def removes(tmp):
    for n in range(9):
        (tmp / str(n)).touch()
    remaining = [tmp / str(n) for n in range(9)]
    return lambda: os.remove(next(p for p in remaining if os.path.exists(p))), lambda: 9 - files(tmp)


def runs_a_process(tmp):
    (tmp / "log").touch()
    command = f"echo x >> {tmp / 'log'}"
    return lambda: subprocess.run(["sh", "-c", command], check=True), lambda: (tmp / "log").read_text().count("x")


def sends(tmp):
    here, there = map(at_the_end.enter_context, socket.socketpair())
    there.setblocking(False)
    received = []

    def count():
        with contextlib.suppress(BlockingIOError):
            received.append(there.recv(100))
        return len(b"".join(received))

    return lambda: here.sendall(b"x"), count


def writes_rows(tmp):
    out = io.StringIO()
    writer = csv.writer(out)
    return lambda: writer.writerow(["x"]), lambda: out.getvalue().count("x")


def writes_rows_of_dictionaries(tmp):
    out = io.StringIO()
    writer = csv.DictWriter(out, ["a"])
    return lambda: writer.writerow({"a": "x"}), lambda: out.getvalue().count("x")


def pretty_prints(tmp):
    out = io.StringIO()
    return lambda: pprint.pprint(["x"], stream=out), lambda: out.getvalue().count("x")


def sets_an_event(tmp):
    event, times = threading.Event(), []

    def count():
        times.append(event.is_set())
        event.clear()
        return sum(times)

    return lambda: event.set(), count


def clears_an_event(tmp):
    event, times = threading.Event(), []
    event.set()

    def count():
        times.append(not event.is_set())
        event.set()
        return sum(times)

    return lambda: event.clear(), count


def puts(kind):
    def make(tmp):
        q = kind()
        return lambda: q.put(1), q.qsize

    return make


def gets(kind):
    def make(tmp):
        q = kind()
        for n in range(9):
            q.put(n)
        return lambda: q.get_nowait(), lambda: 9 - q.qsize()

    return make


def gets_by_a_bound_method(tmp):
    q = queue.SimpleQueue()
    for n in range(9):
        q.put(n)
    get = q.get
    return lambda: get(), lambda: 9 - q.qsize()


def appends_by_a_bound_method(tmp):
    results = []
    append = results.append
    return lambda: append(1), lambda: len(results)


def reads_lines(tmp):
    lines = io.StringIO("x\n" * 9)
    return lambda: lines.readline(), lambda: lines.tell() // 2


def reads_lines_by_a_bound_method(tmp):
    lines = io.StringIO("x\n" * 9)
    readline = lines.readline
    return lambda: readline(), lambda: lines.tell() // 2


def changes_the_environment(tmp):
    os.environ["PHONOGRAPH_TEST"] = ""

    def effect():
        os.environ["PHONOGRAPH_TEST"] = os.environ["PHONOGRAPH_TEST"] + "x"

    return effect, lambda: len(os.environ["PHONOGRAPH_TEST"])


def changes_an_array(tmp):
    numpy = pytest.importorskip("numpy")
    n = numpy.zeros(3)

    def effect():
        n[0] += 1

    return effect, lambda: int(n[0])


EFFECTS = {
    "open": prints_to_a_file_of_its_own,
    "write_text": writes_text,
    "write_bytes": writes_bytes,
    "os.write": to_a_descriptor,
    "os.mkdir": lambda tmp: (lambda: os.mkdir(tmp / f"{files(tmp)}"), lambda: files(tmp)),
    "os.makedirs": lambda tmp: (lambda: os.makedirs(tmp / f"{files(tmp)}" / "a"), lambda: files(tmp)),
    "Path.touch": lambda tmp: (lambda: (tmp / f"{files(tmp)}").touch(), lambda: files(tmp)),
    "os.rename": renames,
    "os.remove": removes,
    "torch.save": lambda tmp: (lambda: torch.save({"a": 1}, tmp / f"{files(tmp)}"), lambda: files(tmp)),
    "tempfile": lambda tmp: (lambda: os.close(tempfile.mkstemp(dir=tmp)[0]), lambda: files(tmp)),
    "subprocess": runs_a_process,
    "socket": sends,
    "csv.writer": writes_rows,
    "csv.DictWriter": writes_rows_of_dictionaries,
    "pprint": pretty_prints,
    "Event.set": sets_an_event,
    "Event.clear": clears_an_event,
    "Queue.put": puts(queue.Queue),
    "SimpleQueue.put": puts(queue.SimpleQueue),
    "Queue.get": gets(queue.Queue),
    "SimpleQueue.get": gets(queue.SimpleQueue),
    "get = queue.get": gets_by_a_bound_method,
    "append = list.append": appends_by_a_bound_method,
    "readline": reads_lines,
    "readline = file.readline": reads_lines_by_a_bound_method,
    "os.environ": changes_the_environment,
    "array[0] += 1": changes_an_array,
    "sqlite3": writes_to_a_database,
    "asyncio.Queue": puts_into_a_queue_of_tasks,
    "multiprocessing.Semaphore": takes_a_semaphore_of_processes,
}


@may_run_live
@pytest.mark.parametrize("make", EFFECTS.values(), ids=EFFECTS)
def test_c09_an_effect_happens_exactly_once_a_call(device, tmp_path, monkeypatch, make):
    monkeypatch.setenv("PHONOGRAPH_TEST", "")
    effect, happened = make(tmp_path)
    assert happened() == 0

    def f(x):
        y = x * 2
        effect()
        return y + 1

    recorded = pg.record(f, warmup=1)
    with at_the_end:
        for n in range(1, 7):
            assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2 + 1)
            assert happened() == n


@may_run_live
def test_c11_an_effect_names_the_users_line_and_what_to_do(device, tmp_path):
    log = tmp_path / "log"

    def f(x):
        log.write_text("x")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for _ in range(3):
        recorded(ramp(device, 3))
    said = reasons(recorded)
    assert "calls open()" in said
    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in said
    assert "do it outside" in said


SAYING = {
    "info": lambda log: log.info("said"),
    "log": lambda log: log.log(logging.DEBUG, "said"),
    "adapter": lambda log: logging.LoggerAdapter(log, {}).debug("said"),
    "asked": lambda log: log.isEnabledFor(logging.INFO) and log.info("said"),
    "level": lambda log: log.getEffectiveLevel() <= logging.INFO and log.info("said"),
}
TURNED_ON = {
    "itself": lambda log, on: log.setLevel(logging.DEBUG if on else logging.WARNING),
    "its parent": lambda log, on: log.parent.setLevel(logging.DEBUG if on else logging.WARNING),
    "all": lambda log, on: logging.disable(logging.NOTSET if on else logging.CRITICAL),
    "enabled": lambda log, on: setattr(log, "disabled", not on),
}


@pytest.fixture
def log(monkeypatch):
    """A logger whose messages are kept, and one that is all that lies between it and the root."""
    log, parent = logging.getLogger("user.inner"), logging.getLogger("user")
    log.said, handler = [], logging.Handler()
    handler.emit = lambda record: log.said.append(record.getMessage())
    log.addHandler(handler)
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "disabled", False)
    yield log
    log.removeHandler(handler)
    logging.disable(logging.NOTSET)
    for each in (log, parent):
        each.setLevel(logging.NOTSET)


@may_run_live
@pytest.mark.parametrize("turn", TURNED_ON.values(), ids=TURNED_ON)
@pytest.mark.parametrize("say", SAYING.values(), ids=SAYING)
def test_c09_a_message_of_a_level_that_is_turned_on_later(device, log, say, turn):
    if turn in (TURNED_ON["all"], TURNED_ON["enabled"]):
        log.setLevel(logging.DEBUG)
    if say is SAYING["level"] and turn in (TURNED_ON["all"], TURNED_ON["enabled"]):
        turn = TURNED_ON["itself"]  # it asks for nothing else

    def f(x):
        say(log)
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(8):
        turn(log, n in (4, 5, 7))
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
        if n == 3:
            assert counts(recorded) == (1, 1, 3)
    assert log.said == ["said"] * 3
    assert "logs a message" in pg.explain(recorded)


def test_c09_a_message_that_nobody_wants(device, log):
    """Is no effect."""

    def f(x):
        log.debug("shape %s", x.shape)
        return x + 1

    log.setLevel(logging.INFO)
    recorded = pg.record(f, warmup=1)
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert counts(recorded) == (1, 1, 5)
    assert log.said == []


class _Verbose(logging.Logger):
    """Decides itself what it lets through."""

    verbose = False

    def isEnabledFor(self, level):  # noqa: N802 - logging's names
        return self.verbose


class _Direct(logging.Logger):
    """Sends a message nowhere else."""

    def _log(self, level, message, *args, **options):
        self.said.append(message)


class _Handling(logging.Logger):
    def handle(self, record):
        self.said.append(record.getMessage())


class _Prefixing(logging.LoggerAdapter):
    def log(self, level, message, *args, **options):
        self.logger.log(level, message, *args, **options)


def set_debug(log, on):
    log.setLevel(logging.DEBUG if on else logging.WARNING)


def set_verbose(log, on):
    log.verbose = on


@may_run_live
@pytest.mark.parametrize(("kind", "turn"), [(_Verbose, set_verbose), (_Direct, set_debug), (_Handling, set_debug)])
def test_c09_a_logger_that_decides_itself(device, log, kind, turn):
    """It is got by its name, so that nothing of it is in reach."""
    made = kind(f"user.{kind.__name__}")
    made.said, made.parent, made.propagate = log.said, logging.root, False
    made.addHandler(log.handlers[0])
    logging.root.manager.loggerDict[made.name] = made
    name = made.name

    def f(x):
        logging.getLogger(name).debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(8):
        turn(made, n in (3, 4, 6))
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["said"] * 3


@may_run_live
@pytest.mark.parametrize("adapter", [logging.LoggerAdapter, _Prefixing])
def test_c09_a_package_that_logs_for_the_user(device, log, adapter):
    """Its own class of adapters, a function that is given the logger, a hook that is the logger's method."""
    space = {"adapter": adapter(log, {}), "log": log}
    exec(compile("def says(x):\n    adapter.debug('adapted')\n    log.debug('said')\n    return x", "/site-packages/says.py",
                 "exec"), space)  # fmt: skip
    says, adapted = space["says"], space["adapter"]
    net = torch.nn.Identity()
    net.register_forward_hook(lambda *_: None)
    net._forward_hooks[0] = log.debug  # torch calls it

    def f(x):
        adapted.debug("seen")
        return says(x) + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        set_debug(log, n in (3, 4))
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["seen", "adapted", "said"] * 2


def other_logger(log, adapter):
    adapter.logger = logging.getLogger("user.other")
    adapter.logger.addHandler(log.handlers[0])
    adapter.logger.setLevel(logging.DEBUG)


def by_hand(log, adapter):
    log.level = logging.DEBUG  # what it remembers of its level is not that yet
    logging.getLogger("user.other").setLevel(logging.INFO)


@may_run_live
@pytest.mark.parametrize("turn", [other_logger, by_hand])
def test_c09_a_level_that_is_set_in_another_way(device, log, turn):
    adapter = logging.LoggerAdapter(log, {})
    log.setLevel(logging.WARNING)

    def f(x):
        adapter.debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        if n == 3:
            turn(log, adapter)
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    logging.getLogger("user.other").handlers.clear()
    assert log.said == ["said"] * 3


@may_run_live
def test_c09_several_loggers_are_asked(device, log):
    others = [logging.getLogger(f"user.inner.{n}") for n in range(3)]

    def f(x):
        for each in others:
            each.debug("said")
        return x + 1

    log.setLevel(logging.WARNING)
    recorded = pg.record(f, warmup=1)
    for n in range(6):
        others[2].setLevel(logging.DEBUG if n in (3, 5) else logging.NOTSET)
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["said"] * 2


@may_run_live
def test_c09_a_logger_of_torchs_that_the_user_asks(device):
    log = logging.getLogger("torch.users")

    def f(x):
        return x * 5 if log.isEnabledFor(logging.DEBUG) else x

    recorded = pg.record(f, warmup=1)
    try:
        for n in range(7):
            set_debug(log, n in (3, 5))
            assert_same(recorded(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    finally:
        log.setLevel(logging.NOTSET)


@may_run_live
@pytest.mark.parametrize("name", ["debug", "isEnabledFor"])
def test_c09_a_method_of_a_logger_that_is_replaced(device, log, name):
    log.setLevel(logging.WARNING)

    def f(x):
        log.debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    with contextlib.ExitStack() as replaced:
        for n in range(6):
            if n == 3:
                replaced.enter_context(mock.patch.object(log, name, log.said.append if name == "debug" else lambda level: True))
            assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["said"] * 3
    assert name not in vars(log)  # nothing of it stays for the next test


@may_run_live
def test_c12_a_logger_that_cannot_be_asked(device, log):
    """A level that is none, which the function takes for off; an adapter that has lost its logger."""
    p = torch.ones(3, device=device, requires_grad=True)
    adapter = logging.LoggerAdapter(log, {})

    def f(x):
        with contextlib.suppress(TypeError):
            log.isEnabledFor("INFO")
        with contextlib.suppress(AttributeError):
            adapter.debug("said")
        loss = (p * x).sum()
        loss.backward()
        return loss.detach()

    log.setLevel(logging.WARNING)
    recorded = pg.record(f, warmup=1)
    for n in range(7):
        if n == 3:
            assert counts(recorded) == (1, 1, 2)
            del adapter.logger
        x, p.grad = ramp(device, 3, start=n), None
        assert_same(recorded(x), x.sum())
        assert_same(p.grad, x)


def test_c17_an_adapter_made_in_a_call_is_not_kept(device, log):
    log.setLevel(logging.WARNING)
    recorded = pg.record(lambda x: says_with_a_context(log, x), warmup=1)
    contexts = len([x for x in gc.get_objects() if type(x) is _Context])
    for n in range(4):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    gc.collect()
    assert counts(recorded) == (1, 1, 3)
    assert len([x for x in gc.get_objects() if type(x) is _Context]) == contexts


class _Context:
    pass


def says_with_a_context(log, x):
    logging.LoggerAdapter(log, {"context": _Context()}).debug("said")
    return x + 1


@may_run_live
def test_c09_the_root_gets_a_handler_where_it_has_none(device, log, monkeypatch):
    """`logging.debug` sees to that, whether or not it says something."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    logging.root.manager._clear_cache()

    def f(x):
        logging.debug("said")  # noqa: LOG015 - it is what is tested
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        if n % 3 == 0:
            logging.root.handlers.clear()
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
        assert len(logging.root.handlers) == 1


@may_run_live
def test_c09_messages_that_have_numbers(device, log, monkeypatch):
    """None is made in a capture."""
    numbers = itertools.count()

    class Numbered(logging.LogRecord):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.msg = f"{self.msg} {next(numbers)}"

    monkeypatch.setattr(logging, "_logRecordFactory", Numbered)
    log.setLevel(logging.DEBUG)

    def f(x):
        log.debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(4):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == [f"said {n}" for n in range(4)]


# ---------------------------------------------------------------------------------------------------
# Values that are new in each call


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
