"""C11: values read on the host without an operator."""

import contextlib
import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.corners import globals_as_before  # noqa: F401
from tests.helpers import may_run_live, plain, ramp, reasons, side_by_side


def written_at(rows, x):
    x[rows,] = 7.0
    return x


READS = {
    "torch.tensor": lambda x: x + torch.tensor([x[0], x[1], 2.0], device=x.device),
    "torch.as_tensor": lambda x: x + torch.as_tensor([x[0], 2.0, 3.0], device=x.device),
    "new_tensor": lambda x: x + x.new_tensor([x[0], x[1], 2.0]),
    "FloatTensor": lambda x: x + torch.FloatTensor([x[0], x[1], 2.0]).to(x.device),
    "a list as index": lambda x: x.repeat(9, 1)[[x[0].long(), x[1].long()],],
    "a list as index of a write": lambda x: written_at([x[0].long(), x[1].long()], x.repeat(9, 1)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@may_run_live
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_c11_values_that_python_reads(device, read):
    f = pg.record(read, warmup=1)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(f(x), read(x))


@may_run_live
def test_c11_what_a_distribution_reads_otherwise(device):
    """Turning its checks off would not help."""
    x = torch.tensor([0.2, 0.8], device=device)
    kind = torch.distributions.Categorical(x, validate_args=False)
    f = pg.record(lambda x: x * kind.sample().item(), warmup=0, fallback="live")
    f(x)
    assert "reads a tensor's value on the host" in reasons(f)
    assert "validate_args" not in reasons(f)


@may_run_live
def test_c11_a_mask_of_which_torch_asks_whether_it_is_causal(device):
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).to(device)
    x = torch.ones(2, 4, 8, device=device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4, device=device)
    f, g = (
        pg.record(lambda x, mask, kw=kw: encoder(x, mask=mask, **kw), warmup=0, fallback="live")
        for kw in ({}, {"is_causal": True})
    )
    f(x, mask)
    assert "pass is_causal as well as the mask" in reasons(f)
    held = pg.record(lambda x: encoder(x, mask=mask), warmup=0, fallback="live")
    for recorded, args in ((g, (x, mask)), (held, (x,))):
        recorded(*args)
        assert pg.stats(recorded).recorded == 1, reasons(recorded)


@may_run_live
def test_c11_an_array_as_an_argument(device):
    np = pytest.importorskip("numpy")
    f = pg.record(lambda x, rows: x[: len(rows)] * 2)
    for _ in range(2):
        assert_same(f(ramp(device, 3), np.arange(2)), ramp(device, 3)[:2] * 2)
    assert pg.stats(f).replayed == 1
    assert_same(f(ramp(device, 3), np.arange(1000)), ramp(device, 3) * 2)
    assert "takes an object of class numpy.ndarray as " in reasons(f)
    assert "pass a tensor: torch.from_numpy(array)" in reasons(f)


@may_run_live
def test_c11_a_loader_as_an_argument(device):
    """The loop goes outside, as the reason says."""
    rows = ramp(device, 6, 2)

    def step(x, total):
        return total + x.sin().sum()

    def epoch(loader, step):
        total = torch.zeros((), device=device)
        for x in loader:
            total = step(x, total)
        return total

    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    whole, one = pg.record(lambda loader: epoch(loader, step)), pg.record(step)
    for _ in range(3):
        assert_same(whole(loader), epoch(loader, step))
        assert_same(epoch(loader, one), epoch(loader, step))
    assert "record what is done with one batch, and loop over the batches outside" in reasons(whole)
    assert pg.stats(one).replayed >= 7


@may_run_live
def test_c11_a_constant_that_is_copied_from_the_host(device):
    f = pg.record(lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device), warmup=0)
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) + torch.tensor([1.0, 2.0, 3.0], device=device))
    assert pg.stats(f).replayed == 4, reasons(f)


@may_run_live
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_c11_a_mask_that_decides_which_way_an_encoder_takes(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 1).to(device).eval()

    @torch.no_grad()
    def f(x, mask):
        return encoder(x, src_key_padding_mask=mask)

    recorded = pg.record(f, warmup=1)
    x = torch.randn(2, 4, 8, device=device)
    holes = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]], device=device).bool()
    right = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]], device=device).bool()
    for mask in (holes, holes, holes, right, right, holes):
        assert_same(recorded(x, mask), f(x, mask))


@may_run_live
@pytest.mark.parametrize("draw", ["randn", "rand", "normal"])
def test_c02_numpys_generators(device, draw):
    numpy = pytest.importorskip("numpy")

    def make():
        state = numpy.random.RandomState(0)
        return lambda x: x * float(getattr(state, draw)()) + float(getattr(numpy.random, draw)())

    numpy.random.seed(0)
    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 3, start=n))


@may_run_live
def test_c01_an_array_that_shows_a_tensor_which_the_call_writes():
    stage = torch.zeros(2)
    view = stage.numpy()

    def f(x):
        stage.copy_(x)
        return x * float(view[0])

    recorded = pg.record(f, warmup=1)
    for n in (1, 1, 1, 1, 2, 2, 3, 3):
        assert_same(recorded(torch.full((2,), float(n))), torch.full((2,), float(n * n)))


@may_run_live
@pytest.mark.parametrize("change", [lambda y: y.apply_(lambda v: max(v, 3.0) * 2), lambda y: y.map_(y + 1, lambda a, b: a * b)],
                         ids=["apply_", "map_"])  # fmt: skip
def test_c01_python_code_for_each_element(change):
    both = plain(lambda x: change(x.clone()))
    for n in range(5):
        both(torch.full((2,), float(n)))


