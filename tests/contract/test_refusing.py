"""C11-C13: refusing. What cannot be recorded runs live, is right, and says why; nothing is left behind by a recording
that failed; what the function raises reaches the caller as it is."""

import asyncio
import contextlib
import gc
import io
import logging
import re
import sys
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.helpers import assert_settles, counts, here, may_run_live, plain, ramp, reasons, side_by_side

# ---------------------------------------------------------------------------------------------------
# C11: what cannot be recorded. Each function stands on two lines, the refused operator on the second.


def item(x):
    return x * x.sum().item()


def truth(x):
    return x * 2 if x.sum() > 3 else x


def number(x):
    return x + float(x[0]) + int(x[1])


def listing(x):
    return sum(x.tolist())


def nonzero(x):
    return x.nonzero()


def mask(x):
    return x[x > 2] * 2


def selected(x):
    return torch.masked_select(x, x > 2)


def unique(x):
    return torch.unique(x)


def where_of_a_condition(x):
    return torch.where(x > 2)[0]


def repeats(x):
    return torch.repeat_interleave(x, x.int())


def sliced(x):
    return x[: int(x[0])]


def looped(x):
    return [x * i for i in range(int(x[0]))]


def equal(x):
    return x * 2 if torch.equal(x, x.flip(0)) else x


def close(x):
    return x + torch.allclose(x, x + 1)


def arange_to_a_tensor(x):
    return torch.arange(x[0])


def formatted(x):
    return f"{x.sum():.3f}"


def one_hot(x):
    return F.one_hot(x.long())


def bin_counts(x):
    return torch.bincount(x.long())


def split_by_a_tensor(x):
    return x.tensor_split(x[:1].long().cpu())


SYNCS = {  # function: words, one of which the reason must contain
    item: ["item()"],
    truth: ["x.sum() > 3", "item()"],
    number: ["float(x[0])", "item()"],
    listing: ["tolist"],
    nonzero: ["nonzero"],
    mask: ["x[x > 2]", "x[mask]"],
    selected: ["masked_select"],
    unique: ["unique"],
    where_of_a_condition: ["torch.where(x > 2)", "torch.where", "torch.nonzero"],
    repeats: ["repeat_interleave"],
    sliced: ["int(x[0])", "item()"],
    looped: ["int(x[0])", "item()"],
    equal: ["torch.equal"],
    close: ["torch.allclose"],
    arange_to_a_tensor: ["torch.arange(x[0])", "item()"],
    formatted: ["x.sum():.3f", "item()"],
    one_hot: ["one_hot", "item()"],
    bin_counts: ["bincount"],
    split_by_a_tensor: ["tensor_split", "cpu()", ".to()"],
}
every_sync = pytest.mark.parametrize("function", SYNCS, ids=lambda f: f.__name__)


def called(function, times, *args):
    for _ in range(times):
        function(*args)


def line_in(function):
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + 1}"


@may_run_live
@every_sync
def test_c11_a_refused_function_is_right_in_each_call(device, function):
    both = plain(function, hold=True)
    for n in range(6):
        both(ramp(device, 4, start=n % 3))


@may_run_live
@every_sync
def test_c11_the_reason_names_the_operator_and_the_users_own_line(device, function):
    f = pg.record(function, warmup=1)
    for n in range(4):
        f(ramp(device, 4, start=n))
    said = reasons(f)
    assert any(name in said for name in SYNCS[function]), said
    assert "aten::" not in said
    assert line_in(function) in said
    assert counts(f) == (4, 0, 0)


@every_sync
def test_c11_fallback_error_raises_with_the_same_reason(device, function):
    f = pg.record(function, warmup=1, fallback="error")
    with pytest.raises(pg.Unrecordable) as raised:
        called(f, 3, ramp(device, 4))
    assert any(name in str(raised.value) for name in SYNCS[function]), str(raised.value)
    assert line_in(function) in str(raised.value)


