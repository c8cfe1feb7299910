"""C1, C2, C11: higher-order operators (`torch.ops.higher_order`), which are given functions or other operators: what they call
is recorded. Compiled code calls them, and people do, by `torch.cond` and its like."""

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.compile import backend, graphs
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons

hops = torch.ops.higher_order
aten = torch.ops.aten


def named(name):
    return getattr(hops, name, None) or pytest.skip(f"this release of torch has no {name}")


def wrapped(x):
    return named("wrap")(lambda t: (t * 2).sin(), x)


def chosen(x):
    return named("cond")(True, lambda t: (t * 2,), lambda t: (t - 1,), (x,))[0]


def drawn(x):
    """As what compiled code calls draws; the state is not looked at again."""
    return x + hops.run_and_save_rng_state(aten.rand.default, [3], device=x.device)[1]


def drawn_again(x):
    state, first = hops.run_and_save_rng_state(aten.rand_like.default, x)
    return first, hops.run_with_rng_state(state, aten.rand_like.default, x), torch.rand_like(x)


def widened(x):
    return named("out_dtype")(aten.mul.Tensor, torch.float64, x, x)


def mapped(x):
    return named("map_impl")(lambda t, y: (t * 2 + y,), (x,), (x,))[0]


def accumulated(x):
    return named("associative_scan")(lambda a, b: (a + b,), (x,), ())[0]


def invoked(x):
    return named("invoke_subgraph")(lambda t: (t.sin() * 2,), "a_name", x)[0]


def boxed(x):
    def inner(args):
        return (args[0].cos() + 1,)

    inner._boxed_call = True
    return named("invoke_subgraph")(inner, "another_name", x)[0]


def of_each(x):
    return named("foreach_map")(lambda t: t * 2, [x])[0]


def hinted(x):
    return named("hints_wrapper")(lambda t: (t * 2,), (x,), {}, hints={})[0]


def ordered(x):
    return named("with_effects")(torch.ops.prims._make_token(), aten.sin.default, x)[1]


@torch.library.custom_op("phonograph_test_higher_order::add_one", mutates_args={"x"})
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def functionalized(x):
    """What writes is called on a copy."""
    y = x * 2
    return named("auto_functionalized")(torch.ops.phonograph_test_higher_order.add_one.default, x=y)[1] + y


def functionalized_by_bases(x):
    y = x * 2
    add = torch.ops.phonograph_test_higher_order.add_one.default
    return named("auto_functionalized_v2")(add, _x_base_index=0, _all_bases=[y])[1] + y


def attended(x):
    q = x.reshape(1, 1, 1, 3).expand(1, 1, 16, 3).contiguous()
    options = {"PRESCALE_QK": False, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device=x.device).as_tuple()
    return named("flex_attention")(q, q, q, lambda s, b, h, i, j: s + (i - j), mask, 1.0, options)[0]


_OF_FUNCTIONS = (wrapped, chosen, drawn, widened, mapped, accumulated, invoked, boxed, of_each, hinted, ordered)
CALLED = {f.__name__: f for f in (*_OF_FUNCTIONS, functionalized, functionalized_by_bases, attended)}


@pytest.mark.parametrize("function", CALLED.values(), ids=CALLED)
def test_c01_what_they_call_is_recorded(device, function):
    f = pg.record(function)
    for n in range(5):
        x = ramp(device, 3, start=n)
        torch.manual_seed(n)
        ours = f(x)
        after = torch.rand(2, device=device)
        torch.manual_seed(n)
        assert_same(ours, function(x))
        assert_same(after, torch.rand(2, device=device))
    assert counts(f) == (1, 1, 4), reasons(f)


def test_c02_a_state_that_is_kept_and_set_again(device):
    f = pg.record(drawn_again)
    for n in range(5):
        x = ramp(device, 3, start=n)
        torch.manual_seed(n)
        ours = f(x)
        torch.manual_seed(n)
        assert_same(ours, drawn_again(x))
        assert_same(ours[0], ours[1])


def test_c24_one_that_decides_by_a_value(device):
    def f(x):
        return named("cond")(x.sum() > 9, lambda t: (t * 2,), lambda t: (t - 1,), (x,))[0]

    g = pg.record(f)
    for n in (1, 1, 5, 5, 1):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert counts(g) == (1, 1, 4), reasons(g)


