"""C9, C11: attributes that nothing in the call touches do not refuse it, also where a wrapper hands on what is asked of it
(``__getattr__``). What is asked of such a wrapper is noticed as any attribute is."""

import concurrent.futures
import contextvars
import functools
import io
import itertools
import logging
import mmap
import multiprocessing.pool
import queue
import random
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons


class Inner:
    def __init__(self):
        self.scale = 2.0


class Wrapper:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Scaling:
    def __init__(self, wrapped):
        self.wrapped = wrapped

    def step(self, x):
        return x * self.wrapped.scale


def items():
    yield 1


THINGS = {
    "a generator": items,
    "an iterator": lambda: iter([1, 2]),
    "one that is used up": lambda: iter([]),
    "pairs": lambda: zip([1], [2], strict=True),
    "a lock": threading.Lock,
    "a file": lambda: open(__file__),  # noqa: SIM115
    "a socket": socket.socket,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("wrap", [lambda inner: inner, Wrapper], ids=["plain", "wrapped"])
@pytest.mark.parametrize("make", THINGS.values(), ids=THINGS)
def test_c11_attributes_that_nothing_names(device, make, wrap):
    inner = Inner()
    inner.never_asked_for = thing = make()
    model = Scaling(wrap(inner))
    model.nor_this_one = thing
    f = pg.record(model.step)
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    assert counts(f) == (1, 1, 3), reasons(f)
    if hasattr(thing, "close"):
        thing.close()


def test_c09_what_is_asked_of_a_wrapper_is_noticed(device):
    model = Scaling(Wrapper(Inner()))
    f = pg.record(model.step)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 2.5):
        model.wrapped.inner.scale = scale
        assert_same(f(ramp(device, 3)), ramp(device, 3) * scale)
    model.wrapped.scale = 7.0  # which hides the other
    assert_same(f(ramp(device, 3)), ramp(device, 3) * 7)
    model.wrapped.inner = Inner()
    del model.wrapped.__dict__["scale"]
    assert_same(f(ramp(device, 3)), ramp(device, 3) * 2)


@may_run_live
def test_c09_a_wrapper_that_asks_for_something_else(device):
    class Renaming:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            name = name + "_of_it"
            return getattr(self.inner, name)

    inner = Inner()
    inner.scale_of_it = 2.0
    f = pg.record(Scaling(Renaming(inner)).step)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0):
        inner.scale_of_it = scale
        assert_same(f(ramp(device, 3)), ramp(device, 3) * scale)


@may_run_live
def test_c11_an_iterator_that_is_asked_of_a_wrapper(device):
    class Feeding(Scaling):
        def step(self, x):
            return x * next(self.wrapped.feed)

    inner = Inner()
    inner.feed = iter(range(1, 9))
    f = pg.record(Feeding(Wrapper(inner)).step)
    for n in range(1, 6):
        assert_same(f(ramp(device, 3)), ramp(device, 3) * n)
    assert pg.stats(f).recorded == 0
    assert torch.is_tensor(f(ramp(device, 3)))


# -- what a capture can neither compare nor put back, beside what is read


class Writer:
    """As of a summary: it has a file, a queue, a thread that waits."""

    def __init__(self):
        self.file, self.queue, self.steps = io.StringIO(), queue.Queue(), 0
        self.thread = threading.Thread(target=self.queue.get, daemon=True)

    def add(self, value):
        self.file.write(f"{value},")
        return float(self.file.tell())


class Environment:
    def __init__(self):
        self.random = random.Random(0)

    def act(self):
        return self.random.random()


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return float(i)


class Endless:
    def __init__(self):
        self.n = 0.0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return self.n


def numbers():
    n = 0.0
    while True:
        yield (n := n + 1)


def put(waiting):
    waiting.put(1)
    return float(waiting.qsize())


def written(file):
    file.write("item ")
    return float(file.tell())


def in_context():
    variable = contextvars.ContextVar("variable")
    variable.set(numbers())
    return variable


def loading(workers=0):
    return iter(torch.utils.data.DataLoader(Items(), batch_size=None, num_workers=workers))


def filled(memory):
    memory[0] += 1
    return float(memory[0])


def logged(logger):
    logger.warning("a step")
    return float(len(logger.handlers[0].stream.getvalue()))


def a_logger():
    logger = logging.Logger("of steps")  # noqa: LOG001 - one of its own for each
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    return logger


def profiled(profile):
    profile.step()
    return 2.0