@may_run_live
@pytest.mark.parametrize("table", [lambda a: {a: 5.0}, lambda a: WeakTensorKeyDictionary({a: 5.0})], ids=["dict", "weak"])
def test_c07_an_argument_is_looked_up(device, table):
    a, b = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
    scale = table(a)
    recorded = pg.record(lambda x: x * scale.get(x, 1.0), warmup=1)
    for n in range(8):
        x = a if n % 3 == 2 else b
        assert_same(recorded(x), x * (5.0 if n % 3 == 2 else 1.0))


@may_run_live
def test_c07_whether_an_argument_is_in_a_set(device):
    a, b = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
    known = {a}
    recorded = pg.record(lambda x: x * (5.0 if x in known else 1.0), warmup=1)
    for n in range(8):
        x = a if n % 3 == 2 else b
        assert_same(recorded(x), x * (5.0 if n % 3 == 2 else 1.0))


@may_run_live
def test_c08_how_often_a_weight_was_written(device):
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = nn.Parameter(torch.ones(2, device=device)), -1

        def forward(self, x):
            if self.seen != self.weight._version:
                self.folded, self.seen = (self.weight * 2).detach(), self.weight._version
            return x * self.folded

    found = []
    for wrap in (lambda m: m, pg.record):
        module = wrap(Folded())
        results = []
        for n in range(9):
            if n in (4, 7):
                with torch.no_grad():
                    module.weight.add_(1)
            results.append(module(ramp(device, 2)))
        found.append(results)
    assert_same(*found)


@may_run_live
@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, type("Own", (BaseException,), {})])
def test_c13_what_was_done_before_an_exception_that_is_no_error(device, error):
    total = torch.zeros(1, device=device)

    def f(x, stop):
        total.add_(x)
        if stop:
            raise error
        return total.clone()

    f = pg.record(f, warmup=1)
    for _ in range(3):
        f(torch.ones(1, device=device), False)
    for _ in range(4):
        with pytest.raises(error):
            f(torch.ones(1, device=device), True)
    assert total.item() == 7


@may_run_live
def test_c13_an_exception_that_the_function_handles(device):
    def f(x):
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return torch.linalg.cholesky(x + 10 * torch.eye(2, device=device))

    recorded = pg.record(f, warmup=1)
    for sign in (1, 1, 1, -1, -1, 1):
        x = sign * torch.eye(2, device=device)
        assert_same(recorded(x), f(x))


class Ignoring:
    def __enter__(self):
        pass

    def __exit__(self, kind, *_):
        return kind in (RuntimeError, IndexError, torch.linalg.LinAlgError)


def counts_at_the_end(factor, st):
    done = False
    try:
        y = torch.linalg.cholesky(factor)
        done = True
        return y
    finally:
        if not done:
            st.failed += 1


def goes_on_after_a_context(factor, st):
    y = factor * 0
    with Ignoring():
        y = torch.linalg.cholesky(factor)
    return y


def is_busy_for_a_time(factor, st):
    st.busy = True
    y = torch.linalg.cholesky(factor)
    st.busy = False
    return y


def calls_back(factor, st):
    with contextlib.ExitStack() as stack:
        stack.callback(st.calls.append, 1)
        return torch.linalg.cholesky(factor)


@may_run_live
@pytest.mark.parametrize("function", [counts_at_the_end, goes_on_after_a_context, is_busy_for_a_time, calls_back])
def test_c13_what_runs_after_an_operators_exception(device, function):
    """A replay does not know that code: it raises, and that is all."""
    found = []
    for wrap in (lambda f: f, lambda f: pg.record(f, warmup=1)):
        st = types.SimpleNamespace(failed=0, busy=False, calls=[])
        f = wrap(lambda x, st=st: function(x, st))
        results = []
        for sign in (1, 1, 1, -1, 1, -1):
            try:
                results.append(f(sign * torch.eye(2, device=device)))
            except RuntimeError as e:
                results.append(type(e).__name__)
            results.append((st.failed, st.busy, len(st.calls)))
        found.append(results)
    assert_same(*found)


RAISING = {
    "division": lambda x: torch.div(torch.ones_like(x), x, rounding_mode="floor"),
    "masked_scatter": lambda x: torch.zeros(2, device=x.device).masked_scatter(x > 0, torch.ones(2, device=x.device)),
    "bernoulli": lambda x: torch.bernoulli(x / 2.0),
}


@may_run_live
@pytest.mark.parametrize("operator", RAISING.values(), ids=RAISING)
def test_c13_an_exception_of_an_operator_that_rarely_raises(operator):
    """(On CUDA such operators end the process's use of the device.)"""

    def f(x):
        try:
            return operator(x) + 0.0
        except RuntimeError:
            return x * 0.0 - 1

    recorded = pg.record(f, warmup=1)
    for n in (1, 1, 1, 0, 5, 1, 0):
        x = torch.full((2,), n)
        torch.manual_seed(n)
        expected = f(x)
        torch.manual_seed(n)
        assert_same(recorded(x), expected)


@may_run_live
@pytest.mark.parametrize("by_others", [True, False])
def test_c13_a_clause_around_what_may_raise(by_others):
    """For what no operator raises, or for that: there a replay is taken back, and the call begins again."""

    def others(x, i):
        try:
            return x[i]
        except (KeyError, OSError):
            return x * 0

    def its_own(x, i):
        try:
            return x[i]
        except (KeyError, IndexError):
            return x * 0

    function = others if by_others else its_own
    f = pg.record(function, warmup=1)
    for n in (0, 1, 2, 9, 1):
        x, i = torch.ones(3) + n, torch.tensor([n])
        try:
            expected = function(x, i)
        except IndexError:
            with pytest.raises(IndexError):
                f(x, i)
        else:
            assert_same(f(x, i), expected)
    if sys.version_info >= (3, 11):
        assert pg.stats(f).replayed >= 3, pg.explain(f)
