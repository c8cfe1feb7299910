"""Streams of the user's own inside of recorded functions. On the CPU there are none: these promises are a GPU's."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.cuda import current_stream as current

import phonograph as pg
from phonograph.compile import backend
from phonograph.testing import assert_same
from tests.helpers import copy_of, counts, may_run_live, side_by_side

N = 256


class Streams:
    """Two that last, made when first asked for."""

    def __getattr__(self, name):
        stream = torch.cuda.Stream()
        setattr(self, name, stream)
        return stream


S = Streams()


def slow(x):
    """Takes the device a while, so that work which does not wait for it comes too early."""
    for _ in range(40):
        x = x @ x * (1 / N) + 1e-3
    return x


def inputs(device, calls=8):
    return [torch.full((N, N), (n + 1) / N, device=device) for n in range(calls)]


def shown(t):
    return t.sum().item()


@pg.live
def note(t):
    shown(t)
    return t + 1


@pg.live
def on_a_stream(t):
    S.b.wait_stream(current())
    with torch.cuda.stream(S.b):
        result = slow(t)
    current().wait_stream(S.b)
    shown(result)
    return result


# -- what is recorded


def both_ways(x):
    S.a.wait_stream(current())
    y = slow(x)
    with torch.cuda.stream(S.a):
        z = slow(x + 1e-3)
    current().wait_stream(S.a)
    return y + z, z


def a_stream_of_its_own(x):
    stream = torch.cuda.Stream()
    stream.wait_stream(current())
    with torch.cuda.stream(stream):
        y = slow(x)
    current().wait_stream(stream)
    return y + 1


def by_events(x):
    start = torch.cuda.Event()
    start.record()
    S.a.wait_event(start)
    with torch.cuda.stream(S.a):
        y = slow(x)
        end = S.a.record_event()
    z = slow(x + 1e-3)
    current().wait_event(end)
    return y + z


def one_after_another(x):
    S.a.wait_stream(current())
    S.b.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = slow(x)
    with torch.cuda.stream(S.b):
        z = slow(x + 1e-3)
        S.b.wait_stream(S.a)
        z = z + y
    current().wait_stream(S.b)
    return z, y + 1


def with_memory_that_is_freed(x):
    S.a.wait_stream(current())
    y = x * 2
    with torch.cuda.stream(S.a):
        z = slow(y)
    y.record_stream(S.a)
    del y
    w = slow(x)
    current().wait_stream(S.a)
    z.record_stream(current())
    return z + w


def not_waited_for(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        slow(x)
    return x * 2


def masked(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = slow(x)
    z = x * 2
    z[x > 4 / N] = 1.0
    current().wait_stream(S.a)
    return y + z


def masked_there(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = slow(x)
        y[y > 0.003] = 1.0
        y = slow(y)
    current().wait_stream(S.a)
    return y


def marked(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = slow(x)
    z = note(x * 2)
    with torch.cuda.stream(S.a):
        y = slow(y)
    current().wait_stream(S.a)
    return y + z


def marked_there(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = slow(note(slow(x)))
    current().wait_stream(S.a)
    return y


def marked_on_a_stream(x):
    return on_a_stream(slow(x)) + 1


def dropped_out(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = nn.functional.dropout(x, 0.5)
    current().wait_stream(S.a)
    return nn.functional.dropout(y, 0.5)


RECORDED = (both_ways, a_stream_of_its_own, by_events, one_after_another, with_memory_that_is_freed, not_waited_for, masked,
            masked_there, marked, marked_there, marked_on_a_stream, dropped_out)  # fmt: skip


@pytest.mark.parametrize("where", ["default", "another"])
@pytest.mark.parametrize("function", RECORDED)
def test_c14_streams_of_the_functions_own(cuda, function, where):
    stream = torch.cuda.Stream() if where == "another" else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        both = side_by_side(lambda: function, fallback="split" if "masked" in function.__name__ else "live")
        for n, x in enumerate(inputs(cuda)):
            torch.manual_seed(n)
            both(x)
        both.check()
    assert pg.stats(both.recorded).replayed >= 6, pg.explain(both.recorded)


# -- what runs live


def waits_for_nobody(x):
    with torch.cuda.stream(S.a):
        y = torch.ones(N, N, device=x.device)
    current().wait_stream(S.a)
    return x + y


def asks_inside(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        k = shown(slow(x))
    current().wait_stream(S.a)
    return x + k


def asks_meanwhile(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = slow(x)
    k = x.nonzero()
    current().wait_stream(S.a)
    return y + k.shape[0]


def waits_for_the_device(x):
    y = slow(x)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return x
    return y


def waits_for_a_stream(x):
    S.a.synchronize()
    return x * 2


def asks_a_stream(x):
    return x * 2 if S.a.query() else x + x


def leaves_another_stream(x):
    S.a.wait_stream(current())
    torch.cuda.set_stream(S.a)
    return x * 2


def fails(x):
    S.a.wait_stream(current())
    with torch.cuda.stream(S.a):
        y = slow(x)
    if x.shape == (N, N):
        raise ValueError("the user's")
    return y


LIVE = {waits_for_nobody: "does not wait", asks_inside: "on the host", asks_meanwhile: "depends on data",
        waits_for_the_device: "waits for the GPU", waits_for_a_stream: "waits for the GPU", asks_a_stream: "how far",
        leaves_another_stream: "another stream", fails: ""}  # fmt: skip


@may_run_live
@pytest.mark.parametrize("function", LIVE)
def test_c14_what_cannot_be_recorded_of_streams(cuda, function):
    """And afterwards everything is as before: something else can be recorded."""
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        both = side_by_side(lambda: function, fallback="live")
        for x in inputs(cuda, 5):
            with torch.cuda.stream(mine):
                S.a.wait_stream(mine)
                both.outcome(x)
                torch.cuda.current_stream().synchronize()
                torch.cuda.synchronize()
        assert pg.stats(both.recorded).replayed == 0
        assert all(LIVE[function] in reason for reason in pg.stats(both.recorded).refusals), pg.stats(both.recorded).refusals
    after = side_by_side(lambda: both_ways)
    for x in inputs(cuda, 4):
        after(x)
    assert pg.stats(after.recorded).replayed == 3, pg.explain(after.recorded)


@may_run_live
def test_c14_work_on_a_stream_that_does_not_wait_happens_once(cuda):
    def make():
        count = torch.zeros(1, device=cuda)
        S.a.wait_stream(current())

        def function(x):
            with torch.cuda.stream(S.a):
                count.add_(1)
            current().wait_stream(S.a)
            return x + count

        return function

    both = side_by_side(make)
    for x in inputs(cuda, 6):
        both(x)
        S.a.wait_stream(current())
    both.check()


@may_run_live
def test_c14_a_stream_that_the_function_has_from_outside(cuda):
    """In a warm-up call as well, the work is done in the order of the caller's stream."""
    mine = current()

    def function(x):
        y = slow(x)
        S.a.wait_stream(mine)
        with torch.cuda.stream(S.a):
            z = y * 2
        mine.wait_stream(S.a)
        return z + 1

    both = side_by_side(lambda: function)
    for x in inputs(cuda):
        both(x)
        torch.cuda.synchronize()
    both.check()
    assert pg.stats(both.recorded).replayed == 0