# How each is made; what touches it, and gives a number; the reason for which that runs live, if it is one of these.
WORKERS = "a loader's workers"  # which take seconds to end
ITERATOR, FILE, ARRAY = "uses an iterator", "uses an open file", "uses an array"
UNWATCHED = {
    "a generator": (numbers, next, ITERATOR),
    "an iterator of a list": (lambda: iter([*map(float, range(64))]), next, ITERATOR),
    "zip": (lambda: zip(map(float, range(64)), range(64), strict=True), lambda t: next(t)[0], ITERATOR),
    "enumerate": (lambda: enumerate(range(64)), lambda t: float(next(t)[0]), ITERATOR),
    "map": (lambda: map(float, range(64)), next, ITERATOR),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next, ITERATOR),
    "count": (lambda: itertools.count(1.0), next, ITERATOR),
    "an iterator of the user's": (Endless, next, ITERATOR),
    "matches": (lambda: re.finditer("a", "a" * 64), lambda t: float(next(t).start()), ITERATOR),
    "next of a generator": (lambda: functools.partial(next, numbers()), lambda t: t(), ITERATOR),
    "generators in a list": (lambda: [numbers()], lambda t: next(t[0]), ITERATOR),
    "generators in dictionaries": (lambda: {"a": {"b": numbers()}}, lambda t: next(t["a"]["b"]), ITERATOR),
    "a generator in a context": (in_context, lambda t: next(t.get()), ITERATOR),
    "a loader's iterator": (loading, lambda t: float(next(t)), ITERATOR),
    WORKERS: (lambda: loading(1), lambda t: float(next(t)), ITERATOR),
    "a file": (lambda: tempfile.TemporaryFile("w+"), written, FILE),  # noqa: SIM115
    "a text in memory": (io.StringIO, written, FILE),
    "a method of a file": (lambda: io.StringIO().write, lambda t: float(t("a")), FILE),
    "a writer": (Writer, lambda t: t.add(1), FILE),
    "a queue": (queue.Queue, put, ""),
    "a thread": (lambda: threading.Thread(target=time.sleep), lambda t: 1.0 + t.is_alive(), ""),
    "an executor": (lambda: concurrent.futures.ThreadPoolExecutor(1), lambda t: t.submit(float, "2").result(), ""),
    "a pool": (lambda: multiprocessing.pool.ThreadPool(1), lambda t: t.apply(float, "2"), ""),
    "an environment": (Environment, lambda t: t.act(), ""),
    "a sampler": (lambda: torch.utils.data.RandomSampler(Items()), lambda t: float(len(t)), ""),
    "a lock": (threading.Lock, lambda t: 2.0 + t.acquire(blocking=False), ""),
    "a condition": (threading.Condition, lambda t: 2.0 + t.acquire(blocking=False), ""),
    "an event": (threading.Event, lambda t: 2.0 + t.is_set(), ""),
    "a weak reference": (lambda: weakref.ref(Items), lambda t: float(len(t()())), ""),
    "a logger": (a_logger, logged, ""),
    "a process": (lambda: subprocess.Popen([sys.executable, "-c", ""]), lambda t: 2.0 + (t.wait() or 0), ""),
    "a data base": (lambda: sqlite3.connect(":memory:"), lambda t: float(t.execute("select 2").fetchone()[0]), ""),
    "a match": (lambda: re.match("a", "a"), lambda t: 1.0 + t.end(), ""),
    "a view of memory": (lambda: memoryview(bytearray(9000)), filled, ARRAY),
    "memory of a file": (lambda: mmap.mmap(-1, 9000), filled, ARRAY),
    "a profiler": (lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), profiled, ""),
    "more than can be watched": (lambda: [[float(i)] for i in range(60_000)], lambda t: t[7][0], "can reach more than can be"),
}


class Program:
    """A step that comes to a thing only while it is `on`."""

    def __init__(self, thing, touch):
        self.thing, self.touch, self.on, self.by = thing, touch, False, 2.0

    def step(self, x):
        return x * (self.touch(self.thing) if self.on else self.by)


class Filtering(logging.Filter):
    """One whose class is a library's: it may read all of it."""

    def __init__(self, thing, touch):
        super().__init__()
        self.thing, self.touch, self.on, self.by = thing, touch, False, 2.0

    step = Program.step


class Module(torch.nn.Module):
    def __init__(self, thing, touch):
        super().__init__()
        self.thing, self.touch, self.on, self.by = thing, touch, False, 2.0

    def forward(self, x):
        return x * (self.touch(self.thing) if self.on else self.by)