def test_c11_the_warning_is_given_once_with_operator_line_and_remedy(device):
    f = pg.record(item, warmup=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            f(ramp(device, 3))
    ours = [w for w in said if issubclass(w.category, pg.RunsLive)]
    assert len(ours) == 1
    text = str(ours[0].message)
    assert line_in(item) in text
    assert "item()" in text


def test_c11_the_warning_points_at_the_users_code(device):
    f = pg.record(item, warmup=1)
    with pytest.warns(pg.RunsLive) as said:
        called(f, 3, ramp(device, 3))
    assert said[0].filename == __file__


@may_run_live
def test_c11_two_functions_with_one_reason_are_each_reported(device):
    f, g = pg.record(item, warmup=1), pg.record(nonzero, warmup=1)
    for _ in range(3):
        f(ramp(device, 3))
        g(ramp(device, 3))
    assert line_in(item) in reasons(f)
    assert line_in(nonzero) in reasons(g)
    assert line_in(nonzero) not in reasons(f)


@may_run_live
def test_c11_only_the_signature_that_cannot_be_recorded_runs_live(device):
    def sometimes(x, sync):
        return x * x.sum().item() if sync else x * 2

    both = plain(sometimes)
    for n in range(8):
        both(ramp(device, 3, start=n), sync=True)
        both(ramp(device, 3, start=n), sync=False)
    assert counts(both)[1:] == (1, 7)


@may_run_live
def test_c11_a_refusal_in_a_helper_names_the_helpers_line(device):
    def helper(x):
        return x.sum().item()

    f = pg.record(lambda x: x + helper(x), warmup=1)
    for _ in range(3):
        f(ramp(device, 3))
    assert line_in(helper) in reasons(f)


@may_run_live
def test_c11_a_refusal_inside_of_torch_names_the_users_line(device):
    f = pg.record(lambda x: torch.nn.functional.one_hot(x.long()), warmup=1)
    line = here(-1)
    for _ in range(3):
        f(ramp(device, 3))
    assert line in reasons(f)


@may_run_live
@pytest.mark.parametrize("say", [print, lambda t: repr(t), lambda t: f"{t}"], ids=["print", "repr", "format"])
def test_c11_a_tensor_that_is_printed(device, capsys, say):
    def shows(x):
        return x * 2, say(x * 3)

    f = pg.record(shows, warmup=1)
    for n in range(5):
        value, text = f(ramp(device, 2, start=n))
        assert_same(value, ramp(device, 2, start=n) * 2)
        shown = capsys.readouterr().out if say is print else text
        assert f"{3.0 * n:.0f}." in shown


@may_run_live
def test_c11_a_tensor_that_goes_to_numpy(device):
    pytest.importorskip("numpy")
    both = plain(lambda x: x * float(x.cpu().numpy().sum()))
    for n in range(5):
        both(ramp(device, 3, start=n))


@may_run_live
def test_c11_control_flow_that_takes_the_other_branch_later(device):
    """Live in each call: a recording would have kept the branch of its own data."""

    def branches(x):
        if x.sum() > 0:
            return x * 2
        return x - 100

    both = plain(branches)
    for sign in [1, 1, 1, -1, 1, -1]:
        both(sign * ramp(device, 3))


@may_run_live
def test_c11_a_number_read_from_a_tensor_on_the_cpu(device):
    """No device waits for it, so a capture would not object: and it is another number after the tensor was written."""

    def make():
        length = torch.tensor([2, 0])
        return lambda x: x[: int(length[0])] * length[0].item(), length

    both = side_by_side(make)
    for n in [2, 2, 2, 3, 3, 1, 2]:
        both.change(lambda length, n=n: length.fill_(n))
        both(ramp(device, 4))


@may_run_live
def test_c11_state_is_updated_once_a_call_before_and_after_the_sync(device):
    def make():
        before, after = torch.zeros((), device=device), torch.zeros((), device=device)

        def f(x):
            before.add_(1)
            scale = x.sum().item()
            after.add_(1)
            return F.dropout(x, 0.5) * scale

        return f, [before, after]

    both = side_by_side(make)
    for n in range(1, 7):
        both(ramp(device, 3))
        assert [t.item() for t in both.state] == [n, n]


class Custom:
    """A class that phonograph has never seen."""

    def __init__(self, value):
        self.value = value


def numbers():
    yield from (1.0, 2.0, 3.0)


EXOTIC = {
    "generator object": (numbers, lambda x, g: x + next(g) + sum(g)),
    "iterator": (lambda: iter([1.0, 2.0]), lambda x, it: x + next(it)),
    "open file": (lambda: io.StringIO("2.5\n3.5\n"), lambda x, file: x + float(file.readline())),
    "custom object": (lambda: Custom(2.0), lambda x, c: x * c.value),
    "custom object that is changed": (lambda: Custom(2.0), lambda x, c: (x * c.value, setattr(c, "value", 9.0))[0]),
    "module": (lambda: torch.nn.PReLU().requires_grad_(False), lambda x, m: x * m.weight.to(x.device)),
    "lambda": (lambda: lambda x: x * 5, lambda x, g: g(x)),
    "bytearray": (lambda: bytearray(b"ab"), lambda x, b: x + b[0]),
    "lock-like": (lambda: types.SimpleNamespace(depth=[1]), lambda x, s: x + s.depth[0]),
    "exception": (lambda: ValueError("a"), lambda x, e: x + len(str(e))),
    "unhashable key's dictionary": (lambda: {(1, 2): 3.0}, lambda x, d: x * d[(1, 2)]),
}


@may_run_live
@pytest.mark.parametrize(("make_argument", "function"), EXOTIC.values(), ids=EXOTIC)
def test_c11_exotic_arguments(device, make_argument, function):
    both = plain(function)
    for n in range(5):
        both(ramp(device, 3, start=n), Pair(make_argument(), make_argument()))


@may_run_live
def test_c11_an_object_argument_whose_value_changes(device):
    both = plain(lambda x, c: x * c.value)
    c = Pair(Custom(1.0), Custom(1.0))
    for n in range(8):
        c.each(lambda c, n=n: setattr(c, "value", float(n // 2)))
        both(ramp(device, 3), c)
    for n in range(4):
        both(ramp(device, 3), Custom(float(n)))


@may_run_live
def test_c11_a_generator_function_and_a_coroutine(device):
    def yields(x):
        yield x + 1
        yield x * 2

    async def waits(x):
        await asyncio.sleep(0)
        return x * 3

    f, g = pg.record(yields, warmup=1), pg.record(waits, warmup=1)
    for n in range(5):
        x = ramp(device, 3, start=n)
        one, other = f(x)
        assert_same(one, x + 1)
        assert_same(other, x * 2)
        assert_same(asyncio.run(g(x)), x * 3)


@may_run_live
def test_c11_a_tensor_subclass_argument(device):
    class Tagged(torch.Tensor):
        pass

    f = pg.record(lambda x: x * 2, warmup=1)
    for n in range(5):
        result = f(ramp(device, 3, start=n).as_subclass(Tagged))
        assert type(result) is Tagged
        assert result.tolist() == (ramp(device, 3, start=n) * 2).tolist()


@may_run_live
def test_c11_a_synchronization_of_the_device(cuda):
    def waits(x):
        y = x * 2
        torch.cuda.synchronize()
        return y + x.cpu().sum().to(x.device)

    both = plain(waits)
    for n in range(5):
        both(ramp(cuda, 3, start=n))


# ---------------------------------------------------------------------------------------------------
# C12: a failed recording leaves nothing behind (`conftest.py` looks at the process after every test of the suite)


class Switch:
    """A module-level like flag: off while warming up, on when the call is recorded."""

    def __init__(self, device):
        self.fail = False
        self.net = torch.nn.Linear(3, 3, device=device)
        self.count = torch.zeros((), device=device)


def fails_in_recording(action):
    """Makes a function whose second call, the one that would be recorded, does `action` half-way."""

    def make_on(device):
        def make():
            switch = Switch(device)

            def f(x):
                switch.count.add_(1)
                x.mul_(2)
                y = F.dropout(switch.net(x), 0.5)
                y.sum().backward()
                if switch.fail:
                    action(x)
                switch.count.add_(1)
                return y.detach() + x

            return f, [switch.net, switch.count, switch]

        return make

    return make_on


def raise_an_error(x):
    raise ValueError("half-way")


def raise_an_operators_error(x):
    return x @ torch.ones(7, 7, device=x.device)


FAILURES = {
    "sync": lambda x: x.sum().item(),
    "shape": lambda x: x.nonzero(),
    "exception": raise_an_error,
    "operator's exception": raise_an_operators_error,
}


@may_run_live
@pytest.mark.parametrize("fail_at", [1, 2, 4], ids=["in warm-up", "in recording", "in replay"])
@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES)
def test_c12_failing_half_way_updates_everything_exactly_as_eager_does(device, action, fail_at):
    both = side_by_side(fails_in_recording(action)(device))
    for n in range(1, 9):
        both.change(lambda state, n=n: setattr(state[2], "fail", n == fail_at))
        both.outcome(torch.randn(2, 3, device=device))


@may_run_live
@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES)
def test_c12_the_process_is_as_before(device, action):
    both = side_by_side(fails_in_recording(action)(device))
    both(torch.randn(2, 3, device=device))
    both.change(lambda state: setattr(state[2], "fail", True))
    gc.disable()
    profile = lambda *event: None  # noqa: E731
    sys.setprofile(profile)
    try:
        both.outcome(torch.randn(2, 3, device=device))
        assert not gc.isenabled()
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
        gc.enable()
    assert torch.is_grad_enabled()
    if device.type == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()


@may_run_live
@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES)
def test_c12_the_next_functions_record(device, action):
    failing = side_by_side(fails_in_recording(action)(device))
    failing(torch.randn(2, 3, device=device))
    failing.change(lambda state: setattr(state[2], "fail", True))
    failing.outcome(torch.randn(2, 3, device=device))
    both = plain(lambda x: F.dropout(x, 0.5) * 2)
    for _ in range(7):
        both(torch.randn(2, 3, device=device))
    assert counts(both) == (1, 1, 6)


@may_run_live
def test_c12_an_exception_leaves_the_function_recordable(device):
    def make():
        switch = Switch(device)

        def f(x):
            if switch.fail:
                raise ValueError("not today")
            return x * 2

        return f, switch.__dict__

    both = side_by_side(make)
    for fail in [False, True, False]:
        both.change(lambda state, fail=fail: state.update(fail=fail))
        both.outcome(ramp(device, 3))
    assert_settles(both, ramp(device, 3))


@may_run_live
def test_c12_hooks_of_the_user_are_still_there(device):
    net = torch.nn.Linear(3, 3, device=device)
    calls = []
    net.weight.register_hook(lambda grad: calls.append("grad"))
    net.register_forward_hook(lambda *args: calls.append("forward"))
    flag = {"sync": False}

    def step(x):
        loss = net(x).sum()
        loss.backward()
        if flag["sync"]:
            loss.item()
        return loss.detach()

    f = pg.record(step, warmup=1)
    for n in range(1, 6):
        flag["sync"] = n == 2
        f(ramp(device, 2, 3))
        assert calls == ["forward", "grad"] * n
    net(ramp(device, 2, 3)).sum().backward()
    assert calls == ["forward", "grad"] * 6


@may_run_live
def test_c12_memory_of_failed_recordings_is_given_back(device):
    good = plain(lambda x: x * 2)
    for _ in range(3):
        good(torch.ones(10_000, device=device))
    before = pg.stats(good.recorded).pool_bytes
    for k in range(20):
        bad = pg.record(lambda x, k=k: torch.cat([x * i for i in range(50)]) * x.sum().item() * k, warmup=1)
        for _ in range(3):
            bad(torch.ones(10_000, device=device))
    # Each attempt needs 4 MB; CUDA's allocator hands out 20 MB at a time.
    assert pg.stats(good.recorded).pool_bytes <= before + 24_000_000


@may_run_live
def test_c12_held_outputs_survive_a_failed_recording(device):
    good = plain(lambda x: x * 2, hold=True)
    for n in range(4):
        good(ramp(device, 50, start=n))
    bad = plain(lambda x: (x * 3 + torch.cat([x, x])[:50]) * x.sum().item())
    for n in range(4):
        bad(ramp(device, 50, start=n))
        good(ramp(device, 50, start=n))


# ---------------------------------------------------------------------------------------------------
# C13: exceptions


class OwnError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(code)
        self.detail = detail


@may_run_live
@pytest.mark.parametrize("phase", [1, 2, 3, 5], ids=["warm-up", "recording", "replay", "later"])
@pytest.mark.parametrize(
    "error",
    [OwnError(3, detail="d"), KeyError("k"), AssertionError(), StopIteration(1), KeyboardInterrupt(), SystemExit(3)],
    ids=lambda e: type(e).__name__,
)
def test_c13_the_very_exception_reaches_the_caller(device, phase, error):
    cell = {"raise": False}

    def f(x):
        y = x * 2
        if cell["raise"]:
            raise error
        return y

    recorded = pg.record(f, warmup=1)
    for n in range(1, 9):
        cell["raise"] = n == phase
        if n == phase:
            with pytest.raises(type(error)) as raised:
                recorded(ramp(device, 3))
            assert raised.value is error
            assert raised.value.__cause__ is None
            assert raised.value.__context__ is None
            frames = [entry.frame.code.raw for entry in raised.traceback]
            assert f.__code__ in frames
            error.__traceback__ = None  # a test's parameters outlive it, and these frames would with them
        else:
            assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)