@may_run_live
def test_c14_an_event_that_others_wait_for(cuda):
    def run(wrap):
        done, results = torch.cuda.Event(), []

        def function(x):
            y = slow(x)
            done.record()
            return y

        f = wrap(function)
        for x in inputs(cuda):
            y = f(x)
            S.a.wait_event(done)
            with torch.cuda.stream(S.a):
                results.append(y * 2)
        torch.cuda.synchronize()
        return results

    assert_same(run(lambda f: f), run(pg.record))


def test_c14_a_result_that_is_used_on_the_stream_where_it_was_made(cuda):
    """Whoever uses it there need not wait for the caller's stream."""

    def make(x):
        S.a.wait_stream(current())
        with torch.cuda.stream(S.a):
            return slow(x)

    def run(f):
        results = []
        for x in inputs(cuda):
            y = f(x)
            with torch.cuda.stream(S.a):
                results.append(y * 2)
            current().wait_stream(S.a)
        return results

    f = pg.record(make, warmup=1)
    assert_same(run(make), run(f))
    assert pg.stats(f).replayed == 7


def test_c14_work_outside_on_the_functions_stream_comes_first(cuda):
    def run(wrap):
        weight, results = torch.zeros(N, N, device=cuda), []

        def function(x):
            S.a.wait_stream(current())
            with torch.cuda.stream(S.a):
                y = weight * 1
            current().wait_stream(S.a)
            return y + x

        f = wrap(function)
        for x in inputs(cuda):
            S.a.wait_stream(current())
            with torch.cuda.stream(S.a):
                weight.add_(slow(x) * 0 + 1)
            results.append(f(x))  # in the order of that stream alone
        return results, f

    (live, _), (ours, f) = run(lambda f: f), run(lambda f: pg.record(f, warmup=1))
    assert_same(live, ours)
    assert pg.stats(f).replayed == 7


