"""C2-C6, C12, C15: memory. Results, arguments, views, gradients and borrowed outputs share memory with each other and with
the recordings, as they would without any."""

import contextlib
import copy
import dataclasses
import functools
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.devices import device_for
from phonograph.devices.cuda import allocator as cuda_memory
from phonograph.testing import Pair, assert_same
from tests.helpers import assert_replays, counts, may_run_live, plain, ramp, side_by_side


def not_yet(reason, **options):
    return pytest.mark.xfail(strict=True, reason=reason, **options)


def filled(device, value, size=4):
    return torch.full((size,), float(value), device=device)


# ---------------------------------------------------------------------------------------------------
# C1: operators whose results are easily written to the wrong place

LAZY = {
    "product with the adjoint": lambda a: a.mH @ a,
    "copy of the conjugate": lambda a: torch.empty_like(a).copy_(a.conj()),
    "clone of the conjugate": lambda a: a.conj().clone(),
    "imaginary part of the conjugate": lambda a: torch.empty(3, 3, device=a.device).copy_(a.conj().imag),
    "concatenation": lambda a: torch.cat([a.conj(), a]),
    "dot product": lambda a: torch.dot(a[0].conj(), a[1]),
    "conversion": lambda a: a.conj().to(torch.complex128),
    "contiguous": lambda a: a.mT.conj().contiguous(),
    "reshape": lambda a: a.conj().reshape(9, 1) @ a.reshape(1, 9),
    "times two": lambda a: a.conj() * 2,
}


@may_run_live
@pytest.mark.parametrize("function", LAZY.values(), ids=LAZY)
def test_c01_lazily_conjugated_and_negated_tensors_inside(device, function):
    both = plain(function)
    for _ in range(5):
        both(torch.randn(3, 3, dtype=torch.complex64, device=device))


@may_run_live
def test_c01_a_lazily_conjugated_tensor_of_the_closure(device):
    adjoint = torch.randn(3, 3, dtype=torch.complex64, device=device).mH
    both = plain(lambda x: adjoint @ x)
    for _ in range(5):
        both(torch.randn(3, 3, dtype=torch.complex64, device=device))


LOSSES = {
    "binary cross-entropy, mean": lambda a, b: F.binary_cross_entropy(a, b),
    "binary cross-entropy, sum": lambda a, b: F.binary_cross_entropy(a, b, reduction="sum"),
    "binary cross-entropy, none": lambda a, b: F.binary_cross_entropy(a, b, reduction="none"),
    "huber": F.huber_loss,
    "mean squared": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "soft margin": F.soft_margin_loss,
}


@may_run_live
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_c01_losses_that_reduce_after_they_compute(device, loss):
    both = plain(loss)
    for _ in range(5):
        both(torch.rand(6, 3, device=device), torch.rand(6, 3, device=device))


@may_run_live
@pytest.mark.parametrize("size", [5, 500])
def test_c01_an_out_tensor_that_begins_empty(device, size):
    both = plain(lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)))
    for _ in range(5):
        both(torch.randn(size, device=device))


@may_run_live
def test_c01_lengths_that_are_read_on_the_host(device):
    def packed(x, lengths):
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data * 2

    both = plain(packed)
    for lengths in [[4, 3], [4, 3], [4, 3], [3, 2], [4, 4]]:
        both(ramp(device, 2, 4), torch.tensor(lengths))


def test_c13_an_index_out_of_range_in_a_replay():
    device = torch.device("cpu")  # a GPU does not raise, it asserts, and is of no use afterwards
    table = ramp(device, 4)
    both = plain(lambda x, i: (x.add_(1), table[i])[1])
    for i in [0, 1, 2, 3]:
        both(ramp(device, 2), torch.tensor([i]))
    both.outcome(ramp(device, 2), torch.tensor([9]))
    both(ramp(device, 2), torch.tensor([1]))


# ---------------------------------------------------------------------------------------------------
# C2: generators that come and go


def test_c02_a_new_generator_in_each_call(device):
    f = pg.record(lambda x, g: x + torch.rand(4, generator=g, device=device), warmup=1)
    for n in range(8):
        mine, live = (torch.Generator(device).manual_seed(n) for _ in range(2))
        assert_same(f(filled(device, 0), mine), torch.rand(4, generator=live, device=device) + 0)
        assert_same(mine.get_state(), live.get_state())


def test_c02_a_generator_whose_state_is_set_from_outside(device):
    def make():
        at = [torch.Generator(device).manual_seed(1)]
        return lambda x: x + torch.rand(4, generator=at[0], device=device), at

    both = side_by_side(make)
    other = torch.Generator(device).manual_seed(4).get_state()
    for n in range(12):
        if n == 4:
            both.change(lambda at: at.__setitem__(0, torch.Generator(device).manual_seed(9)))
        if n == 7:
            both.change(lambda at: at[0].manual_seed(3))
        if n == 9:
            both.change(lambda at: at[0].set_state(other))
        both(filled(device, n))


class Tracker:
    """Named generators, as tensor-parallel code has them: inside of `fork`, the default generator is one of them."""

    def __init__(self, device, *names):
        self._default = torch.cuda.default_generators[device.index or 0]
        self.states = {name: self._default.clone_state() for name in names}
        self.seed(1)

    def seed(self, n):
        for i, state in enumerate(self.states.values()):
            state.manual_seed(100 * n + i)

    @contextlib.contextmanager
    def fork(self, name):
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._default.graphsafe_get_state()
            self._default.graphsafe_set_state(before)

    def stands(self):
        return [(g.initial_seed(), g.get_offset()) for g in (self._default, *self.states.values())]


def two_trackers(device, make, **options):
    """A function made with a tracker, recorded, and another live: called one after the other, from one seed."""
    trackers = [Tracker(device, "a", "b") for _ in range(2)]
    recorded, live = pg.record(make(trackers[0]), warmup=1, **options), make(trackers[1])

    def both(n, *args):
        found = []
        for f, tracker in ((recorded, trackers[0]), (live, trackers[1])):
            torch.manual_seed(n)
            found.append((f(*args), tracker.stands()))
        assert_same(*found)

    return recorded, trackers, both


def test_c02_named_generators_of_a_tracker(cuda):
    def make(tracker):
        def f(x):
            with tracker.fork("a"):
                y = F.dropout(x, 0.5)
                with tracker.fork("b"):
                    y = y + torch.rand_like(x)
            with tracker.fork("a"):
                return F.dropout(y, 0.5) + torch.rand_like(y)

        return f

    recorded, trackers, both = two_trackers(cuda, make)
    x = torch.ones(64, device=cuda)
    for n in range(12):
        both(n, x)
        if n % 3 == 1:  # used by others, which puts another object in its place
            for tracker in trackers:
                with tracker.fork("b"):
                    torch.rand(5, device=cuda)
        if n == 7:
            for tracker in trackers:
                tracker.seed(n)
    assert counts(recorded) == (1, 1, 11)
    for tracker in trackers:
        tracker.states["a"] = torch.Generator(cuda).manual_seed(5)
    for n in range(3):
        both(n, x)
    assert counts(recorded) == (2, 2, 13)  # a change is first met in a live call


def test_c02_a_call_while_the_default_generator_is_another(cuda):
    """As it is inside of a tracker's `fork`."""
    recorded, trackers, both = two_trackers(cuda, lambda tracker: lambda x: F.dropout(x, 0.5))
    x = torch.ones(64, device=cuda)
    for tracker in trackers:
        tracker.states["same numbers"] = torch.cuda.default_generators[cuda.index or 0].clone_state()

    def inside(n, name):
        found = []
        for f, tracker in zip((recorded, lambda x: F.dropout(x, 0.5)), trackers, strict=True):
            torch.manual_seed(n)
            if name == "same numbers":
                tracker.states[name].manual_seed(n)
            with tracker.fork(name):
                found.append((f(x), f(x)))
            found[-1] += (tracker.stands(), torch.rand(4, device=cuda))
        assert_same(*found)

    for n in range(4):
        both(n, x)
    for n in range(9):
        inside(n, ("a", "same numbers", "b")[n % 3])
        both(n, x)
    assert counts(recorded) == (1, 1, 30)


