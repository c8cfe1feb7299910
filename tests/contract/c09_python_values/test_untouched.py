"""C9, C11: attributes that nothing in the call touches do not refuse it, also where a wrapper hands on what is asked of it
(``__getattr__``). What is asked of such a wrapper is noticed as any attribute is."""

import socket
import threading

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