@may_run_live
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_c14_compiled_code_on_two_streams(cuda, inner):
    compiled = torch.compile(copy_of(both_ways), backend=backend, options={"inner": inner})
    results = [compiled(x) for x in inputs(cuda)]
    torch.cuda.synchronize()
    expected = [both_ways(x) for x in inputs(cuda)]
    torch.cuda.synchronize()
    assert_same(results, expected, tolerance=1e-5)


class Two(nn.Module):
    """Its layers work side by side."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x):
        S.a.wait_stream(current())
        with torch.cuda.stream(S.a):
            y = self.first(x).tanh()
        z = self.second(x).tanh()
        current().wait_stream(S.a)
        return y * z


def test_c14_a_whole_step_with_two_streams(cuda):
    def make():
        torch.manual_seed(0)
        model = Two().to(cuda)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), *(p.detach().clone() for p in model.parameters())

        return step

    both = side_by_side(make)
    for x in inputs(cuda):
        both(x)
    both.check()
    assert counts(both) == (1, 1, 7), pg.explain(both.recorded)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_c06_a_model_with_two_streams(cuda):
    torch.manual_seed(0)
    live = Two().to(cuda)
    ours = pg.record(copy.deepcopy(live), warmup=1)
    for n, x in enumerate(inputs(cuda)):
        seen = []
        for model in (live, ours):
            model.zero_grad()
            given = x.clone().requires_grad_()
            y = model(given)
            y.square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            seen.append([y.detach().clone(), given.grad, *(p.detach().clone() for p in model.parameters())])
        assert_same(*seen, f"call {n}: ")
    assert pg.stats(ours).replayed >= 6, pg.explain(ours)


def test_c15_memory_of_other_streams_is_protected_and_used_again(cuda):
    """Results that lie in it are held over captures of other functions; the pool does not grow with each capture."""
    torch.cuda.synchronize()
    functions = [both_ways, a_stream_of_its_own, by_events, one_after_another, with_memory_that_is_freed]
    recorded, held = [pg.record(f, warmup=1) for f in functions], []
    for x in inputs(cuda, 6):
        for f, g in zip(functions, recorded, strict=True):
            held.append((f(x), g(x)))
    torch.cuda.synchronize()
    assert_same([a for a, _ in held], [b for _, b in held])
    del held
    for g in recorded:
        pg.reset(g)
    sizes = []
    for _ in range(4):
        for g in recorded:
            for x in inputs(cuda, 3):
                g(x)
                torch.cuda.synchronize()  # memory that another stream uses is free only then
        sizes.append(pg.stats(recorded[0]).pool_bytes)
        for g in recorded:
            pg.reset(g)
        gc.collect()
    assert max(sizes[2:]) <= max(sizes[:2]), sizes