def test_c02_a_fork_around_a_call_that_forks_the_same(cuda):
    """Then what the call draws from two generators comes from one state."""

    def make(tracker):
        def f(x):
            y = F.dropout(x, 0.5)
            with tracker.fork("a"):
                return F.dropout(y, 0.5) + torch.rand_like(y)

        return f

    recorded, trackers, _ = two_trackers(cuda, make)
    live = make(trackers[1])
    x = torch.ones(64, device=cuda)
    for n in range(12):
        found = []
        for f, tracker in zip((recorded, live), trackers, strict=True):
            torch.manual_seed(n)
            tracker.seed(n)
            with tracker.fork("a") if n % 4 == 3 else contextlib.nullcontext():
                found.append(f(x))
            found.append(tracker.stands())
        assert_same(found[:2], found[2:])
    assert pg.stats(recorded).replayed > 6


def test_c02_a_function_recorded_while_the_default_generator_is_another(cuda):
    recorded, trackers, _ = two_trackers(cuda, lambda tracker: lambda x: F.dropout(x, 0.5))
    x = torch.ones(64, device=cuda)
    for n in range(12):
        found = []
        for f, tracker in zip((recorded, lambda x: F.dropout(x, 0.5)), trackers, strict=True):
            torch.manual_seed(n)
            with tracker.fork("a") if n < 6 else contextlib.nullcontext():
                found.append(f(x))
            found.append(tracker.stands())
        assert_same(found[:2], found[2:])
    assert counts(recorded) == (1, 1, 11)


@may_run_live
def test_c12_a_generator_that_is_left_with_the_state_of_another(cuda):
    default = torch.cuda.default_generators[cuda.index or 0]
    own, other = default.graphsafe_get_state(), default.clone_state()

    def f(x):
        default.graphsafe_set_state(other)
        return F.dropout(x, 0.5)

    recorded = pg.record(f, warmup=1)
    try:
        for g in (recorded, f):
            default.graphsafe_set_state(own)
            own.manual_seed(2)
            other.manual_seed(3)
            results = []
            for n in range(9):
                if n in (3, 5, 6):
                    default.graphsafe_set_state(own)
                results.append(g(torch.ones(64, device=cuda)))
                results.append(torch.rand(4, device=cuda))
            results += [own.get_state(), other.get_state()]
            if g is recorded:
                expected = results
        assert_same(results, expected)
    finally:
        default.graphsafe_set_state(own)
    assert "leaves a random generator with the state of another" in pg.explain(recorded)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_c06_dropout_from_named_generators(cuda, pair, recompute):
    """What is recomputed draws from them anew, as it does live."""

    class Net(nn.Module):
        def __init__(self, tracker):
            super().__init__()
            self.tracker, self.first, self.second = tracker, nn.Linear(16, 64), nn.Linear(64, 16)

        def part(self, x):
            h = F.dropout(self.first(x), 0.5)
            with self.tracker.fork("a"):
                return F.dropout(h, 0.5)

        def forward(self, x):
            h = checkpoint(self.part, x, use_reentrant=False) if recompute else self.part(x)
            with self.tracker.fork("b"):
                return F.dropout(self.second(h), 0.1)

    def make(tracker):
        torch.manual_seed(0)
        net = Net(tracker).to(cuda)
        made.append(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach(), [p.detach().clone() for p in net.parameters()]

        return step

    made = []
    if pair:
        trackers = [Tracker(cuda, "a", "b") for _ in range(2)]
        steps = [make(tracker) for tracker in trackers]
        pg.record(made[0], warmup=1)
    else:
        recorded, trackers, both = two_trackers(cuda, make)
    for n in range(6):
        x = torch.full((8, 16), 0.1 * n, device=cuda)
        if not pair:
            both(n, x)
            continue
        found = []
        for step, tracker in zip(steps, trackers, strict=True):
            torch.manual_seed(n)
            found.append((step(x), tracker.stands()))
        assert_same(*found)
    assert counts(made[0] if pair else recorded) == (1, 1, 5), pg.explain(made[0] if pair else recorded)


# ---------------------------------------------------------------------------------------------------
# C3: arguments


@may_run_live
def test_c03_two_arguments_that_share_numpys_memory():
    numpy = pytest.importorskip("numpy")
    f = pg.record(lambda a, b: (a.add_(1), b * 2)[1], warmup=1)
    for _ in range(5):
        array = numpy.ones(3, numpy.float32)
        assert f(torch.from_numpy(array), torch.from_numpy(array)).tolist() == [4.0] * 3


@may_run_live
def test_c03_an_argument_that_shares_numpys_memory_with_state():
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(3, numpy.float32)
    state = torch.from_numpy(array)
    f = pg.record(lambda x: (state.add_(1), x * 2)[1], warmup=1)
    for n in range(5):
        assert f(torch.from_numpy(array)).tolist() == [2.0 * (n + 2)] * 3


@pytest.mark.parametrize("grad", [True, False])
def test_c03_an_argument_that_compiled_code_writes(cuda, grad):
    """Its kernels are no operators."""

    def make():
        torch._dynamo.reset()
        return torch.compile(lambda x, y: (x.add_(y), x * 2)[1])

    both = side_by_side(make)
    xs = [filled(cuda, 0) for _ in range(2)]
    with torch.set_grad_enabled(grad):
        for n in range(6):
            versions = [x._version for x in xs]
            results = [f(x, filled(cuda, n)) for f, x in zip((both.recorded, both.live), xs, strict=True)]
            assert_same(*results)
            assert_same(*xs)
            assert xs[0]._version > versions[0] or not n
    assert counts(both) == (1, 1, 5)


def test_c03_an_argument_that_a_triton_kernel_writes(cuda):
    pytest.importorskip("triton")
    from tests.contract.kernels import add_one

    state = filled(cuda, 0)

    def f(x):
        made = x * 2
        for t in (x, made, state):
            add_one[(1,)](t, t.numel(), block=16)
        return made + x + state

    recorded = pg.record(f, warmup=1)
    x = filled(cuda, 0)
    for n in range(6):
        before = x[0].item()
        assert_same(recorded(x), filled(cuda, 2 * before + 1 + before + 1 + n + 1))
        assert_same(x, filled(cuda, before + 1))
    assert counts(recorded) == (1, 1, 5)


@may_run_live
def test_c03_an_array_of_the_closure_that_is_written_through_a_tensor():
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(3, numpy.float32)
    f = pg.record(lambda x: torch.as_tensor(array).add_(x).clone(), warmup=1)
    for n in range(1, 6):
        assert f(torch.ones(3)).tolist() == [float(n)] * 3
        assert array.tolist() == [float(n)] * 3


@may_run_live
def test_c03_an_argument_that_is_a_gradient_of_state(device):
    p = torch.ones(2, device=device, requires_grad=True)
    p.grad = torch.ones(2, device=device)
    f = pg.record(lambda g: (g.add_(1), p.grad * 2)[1], warmup=1)
    for _ in range(3):
        assert f(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
    for n in range(1, 4):
        assert f(p.grad).tolist() == [2.0 * (n + 1)] * 2


def test_c03_a_view_of_an_earlier_result_is_written(device):
    f, g = plain(lambda x: x * 2), plain(lambda view: view.add_(1))
    for n in range(7):
        y = f(filled(device, n))
        g(y.each(lambda y: y[1:3]))
        y.check()


@may_run_live
def test_c03_autograd_notices_what_a_replay_writes_through_data_or_not(device):
    """Eager's version counters: `.data` hides a write from autograd, recorded as well as live."""
    w = torch.ones(2, device=device, requires_grad=True)
    f = pg.record(lambda x: w.data.add_(x), warmup=1)
    for n in range(1, 6):
        loss = (w * w).sum()
        f(torch.ones(2, device=device))
        w.grad = None
        loss.backward()
        assert w.grad.tolist() == [2.0 * (n + 1)] * 2


@may_run_live
def test_c03_an_argument_made_in_inference_mode(device):
    w = torch.ones(2, device=device, requires_grad=True)
    f = pg.record(lambda x: torch.autograd.grad((x * w).sum(), w)[0], warmup=1)
    with torch.inference_mode():
        x = torch.ones(2, device=device) * 2
    for _ in range(4):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            f(x)


@may_run_live
@pytest.mark.parametrize("set_to_none", [False, True])
def test_c06_a_gradient_of_an_argument_is_read_or_dropped(device, set_to_none):
    @torch.no_grad()
    def update(p):
        p.sub_(0.5 * p.grad)
        if set_to_none:
            p.grad = None

    update = pg.record(update, warmup=1)
    w = torch.ones(3, device=device, requires_grad=True)
    for n in range(5):
        w.grad = filled(device, n, 3)
        update(w)
        assert (w.grad is None) == set_to_none
    assert w.tolist() == [1 - 0.5 * (0 + 1 + 2 + 3 + 4)] * 3


# ---------------------------------------------------------------------------------------------------
# C4: results that are, or belong to, something else


@pytest.mark.parametrize(
    ("view", "window"),
    [
        (lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2))), slice(8, 16)),
        (lambda x: x.view(torch.uint8), slice(8, 12)),
        (lambda x: x.view(torch.float64), slice(8, 12)),
        (lambda x: x.detach(), slice(8, 12)),
        (lambda x: x[1:].unfold(0, 2, 1), slice(8, 12)),
    ],
    ids=["complex", "bytes", "double", "detached", "unfolded"],
)
def test_c04_a_view_of_a_part_of_a_larger_tensor(device, view, window):
    both = plain(view)
    for n in range(5):
        base = Pair.of(ramp(device, 32, start=n))
        result = both(base.each(lambda b: b[window]))
        base.each(lambda b: b.mul_(2))
        result.check()