class Having:
    def __init__(self, thing):
        self.thing = thing

    def given(self):
        return self.thing


def on_self(thing, touch):
    program = Program(thing, touch)
    return program.step, program


def of_a_librarys(thing, touch):
    program = Filtering(thing, touch)
    return program.step, program


def on_a_module(thing, touch):
    program = Module(thing, touch)
    return program, program


def in_a_dictionary(thing, touch):
    program = Program({"thing": thing}, lambda d: touch(d["thing"]))
    return program.step, program


def beside_what_is_read(thing, touch):
    state = {"thing": thing, "by": 2.0}
    program = types.SimpleNamespace(on=False)
    return lambda x: x * (touch(state["thing"]) if program.on else state["by"]), program


def in_an_object(thing, touch):
    inner, program = Having(thing), types.SimpleNamespace(on=False)
    inner.by = 2.0
    return lambda x: x * (touch(inner.given()) if program.on else inner.by), program


def in_a_closure(thing, touch):
    program = types.SimpleNamespace(on=False)
    return lambda x: x * (touch(thing) if program.on else 2.0), program


def in_a_function_within(thing, touch):
    program = types.SimpleNamespace(on=False)

    def step(x):
        def touched():
            return touch(thing)

        return x * (touched() if program.on else 2.0)

    return step, program


def in_globals(thing, touch):
    space = {"thing": thing, "touch": touch, "program": types.SimpleNamespace(on=False)}
    exec("def step(x):\n    return x * (touch(thing) if program.on else 2.0)", space)
    return space["step"], space["program"]


def on_the_class(thing, touch):
    class Classy(Program):
        def __init__(self):
            self.touch, self.on, self.by = touch, False, 2.0

    Classy.thing = thing
    program = Classy()
    return program.step, program


def of_another_class(thing, touch):
    class Settings:
        by = 2.0

    Settings.thing = thing
    program = types.SimpleNamespace(on=False)
    return lambda x: x * (touch(Settings.thing) if program.on else Settings.by), program


PLACES = [on_self, of_a_librarys, on_a_module, in_a_dictionary, beside_what_is_read, in_an_object, in_a_closure,
          in_a_function_within, in_globals, on_the_class, of_another_class]  # fmt: skip


def closed(*things):
    for thing in things:
        for method in ("close", "terminate", "shutdown", "communicate"):
            if hasattr(thing, method):
                getattr(thing, method)()


@may_run_live
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::UserWarning")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", [name for name in UNWATCHED if name != WORKERS])
def test_c11_what_is_untouched_refuses_nothing_and_what_is_touched_later_is_noticed(device, name, place):
    _untouched_then_touched(device, name, place)


@may_run_live
def test_c11_workers_of_a_loader_that_are_untouched_and_then_touched(device):
    _untouched_then_touched(device, WORKERS, on_self)


def _untouched_then_touched(device, name, place):
    make, touch, reason = UNWATCHED[name]
    things = make(), make()
    (step, program), (live, live_program) = (place(thing, touch) for thing in things)
    f = pg.record(step, warmup=1, keep="always")
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    assert counts(f) == (1, 1, 3), reasons(f)
    program.on = live_program.on = True
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), live(ramp(device, 3, start=n)))
    assert not reason or pg.stats(f).recorded == 1
    assert reason in reasons(f)
    program.on = live_program.on = False
    for n in range(3):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    closed(*things)


# -- it does not count which it is


def renewed(device, read):
    class Trainer:
        def __init__(self):
            self.batches, self.last = numbers(), False

        def step(self, x):
            return x * (next(self.batches) if self.last else 2.0)

    batches, trainer, space = numbers(), Trainer(), {"batches": numbers(), "last": False}

    def step(x):
        return x * (next(batches) if trainer.last else 2.0)

    def renew():
        nonlocal batches
        batches = trainer.batches = space["batches"] = numbers()

    exec("def step(x):\n    return x * (next(batches) if last else 2.0)", space)
    return {"an attribute": trainer.step, "a closure": step, "a global": space["step"]}[read], renew


@pytest.mark.parametrize("read", ["an attribute", "a closure", "a global"])
def test_c09_an_iterator_that_is_renewed_each_epoch_and_not_read(device, read):
    """Over an audit as well, which must not read it either."""
    step, renew = renewed(device, read)
    f = pg.record(step, warmup=1, keep="always")
    for n in range(24):
        if n % 4 == 3:
            renew()
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    assert counts(f) == (1, 1, 23), reasons(f)