def test_c24_one_that_repeats_by_a_value(device):
    def f(x):
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return named("while_loop")(lambda i, y: y.sum() < 99, lambda i, y: (i + 1, y * 2), (start, x), ())

    g = pg.record(f)
    for n in (1, 1, 5, 40, 1):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert counts(g) == (1, 1, 4), reasons(g)


def test_c01_a_triton_kernel_of_the_users_in_compiled_code(cuda):
    """`triton_kernel_wrapper_mutation`, which compiled code that stays of operators calls."""
    pytest.importorskip("triton")
    from tests.contract.kernels import add_one as adding

    def f(x):
        y = x * 2
        adding[(1,)](y, y.numel(), block=16)
        return y

    torch._dynamo.reset()
    g = pg.record(torch.compile(f, backend="aot_eager"))
    for n in range(5):
        assert_same(g(ramp(cuda, 3, start=n)), ramp(cuda, 3, start=n) * 2 + 1)
    assert counts(g) == (1, 1, 4), reasons(g)


@may_run_live
@pytest.mark.parametrize("fallback", ["live", "split"])
def test_c11_what_they_call_may_be_refused(device, fallback):
    def f(x):
        return named("wrap")(lambda t: t * t.sum().item(), x)

    g = pg.record(f, fallback=fallback)
    for n in range(4):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert ("value on the host" if fallback == "live" else "another number") in reasons(g)


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def block(self, x):
        return F.dropout(self.a(x).relu(), 0.5, self.training)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return self.b(F.dropout(x, 0.3, self.training))