def test_c04_a_complex_argument_as_real(device):
    both = plain(lambda x: torch.view_as_real(x))
    for _ in range(5):
        base = Pair.of(torch.randn(32, dtype=torch.complex64, device=device))
        both(base.each(lambda b: b[8:16]))


@may_run_live
def test_c04_detached_results_need_no_grad(device):
    f = pg.record(lambda x: (x.detach(), (x * 2).detach()), warmup=1)
    for n in range(5):
        x = ramp(device, 3, start=n).requires_grad_()
        assert_same(f(x), (x.detach(), (x * 2).detach()))


def two_views(x):
    y = x * 2
    return y, y[0]


def test_c04_two_results_that_share_memory_are_views_to_autograd(device):
    f = pg.record(two_views, warmup=1)
    for _ in range(5):
        w = torch.tensor(3.0, device=device, requires_grad=True)
        y, first = f(torch.ones(2, 2, device=device))
        first.mul_(w)
        y.sum().backward()
        assert w.grad.item() == 4


def test_c04_two_results_that_share_memory_have_one_version(device):
    f = pg.record(two_views, warmup=1)
    for _ in range(5):
        w = torch.ones(2, 2, device=device, requires_grad=True)
        y, first = f(torch.ones(2, 2, device=device))
        loss = (y * w).sum()
        first.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_c04_one_result_in_three_places(device):
    def f(x):
        y = x * 2
        return y, y, [y.view(-1), y]

    f = pg.record(f, warmup=1)
    for n in range(5):
        a, b, (c, d) = f(torch.ones(2, device=device))
        a.add_(n)
        assert a is b is d
        assert c.tolist() == [2.0 + n] * 2


@dataclasses.dataclass
class Outcome:
    y: torch.Tensor

    def __post_init__(self):
        self.norm = self.y.abs().sum()


@may_run_live
@pytest.mark.parametrize("kept", [False, True])
def test_c04_a_dataclass_result_with_an_attribute_that_is_no_field(device, kept):
    f = pg.record(lambda x: Outcome(x * 2), warmup=1)
    results = []
    for n in range(6):
        results = [*results, f(filled(device, n))] if kept else [f(filled(device, n))]
        for result in results:
            assert result.norm.item() == 4 * result.y[0].item()
        assert results[-1].norm.item() == 8 * n


@may_run_live
def test_c04_each_call_makes_a_new_set(device):
    f = pg.record(lambda x: (x * 2, {1, 2}), warmup=1)
    for n in range(5):
        found = f(ramp(device, 2))[1]
        assert found == {1, 2}
        found.add(10 + n)


def a_closure(x):
    y = x * 2
    return lambda: y + 1


def a_pullback(x):
    pull = torch.func.vjp(lambda t: t * t, x)[1]
    return lambda: pull(torch.ones_like(x))[0] + 1


@may_run_live
@pytest.mark.parametrize("function", [a_closure, a_pullback])
def test_c04_a_function_as_the_result(device, function):
    f = pg.record(function, warmup=1)
    results = [f(filled(device, n)) for n in range(6)]
    assert [result()[0].item() for result in results] == [2.0 * n + 1 for n in range(6)]


# ---------------------------------------------------------------------------------------------------
# C5: results that are held, in yet other ways

HOLDS = {
    "dlpack capsule": (lambda y: torch.utils.dlpack.to_dlpack(y), torch.utils.dlpack.from_dlpack),
    "storage": (lambda y: y.untyped_storage(), lambda s: of_storage(s, 4)),
    "data of a parameter": (lambda y: with_data(y), lambda p: p.detach()),
    "swapped with another": (lambda y: swapped(y), lambda z: z),
}


def with_data(y):
    parameter = nn.Parameter(torch.empty(2, device=y.device))
    parameter.data = y
    return parameter


def swapped(y):
    other = torch.zeros(4, device=y.device)
    torch.utils.swap_tensors(y, other)
    return other


@pytest.mark.parametrize(("hold", "read"), HOLDS.values(), ids=HOLDS)
def test_c05_a_result_held_by_something_else_keeps_its_value(device, hold, read):
    f = pg.record(lambda x: x * 2, warmup=1)
    held = [hold(f(filled(device, n))) for n in range(7)]
    assert [read(one)[0].item() for one in held] == [2.0 * n for n in range(7)]


def test_c05_a_result_sent_through_a_queue_of_processes():
    f = pg.record(lambda x: x * 2, warmup=1)
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    for n in range(6):
        queue.put(f(filled(torch.device("cpu"), n)))
        f(filled(torch.device("cpu"), 50))
        assert queue.get().tolist() == [2.0 * n] * 4


class _Ring:
    """Garbage as soon as it is dropped, and gone only when that is collected."""

    def __init__(self, held):
        self.me, self.held = self, held


@pytest.mark.parametrize("often", [53, 97, 211, 700])
def test_c05_garbage_that_is_collected_anywhere_in_a_capture(device, often):
    """Also where a place in memory is looked for: its own then becomes free."""

    def f(x):
        kept, total = [], x
        for i in range(300):
            _Ring((x * i, [[] for _ in range(i % 13)]))
            kept.append(x + i)
            if len(kept) > 7:
                total = total + kept.pop(0) * 2
        return total + sum(kept)

    before = gc.get_threshold()
    for n in range(2):
        x = ramp(device, 100 + n)
        recorded = pg.record(f, warmup=0)
        gc.set_threshold(often, 3, 3)
        try:
            recorded(x)
        finally:
            gc.set_threshold(*before)
        assert_same(recorded(x), f(x))
        assert counts(recorded) == (0, 1, 2)


