"""C9, C11, C12: effects on the world outside Python's own objects, and values that are new in each call. A recording could
not repeat them: the function is right all the same, and has each effect exactly once a call, also in the call that was to
be recorded."""

import asyncio
import contextlib
import csv
import io
import itertools
import multiprocessing
import os
import pprint
import queue
import socket
import sqlite3
import subprocess
import tempfile
import threading

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

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


ASKS = {
    "os.path.exists": lambda path: os.path.exists(path),
    "Path.exists": lambda path: path.exists(),
    "os.path.getmtime": lambda path: path.parent.exists() and os.path.getmtime(path.parent) and os.path.isfile(path),
    "os.access": lambda path: os.access(path, os.R_OK),
}


@may_run_live
@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_c11_a_step_that_stops_where_a_file_appears(device, tmp_path, asks):
    stop = tmp_path / "stop"
    recorded = pg.record(lambda x: x * (0 if asks(stop) else 2), warmup=1)
    for n in range(8):
        if n == 5:
            stop.touch()
        assert_same(recorded(ramp(device, 3)), ramp(device, 3) * (0 if n >= 5 else 2))
    assert "asks for a file (os." in reasons(recorded)


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
