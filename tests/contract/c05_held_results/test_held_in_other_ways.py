"""C5: results that are held in yet other ways."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves as tensors_of

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.memory import filled, of_storage
from tests.helpers import counts, may_run_live, plain, ramp

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


class Two(nn.Module):
    """Two results that the backward reads, and a third that it does not."""

    def forward(self, x):
        y = x.tanh()
        return y, x.sigmoid().mT, y.detach() + 1


READ_BY_THE_BACKWARD = {
    "tanh": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "sigmoid": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)),
    "lstm": lambda: nn.LSTM(4, 4),
    "two": lambda: nn.Sequential(nn.Linear(4, 4), Two()),
    "large": lambda: nn.Sequential(nn.Linear(4, 40_000), nn.Tanh()),
}


def first(result):
    return result[0] if isinstance(result, tuple) else result


def total(result):
    return sum(t.square().sum() for t in tensors_of(result) if t.requires_grad)


def models_of(device, kind):
    torch.manual_seed(0)
    plain, model = (READ_BY_THE_BACKWARD[kind]().to(device) for _ in range(2))  # no copy: cuDNN's weights lie together
    model.load_state_dict(plain.state_dict())
    return plain, pg.record(model, keep="always")


@pytest.mark.parametrize("kind", READ_BY_THE_BACKWARD)
def test_c05_results_that_the_backward_reads_and_one_keeps_settle(device, kind):
    plain, model = models_of(device, kind)
    held = []
    for n in range(24):
        x = torch.linspace(-1, 1 + n, 12, device=device).view(3, 4)
        held.append((model(x), plain(x)))
        for result, m in zip(held[-1], (model, plain), strict=True):
            m.zero_grad()
            total(result).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    for ours, theirs in held:
        assert_same(tensors_of(ours), tensors_of(theirs))
    assert pg.stats(model).recorded <= 3, pg.explain(model)
    assert not pg.stats(model).refusals, pg.explain(model)


@pytest.mark.parametrize("kind", ["tanh", "two"])
def test_c06_a_result_that_the_backward_reads_is_written_before_it(device, kind):
    """As eager: what is written unseen is read, a write that is seen raises. Some are kept, so that replays hand out copies."""
    plain, model = models_of(device, kind)
    held = []
    for n in range(24):
        x = torch.linspace(-1, 1 + n, 12, device=device).view(3, 4)
        other, waits = [m(x * 2) for m in (model, plain)], n % 3 == 1  # a second forward in flight
        held.append([m(x) for m in (model, plain)])
        for result, late, m in zip(held[-1], other, (model, plain), strict=True):
            m.zero_grad()
            loss = total(result)
            first(result).data.mul_(0.5)
            loss.backward()
            if waits:
                total(late).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    for m in (model, plain):
        result = first(m(x))
        with torch.no_grad():
            result.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
    assert pg.stats(model).replayed >= 40, pg.explain(model)


def test_c06_results_of_several_calls_that_are_kept_and_read_late(device):
    """One result's backward has read all that was saved; another's comes when the next call has been."""
    plain, model = models_of(device, "two")
    held = []
    for n in range(16):
        x = torch.linspace(-1, 1 + n, 12, device=device).view(3, 4)
        held.append([m(x) for m in (model, plain)])
        for results, m in zip(zip(*held, strict=True), (model, plain), strict=True):
            m.zero_grad()
            results[-1][0].sum().backward(retain_graph=True)
            if n:
                results[-2][1].sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    for ours, theirs in held:
        assert_same(ours, theirs)
