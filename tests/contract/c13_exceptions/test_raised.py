"""C13: an exception that the function raises reaches the caller unchanged."""

import contextlib
import gc
import logging
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.refusing import item
from tests.helpers import counts, may_run_live, plain, ramp, side_by_side


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
    assert counts(both)[1:] == (1, 4), pg.explain(both.recorded)


class Booked:
    """A step that counts, keeps its last loss, draws random numbers and moves statistics before an operator may raise."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.steps, self.last, self.history = 0, None, []

    def step(self, x, y):
        self.steps += 1
        self.last = out = self.model(x)
        loss = nn.functional.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.detach())
        return loss.detach()

    def forgiving(self, x, y):
        try:
            return self.step(x, y)
        except IndexError:
            self.steps -= 100
            return x.sum()


@may_run_live
@pytest.mark.parametrize("name", ["step", "forgiving"])
def test_c13_what_is_changed_before_an_operator_raises(device, name):
    """A replay in which it raises is taken back, and the call runs live from its beginning."""
    if device.type == "cuda":
        pytest.skip("an index out of range ends the process's use of the GPU")
    ours, theirs = Booked(device), Booked(device)
    recorded = pg.record(getattr(ours, name), keep="always")
    for n, label in enumerate((0, 1, 2, 3, 9, 2, 3, 9, 9, 0)):
        outcomes = []
        for step in (recorded, getattr(theirs, name)):
            torch.manual_seed(n)
            try:
                outcomes.append(step(ramp(device, 5, 3, start=n) / 7, torch.tensor([0, 1, 2, 3, label])))
            except IndexError as error:
                outcomes.append(str(error))
        assert_same(outcomes[0], outcomes[1])
        assert_same([ours.steps, ours.last.detach(), ours.history], [theirs.steps, theirs.last.detach(), theirs.history])
        assert_same(ours.model.state_dict(), theirs.model.state_dict())
        assert_same(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
    assert counts(recorded)[1:] == (1, 6), pg.explain(recorded)


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
@pytest.mark.parametrize("write", ["_foreach_mul_", "_foreach_copy_", "_foreach_addcmul_"])
@pytest.mark.parametrize("what", ["parameters", "activations"])
def test_c13_a_backward_that_needs_what_an_operator_on_lists_has_overwritten(device, write, what):
    """A capture is shown the lists: what torch does with each of their tensors moves its version on all the same."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)

    def step(x):
        h = net[0](x)
        loss = net[1](h).square().sum()
        written = [h.detach()] if what == "activations" else [p.detach() for p in net.parameters()]
        ones = [torch.ones_like(t) for t in written]
        given = {"_foreach_mul_": [0.5], "_foreach_copy_": [ones], "_foreach_addcmul_": [ones, ones]}[write]
        getattr(torch, write)(written, *given)
        loss.backward()

    step = pg.record(step, keep="always")
    for n in range(4):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(ramp(device, 2, 3, start=n))


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


@pg.live
def doubled(x):
    return x * 2


@may_run_live
@pytest.mark.parametrize("replaced", [True, False])
def test_c13_gradients_before_what_raises(device, replaced):
    """A live operator raises in a replay, after a backward of the call: the gradients are there, as in eager."""

    def made():
        torch.manual_seed(0)
        net = nn.Linear(4, 4).to(device)

        def step(x):
            y = doubled(x + 1)
            with torch.enable_grad():
                (net.weight * 2).sum().backward()
            x.add_(1)  # where several elements share their memory
            return y

        return net, step

    (net, step), (other, plain) = made(), made()
    recorded = pg.record(step, fallback="split")
    for n in range(5):
        if n == 2 and replaced:
            for one in (net, other):
                one.load_state_dict({name: t.clone() for name, t in one.state_dict().items()}, assign=True)
        for f in (recorded, plain):
            with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
                f(torch.ones(2, 1, device=device).expand(2, 4))
        assert_same(net.weight.grad, other.weight.grad)


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_c13_a_backward_that_needs_one_of_several_weights_in_one_vector(device, which, foreach):
    """Each of them has a version of its own, and a replay has written all."""
    net = nn.Linear(4, 4).to(device)
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, 20, device=device), net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), 0.01, foreach=foreach)

    def step(x):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    step, saved = pg.record(step, keep="always"), getattr(net, which)
    for n in range(6):
        versions = [p._version for p in net.parameters()]
        loss = (torch.ones_like(saved, requires_grad=True) * saved.detach()).sum()  # it shares the version
        step(ramp(device, 2, 4, start=n) / 10)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        moved = [p._version - before for p, before in zip(net.parameters(), versions, strict=True)]
        assert moved == ([1, 1] if n != 1 else [2, 2])  # a capture has written them as well
    assert pg.stats(step).replayed == 5
    assert pg.stats(step).recorded == 1


@may_run_live
def test_c13_c19_a_guard_against_nan_raises_as_it_does_live(device):
    """And the next call is neither captured by what that one has read, nor said to fail where it does not."""
    bad = {20, 33, 34, 35, 45}

    def run(record):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        seen = []

        @record
        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            if not torch.isfinite(loss):
                seen.append("bad")
                raise ValueError("not finite")
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = []
        for n in range(60):
            x = ramp(device, 5, 4, start=n).sin()
            try:
                found.append(step(x if n not in bad else x / 0))
            except ValueError as e:
                found.append(str(e))
        return [found, seen, net.weight.detach()], step

    found, step = run(lambda f: pg.record(f, keep="always"))
    expected, _ = run(lambda f: f)
    assert_same(found, expected)
    assert not any("fails while it is captured" in reason for reason in pg.stats(step).refusals), pg.explain(step)
    assert pg.stats(step).replayed >= 40, pg.explain(step)
