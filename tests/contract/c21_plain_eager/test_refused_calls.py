"""C21: once a signature runs live for good, its calls are plain calls: one frame more, nothing taken apart, no mode, nothing
looked at but now and then. They are counted all the same, and a refusal ends as before."""

import gc
import sys
import warnings

import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import phonograph as pg
from phonograph.engine import describer, making, recorded
from phonograph.engine import standing_refusals as standing
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

pytestmark = may_run_live


@pytest.fixture
def done(monkeypatch):
    """What was done about calls."""
    found: list[str] = []

    def noting(where, name):
        before = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, **kwargs: found.append(name) or before(*args, **kwargs))

    for where, name in ((describer, "describe"), (describer, "Reach"), (recorded, "noting"), (recorded, "modes")):
        noting(where, name)
    noting(recorded.Nested, "__enter__")
    noting(standing.Grounds, "_first")
    noting(warnings, "warn")
    return found


def depth():
    frame, n = sys._getframe(1), 0
    while frame is not None:
        frame, n = frame.f_back, n + 1
    return n


class Inside:
    """Notes what a function sees of those who call it."""

    def __init__(self):
        self.seen = []

    def __call__(self):
        self.seen.append((depth(), _len_torch_dispatch_stack(), torch.is_grad_enabled(), gc.isenabled()))


def _reads_the_host(device, inside):
    def f(x):
        inside()
        return x * x.sum().item()

    return f, lambda g: g(ramp(device, 3))


def _names_and_containers(device, inside):
    def f(batch, *, scale):
        inside()
        return batch["x"] * scale * batch["x"].sum().item()

    return f, lambda g: g({"x": ramp(device, 3), "sizes": [1, 2]}, scale=2.5)


def _two_kinds(device, inside):
    f, _ = _reads_the_host(device, inside)

    def call(g):
        with torch.no_grad():
            first = g(ramp(device, 2))
        return first, g(ramp(device, 3))

    return f, call


def _an_object(device, inside):
    def f(x, thing):
        inside()
        return x * (2 if thing is not None else 1)

    thing = (n for n in ())
    return f, lambda g: g(ramp(device, 3), thing)


def _an_optimizer(device, inside):
    weight = torch.nn.Parameter(ramp(device, 3))
    optimizer = torch.optim.Adam([weight], lr=0.1)

    def step(x):
        inside()
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        state = optimizer.state[weight]["step"]
        return loss.item(), group, state.device.type, state.item(), weight.detach().clone()

    return step, lambda g: g(ramp(device, 3))


def _a_generator_function(device, inside):
    def f(x):
        inside()
        yield x * 2

    return f, lambda g: next(g(ramp(device, 3)))


CASES = [_reads_the_host, _names_and_containers, _two_kinds, _an_object, _an_optimizer, _a_generator_function]
_LOOKED_AT = {_an_object: 1 / 8}  # there is nothing that could be told of an object but by describing it


@pytest.mark.parametrize("case", CASES)
def test_c21_a_refused_call_is_a_plain_call(device, case, done):
    plain, live = Inside(), Inside()
    f, call = case(device, plain)
    theirs, call_theirs = case(device, live)
    g = pg.record(theirs)
    for _ in range(24):
        assert_same(call_theirs(g), call(f))
    done.clear()
    plain.seen.clear()
    live.seen.clear()
    stats = pg.stats(g)
    for _ in range(24):
        assert_same(call_theirs(g), call(f))
    calls = len(live.seen)
    frames = 0 if case is _a_generator_function else 1  # which runs after the call
    others = [now for now, (n, *rest) in zip(live.seen, plain.seen, strict=True) if now != (n + frames, *rest)]
    assert len(others) <= _LOOKED_AT.get(case, 0) * calls, others
    looked = [name for name in done if name == "_first"]
    assert len(looked) <= 6 * calls / 12, "it looks more often than every twelfth call"
    assert len(done) - len(looked) <= _LOOKED_AT.get(case, 0) * 2 * calls, done
    now = pg.stats(g)
    assert (now.calls, now.live) == (stats.calls + calls, stats.live + calls)
    assert sum(now.refusals.values()) == sum(stats.refusals.values()) + calls
    assert now.recorded == 0