@may_run_live
@pytest.mark.parametrize("phase", [1, 2, 3, 5], ids=["warm-up", "recording", "replay", "later"])
def test_c13_a_shape_error_is_torchs_own(device, phase):
    both = plain(lambda x, y: x @ y)
    for n in range(1, 8):
        if n == phase:
            with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
                both(ramp(device, 2, 3), ramp(device, 2, 3))
        else:
            both(ramp(device, 2, 3), ramp(device, 3, 2))


WRONG_CALLS = {
    "too few": ((), {}),
    "too many": ((1, 2, 3, 4), {}),
    "unknown keyword": ((1,), {"scael": 2}),
    "twice": ((1,), {"x": 1}),
    "missing keyword-only": ((1,), {}),
    "positional-only by name": ((), {"x": 1, "must": 1}),
    "not a tensor": (("text",), {"must": 1}),
}


@may_run_live
@pytest.mark.parametrize("after", [0, 1, 4], ids=["first", "after warm-up", "after replays"])
@pytest.mark.parametrize(("args", "kwargs"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_c13_wrong_arguments_raise_what_the_function_raises(device, args, kwargs, after):
    def scaled(x, /, scale=2.0, *, must):
        return x.sin() * scale * must

    both = plain(scaled)
    for _ in range(after):
        both(ramp(device, 3), must=1.0)
    with pytest.raises((TypeError, AttributeError)):
        both(*args, **kwargs)
    both(ramp(device, 3), must=1.0)


@may_run_live
def test_c13_exceptions_that_the_function_itself_catches(device):
    def catches(x, y):
        try:
            return x @ y
        except RuntimeError as error:
            return x.sum() + len(str(error)) * 0

    both = plain(catches)
    for _ in range(4):
        both(ramp(device, 2, 3), ramp(device, 2, 3))
        both(ramp(device, 2, 3), ramp(device, 3, 2))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not tell where its clauses are")
def test_c13_an_operator_that_raises_beside_code_that_catches(device):
    """What is not around it does not matter."""
    if device.type == "cuda":
        pytest.skip("an index out of range ends the process's use of the GPU")

    def function(x, index):
        try:
            scale = float("2")
        except ValueError:
            scale = 1.0
        return x.index_select(0, index) * scale

    both = plain(function)
    for n in (0, 1, 2, 7, 1, 9, 2):
        both.outcome(ramp(device, 3), torch.tensor([n]))
    assert counts(both)[2] >= 3, pg.explain(both.recorded)


class Undoes:
    """A context manager of the user's, which swallows what an operator raises."""

    def __enter__(self):
        pass

    def __exit__(self, *_):
        return True


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not tell where its clauses are")
@may_run_live
@pytest.mark.parametrize("kind", ["torch's or none", "torch's or the user's", "the user's or none", "or"])
def test_c13_an_operator_that_raises_in_one_of_two_context_managers(device, kind):
    if device.type == "cuda":
        pytest.skip("an index out of range ends the process's use of the GPU")

    def torchs_or_none(x, index, which=True):
        with torch.no_grad() if which else contextlib.nullcontext():
            return x.index_select(0, index) * 2

    def torchs_or_users(x, index, which=True):
        with torch.no_grad() if which else Undoes():
            return x.index_select(0, index) * 2

    def users_or_none(x, index, which=True):
        with Undoes() if which else contextlib.nullcontext():
            return x.index_select(0, index) * 2

    def users_or_other(x, index, which=None):
        with which or Undoes():
            return x.index_select(0, index) * 2

    functions = {
        "torch's or none": torchs_or_none,
        "torch's or the user's": torchs_or_users,
        "the user's or none": users_or_none,
    }
    both = plain(functions.get(kind, users_or_other))
    for n in (0, 1, 2, 7, 1, 9, 2):
        both.outcome(ramp(device, 3), torch.tensor([n]))
    assert bool(counts(both)[2]) is (kind == "torch's or none"), pg.explain(both.recorded)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not tell where its clauses are")
def test_c13_an_operator_that_raises_where_only_a_missing_kernel_is_caught(device):
    """As `transformers` does for its static caches: no data make a kernel be missing that was there before."""
    if device.type == "cuda":
        pytest.skip("an index out of range ends the process's use of the GPU")

    def function(x, index):
        try:
            return x.index_select(0, index) * 2
        except NotImplementedError:
            return x.neg()

    both = plain(function)
    for n in (0, 1, 2, 7, 1, 9, 2):
        both.outcome(ramp(device, 3), torch.tensor([n]))
    assert counts(both)[2] >= 3, pg.explain(both.recorded)


@may_run_live
def test_c13_an_operator_of_the_users_raises_what_it_likes(device):
    """One that runs live between segments."""

    @torch.library.custom_op("phonograph_tests::raises", mutates_args=())
    def raises(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 100:
            raise KeyError("large")
        return x * 2

    @raises.register_fake
    def _(x):
        return torch.empty_like(x)

    def function(x):
        try:
            return raises(x) + 1
        except KeyError:
            return x.neg()

    both = plain(function, fallback="split", split_at=("phonograph_tests::raises",))
    for n in (0, 1, 2, 700, 1, 900, 2):
        both(ramp(device, 3, start=n))


@may_run_live
def test_c13_an_exception_in_backward(device):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fail):
            ctx.fail = fail
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if ctx.fail:
                raise ValueError("in backward")
            return grad * 2, None

    def make():
        w = torch.ones(3, device=device, requires_grad=True)

        def f(x, fail):
            loss = Fails.apply(w * x, fail).sum()
            loss.backward()
            return loss.detach()

        return f, [w]

    both = side_by_side(make)
    for fail in [False, True, False, True, True, False, False]:
        both.outcome(ramp(device, 3), fail)
        assert_same(both.state[0].grad, both.live_state[0].grad)


@may_run_live
def test_c13_a_warning_of_the_users_is_no_error_of_ours(device):
    def warns(x):
        warnings.warn("mind the gap", UserWarning, stacklevel=2)
        return x * 2

    f = pg.record(warns, warmup=1)
    for n in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)


@may_run_live
def test_c13_a_warning_turned_into_an_error_by_the_user(device):
    def warns(x):
        warnings.warn("mind the gap", UserWarning, stacklevel=2)
        return x * 2

    f = pg.record(warns, warmup=1)
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", pg.RunsLive)
            with pytest.raises(UserWarning, match="mind the gap"):
                f(ramp(device, 3))


@may_run_live
def test_c13_nothing_is_logged_as_an_error_for_a_users_exception(device, caplog):
    def fails(x):
        raise ValueError("mine")

    f = pg.record(fails, warmup=1)
    with caplog.at_level(logging.ERROR, "phonograph"):
        for _ in range(3):
            with pytest.raises(ValueError, match="mine"):
                f(ramp(device, 3))
    assert not [r for r in caplog.records if r.name.startswith("phonograph")]


def test_c12_a_capture_refused_at_its_end_leaves_the_gradients_as_they_were(device):
    """What is refused is known only after the whole call was captured, with its backward."""
    weights = [torch.ones(4, device=device, requires_grad=True) for _ in range(2)]

    def step_of(weight):
        def step(a, b):
            (weight * b.detach().clone()).sum().backward()
            return a.add_(1).clone()

        return step

    recorded, live = pg.record(step_of(weights[0]), warmup=1), step_of(weights[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        for n in range(5):
            if n == 1:  # the capture makes a gradient, which must not be there for the live run
                weights[0].grad = weights[1].grad = None
            x, y = ramp(device, 4), ramp(device, 4)
            assert_same(recorded(x, x.view(4)), live(y, y.view(4)))
            assert_same(weights[0].grad, weights[1].grad)


@may_run_live
def test_c12_a_refused_function_does_not_keep_its_arguments(device):
    f = pg.record(item, warmup=1)
    gone = []
    for n in range(5):
        x = ramp(device, 4, start=n)
        gone.append(weakref.ref(x))
        f(x)
        del x
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5


# ---------------------------------------------------------------------------------------------------
# What is told


class _Weighing:
    def __init__(self):
        self.weight = 0

    def loss(self, x):
        return x * self.weight  # read here


@may_run_live
@pytest.mark.parametrize("way", ["an attribute", "a closure variable", "an item"])
def test_c12_what_changes_from_call_to_call_is_told_with_the_line_that_reads_it(device, way):
    weighing, scale, settings = _Weighing(), 0, {"scale": 0}  # whole numbers, which are not followed

    def by_closure(x):
        return x * scale

    def by_item(x):
        return x * settings["scale"]

    reads, line = {
        "an attribute": (weighing.loss, _Weighing.loss.__code__.co_firstlineno + 1),
        "a closure variable": (by_closure, by_closure.__code__.co_firstlineno + 1),
        "an item": (by_item, by_item.__code__.co_firstlineno + 1),
    }[way]
    f = pg.record(reads)
    for n in range(6):
        weighing.weight = scale = settings["scale"] = n
        assert_same(f(ramp(device, 3)), ramp(device, 3) * n)
    told = pg.explain(f)
    assert re.search(rf"^changed \dx: .* \(read at {re.escape(__file__)}:{line}\)$", told, re.MULTILINE), told
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", pg.RunsLive)
        for n in range(30):
            weighing.weight = scale = settings["scale"] = n
            assert_same(f(ramp(device, 3)), ramp(device, 3) * n)
    (message,) = [str(w.message) for w in said]
    assert f"changes from call to call at {__file__}:{line} (" in message
    pg.reset(f)
    assert "changed" not in pg.explain(f)


@may_run_live
def test_c12_values_that_change_one_after_the_other_are_not_said_to_change_from_call_to_call(device):
    settings = types.SimpleNamespace(a=0.0, b=0.0, c=0.0, d=0.0, e=0.0, f=0.0, g=0.0, h=0.0, i=0.0, j=0.0, k=0.0)

    def reads(x):
        return x * (settings.a + settings.b + settings.c + settings.d + settings.e + settings.f + settings.g + settings.h
                    + settings.i + settings.j + settings.k)  # fmt: skip

    f = pg.record(reads)
    for name in vars(settings):
        setattr(settings, name, 1.0)
        for _ in range(4):
            x = ramp(device, 3)
            assert_same(f(x), reads(x))
    (reason,) = pg.stats(f).refusals
    told = r"values that it relies on have changed 9 times in quick succession, settings\.\w the last"
    assert re.fullmatch(told, reason), reason


@may_run_live
def test_c12_a_transform_of_torch_func_with_a_history_is_refused_with_a_remedy(device):
    weight = torch.ones(3, device=device, requires_grad=True)

    def slope(x):
        return torch.func.grad(lambda y: (y * weight).sin().sum())(x)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", pg.RunsLive)
        f = pg.record(slope)
        for n in range(4):
            assert_same(f(ramp(device, 3, start=n)), slope(ramp(device, 3, start=n)))
    assert any("return results detached (y.detach())" in str(w.message) for w in said), [str(w.message) for w in said]
    detached = plain(lambda x: slope(x).detach())
    assert_settles(detached, ramp(device, 3))


def test_c12_what_has_no_name_is_read_nowhere():
    used = 2.0
    f = pg.record(lambda x: x * used)
    assert f._read_at("the memory that it used", None) == ""


def test_c12_signatures_that_do_not_come_again_are_explained(device):
    f = pg.record(lambda x, n: x * n)
    for n in range(5):
        f(ramp(device, 3), n)
    assert "\n5 of the last 5 calls had a signature of their own: another value of `n`" in pg.explain(f)
    for n in range(5):
        f(ramp(device, 3), n)
    assert "of their own" not in pg.explain(f)


def test_c12_who_steps_a_scheduler_inside_is_told_to_do_it_outside(device):
    net = torch.nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        scheduler.step()

    step = pg.record(step)
    x = torch.ones(1, 2, device=device)
    step(x)
    with pytest.warns(pg.RunsLive, match=r"last_epoch.*call the scheduler's step\(\) outside"):
        step(x)


def test_c12_a_model_that_runs_live_is_told_at_the_users_line(device):
    class Net(torch.nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    net = pg.record(Net())
    x = torch.ones(2, device=device)
    net(x)
    with pytest.warns(pg.RunsLive) as said:
        net(x)
    assert {w.filename for w in said} == {__file__}