def test_c05_a_dropped_result_is_gone(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for n in range(5):
        y = f(filled(device, n))
        gone = weakref.ref(y)
        del y
        assert gone() is None


def test_c05_a_result_whose_storage_its_owner_empties(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for n in range(6):
        y = f(filled(device, n))
        assert y.tolist() == [2.0 * n] * 4
        y.untyped_storage().resize_(0)


@may_run_live
@pytest.mark.parametrize("most", [1, 2])
def test_c05_results_of_recordings_that_had_to_go(device, most):
    f = pg.record(lambda x: (x * 2 + 1, x.sum()), warmup=1, max_recordings=most)
    held = []
    for n in range(18):
        size = 2 + n % (most + 1)
        held = [*held[-4:], (n, size, f(filled(device, n, size)))]
        for n_then, size_then, (y, total) in held:
            assert y.tolist() == [2.0 * n_then + 1] * size_then
            assert total.item() == n_then * size_then


def test_c05_results_of_a_function_that_is_reset_again_and_again(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    held = []
    for n in range(9):
        held.append(f(filled(device, n)))
        if n % 3 == 2:
            pg.reset(f)
            gc.collect()
            taken = [torch.full((1 << 12,), 7.0, device=device) for _ in range(8)]
    assert [y[0].item() for y in held] == [2.0 * n for n in range(9)]
    del taken


def test_c05_a_result_and_a_state_fed_back(device):
    both = plain(lambda x, s: (x * 2 + s, s + 1))
    s = Pair.of(torch.zeros(4, device=device))
    for n in range(10):
        s = both(filled(device, n), s).each(lambda result: result[1])


def test_c05_two_results_that_change_places(device):
    both = plain(lambda a, b: (a + 1, b * 2))
    a, b = Pair.of(filled(device, 1)), Pair.of(filled(device, 3))
    for _ in range(10):
        result = both(a, b)
        b, a = result.each(lambda r: r[0]), result.each(lambda r: r[1])
        del result


# ---------------------------------------------------------------------------------------------------
# C5: borrowed outputs. Whatever a caller does with one, it reads the right value or raises StaleOutput.


def borrowing(device, function=lambda x: x * 2):
    f = pg.record(function, warmup=1, outputs="borrow")
    for n in range(3):
        f(filled(device, n))
    return f


def right_or_stale(read, right):
    """Assert that reading gives what it gave before, or raises."""
    with contextlib.suppress(pg.StaleOutput):
        assert_same(read(), right)


Two = namedtuple("Two", "a b")

KEEPS = {
    "copy.copy": (copy.copy, lambda held: held + 0),
    "named tuple": (lambda y: Two(y, y), lambda held: torch.stack(held)[0]),
    "NumPy array": (lambda y: y.numpy(), lambda held: torch.tensor(held)),
    "storage": (lambda y: y.untyped_storage(), lambda held: of_storage(held, 4)),
    "list": (lambda y: [y], torch.cat),
    "dictionary": (lambda y: {"y": y}, lambda held: held["y"] + 0),
    "slice": (lambda y: y[:4], lambda held: held * 1),
    "detached alias": (lambda y: y.detach(), lambda held: held.clone()),
}


def of_storage(storage, size):
    return torch.empty(0, device=storage.device).set_(storage, 0, (size,))


@pytest.mark.parametrize(("keep", "read"), KEEPS.values(), ids=KEEPS)
def test_c05_a_borrowed_output_kept_in_another_form(keep, read):
    device = torch.device("cpu")
    f = borrowing(device)
    held = keep(f(filled(device, 1)))
    f(filled(device, 5))
    right_or_stale(lambda: read(held).as_subclass(torch.Tensor), filled(device, 2))


@pytest.mark.parametrize("there", ["itself", "view", "detach", "data", "slice"])
def test_c05_a_borrowed_output_saved_by_autograd(device, there):
    on = {"itself": lambda b: b, "view": lambda b: b.view(2, 2), "detach": lambda b: b.detach(), "data": lambda b: b.data,
          "slice": lambda b: b[1:]}[there]  # fmt: skip
    f = borrowing(device)
    w = torch.ones((), device=device, requires_grad=True)
    loss = (w * on(f(filled(device, 1)))).sum()  # which alone has the tensor now
    f(filled(device, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_c05_a_borrowed_output_unpacked(device):
    f = borrowing(device)
    a, b, c, d = f(filled(device, 1))
    f(filled(device, 5))
    for part in (a, b, c, d):
        right_or_stale(lambda: part.clone(), torch.tensor(2.0, device=device))


def test_c05_a_borrowed_output_is_the_first_argument_of_another_function(device):
    f, g = borrowing(device), pg.record(lambda y: y + 1, warmup=1)
    for n in range(5):
        assert_same(g(f(filled(device, n))), filled(device, 2 * n + 1))


def test_c05_a_borrowed_output_that_is_the_argument_itself(device):
    f = pg.record(lambda x: (x, x + 1), warmup=1, outputs="borrow")
    y = filled(device, 0)
    for n in range(6):
        given, y = f(y)
        right_or_stale(lambda: given.clone(), filled(device, n))


def test_c05_a_borrowed_output_while_another_function_is_filled(device):
    size = 40_000
    f, g = pg.record(lambda x: x * 2, warmup=1), pg.record(lambda y: (y * 3).sum(), warmup=1)
    h = pg.record(lambda z: z + 5, warmup=1, outputs="borrow")
    large = pg.record(lambda x: (x @ x).sum(), warmup=1)
    for _ in range(3):
        large(torch.ones(300, 300, device=device))
    for _ in range(3):
        g(f(filled(device, 1, size)))
    for _ in range(3):
        h(filled(device, 1, size))
    borrowed = h(filled(device, 1, size))
    g(filled(device, 100, size))
    right_or_stale(lambda: borrowed.clone(), filled(device, 6, size))


def test_c05_a_borrowed_argument_lies_where_another_one_goes(device, monkeypatch):
    monkeypatch.setattr(device_for(device), "roomy", 0, raising=False)  # the memory of recordings is shared
    f, g = pg.record(lambda x: x * 2, outputs="borrow"), pg.record(lambda z, w, y: y - w)
    for n in range(6):
        given = [filled(device, v, 1 << 16) for v in (100, 0, n)]
        assert_same(g(*given[:2], f(given[2])), given[2] * 2)


def test_c05_a_borrowed_argument_lies_where_another_ones_place_is(device, monkeypatch):
    """A place in the memory of a third function, whose results are passed on without a copy."""
    monkeypatch.setattr(device_for(device), "roomy", 0, raising=False)
    f, g = pg.record(lambda x: x * 2), pg.record(lambda a, b: a - b)
    lending = pg.record(lambda x: x * 3, outputs="borrow")
    large = [filled(device, n, 1 << 16) for n in range(5)]
    for x in large:
        g(f(x), large[1])
    for x in large:
        lending(x)
    for x in large:
        assert_same(g(large[4], lending(x)), large[4] - x * 3)


@pytest.mark.parametrize("gradients", [torch.no_grad, torch.enable_grad])
def test_c07_a_borrowed_argument_that_requires_a_gradient(device, gradients):
    f, g = borrowing(device), pg.record(lambda y: (y * 2, y.requires_grad))
    for n in range(5):
        y = f(filled(device, n)).requires_grad_()
        with gradients():
            found, required = g(y)
        assert required
        assert_same(found.detach().clone(), filled(device, 4 * n))


def test_c05_a_borrowed_argument_is_written_that_lies_where_results_go(device, monkeypatch):
    monkeypatch.setattr(device_for(device), "roomy", 0, raising=False)

    def several(y):
        a = y * 3
        b = a + 1
        c = b + 1
        y.add_(1)
        return a, b, c

    f, g = pg.record(lambda x: x * 2, outputs="borrow"), pg.record(several, outputs="borrow")
    for n in range(6):
        x = filled(device, n, 1 << 16)
        y = f(x)
        assert_same([t.clone() for t in g(y)], [x * 6, x * 6 + 1, x * 6 + 2])
        right_or_stale(lambda: y + 0, x * 2 + 1)


def test_c05_a_borrowed_output_is_written_by_the_function_that_gave_it(device):
    def function(a):
        a.mul_(0.5)
        return a + 1

    f, y, expected = pg.record(function, outputs="borrow"), filled(device, 1), filled(device, 1)
    for _ in range(6):
        y, expected = f(y), function(expected)
        assert_same(y.clone(), expected)


def test_c05_a_borrowed_output_whose_backward_has_run(device):
    w = torch.ones(4, device=device, requires_grad=True)

    def step(x):
        w.grad = None
        y = (w * x).tanh()
        y.sum().backward()
        return y[1:], y

    f = pg.record(step, outputs="borrow")
    kept = []
    for n in range(5):
        x = filled(device, 1 + n / 4)
        found, expected = f(x), step(x)
        assert_same([t.detach().clone() for t in found], [t.detach() for t in expected])
        with pytest.raises(RuntimeError, match="second time"):
            found[0].sum().backward()
        kept.append((found[0], expected[0].detach()))
    for held, right in kept:
        right_or_stale(lambda held=held: held.detach().clone(), right)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, z: (a + b, z)[1],
        lambda a, b, z: (z.add_(a), a * b)[1],
        lambda a, b, z: (a.add_(z), b[1:] * 2)[1],
        lambda a, b, z: (a.view(2, 2), b)[0],
        lambda a, b, z: a.sum().item() + z,
    ],
    ids=["returned", "written", "both written", "view", "live"],
)
@pytest.mark.parametrize("second", [lambda y: y, lambda y: y[:], lambda y: y.clone()], ids=["twice", "overlapping", "apart"])
@may_run_live
def test_c05_borrowed_arguments_together(device, function, second):
    f, g = borrowing(device), pg.record(function)
    for n in range(5):
        x = filled(device, n)
        y, z, right, other = f(x), filled(device, 7), x * 2, filled(device, 7)
        found, expected = g(y, second(y), z), function(right, second(right), other)
        assert_same((found.clone(), z), (expected.clone(), other))
        right_or_stale(lambda y=y: y + 0, right)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("late", [False, True])
def test_c05_a_borrowed_output_in_an_autograd_function(device, late):
    f = borrowing(device)
    for n in range(3):
        y = f(filled(device, n)).requires_grad_()
        assert y.mul(1).requires_grad
        loss = (Squared.apply(y) + y).sum()
        if late:
            f(filled(device, 5))
            with pytest.raises((pg.StaleOutput, RuntimeError)):
                loss.backward()
        else:
            loss.backward()
            assert_same(y.grad, filled(device, 4 * n + 1))


def test_c05_a_borrowed_output_that_a_recorded_function_differentiates(device):
    f, g = borrowing(device), pg.record(lambda y: (y * y * 3).sum())
    for n in range(5):
        y, given = f(filled(device, n)).requires_grad_(), []
        y.register_hook(given.append)
        g(y).backward()
        assert_same(given, [filled(device, 12 * n)])


def test_c05_a_borrowed_output_that_is_saved_and_stale_at_the_backward(device):
    """What a recorded backward reads of it is as it was. (That of a live call raises: autograd has saved what is stale.)"""
    f, g = borrowing(device), pg.record(lambda y, w: (y[1:] * w).sum())
    for n in range(6):
        w = torch.full((3,), 2.0, device=device, requires_grad=True)
        y = f(filled(device, n))
        z = g(y, w)
        expected = y.clone()[1:]
        if n:
            f(filled(device, n + 7))
        z.backward()
        assert_same(w.grad, expected)
    assert pg.stats(g).replayed >= 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_c05_a_borrowed_output_in_compiled_code(device, backend):
    def h(t):
        t.add_(1)
        return t * 2

    f, compiled = borrowing(device), torch.compile(h, backend=backend)
    for n in range(5):
        y = f(filled(device, n))
        assert_same(compiled(y), filled(device, 4 * n + 2))
        assert_same(y.clone(), filled(device, 2 * n + 1))
        f(filled(device, 9))
        with pytest.raises(pg.StaleOutput):
            compiled(y)


@may_run_live
@pytest.mark.parametrize("options", [{}, {"shapes": {"x": {0: [4, 8]}}}], ids=["plain", "padded"])
@pytest.mark.parametrize("stale", [False, True])
def test_c05_a_borrowed_output_in_reach(device, options, stale):
    f, kept = borrowing(device), {"y": None}

    def function(x):
        return x * 3 if kept["y"] is None or stale else x + kept["y"]

    g = pg.record(function, **options)
    for n in range(6):
        if n % 3:
            kept["y"] = f(filled(device, n))
            if stale:
                f(filled(device, 9))
        else:
            kept["y"] = None
        x = filled(device, n)
        assert_same(g(x), x + x * 2)


UNUSUAL = {
    "out=": lambda y: torch.max(torch.full((1, 4), 6.0, device=y.device), 0, out=(y, y.new_empty(4, dtype=torch.long))).values,
    "nested": lambda y: torch.nested.nested_tensor_from_jagged(y[:, None], torch.tensor([0, 1, 4], device=y.device)),
}


@pytest.mark.parametrize("keep", UNUSUAL.values(), ids=UNUSUAL)
def test_c05_a_borrowed_output_in_an_unusual_tensor(device, keep):
    f = borrowing(device)
    held = keep(f(filled(device, 3)))
    f(filled(device, 50))
    right_or_stale(lambda: (held.values() if held.is_nested else held + 0).flatten(),
                   filled(device, 6))  # fmt: skip


@pytest.mark.parametrize("which", ["view written", "base written", "base requires"])
def test_c06_views_of_a_borrowed_output_and_their_base(device, which):
    def run(f):
        found = []
        for n in range(4):
            w = torch.ones(4, device=device, requires_grad=True)
            y = f(filled(device, n + 1, 12).view(3, 4))
            view = y[0]
            if which == "view written":
                view.mul_(w * 3)
                (y.sum() + 0 * w.sum()).backward()
            elif which == "base written":
                y.mul_(w * 3)
                (view.sum() + 0 * w.sum()).backward()
            else:
                y.requires_grad_()
                found.append(view.requires_grad)
            found += [y.requires_grad, None if w.grad is None else w.grad.clone()]
        return found

    assert_same(run(borrowing(device)), run(lambda x: x * 2))


@pytest.mark.parametrize("function", [lambda x: (x + 1, x * 2), lambda x: x.view(2, 2).max(0), lambda x: (y := x + 1, y[1:])])
def test_c10_verify_of_borrowed_outputs(device, function):
    f = pg.record(function, outputs="borrow", verify=1)
    for n in range(6):
        x = filled(device, n)
        assert_same([t.clone() for t in f(x)], [t.clone() for t in function(x)])


def test_c10_verify_of_a_borrowed_output_fed_back(device):
    f, y = pg.record(lambda x: x * 2, outputs="borrow", verify=1), filled(device, 1)
    for _ in range(6):
        y = f(y)
    assert_same(y.clone(), filled(device, 64))


def test_c16_a_copy_of_a_borrowed_output_has_its_gradient(device):
    y = borrowing(device)(filled(device, 1)).requires_grad_()
    y.grad = filled(device, 3)
    copied = copy.deepcopy(y)
    assert type(copied) is torch.Tensor
    assert_same((copied.clone().detach(), copied.grad), (filled(device, 2), filled(device, 3)))


def test_c05_the_storage_of_a_part_of_a_borrowed_output(device):
    f = borrowing(device)
    y = f(torch.arange(4.0, device=device))
    part = y[2:]
    other = torch.empty(0, device=device).set_(part.untyped_storage(), part.storage_offset(), part.size(), part.stride())
    assert_same(other, torch.tensor([4.0, 6.0], device=device))


# ---------------------------------------------------------------------------------------------------
# C6: gradients


def steps(make_net, *, zero=True, **options):
    """A backward beside a live one; the state is (net, optimizer)."""

    def make():
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            if zero:
                net.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        return step, [net, optimizer]

    return side_by_side(make, **options)


def linear(device):
    return lambda: nn.Linear(4, 2, device=device)


@may_run_live
@pytest.mark.parametrize("zero", [True, False], ids=["made anew", "accumulated"])
def test_c06_the_data_of_a_gradient_is_replaced_after_each_step(device, zero):
    both = steps(linear(device), zero=zero)
    for _ in range(8):
        both(torch.randn(3, 4, device=device))
        both.change(lambda state: halve_the_data_of_gradients(state[0]))
        both.change(lambda state: state[1].step())


def halve_the_data_of_gradients(net):
    for p in net.parameters():
        p.grad.data = p.grad.data / 2


@may_run_live
@pytest.mark.parametrize("zero", [True, False], ids=["made anew", "accumulated"])
def test_c06_the_data_of_a_gradient_is_replaced_once(device, zero):
    both = steps(lambda: nn.Linear(64, 64, device=device), zero=zero)
    for n in range(9):
        if n == 5:
            both.change(lambda state: setattr(state[0].weight.grad, "data", torch.zeros(64, 64, device=device)))
        both(torch.randn(2, 64, device=device))


@may_run_live
def test_c06_gradients_set_by_hand_between_the_steps(device):
    def set_weight(value):
        return lambda state: setattr(state[0].weight, "grad", None if value is None else filled(device, value, 8).view(2, 4))

    both = steps(linear(device), zero=False)
    changes = {
        4: set_weight(None),
        6: set_weight(1),
        8: lambda state: setattr(state[0].bias, "grad", torch.zeros(2, device=device)),
        10: lambda state: setattr(state[0].weight, "grad", state[0].weight.grad.clone()),
        12: lambda state: state.append(state[0].weight.grad) or setattr(state[0].weight, "grad", None),
        14: lambda state: setattr(state[0].weight, "grad", state.pop()),
    }
    for n in range(18):
        both.change(changes.get(n, lambda state: None))
        both(torch.randn(3, 4, device=device))
        both.change(lambda state: state[1].step())


KEPT_GRADIENTS = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "a view": lambda grad: grad.view(-1)[1:],
    "its storage": lambda grad: grad.untyped_storage(),
    "a NumPy array": lambda grad: grad.numpy() if grad.device.type == "cpu" else grad,
    "a tensor on a NumPy array": lambda grad: torch.from_numpy(grad.numpy()) if grad.device.type == "cpu" else grad,
}


@may_run_live
@pytest.mark.parametrize("keep", KEPT_GRADIENTS.values(), ids=KEPT_GRADIENTS)
@pytest.mark.parametrize("all_of_them", [True, False])
def test_c06_a_gradient_that_is_kept_keeps_its_value(device, keep, all_of_them):
    w = torch.ones(2, device=device, requires_grad=True)

    def f(x):
        w.grad = None
        (w * x).sum().backward()

    f, kept = pg.record(f, warmup=1), []
    for n in range(7):
        f(filled(device, n, 2))
        kept = [*kept[0 if all_of_them else -1 :], (n, keep(w.grad))]
        for n_then, grad in kept:
            values = of_storage(grad, 2) if isinstance(grad, torch.UntypedStorage) else grad
            assert set(values.tolist()) == {float(n_then)}


@may_run_live
def test_c06_a_gradient_that_is_returned_keeps_its_value(device):
    w = torch.ones(2, device=device, requires_grad=True)

    def f(x):
        w.grad = None
        (w * x).sum().backward()
        return w.grad

    f, last = pg.record(f, warmup=1), None
    for n in range(7):
        before, last = last, f(filled(device, n, 2))
        assert last is w.grad
        assert before is None or before.tolist() == [n - 1.0] * 2


def test_c06_a_gradient_retained_in_the_middle(device):
    def make():
        net = nn.Linear(4, 2, device=device)

        def step(x):
            net.zero_grad()
            h = net(x)
            h.retain_grad()
            h.pow(2).mean().backward()
            return h.grad, h.detach()

        return step, net

    both = side_by_side(make, hold=True)
    for _ in range(6):
        both(torch.randn(3, 4, device=device))


def test_c06_two_functions_add_to_the_same_gradients(device):
    net = nn.Linear(4, 2, device=device)
    twin = copy.deepcopy(net)

    def backward_of(net, loss):
        return lambda x: loss(net(x)).backward()

    losses = [lambda y: y.pow(2).mean(), lambda y: y.abs().mean()]
    recorded = [pg.record(backward_of(net, loss), warmup=1) for loss in losses]
    live = [backward_of(twin, loss) for loss in losses]
    for n in range(14):
        x = torch.randn(3 - n % 2, 4, device=device)
        for f in (recorded[n % 2], recorded[0]):
            f(x)
        for f in (live[n % 2], live[0]):
            f(x)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        if n % 4 == 3:
            net.zero_grad(set_to_none=n > 8)
            twin.zero_grad(set_to_none=n > 8)


def test_c06_parameters_that_are_used_in_some_calls_only(device):
    def make():
        nets = nn.ModuleList([nn.Linear(4, 2, device=device) for _ in range(2)])
        optimizer = torch.optim.SGD(nets.parameters(), lr=0.1, momentum=0.9)

        def step(x, which):
            optimizer.zero_grad()
            loss = nets[which](x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [nets, optimizer]

    both = side_by_side(make)
    for n in range(15):
        both(torch.randn(3, 4, device=device), int(n % 3 == 0))


def test_c06_signatures_share_the_gradients_that_they_make(device):
    both = steps(linear(device))
    for n in range(14):
        both(torch.randn(3 + 2 * n % 3, 4, device=device))
        if n % 5 == 4:
            both.change(lambda state: state[0].zero_grad())


@may_run_live
def test_c06_sparse_gradients(device):
    def make():
        table = nn.Embedding(10, 4, sparse=True, device=device)
        return lambda i: table(i).sum().backward(), table

    both = side_by_side(make)
    for _ in range(4):
        both(torch.tensor([1, 2], device=device))


@may_run_live
def test_c06_autograd_notices_a_gradient_that_a_replay_adds_to(device):
    w, u = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    f = pg.record(lambda x: (w * x).sum().backward(), warmup=1)
    for n in range(5):
        f(filled(device, n, 2))
        product = (w.grad * u).sum()
        f(filled(device, n, 2))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@may_run_live
def test_c06_backward_reaches_an_earlier_result_that_requires_grad_now(device):
    f = pg.record(lambda x: x + 1, warmup=1)
    w = torch.ones(2, device=device, requires_grad=True)
    g = pg.record(lambda y: (w * y).sum().backward(), warmup=1)
    for n in range(5):
        w.grad = None
        y = f(filled(device, n, 2)).requires_grad_()
        g(y)
        assert w.grad.tolist() == [n + 1.0] * 2
        assert y.grad.tolist() == [1.0] * 2


@may_run_live
def test_c06_backward_reaches_what_an_earlier_result_was_multiplied_with(device):
    f = pg.record(lambda x: x + 1, warmup=1)
    w, u = torch.ones(2, device=device, requires_grad=True), torch.tensor(3.0, device=device, requires_grad=True)
    g = pg.record(lambda y: (w * y).sum().backward(), warmup=1)
    for n in range(5):
        w.grad = u.grad = None
        g(f(filled(device, n, 2)).mul_(u))
        assert w.grad.tolist() == [3 * (n + 1.0)] * 2
        assert u.grad.item() == 2 * (n + 1.0)


# ---------------------------------------------------------------------------------------------------
# C12, C14, C15: threads, resets, and what is shared


@may_run_live
def test_c14_a_thread_of_the_functions_own_writes_its_result(device):
    def f(x):
        result = torch.zeros(4, device=device)
        thread = threading.Thread(target=lambda: result.copy_(x))
        thread.start()
        thread.join()
        return result

    f = pg.record(f, warmup=1)
    for n in range(5):
        assert f(filled(device, n)).tolist() == [float(n)] * 4


@may_run_live
def test_c14_a_thread_of_the_functions_own_calls_a_recorded_function(device):
    inner = pg.record(lambda x: x + 1, warmup=1)

    def f(x):
        result = []
        thread = threading.Thread(target=lambda: result.append(inner(x)), daemon=True)
        thread.start()
        thread.join(timeout=2)
        return result[0] * 2

    f = pg.record(f, warmup=1)
    for n in range(4):
        assert f(filled(device, n)).tolist() == [2.0 * (n + 1)] * 4


def test_c12_a_function_is_reset_while_another_thread_waits_to_call_it(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for n in range(4):
        f(filled(device, n))

    begun = threading.Event()

    def slow(x):
        begun.set()
        time.sleep(0.3)
        pg.reset(f)
        return x

    thread = threading.Thread(target=quietly, args=(pg.record(slow, warmup=1), filled(device, 1)))
    thread.start()
    begun.wait()
    try:
        assert f(filled(device, 50)).tolist() == [100.0] * 4
    finally:
        thread.join()


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*args)


def test_cublas_has_its_workspace_by_itself(cuda):
    """And not in the middle of what a large temporary has left, which would need as much again."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, device=cuda)
    large = 128 << 20

    def f(x):
        one = torch.ones(large, dtype=torch.uint8, device=cuda)[0].float()
        return x @ weight * one

    recorded = pg.record(f)
    for _ in range(4):
        x = torch.randn(64, 64, device=cuda)
        assert_same(recorded(x), f(x))
    assert pg.stats(recorded).replayed == 3
    assert pg.stats(recorded).pool_bytes < large + (64 << 20)


def test_a_capture_needs_no_more_memory_than_the_call_before_it(cuda):
    """What the warm-up call took is enough for the slots as well: it has kept places for them."""

    def f(x):
        y = x.repeat(16, 1)
        return (y * 2 + x.repeat(16, 1)).sum()

    x = torch.randn(2048, 1536, device=cuda)  # 12 MiB, and three times 192
    recorded = pg.record(f, warmup=1)
    recorded(x)
    before = device_for(cuda).pool_bytes
    torch.testing.assert_close(recorded(x), f(x))
    assert pg.stats(recorded).recorded == 1
    assert device_for(cuda).pool_bytes == before >= 3 * 192 << 20


def test_c15_a_capture_finds_the_memory_of_its_warm_up_where_recordings_have_gone(cuda):
    """What they leave is given back before the warm-up call, and not between it and the capture."""

    def f(x):
        y = x.repeat(16, 1)
        return (y * 2 + x.repeat(16, 1)).sum()

    x = torch.randn(2048, 1536, device=cuda)
    expected = f(x)
    for _ in range(2):  # the second time a recording has gone
        recorded = pg.record(f, warmup=1)
        recorded(x)
        before = torch.cuda.memory_stats(cuda)["num_device_alloc"]
        result = recorded(x)
        assert torch.cuda.memory_stats(cuda)["num_device_alloc"] - before <= 1  # for the result, perhaps; none of 192 MiB
        torch.testing.assert_close(result, expected)
        assert pg.stats(recorded).recorded == 1
        del recorded
        gc.collect()
        torch.cuda.empty_cache()


def test_c15_a_warm_function_takes_the_result_of_a_cold_one(device):
    f, g = plain(lambda x: x * 2), plain(lambda y: y + 1)
    for n in range(4):
        f(filled(device, n))
    for n in range(6):
        g(f(filled(device, n)))
    assert_replays(g, f(filled(device, 9)))


def test_c10_verify_while_results_are_held(device):
    def make():
        w = torch.ones(2, device=device)
        return lambda x: (w.add_(x) * 2, torch.rand(2, device=device)), w

    both = side_by_side(make, verify=2, hold=True)
    for _ in range(8):
        both(torch.ones(2, device=device))
    assert counts(both)[2] >= 6


def test_c10_verify_of_one_element_whose_stride_is_two(device):
    def f(x):
        return torch.as_strided(x * 2, (1,), (2,))

    recorded = pg.record(f, verify=1)
    for n in range(5):
        assert_same(recorded(filled(device, n)), f(filled(device, n)))


# ---------------------------------------------------------------------------------------------------
# What a wrong line would break, each seen to fail without it


@may_run_live
def test_c03_separate_arguments_at_first_and_overlapping_ones_later(device):
    f = pg.record(lambda a, b: (a.add_(1), b * 2)[1], warmup=1)
    for n in range(4):
        assert_same(f(filled(device, n), filled(device, n)), filled(device, 2 * n))
    for n in range(3):
        memory = ramp(device, 6, start=n)
        assert_same(f(memory[:4], memory[:4]), (ramp(device, 4, start=n) + 1) * 2)


def test_c05_a_dropped_result_that_went_to_shared_memory(device, results_are):
    f = pg.record(lambda x: x * 2, warmup=1)
    for n in range(6):
        y = f(filled(device, n))
        y.share_memory_()  # gives it other memory, on the CPU
        assert_same(y, filled(device, 2 * n))
        del y


@may_run_live
def test_c12_a_refused_capture_that_grew_the_dictionaries_of_a_module_and_an_optimizer(device):
    def make():
        model = nn.Linear(3, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.register_buffer("seen", torch.zeros(3, device=device))
        model.register_forward_hook(lambda *args: None)

        def f(x):
            n = len(model._buffers)
            model.register_buffer(f"b{n}", x + n)
            model.add_module(f"m{n}", nn.Identity())
            model.register_forward_pre_hook(lambda *args: None)
            optimizer.register_step_post_hook(lambda *args: None)
            return model(x).sum().item()

        return f, (model, optimizer)

    def shape(state):
        model, optimizer = state
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks)
        return list(model._buffers), list(model._modules), list(model._parameters), hooks

    both = side_by_side(make)
    for n in range(4):
        both(ramp(device, 2, 3, start=n))
        assert shape(both.state) == shape(both.live_state)


@may_run_live
def test_c09_a_scheduler_that_steps_inside_before_the_optimizer(device):
    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def f(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            schedule.step()
            optimizer.step()

        return f, weight

    both = side_by_side(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's: they are called in the wrong order
        for n in range(6):
            both(ramp(device, 3, start=n))
            assert_same(both.state, both.live_state)


@may_run_live
def test_c14_a_recorded_function_in_the_backward_of_another(device):
    """On a GPU backward runs on a thread of autograd's own, while the recording waits for it."""
    inner = pg.record(lambda grad: grad * 3, warmup=1)

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return inner(grad)

    weight = torch.ones(4, device=device, requires_grad=True)
    f = pg.record(lambda x: torch.autograd.grad(Tripled.apply(weight * x).sum(), weight)[0], warmup=1)
    for n in range(5):
        assert_same(f(filled(device, n)), filled(device, 3 * n))


@pytest.mark.parametrize("make", [nn.BatchNorm1d, functools.partial(nn.InstanceNorm1d, affine=True, track_running_stats=True)])
def test_c03_running_statistics_in_inference_mode(device, make):
    """There operators that consist of others are seen as one."""
    norms = [make(3).to(device) for _ in range(2)]
    recorded = pg.record(norms[0], warmup=1)
    for n in range(6):
        torch.manual_seed(n)
        x = torch.randn(4, 3, 5, device=device)
        with torch.inference_mode():
            assert_same(recorded(x), norms[1](x))
        assert_same([*norms[0].buffers()], [*norms[1].buffers()])
    assert counts(recorded) == (1, 1, 5)


@may_run_live
def test_c11_where_with_one_argument_in_inference_mode(device):
    f = pg.record(lambda x: torch.where(x > 0), warmup=1)
    for values in ([1.0, -1, 1], [1.0, -1, 1], [1.0, 1, 1], [-1.0, -1, 1]):
        with torch.inference_mode():
            x = torch.tensor(values, device=device)
            assert_same(f(x), torch.where(x > 0))


@may_run_live
def test_c08_a_cached_tensor_that_the_first_call_made(device):
    """What a warm-up leaves behind on a GPU lies in the memory of the pool, and is no memory of the recording's."""
    factor = [2.0]

    @functools.lru_cache
    def table():
        return torch.full((4,), factor[0], device=device)

    f = pg.record(lambda x: x * table(), warmup=1)
    for n in range(8):
        if n == 5:
            factor[0] = 5.0
            table.cache_clear()
        assert_same(f(filled(device, n)), filled(device, n * factor[0]))


def of_a_package(source):
    """What `source` defines, as code of an installed package: the names that it uses are not looked at."""
    space = {}
    exec(compile(source, "/usr/lib/site-packages/package.py", "exec"), space)
    return space


def test_c09_code_that_a_compiler_wrote_is_no_code_of_the_users(device):
    """It is captured at the first look: `torch.compile` calls functions that nothing names."""
    package = of_a_package("KERNELS = {}\ndef run(x):\n    return KERNELS['c' 'all']([x])\n")
    source = "def call(args):\n    x, = args\n    return getattr(x, 'mul')(2)\n"
    exec(compile(source, "/tmp/torchinductor_me/ab/cab.py", "exec"), package["KERNELS"])
    run = package["run"]
    f = pg.record(lambda x: run(x), warmup=1)
    for n in range(4):
        assert_same(f(filled(device, n)), filled(device, n) * 2)
    assert pg.stats(f).replayed == 3, pg.explain(f)
    assert not f._describer.heard


RATES = """
def adjust(optimizer, rate):
    for group in optimizer.param_groups:
        group['lr'] = rate

def step_with(optimizer, factor):
    group = optimizer.param_groups[0]
    was = group['lr']
    group['lr'] = was * factor
    optimizer.step()
    group['lr'] = was
"""


@may_run_live
@pytest.mark.parametrize("after", [False, True])
def test_c09_a_rate_that_code_of_a_package_sets_inside(device, after):
    adjust = of_a_package(RATES)["adjust"]

    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def f(x, rate):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            if after:
                optimizer.step()
            adjust(optimizer, rate)
            if not after:
                optimizer.step()

        return f, (weight, optimizer)

    both = side_by_side(make)
    for rate in [0.5, 0.5, 0.25, 0.25, 0.5, 0.25, 0.5]:
        both(ramp(device, 3), rate)


@may_run_live
def test_c09_a_rate_that_code_of_a_package_sets_for_a_moment(device):
    step_with = of_a_package(RATES)["step_with"]

    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def f(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            step_with(optimizer, 0.5)

        return f, (weight, optimizer)

    both = side_by_side(make)
    for n in range(6):
        if n == 3:
            for optimizer in (both.state[1], both.live_state[1]):
                optimizer.param_groups[0]["lr"] = 0.25
        both(ramp(device, 3))


@pytest.mark.parametrize("kind", ["fused", "clipped"])
def test_c17_gradients_do_not_wait_for_the_garbage_collector(device, kind):
    """What a capture has noted goes with it."""
    net = nn.Linear(4, 4).to(device)
    fused, plain = functools.partial(torch.optim.AdamW, fused=True), functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = (fused if kind == "fused" else plain)(net.parameters())
    pg.record(net, warmup=1)

    def clip():
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()

    update = pg.record(optimizer.step if kind == "fused" else clip, warmup=1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            net(torch.ones(2, 4, device=device)).sum().backward()
            gradients = [weakref.ref(p.grad) for p in net.parameters()]
            update()
            optimizer.zero_grad()
            assert [g() for g in gradients] == [None, None]
    finally:
        gc.enable()
    assert pg.stats(net).recorded == 1, pg.explain(net)


def test_c15_what_a_warm_up_leaves_behind_is_given_back(cuda):
    """Its backward works in the pool too: what is cached for our stream outside of it, nobody else could use."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(cuda)
    stream = device_for(cuda)._stream.stream.cuda_stream
    before = {s["address"] for s in torch.cuda.memory_snapshot()}  # of other tests, perhaps
    pg.record(net, warmup=1)
    for _ in range(5):
        net.zero_grad()
        net(torch.randn(64, 512, device=cuda)).square().sum().backward()
        outside = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0)]
        assert [s["total_size"] for s in outside if s["stream"] == stream and s["address"] not in before] == []
    assert pg.stats(net).replayed >= 3


_IN_FLIGHT = """
import copy, sys
import torch
from torch import nn
import phonograph as pg
from phonograph.testing import assert_same

torch.manual_seed(0)
theirs = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(512, 512), nn.Tanh()))).cuda()
ours = pg.record(copy.deepcopy(theirs), warmup=1, keep="always")


def step(module, n):
    module.zero_grad()
    torch.manual_seed(n)
    made = [module(torch.randn(3584, 512, device="cuda")) for _ in range(3)]  # 7 MiB of each layer are saved
    sum(out.square().sum() for out in made).backward()
    return [out.detach().clone() for out in made], [p.grad.clone() for p in module.parameters()]


for n in range(4):
    assert_same(step(ours, n), step(theirs, n))
assert pg.stats(ours).replayed > 6, pg.explain(ours)
pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
print(sum(s["total_size"] for s in pools) >> 20)
"""


def _memory_in_flight(settings):
    """MiB of all graphs' memory where three forwards wait for their backwards, in a process with these settings of the
    allocator."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", _IN_FLIGHT], env={**environment, "PYTORCH_CUDA_ALLOC_CONF": settings}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_c15_segments_may_be_expandable(cuda):
    """All recordings have one pool then, too."""
    fixed = _memory_in_flight("expandable_segments:False")
    growing = _memory_in_flight("expandable_segments:True")
    assert growing < 1.2 * fixed + 64, (growing, fixed)


def _gives_back_all_memory(other, x):
    if x.is_cuda:
        torch.cuda.empty_cache()


def _captures(other, x):
    other(x.detach()[..., :8])


def _captures_with_its_backward(other, x):
    with torch.enable_grad():
        torch.autograd.grad(other(x.detach()[..., :8]).sum(), other.weight)


def _drops_recordings(other, x):
    other(x.detach()[..., :8])
    with contextlib.suppress(TypeError):  # the live one
        pg.reset(other)


def _raises(other, x):
    raise KeyError


IN_A_BACKWARD = [_gives_back_all_memory, _captures, _captures_with_its_backward, _drops_recordings, _raises]


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("does", IN_A_BACKWARD)
def test_c12_what_hooks_do_in_the_backward_of_a_warm_up(device, does, first):
    """In that, or in the first that is captured or played."""
    torch.manual_seed(0)
    theirs, other = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device), nn.Linear(8, 8).to(device)
    ours = pg.record(copy.deepcopy(theirs), warmup=1)
    others = pg.record(copy.deepcopy(other), warmup=0), other
    for n in range(6):
        found = []
        for module, other in zip((ours, theirs), others, strict=True):
            module.zero_grad()
            torch.manual_seed(n)
            out = module(torch.randn(32, 64, device=device))
            hook = functools.partial(does, other)
            handles = [p.register_post_accumulate_grad_hook(hook) for p in module.parameters()] if n == first else []
            fails = n == first and does is _raises
            with pytest.raises(KeyError) if fails else contextlib.nullcontext():
                out.square().sum().backward()
            for handle in handles:
                handle.remove()
            found.append((out.detach(), None if fails else [p.grad for p in module.parameters()]))
        assert_same(*found)
        del found
    assert pg.stats(ours).replayed >= 3, pg.explain(ours)


