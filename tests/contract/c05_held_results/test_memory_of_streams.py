"""Memory that is given out, or given back, while the device has yet to read it: on several streams, in warm-ups, in
captures. On the CPU there is no such time: these promises are a GPU's."""

import gc

import pytest
import torch
from torch import nn
from torch.cuda import current_stream as current

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live

N = 2048  # N x N floats are 16 MiB: segments of their own in the allocator, so that nothing is split or merged
SLEEP = 400_000_000  # cycles: some tenths of a second


@pytest.fixture(autouse=True)
def alone(cuda):
    """Something is recorded, nothing runs, and nothing is cached."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    first = pg.record(lambda t: t + 1, warmup=1)
    for _ in range(3):
        first(torch.zeros(8, device=cuda))
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def sleep(stream):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)


def full(value, n=N):
    return torch.full((n, n), float(value), device="cuda")


def several(x, count=6):
    return [x + i for i in range(count)]


def live(function):
    return function


def recorded(function):
    return pg.record(function, warmup=1)


def compare(run):
    """The same, live and recorded."""
    eager, ours = run(live), run(recorded)
    torch.cuda.synchronize()
    assert_same(ours, eager)


def test_c14_a_result_is_read_on_its_stream_while_another_plays(cuda):
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    xs = [full(n + 1) for n in range(4)]
    torch.cuda.synchronize()

    def double(x):
        return x * 2 + 1

    def run(wrap):
        f = wrap(double)
        for _ in range(4):  # recorded: there are two recordings then, which take turns
            first, second = f(xs[0]), f(xs[0])
            del first, second
        torch.cuda.synchronize()
        with torch.cuda.stream(a):
            y = f(xs[1])
        with torch.cuda.stream(b):
            z = f(xs[2])
        sleep(a)
        with torch.cuda.stream(a):
            w = y * 1
        del y
        with torch.cuda.stream(b):
            last = f(xs[3])
        torch.cuda.synchronize()
        return [w.clone(), z.clone(), last.clone()]

    compare(run)


@pytest.mark.parametrize("same", [False, True])
def test_c14_results_of_a_warm_up_are_read_on_its_stream_meanwhile(cuda, same):
    """What comes next on another stream, a warm-up of something else or the capture, finds their memory free."""
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    one, two = full(1), full(100)
    torch.cuda.synchronize()

    def run(wrap):
        f = wrap(lambda x: several(x))
        g = f if same else wrap(lambda x: several(x))
        with torch.cuda.stream(a):
            r = f(one)
        sleep(a)
        with torch.cuda.stream(a):
            out = [t * 1 for t in r]
        del r
        with torch.cuda.stream(b):
            s = g(two)
        torch.cuda.synchronize()
        return [*out, *s]

    compare(run)


def test_c14_record_stream_in_a_warm_up(cuda):
    side = torch.cuda.Stream()
    one, two = full(1), full(100)

    def run(wrap):
        state = full(0)
        side.wait_stream(current())
        torch.cuda.synchronize()

        def function(x):
            y = x * 2
            side.wait_stream(current())
            with torch.cuda.stream(side):
                state.copy_(y)
            y.record_stream(side)
            del y
            return x.sum()

        f, g = wrap(function), wrap(lambda x: several(x))
        sleep(side)
        f(one)
        torch.empty(1 << 20, device=cuda)  # at an allocation of the user's, torch looks what is free by now
        r = g(two)
        torch.cuda.synchronize()
        return [state, *r]

    compare(run)


@may_run_live
def test_c14_a_stream_of_the_call_waits_for_one_of_another(cuda):
    side, other = torch.cuda.Stream(), torch.cuda.Stream()

    def run(wrap):
        weight, x, results = full(0, 512), full(1, 512), []
        torch.cuda.synchronize()

        def function(x):
            side.wait_stream(other)
            side.wait_stream(current())
            with torch.cuda.stream(side):
                y = weight * 1
            current().wait_stream(side)
            return y + x

        f = wrap(function)
        for _ in range(5):
            sleep(other)
            with torch.cuda.stream(other):
                weight.add_(1)
            results.append(f(x).clone())
            torch.cuda.synchronize()
        return results

    compare(run)


def test_c14_a_stream_that_is_told_to_wait_for_the_call(cuda):
    """It does nothing in the call; who works on it next counts on that."""
    other = torch.cuda.Stream()

    def run(wrap):
        xs, results = [full(n, 512) for n in range(6)], []
        torch.cuda.synchronize()

        def function(x):
            y = x * 2
            other.wait_stream(current())
            return y

        f = wrap(function)
        for x in xs:
            sleep(current())
            y = f(x)
            with torch.cuda.stream(other):
                results.append(y * 1)
            torch.cuda.synchronize()
            del y
        return results

    compare(run)


def test_c14_no_stream_of_the_users_is_that_of_captures(cuda):
    """torch gives out 32 streams in turn."""
    from phonograph.devices import device_for

    mine = device_for(torch.device("cuda", 0))._stream.stream.cuda_stream
    assert mine not in {torch.cuda.Stream(priority=p).cuda_stream for p in (0, -1) for _ in range(40)}


def test_c06_arguments_that_the_backward_of_a_warm_up_reads_last(cuda):
    """Autograd drops one as soon as what reads it is launched; beside it another part of the backward goes on."""

    def run(wrap):
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(N, N, device=cuda) / N**0.5)
        unit = torch.eye(N, device=cuda)
        others = [nn.Parameter(full(1)) for _ in range(8)]
        source = torch.randn(N, N, device=cuda)

        def tower(x):
            y = x @ w
            for _ in range(60):
                y = y @ unit
            return y

        f = wrap(tower)
        z = sum((p * 2).sum() for p in others)  # first, so that its backward comes last
        torch.cuda.synchronize()
        loss = z + f(source * 1.0).sum()
        loss.backward()
        torch.cuda.synchronize()
        return [w.grad.clone()]

    compare(run)


@may_run_live
def test_c12_a_conjugated_gradient_that_a_refused_capture_has_dropped(cuda):
    def run(wrap):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 64, device=cuda, dtype=torch.complex64))
        xs = [torch.randn(64, 64, device=cuda, dtype=torch.complex64) for _ in range(4)]

        def step(x):
            seen = torch.zeros((), device=cuda)
            if p.grad is not None:
                seen = torch.view_as_real(p.grad.resolve_conj())[..., 1].sum()
            p.grad = None
            loss = (p.conj() * x).real.sum()
            loss.backward()
            loss.item()
            return seen

        f = wrap(step)
        return [f(x).clone() for x in xs]

    compare(run)


@pg.live
def shown(t):
    assert t.sum().item() > 0


@may_run_live
@pytest.mark.parametrize("marked", [False, True])
def test_c01_gradients_from_before_a_first_replay_that_is_given_up(cuda, marked):
    """It has written where they lay, when the call begins again and reads them."""

    def run(wrap):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(N, N, device=cuda) / N**0.5)
        x = torch.randn(N, N, device=cuda)
        masks = [torch.arange(64, device=cuda) < n for n in (3, 3, 5, 7, 9)]

        def step(x, mask):
            before = torch.zeros((), device=cuda) if w.grad is None else w.grad.norm()
            w.grad = None
            with torch.no_grad():
                many = several(x, 20)  # all that is free, the old gradient's memory as well
                total = sum(t.sum() for t in many)
                del many
            h = x @ w
            if marked:
                shown(mask)
            loss = h.square().mean() + h.reshape(-1).index_select(0, mask.nonzero()[:, 0]).sum()
            loss.backward()
            return before, loss.detach() + 0 * total

        f = step if wrap is live else pg.record(step, warmup=1, fallback="split")
        return [t.clone() for mask in masks for t in f(x, mask)]

    compare(run)


def test_c05_garbage_that_lies_where_a_result_does(cuda):
    """It is collected in another function's warm-up."""
    x, two = full(1), full(100)

    def function(x):
        kept = [x * 3]
        kept.append(kept)  # a cycle, as a local function that calls itself is one
        return kept[0]

    def collecting(x):
        gc.collect()
        return several(x, 12)

    was = gc.isenabled()
    gc.disable()
    try:
        f, g = recorded(function), recorded(collecting)
        f(x)
        y = f(x)
        torch.cuda.synchronize()
        assert_same([y, *g(two)], [full(3), *several(two, 12)])
    finally:
        if was:
            gc.enable()


