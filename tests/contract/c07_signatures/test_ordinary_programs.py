"""Programs as people write them: methods of one name, copied models, threads, dataclasses, attributes of a function, settings
in a module. Nothing here is rare, and each has to give eager's results."""

import copy
import pickle
import queue
import threading
import time

import pytest
import torch
from torch import nn
from torch.optim import adam

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp


class Doubler(nn.Module):
    """Of the module, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return (self.layer(x) * 2).detach()


def in_threads(*functions, seconds=60):
    """Run each in a thread; what they raised. A deadlock fails the test and leaves the threads behind."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for t in threads:
        t.start()
    deadline = time.monotonic() + seconds
    for t in threads:
        t.join(max(0.0, deadline - time.monotonic()))
    assert not any(t.is_alive() for t in threads), "deadlock"
    return errors


# ---------------------------------------------------------------------------------------------------
# Methods


@may_run_live
def test_c16_a_recorded_method_that_calls_super(device):
    class Base:
        @pg.record(warmup=1)
        def step(self, x):
            return x + 1

    class Own(Base):
        @pg.record(warmup=1)
        def step(self, x):
            return super().step(x) * 2

    own, base = Own(), Base()
    for n in range(6):
        x = ramp(device, 3, start=n)
        assert_same(own.step(x), (x + 1) * 2)
        assert_same(base.step(x), x + 1)


def test_c16_recorded_lambdas_as_methods(device):
    class Both:
        first = pg.record(lambda self, x: x + 1, warmup=1)
        second = pg.record(lambda self, x: x * 10, warmup=1)

    both = Both()
    for n in range(6):
        x = ramp(device, 3, start=n)
        assert_same((both.first(x), both.second(x)), (x + 1, x * 10))
    assert counts(both.first)[2] >= 3
    assert counts(both.second)[2] >= 3


def test_c16_a_recorded_method_made_a_class_method(device):
    class Scale:
        by = 2.0

        @classmethod
        @pg.record(warmup=1)
        def of(cls, x):
            return x * cls.by

    class Larger(Scale):
        by = 3.0

    x = ramp(device, 3)
    for _ in range(5):
        assert_same((Scale.of(x), Scale().of(x), Larger.of(x)), (x * 2, x * 2, x * 3))
    Scale.by = 4.0
    assert_same((Scale.of(x), Larger.of(x)), (x * 4, x * 3))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_c16_a_copied_model_whose_forward_is_recorded(device, copied):
    model = Doubler().to(device)
    model.forward = pg.record(model.forward, warmup=1)
    x = ramp(device, 2, 3)
    for _ in range(4):
        model(x)
    other = copied(model)
    plain = copy.deepcopy(model.layer)
    for _ in range(4):
        assert_same(other(x), (plain(x) * 2).detach())
        assert_same(model(x), (model.layer(x) * 2).detach())


def test_c07_a_method_called_with_a_buffer_of_its_own(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.full((3,), 2.0))
            self.register_buffer("inputs", torch.ones(3))

        @pg.record(warmup=1)
        def product(self, x):
            return x * self.weight

    model = Model().to(device)
    for n in range(6):
        model.inputs.fill_(n)
        assert_same(model.product(model.inputs), torch.full((3,), 2.0 * n, device=device))
    assert counts(model.product)[2] >= 3


# ---------------------------------------------------------------------------------------------------
# Threads


@may_run_live
def test_c14_a_recorded_function_waits_for_what_another_one_produces():
    items, inside = queue.Queue(), threading.Event()
    seen = []

    @pg.record
    def produce(x):
        inside.set()
        time.sleep(0.2)  # the consumer's first call begins meanwhile
        items.put(x + 1)

    @pg.record
    def consume(x):
        return x + items.get() + items.get()

    def consumes():
        inside.wait(20)
        seen.extend(consume(torch.ones(2)) for _ in range(3))

    for _ in range(3):  # until it is known to run live
        produce(torch.ones(2))
        items.get()
    inside.clear()
    assert not in_threads(lambda: [produce(torch.ones(2)) for _ in range(6)], consumes, seconds=20)
    assert_same(seen, [torch.full((2,), 5.0)] * 3)


@may_run_live
def test_c14_the_counts_are_read_while_another_thread_warms_up():
    items = queue.Queue()
    inside = threading.Event()
    read = []

    @pg.record
    def consume(x):
        inside.set()
        return x + items.get(timeout=20)

    def reads():
        inside.wait(20)
        read.append(pg.stats(consume))
        items.put(torch.ones(2))

    assert not in_threads(lambda: consume(torch.ones(2)), reads, seconds=15)
    assert len(read) == 1


@may_run_live
def test_c11_the_first_use_of_a_library_in_a_thread_is_a_live_call(device):
    """What cuBLAS sets up for each thread cannot be captured. Without warm-up, the first call does that; and the next is
    recorded."""
    found = []

    def work():
        for make in (lambda x: x @ x, torch.linalg.inv):
            f = pg.record(make, warmup=0)
            x = torch.eye(64, device=device) * 2
            found.append(([f(x) for _ in range(4)], [make(x) for _ in range(4)], pg.stats(f)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for ours, theirs, _ in found:
        assert_same(ours, theirs)
    stats = found[0][2]
    assert not stats.refusals
    assert stats.live <= 1
    assert stats.replayed >= 3


@may_run_live
def test_c14_two_threads_each_with_an_optimizer_of_its_own():
    reads = adam._get_value

    def trains():
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.zero_()
        optimizer = torch.optim.Adam(model.parameters())

        @pg.record(warmup=1)
        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        results.append([step(torch.ones(2, 4)) for _ in range(60)])

    results = []
    trains()  # alone
    assert not in_threads(trains, trains)
    assert results == [results[0]] * 3
    assert adam._get_value is reads