@pytest.mark.parametrize("entries", [100_000, 2])
@may_run_live
def test_c05_while_memory_is_profiled(cuda, entries):
    """The allocator's history is the user's: it is read and left as it is. With too few entries a call runs live."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64)).to(cuda)
    theirs = copy.deepcopy(model)

    def step(model, x):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        return y.detach()

    torch.cuda.memory._record_memory_history(max_entries=entries, clear_history=True)
    try:
        torch.empty(1 << 20, device=cuda)
        begin = torch.cuda.memory._snapshot()["device_traces"][cuda.index or 0]
        ours = pg.record(functools.partial(step, model), warmup=1)
        held = []
        for n in range(8):
            x = torch.full((32, 64), n / 8, device=cuda)
            held.append((ours(x), step(theirs, x)))
            for result, expected in held:
                assert_same(result, expected)
        trace = torch.cuda.memory._snapshot()["device_traces"][cuda.index or 0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    if entries == 2:
        assert len(trace) == 2
        assert "history" in pg.explain(ours), pg.explain(ours)
    else:
        assert trace[: len(begin)] == begin
        assert pg.stats(ours).replayed >= 6, pg.explain(ours)


def test_c05_placeholders_are_no_peak(cuda):
    """What a capture takes to lead the allocator counts as allocated: it must not be all that is free in the pool."""

    def f(x, w):
        y = x
        for _ in range(4):
            y = (y @ w).tanh()
        return y.sum()

    x, w = torch.randn(8192, 1024, device=cuda), torch.randn(1024, 1024, device=cuda)
    f(x, w)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f(x, w)
    live = torch.cuda.max_memory_allocated() - before
    g = pg.record(f, warmup=1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        g(x, w)
    assert pg.stats(g).replayed == 2, pg.explain(g)
    slots = x.nbytes + w.nbytes
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * live + slots + (34 << 20)  # cuBLAS has a workspace


def test_what_a_checkpoint_keeps_is_in_nobodys_way(cuda):
    """What its parts have of the forward lasts as long as the recording: the backward lies in the same pool all the same, and
    not in another of the same size."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

        def forward(self, x):
            by = x.cos()
            for part in self.parts:
                x = checkpoint(lambda y, part=part: part(y).tanh() * by, x, use_reentrant=False)
            return x.square().mean()

    x = torch.randn(4096, 1024, device=cuda)
    first = pg.record(lambda x: (x * 2).sum())
    for _ in range(2):
        first(x)
    before = pools_in_use()
    live = Net().to(cuda)
    recorded = pg.record(copy.deepcopy(live))
    for n in range(4):
        for net in (recorded, live):
            net.zero_grad()
            net(x * n).backward()
        for p, q in zip(recorded.parameters(), live.parameters(), strict=True):
            assert_same(p.grad, q.grad)
    assert pg.stats(recorded).replayed == 3
    assert pools_in_use() <= before


