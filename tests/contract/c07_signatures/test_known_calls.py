"""C1, C3, C7: the kinds of calls that a loop makes are known after the first few rounds. From then on none is taken apart,
nothing is made to recognise it and no code is compiled, however they take turns."""

import builtins
import enum

import pytest
import torch

import phonograph as pg
from phonograph.engine import describer
from phonograph.engine import known_calls as known
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp


@pytest.fixture
def made(monkeypatch):
    """What was done to recognise calls, besides a look."""
    found: list[str] = []

    def noting(where, name):
        before = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, **kwargs: found.append(name) or before(*args, **kwargs))

    noting(describer, "describe")
    noting(known.KnownCall, "__init__")
    noting(known, "tensor_check")
    noting(builtins, "compile")
    noting(builtins, "eval")
    return found


class Way(enum.Enum):
    UP = 1


def _shapes(device):
    f, xs = pg.record(lambda x: x * 2, audit=0), [ramp(device, n) for n in (2, 3, 4)]
    return [f], lambda: [f(x) for x in (xs[0], xs[1], xs[0], xs[2], xs[2])]


def _train_and_eval(device):
    model = pg.record(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.0)).to(device))
    x = ramp(device, 2, 3)

    def rounds():
        model.train()
        trained = model(x).sum()
        model.eval()
        with torch.no_grad():
            return trained.detach(), model(x)

    return [model], rounds


def _a_written_argument(device):
    f, x = pg.record(lambda x, state: (x + state, state.add_(x))[0], audit=0), ramp(device, 3)
    states = [torch.zeros(3, device=device) for _ in range(2)]
    return [f], lambda: [(f(x, state), state.clone()) for state in states]


def _a_written_leaf(device):
    def write(x, state):
        with torch.no_grad():
            state.add_(x)
        return x * 2

    f, x, state = pg.record(write), ramp(device, 3), torch.zeros(3, device=device, requires_grad=True)
    return [f], lambda: [f(x, state), state.detach().clone()]


def _a_model_with_two_shapes_and_its_backwards(device):
    model, losses = pg.record(torch.nn.Linear(3, 2).to(device)), pg.record(torch.nn.functional.mse_loss)
    batches = [(ramp(device, n, 3), ramp(device, n, 2)) for n in (2, 4)]

    def rounds():
        for p in model.parameters():
            p.grad = None
        found = []
        for x, y in batches:
            loss = losses(model(x), y)
            loss.backward()
            found.append(loss.detach())
        return [*found, *(p.grad.clone() for p in model.parameters())]

    return [model, losses], rounds


def _keywords_and_equal_values(device):
    f = pg.record(lambda x, *, scale, name, sizes: x * scale + len(name) + sizes["a"])
    x = ramp(device, 3)

    def rounds():
        names = ["left-" + side for side in ("one", "another")]  # equal, and not the same objects
        return [f(x, scale=float("1.5"), name=name, sizes={str(b"a", "ascii"): int("1000")}) for name in names]

    return [f], rounds


def _a_module_an_optimizer_and_a_member(device):
    def step(model, optimizer, x, way):
        optimizer.zero_grad()
        loss = model(x).square().mean() * way.value
        loss.backward()
        optimizer.step()
        return loss.detach()

    f, model, x = pg.record(step), torch.nn.Linear(3, 3).to(device), ramp(device, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return [f], lambda: [f(model, optimizer, x, Way.UP)]


def _unaligned(device):
    f, base = pg.record(lambda x: x * 2, audit=0), ramp(device, 9)
    return [f], lambda: [f(base[i : i + 3]) for i in (0, 1, 5)]


LOOPS = [_shapes, _train_and_eval, _a_written_argument, _a_written_leaf,
         _a_model_with_two_shapes_and_its_backwards, _keywords_and_equal_values, _a_module_an_optimizer_and_a_member,
         _unaligned]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_c07_nothing_is_made_in_a_steady_loop_of_several_kinds(device, loop, made, monkeypatch):
    torch.manual_seed(0)
    functions, rounds = loop(device)
    monkeypatch.setenv("PHONOGRAPH", "off")
    torch.manual_seed(0)
    _, plain = loop(device)
    expected = [plain() for _ in range(8)]
    monkeypatch.delenv("PHONOGRAPH")
    for n in range(4):
        assert_same(rounds(), expected[n])
    made.clear()
    live = [pg.stats(f).live for f in functions]
    for n in range(4, 8):
        assert_same(rounds(), expected[n])
    assert made == []
    assert [pg.stats(f).live for f in functions] == live, pg.explain(functions[0])


@may_run_live
def test_c03_a_written_argument_that_shares_memory_with_another_is_another_call(device):
    def write(x, y):
        y.add_(x)
        return x * 2

    f, memory = pg.record(write), ramp(device, 8)
    for _ in range(4):
        f(ramp(device, 4), ramp(device, 4))
    for theirs in (memory, memory.clone()):
        for at in (0, 4):
            before = theirs.clone()
            x, y = theirs[:4], theirs[at : at + 4]
            result = f(x, y)
            mine = before.clone()
            assert_same(result, write(mine[:4], mine[at : at + 4]))
            assert_same(theirs, mine)


def test_c03_what_was_written_before_an_operator_raises_is_written_back(device):
    if device.type == "cuda":
        pytest.skip("there such an error is the process's end")

    def write(table, at, state):
        state.add_(1)
        return table[at]

    f, table, state = pg.record(write), ramp(device, 4), torch.zeros(2)
    for n in range(4):
        f(table, torch.tensor([n]), state)
    with pytest.raises(IndexError):
        f(table, torch.tensor([9]), state)
    assert state.tolist() == [5, 5]


def test_c08_a_known_call_goes_with_its_recordings(device):
    f = pg.record(lambda x: x * 2, max_recordings=2)
    for _ in range(3):
        for n in (1, 2):
            f(ramp(device, n))
    assert len(f._known_calls) == 2
    pg.reset(f)
    assert len(f._known_calls) == 0


def test_c09_another_object_in_the_place_of_one_that_is_gone(device):
    def apply(function, x):
        return function(x) + 1

    f, x, made = pg.record(apply), ramp(device, 3), []
    for n in range(6):
        scale = float(n)
        function = lambda x, scale=scale: x * scale  # noqa: E731
        made.append(function)
        for _ in range(3):
            assert_same(f(made[-1], x), x * n + 1)
        made.clear()


@may_run_live
def test_c07_a_tensor_that_the_function_reaches_by_name_lies_where_arguments_have_lain(device):
    """Where arguments were clear of what the function writes is remembered; which tensor is given is asked all the same."""
    named, total = ramp(device, 4), torch.zeros(4, device=device)

    def f(x):
        total.add_(x)
        return x * 2 if x is named else x * 3

    f, seen = pg.record(f, keep="always"), torch.zeros(4, device=device)
    for n in range(24):
        x = named if n in (12, 13, 20) else named.detach()
        seen += x
        assert_same(f(x), x * 2 if x is named else x * 3, f"call {n}")
        assert_same(total, seen)
    assert pg.stats(f).replayed >= 12, pg.explain(f)