@pytest.mark.parametrize("place", ["an attribute", "a global"])
def test_c09_whether_an_iterator_is_there_is_noticed(device, place):
    class Trainer:
        log = None

        def step(self, x):
            return x * (2.0 if self.log is None else 3.0)

    trainer, space = Trainer(), {"log": None}
    trainer.log = None
    exec("def step(x):\n    return x * (2.0 if log is None else 3.0)", space)
    f = pg.record(trainer.step if place == "an attribute" else space["step"], warmup=1, keep="always")
    for n in range(16):
        trainer.log = space["log"] = io.StringIO() if n // 4 % 2 else None
        assert_same(f(ramp(device, 3)), ramp(device, 3) * (3 if n // 4 % 2 else 2))
    assert pg.stats(f).replayed >= 8, reasons(f)


# -- ways to it that no attribute and no variable is


def by_a_cache(numbers):
    @functools.lru_cache
    def cached():
        return numbers

    cached()
    return lambda x: x * next(cached())


def of_a_function(numbers):
    def helper():
        pass

    helper.numbers = numbers
    return lambda x: x * next(helper.numbers)


def of_a_parameter_group(numbers):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["numbers"] = numbers
    return lambda x: x * next(optimizer.param_groups[0]["numbers"])


def of_a_hook(numbers):
    layer = torch.nn.Identity()
    layer.register_forward_hook(functools.partial(lambda numbers, layer, given, x: x * next(numbers), numbers))
    return lambda x: layer(x)


def of_a_hook_of_a_tensor(numbers):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.register_hook(functools.partial(lambda numbers, g: g * next(numbers), numbers))
    return lambda x: torch.autograd.grad((weight.to(x.device) * x).sum(), weight)[0].to(x.device)


def of_a_tensor(numbers):
    two = torch.ones(())
    two.numbers = numbers
    return lambda x: x * next(two.numbers)


def of_a_default(numbers):
    def inner(x, *, numbers=numbers):
        return x * next(numbers)

    return lambda x: inner(x)


def past_the_class(numbers):
    inner = Having(numbers)
    return lambda x: x * next(object.__getattribute__(inner, "thing"))


def of_all_attributes(numbers):
    inner = Having(numbers)
    return lambda x: x * next(vars(inner)["thing"])


def of_a_cell(numbers):
    def held():
        return numbers

    return lambda x: x * next(held.__closure__[0].cell_contents)


def by_evaluation(numbers):
    space = {"numbers": numbers}
    exec("def step(x):\n    return x * next(eval('numbers'))", space)
    return space["step"]


def of_all_globals(numbers):
    space = {"numbers": numbers}
    exec("def step(x):\n    return x * next(globals()['numbers'])", space)
    return space["step"]


def of_a_module(numbers):
    module = types.ModuleType("numbers_of_ours")
    module.numbers = numbers
    space = {"module": module}
    exec("def step(x):\n    return x * next(module.numbers)", space)
    return space["step"]


def of_a_module_by_another_name(numbers):
    module = types.ModuleType("numbers_of_ours")
    module.numbers = numbers
    space = {"module": module}
    exec("def step(x):\n    m = module\n    return x * next(m.numbers)", space)
    return space["step"]


def of_the_class_of(numbers):
    class Classy(Having):
        given = numbers

        def step(self, x):
            return x * next(type(self).given)

    return Classy(None).step


def in_a_backward(numbers):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g * next(numbers)

    def step(x):
        weight = torch.ones_like(x, requires_grad=True)
        return torch.autograd.grad((Scaled.apply(weight) * x).sum(), weight)[0]

    return step


def caught(numbers):
    inner = Having(numbers)

    def step(x):
        for _ in range(2):
            try:
                n = next(inner.thing)
            except Exception:
                n = 5.0
        return x * n

    return step


WAYS = [by_a_cache, of_a_function, of_a_parameter_group, of_a_hook, of_a_hook_of_a_tensor, of_a_tensor, of_a_default,
        past_the_class, of_all_attributes, of_a_cell, by_evaluation, of_all_globals, of_a_module, of_a_module_by_another_name,
        of_the_class_of, in_a_backward, caught]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_c11_no_capture_takes_an_item(device, way):
    f, live = pg.record(way(numbers()), warmup=1), way(numbers())
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), live(ramp(device, 3, start=n)))
    assert counts(f) == (4, 0, 0), reasons(f)
    assert "uses an iterator" in reasons(f)