def test_what_is_recorded_next_finds_room_where_others_were(cuda):
    """As long as a small recording needs the pool, all of it stays: a large one lies there, and not in another of that size."""
    x = torch.randn(4096, 1024, device=cuda)
    small = pg.record(lambda x: (x * 2).sum())
    for _ in range(3):
        small(x)
    before = pools_in_use()
    for scale in range(2):
        large = pg.record(lambda x, scale=scale: (x.repeat(16, 1) * scale).sum())
        for _ in range(3):
            assert_same(large(x), (x.repeat(16, 1) * scale).sum())
        assert pg.stats(large).replayed == 2
        assert pools_in_use() <= before
        pg.reset(large)
    assert pg.stats(small).pool_bytes > 16 * x.nbytes


@pytest.mark.parametrize("dropped", ["a function", "a model", "an output that was held", "a loss that was held"])
def test_c15_the_pool_goes_with_the_last_that_needs_it(cuda, dropped):
    """Not only where `reset` was asked for it, nor only if nothing was held then."""
    device = device_for(cuda)
    gc.collect()
    device._memory.begin_anew()  # others may have the pool of before
    x, model, held = torch.randn(4096, 1024, device=cuda), dropped in ("a model", "a loss that was held"), None
    f = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()).to(cuda) if model else lambda x: x * 2 + 1
    f = pg.record(f)
    for _ in range(4):
        held = None
        held = f(x)
        if model:
            held = held.square().mean()
            held.backward()
    assert pg.stats(f).replayed == 3
    pool = device._memory.anchor.handle
    if "held" in dropped:
        pg.reset(f)
    else:
        held = None
    del f
    if held is not None:
        device.tidy()
        assert tuple(pool) in pools_in_use()
        held = None
    gc.collect()
    device.tidy()
    assert tuple(pool) not in pools_in_use()


@pytest.mark.parametrize("room", ["plenty", "none on the device", "none allowed"])
def test_an_optimizers_states_fill_no_segment_that_is_larger_than_they_are(cuda, monkeypatch, room):
    """They stay; and what is as large as that segment would need another. But a live call is not to run out of memory."""
    if room == "none on the device":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 80 << 30))
    if room == "none allowed":
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: 0.0)
    asked, before = [], cuda_memory.hold_large
    monkeypatch.setattr(cuda_memory, "hold_large", lambda *given: asked.append(given) or before(*given))
    weight, scale = nn.Parameter(torch.randn(64, 64, device=cuda)), nn.Parameter(torch.randn(64, device=cuda))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.Adam([weight, scale])
    update = pg.record(optimizer.step)
    for _ in range(3):
        update()
    assert pg.stats(update).replayed == 2
    ((_, most, allowed),) = asked
    assert most == 2 * weight.nbytes
    assert (allowed > 0) is (room == "plenty")


def pools_in_use():
    """The private pools of the allocator that have memory."""
    gc.collect()
    torch.cuda.empty_cache()
    return {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()} - {(0, 0)}