def test_c05_memory_of_a_capture_that_waits_for_another_stream(cuda):
    """It counts as taken when the recording is made, and is not the recording's own: a gradient may lie there later."""
    side = torch.cuda.Stream()
    n = 80_000_000  # 305 MiB: more than all recordings may have before they share
    c = torch.rand(n, device=cuda)
    p = nn.Parameter(torch.ones(n, device=cuda))
    x = torch.ones((), device=cuda)

    def function(x):
        y = c + x
        side.wait_stream(current())
        with torch.cuda.stream(side):
            z = y.sum()
        y.record_stream(side)
        del y
        current().wait_stream(side)
        return z * 1

    def step(x):
        p.grad = None
        loss = torch.dot(p, c) * x
        loss.backward()
        return loss.detach()

    f, step = recorded(function), recorded(step)
    for _ in range(3):
        f(x)
        torch.empty(1 << 20, device=cuda)
    torch.cuda.synchronize()
    step(x)
    held = p.grad
    step(x)
    torch.cuda.synchronize()
    f(x)
    f(x)
    assert_same([p.grad, held], [c, c])


def test_c15_what_is_cached_and_used_by_nobody_is_not_there_beside_the_pool(cuda):
    net = torch.nn.Linear(N, N).to(cuda)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    @pg.record
    def step(x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    x, before = torch.ones(2, N, device=cuda), torch.cuda.memory_reserved()
    other = torch.empty(512 << 20, dtype=torch.uint8, device=cuda)
    del other
    assert torch.cuda.memory_reserved() - before >= 512 << 20
    step(x)
    assert torch.cuda.memory_reserved() - before < 512 << 20
