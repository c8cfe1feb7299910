"""C11: what cannot be recorded runs live, is right, and says why."""

import asyncio
import io
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.refusing import item
from tests.helpers import counts, here, may_run_live, plain, ramp, reasons, side_by_side


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
    f = pg.record(function, warmup=1, fallback="live")
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
    f = pg.record(item, warmup=1, fallback="live")
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
    f = pg.record(item, warmup=1, fallback="live")
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

    both = plain(sometimes, fallback="live")
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