def test_c21_what_was_refused_a_thousand_times_is_hardly_looked_at(device):
    """By how many functions run in a call, of which some calls are looked at."""

    def frames(function, calls):
        count = 0

        def called(frame, event, _):
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(called)
        try:
            for _ in range(calls):
                function(x)
        finally:
            sys.setprofile(before)
        return count / calls

    def reads(x):
        return x * x.sum().item()

    x, f = ramp(device, 3), pg.record(reads, fallback="live")
    for _ in range(1200):
        f(x)
    assert frames(f, 256) - frames(reads, 256) < (6 if device.type == "cpu" else 9)
    assert pg.stats(f).live == pg.stats(f).calls == 1456


def test_c21_a_backward_that_cannot_be_recorded(device, done):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.sum().item()

    layer = torch.nn.Linear(3, 3).to(device)
    f, x = pg.record(lambda x: Reads.apply(layer(x))), ramp(device, 2, 3)

    def step(g):
        layer.zero_grad()
        g(x).sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    expected = step(lambda x: Reads.apply(layer(x)))
    for _ in range(12):
        assert_same(step(f), expected)
    done.clear()
    for _ in range(12):
        assert_same(step(f), expected)
    assert "describe" not in done, pg.explain(f)


def test_c21_where_backwards_are_differentiated(device, done):
    f = pg.record(lambda x: (x * x * x).sum())

    def second(g):
        x = ramp(device, 3).requires_grad_()
        (grad,) = torch.autograd.grad(g(x), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    for _ in range(6):
        assert_same(second(f), 6 * ramp(device, 3))
    done.clear()
    for _ in range(6):
        assert_same(second(f), 6 * ramp(device, 3))
    assert done == []
    with torch.no_grad():
        was = pg.stats(f).replayed
        for _ in range(4):
            f(ramp(device, 3))
    assert pg.stats(f).replayed > was


def test_c11_other_modes_are_noticed_where_all_calls_have_run_live(device):
    def f(x):
        return x * 2 if torch.is_inference_mode_enabled() or not torch.is_grad_enabled() else x * x.sum().item()

    g, x = pg.record(f), ramp(device, 3)
    was = 0
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(40):
            assert_same(g(x), x * 6)
        for n in range(24):
            with mode():
                assert_same(g(x), x * 2)
                was = pg.stats(g).replayed if n == 20 else was
        assert pg.stats(g).replayed == was + 3, pg.explain(g)
    live = pg.stats(g).live
    for _ in range(20):
        assert_same(g(x), x * 6)
        with torch.no_grad():
            assert_same(g(x), x * 2)
    assert pg.stats(g).live == live + 20


def test_c11_an_argument_that_can_be_described_after_many_that_could_not(device):
    g, x = pg.record(lambda x, y: x * 2), ramp(device, 3)
    for _ in range(100):
        g(x, (n for n in ()))
    for _ in range(4):
        assert_same(g(x, 1), x * 2)
    assert (pg.stats(g).live, pg.stats(g).replayed) == (101, 3)
    held = ramp(device, 3).requires_grad_()
    for _ in range(30):
        held.grad = ramp(device, 3)
        g(held, 1)
    held.grad = None
    for _ in range(20):
        g(held, 1)
    was = pg.stats(g).replayed
    g(held, 1)
    assert pg.stats(g).replayed == was + 1


def test_c21_fallback_error_raises_each_time(device):
    g = pg.record(lambda x: x.sum().item(), fallback="error")
    g(ramp(device, 3))
    for _ in range(8):
        with pytest.raises(pg.Unrecordable, match="host"):
            g(ramp(device, 3))


def _grows(device):
    """Each text is longer than the one before, and than all others."""
    return lambda g, n: g(ramp(device, 1, 3 + n))


def _grows_and_begins_again(device):
    return lambda g, n: g(ramp(device, 1, 3 + n % 70))


def _slides_over_a_text_that_grows(device):
    text = ramp(device, 1, 500)
    return lambda g, n: g(text[:, : n + 9].clone()[:, -8:])


def _never_the_same(device):
    return lambda g, n: g(ramp(device, 3 + (n * n + 7 * n) % 1009))


NEW_EACH_TIME = [(_grows, False), (_grows, True), (_grows_and_begins_again, True), (_slides_over_a_text_that_grows, False),
                 (_slides_over_a_text_that_grows, True), (_never_the_same, False), (_never_the_same, True)]  # fmt: skip


@pytest.mark.parametrize(("case", "reads"), NEW_EACH_TIME)
def test_c21_sizes_that_are_new_each_time(device, case, reads, done):
    inside = Inside()

    def f(x):
        inside()
        return x * (x.sum().item() if reads else 2)

    g, call = pg.record(f), case(device)
    for n in range(300):
        assert_same(call(g, n), call(f, n))
    done.clear()
    inside.seen.clear()
    stats = pg.stats(g)
    for n in range(300, 364):
        assert_same(call(g, n), call(f, n))
    looked = done.count("describe")
    assert looked <= 64 / 8, pg.explain(g)
    assert len({*inside.seen}) <= 2 + 2 * looked
    now = pg.stats(g)
    assert (now.calls, now.live, now.recorded) == (stats.calls + 64, stats.live + 64, 0)
    assert sum(now.refusals.values()) >= sum(stats.refusals.values()) + 64 - looked


def test_c21_many_kinds_that_run_live_beside_one_that_is_recorded(device, done):
    f = pg.record(lambda x: x * 2 if x.numel() == 1 else x * x.sum().item(), fallback="live")
    generator = torch.Generator().manual_seed(0)
    sizes = [1, *range(3, 83)]
    for n in [1] * 3 + sizes * 3:
        f(ramp(device, n))
    done.clear()
    for i in torch.randint(0, len(sizes), (200,), generator=generator).tolist():
        x = ramp(device, sizes[i])
        assert_same(f(x), x * 2 if x.numel() == 1 else x * x.sum().item())
    assert done.count("describe") == 0
    assert pg.stats(f).recorded == 1


@pytest.mark.parametrize("often", [1, 2, 5])
def test_c11_what_can_be_recorded_is_found_among_many_that_cannot(device, often):
    f = pg.record(lambda x: x * 2 if x.numel() == 1 else x * x.sum().item(), fallback="live")
    for _ in range(100):
        f(ramp(device, 3))
    for n in range(400):
        f(ramp(device, 3 if n % often else 1))
    assert pg.stats(f).recorded == 1
    replayed = pg.stats(f).replayed
    f(ramp(device, 1))
    assert pg.stats(f).replayed == replayed + 1


def test_c21_flags_that_change_while_no_call_is_looked_at(device):
    layer = torch.nn.Dropout(0.0).to(device)

    def f(x):
        x = layer(x)
        return x * x.sum().item() if layer.training else x * 2

    g, x = pg.record(f), ramp(device, 3)
    for _ in range(100):
        g(x)
    layer.eval()
    live = pg.stats(g).live
    for _ in range(8):
        assert_same(g(x), x * 2)
    assert pg.stats(g).live == live + 1
    layer.train()
    for _ in range(8):
        assert_same(g(x), x * x.sum().item())


def _captures(monkeypatch):
    made, record = [], making.record
    monkeypatch.setattr(making, "record", lambda *args: made.append(args) or record(*args))
    return made


def test_c11_of_many_sizes_that_cannot_be_recorded_few_are_tried(device, monkeypatch):
    made = _captures(monkeypatch)
    f, text = pg.record(lambda x: x * x.sum().item(), fallback="live"), ramp(device, 1, 500)
    for _ in range(3):
        for n in range(3, 120):
            x = text[:, :n].clone()[:, -8:]
            assert_same(f(x), x * x.sum().item())
    assert 4 <= len(made) <= 12, pg.explain(f)


def test_c11_a_size_that_can_be_recorded_among_many_that_cannot(device, monkeypatch):
    f = pg.record(lambda x: x * 2 if x.numel() == 1 else x * x.sum().item(), fallback="live")
    for n in [9, 4, 17, 6, 31, 12, 5, 22, 3] * 3:
        x = ramp(device, n)
        assert_same(f(x), x * x.sum().item())
    for _ in range(40):
        assert_same(f(ramp(device, 1)), ramp(device, 1) * 2)
    assert pg.stats(f).recorded == 1
    assert pg.stats(f).replayed >= 10, pg.explain(f)


def _untold(device):
    """A view of which torch does not say where it comes from: it raises instead."""
    base = ramp(device, 4)
    with torch.no_grad():
        view = base.view(2, 2)
    base.add_(torch.ones(4, device=device, requires_grad=True))
    return view


def test_c21_a_view_of_which_torch_does_not_say_where_it_comes_from_in_reach(device):
    state = {"kept": ramp(device, 3), "sum": ramp(device, 3)}
    state["kept"] = _untold(device)

    @torch.no_grad()
    def f(x):
        state["sum"].add_(x)
        return state["kept"].sum() + x

    g = pg.record(f, keep="always")
    for n in range(1, 6):
        assert_same(g(ramp(device, 3)), _untold(device).detach().sum() + ramp(device, 3))
        assert_same(state["sum"], ramp(device, 3) * (n + 1))
    assert "can reach state.kept, a view made without gradients, whose base was written since" in reasons(g)


def test_c21_a_view_that_becomes_one_of_which_torch_does_not_say_where_it_comes_from(device):
    base, one = ramp(device, 4), torch.ones(4, device=device, requires_grad=True)
    with torch.no_grad():
        state = {"view": base.view(2, 2)}

    def f(x):
        base.add_(one)
        return (x * 2).sum().item(), state["view"].detach().sum()

    g = pg.record(f, keep="always")
    for n in range(1, 8):
        assert g(ramp(device, 3))[1].item() == (ramp(device, 4) + n).sum().item()


def test_c21_a_view_of_which_torch_does_not_say_where_it_comes_from_as_an_argument(device):
    g = pg.record(torch.no_grad()(lambda x: x * 2), keep="always")
    for _ in range(4):
        assert_same(g(_untold(device)), (_untold(device).detach() * 2))
    assert "takes a view made without gradients, whose base was written since" in reasons(g)


def _uncounted(device):
    """A tensor of which torch says neither that it is one of inference mode, nor how often it was written."""
    with torch.inference_mode():
        t = torch.zeros(3, device=device)
    t.data = ramp(device, 3)
    return t


def test_c21_a_tensor_of_inference_mode_with_the_memory_of_another_in_reach(device):
    state = {"kept": _uncounted(device)}
    g = pg.record(lambda x: state["kept"].sum() + x, keep="always")
    for n in range(4):
        assert_same(g(ramp(device, 3, start=n)), state["kept"].sum() + ramp(device, 3, start=n))
    assert "can reach state.kept, a tensor of inference mode with the memory of another" in reasons(g)


def test_c21_a_tensor_of_inference_mode_with_the_memory_of_another_as_an_argument(device):
    g = pg.record(lambda x: x * 2, keep="always")
    for _ in range(4):
        assert_same(g(_uncounted(device)), _uncounted(device) * 2)
    assert "takes a tensor of inference mode with the memory of another" in reasons(g)