@pytest.fixture(autouse=True)
def nothing_is_donated():
    """A backward that writes what its forward has saved could not be recorded apart from it."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


INNER = "aot_eager_decomp_partition"  # the same code, compiled by AOTAutograd, of operators


class Job:
    """A model that is compiled, and trained in one of the ways."""

    def __init__(self, device, way, *, updates=True, **options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.device, self.way, self.net = device, way, Recomputing().to(device)
        self.updates = updates
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        if way == "backend":
            self.model = torch.compile(self.net, backend=backend, options={"inner": INNER, **options})
        else:
            self.model = torch.compile(self.net, backend=INNER)
        if way == "pair":
            self.model = pg.record(self.model, **options)
        self._recorded = [self.model] if way == "pair" else []
        if way == "whole step":
            self.step = pg.record(self.step, **options)
            self._recorded = [self.step]
        torch.manual_seed(5)

    def input(self, n):
        return ramp(self.device, 4, 8, start=n) / 16

    def step(self, x):
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if self.updates:
            self.optimizer.step()
        return loss.detach()

    def end(self, results):
        """All that came of it."""
        return [*results, *(p.detach().clone() for p in self.net.parameters()), torch.rand(3, device=self.device)]

    @property
    def recorded(self):
        return self._recorded or graphs()

    @property
    def replayed(self):
        return sum(pg.stats(f).replayed for f in self.recorded)


def steps(job):
    return job.end([job.step(job.input(n)).clone() for n in range(7)])


def in_flight(job):
    """Three forwards wait at a time, their backwards come in another order, one twice; and some never come."""
    results = []
    for n in range(6):
        losses = [job.model(job.input(n + k)).square().mean() for k in range(3)]
        job.optimizer.zero_grad()
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        if n % 2:
            losses[2].backward()
        job.optimizer.step()
        results += [x.detach().clone() for x in losses]
        if n == 3:
            results.append(job.model(job.input(n)).detach().clone())
    return job.end(results)


def chosen_gradients(job):
    """Of one parameter only, and of the input."""
    results = []
    for n in range(6):
        x = job.input(n).requires_grad_()
        y = job.model(x).square().mean()
        results += torch.autograd.grad(y, (job.net.b.weight,), retain_graph=True)
        results += torch.autograd.grad(y, (x, job.net.a.weight))
    return job.end([t.clone() for t in results])


def made(function, device, way, **options):
    job = Job(device, way, **options)
    return function(job), job


@pytest.mark.parametrize("function", [steps, in_flight, chosen_gradients], ids=lambda f: f.__name__)
def test_c02_compiled_dropout_that_is_recomputed(device, function):
    theirs, _ = made(function, device, "live")
    ours, job = made(function, device, "backend")
    assert_same(ours, theirs)
    assert job.replayed >= 4, "".join(map(reasons, job.recorded))


@pytest.mark.parametrize("way", ["whole step", "pair"])
@pytest.mark.parametrize("function", [steps, in_flight, chosen_gradients], ids=lambda f: f.__name__)
def test_c02_compiled_dropout_that_is_recomputed_in_a_recording(cuda, function, way):
    """(The CPU device cannot see what compiled code calls.)"""
    if way == "whole step" and function is not steps:
        pytest.skip("it takes no whole steps")
    theirs, _ = made(function, cuda, "live")
    ours, job = made(function, cuda, way)
    assert_same(ours, theirs)
    assert job.replayed >= 4, "".join(map(reasons, job.recorded))
    if function is steps:
        assert [pg.stats(f).recorded for f in job.recorded] == [1]


def beside_live_calls(job):
    """The same compiled code is called live, before and after recorded steps: what waits for its backward, and what comes next,
    must find the generators as if all were live. Half of the time the gradients are made elsewhere, and a capture may come to
    nothing in the middle of its backward."""
    results, compiled = [], job.model if job.way == "backend" else torch.compile(job.net, backend=INNER)
    for n in range(12):
        waits = compiled(job.input(n)).square().mean() if n % 3 else None
        results.append(job.step(job.input(n)).clone())
        if n % 3 == 2:
            results.append(compiled(job.input(n)).detach().clone())  # whose backward never comes
        if waits is not None:
            results += [g.clone() for g in torch.autograd.grad(waits, [*job.net.parameters()])]
        if n == 7:
            results += torch.autograd.grad(compiled(job.input(n)).sum(), [job.net.a.weight])
    return job.end(results)


@may_run_live
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("way", ["whole step", "pair", "backend"])
def test_c02_compiled_dropout_beside_live_calls_of_the_same_code(cuda, way, warm):
    found = []
    for each in ("live", way):
        job = Job(cuda, each, updates=False)
        before = [job.step(job.input(n)).clone() for n in range(4)] if warm else []
        found.append(before + beside_live_calls(job))
    assert_same(*found)
    if warm:
        assert job.replayed >= 4, "".join(map(reasons, job.recorded))


def two_at_once(job):
    def step(x):
        losses = [job.model(x), job.model(x + 1)]
        job.optimizer.zero_grad()
        (losses[0].square().mean() + losses[1].square().mean() * 2).backward()
        job.optimizer.step()
        return losses[0].detach().clone()

    job.both = pg.record(step) if job.records else step
    return job.end([job.both(job.input(n)).clone() for n in range(7)])


def test_c02_a_step_that_calls_compiled_code_twice(cuda):
    """Before its backwards: these have to begin where each of the forwards has begun, in the same graph."""
    found = []
    for records in (False, True):
        job = Job(cuda, "live")
        job.records = records
        found.append(two_at_once(job))
    assert_same(*found)
    assert counts(job.both)[1:] == (1, 6), reasons(job.both)


@pytest.mark.parametrize("way", ["whole step", "pair", "backend"])
def test_c10_verify_of_compiled_dropout_that_is_recomputed(cuda, way):
    """A live call on the same state draws from compiled code's generators as well."""
    theirs, _ = made(steps, cuda, "live")
    ours, job = made(steps, cuda, way, verify=2)
    assert_same(ours, theirs)
    assert job.replayed >= 4, "".join(map(reasons, job.recorded))


@may_run_live
def test_c11_compiled_dropout_that_is_recomputed_after_what_runs_live(cuda):
    """The graph that ends there knows where the forward began, and the next one does not."""

    @pg.live
    def look(x):
        return x * 2

    found = []
    for records in (False, True):
        job = Job(cuda, "live")

        def step(x, job=job):
            loss = look(job.model(x)).square().mean()
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            return loss.detach()

        run = pg.record(step) if records else step
        found.append(job.end([run(job.input(n)).clone() for n in range(6)]))
    assert_same(*found)
