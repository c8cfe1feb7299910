"""C24, C11: what a branch or a loop must not do. A capture runs all of them, and a replay no Python code: the call runs live,
with the right result, and says why."""

import contextlib
import dataclasses
import itertools
import random
import types
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from tests.helpers import counts, may_run_live, plain, ramp, reasons, side_by_side

pytestmark = may_run_live
TURNS = (1, -1, 1, 1, -1)


def flips(device):
    return [(ramp(device, 4, start=n), torch.tensor(float(turn), device=device)) for n, turn in enumerate(TURNS)]


def assert_runs_live(both, calls, *words):
    for args in calls:
        both(*args)
    assert counts(both)[1:] == (0, 0), reasons(both)
    assert all(word in reasons(both) for word in words), reasons(both)


class Anchor(dict):
    pass


class Thing:
    pass


def with_default(kept=None):
    def f(x, note=[]):  # noqa: B006
        note.append(1)
        return x * len(note)

    return f


def tagged(t, x):
    t.tag = 3
    return x * 2


# What there is before the branch, what the branch does with it, and what the call says of it afterwards.
EFFECTS = Anchor({
    "list": (list, lambda o, x: o.append(x + 1), list),
    "list, shorter": (lambda: [1, 2], lambda o, x: o.pop(), len),
    "dictionary": (dict, lambda o, x: o.update(a=1), len),
    "set": (set, lambda o, x: o.add(1), len),
    "inner list": (lambda: ((1, [2]),), lambda o, x: o[0][1].append(3), lambda o: len(o[0][1])),
    "object": (Thing, lambda o, x: setattr(o, "z", 1), lambda o: getattr(o, "z", 0)),
    "namespace": (types.SimpleNamespace, lambda o, x: vars(o).update(z=1), lambda o: getattr(o, "z", 0)),
    "tensor's attribute": (lambda: torch.zeros(2), lambda o, x: tagged(o, x), lambda o: getattr(o, "tag", 0)),
    "module": (nn.Module, lambda o, x: o.register_buffer("b", x * 2), lambda o: len(o._buffers)),
    "mode of a module": (nn.Identity, lambda o, x: o.eval(), lambda o: o.training),
    "a library's object": (contextlib.ExitStack, lambda o, x: o.callback(int), lambda o: len(o._exit_callbacks)),
    "default argument": (with_default, lambda o, x: o(x), lambda o: o(torch.ones(1))),
    "iterator": (itertools.count, lambda o, x: next(o), next),
    "random numbers": (lambda: random.Random(0), lambda o, x: o.random(), lambda o: o.random()),
    "shape of a tensor": (lambda: torch.zeros(2), lambda o, x: o.unsqueeze_(0), lambda o: o.dim()),
    "memory of a tensor": (lambda: torch.zeros(4), lambda o, x: setattr(o, "data", torch.ones(4)), lambda o: o.sum()),
})  # fmt: skip


@pytest.mark.parametrize("name", EFFECTS)
def test_c24_effects_on_python_objects(device, name):
    made, act, see = EFFECTS[name]

    def f(x, p):
        o = made()

        def one():
            act(o, x)
            return x * 2

        y = pg.cond(p > 0, one, lambda: x * 3)
        return y, see(o)

    assert_runs_live(plain(f), flips(device), "in a branch or loop")


@dataclasses.dataclass
class Counted:
    t: torch.Tensor
    n: int = 0


def counting(given):
    given.n += 1
    return given.t * 2


def test_c24_operands_that_a_branch_changes(device):
    def f(x, p):
        operand = Counted(x)
        return pg.cond(p > 0, counting, lambda given: given.t * 3, operand), operand.n

    def of_a_dictionary(x, p):
        operand = {"a": x}
        return pg.cond(p > 0, lambda d: d.setdefault("b", d["a"] * 2), lambda d: d["a"] * 3, operand), len(operand)

    assert_runs_live(plain(f), flips(device), "in a branch or loop")
    assert_runs_live(plain(of_a_dictionary), flips(device), "in a branch or loop")


def test_c24_variables_of_the_function_around(device):
    def f(x, p):
        n, h = 0, x

        def one():
            nonlocal n, h
            n, h = n + 1, h * 2
            return x * 2

        return pg.cond(p > 0, one, lambda: x * 3) + n + h

    assert_runs_live(plain(f), flips(device), "closure.", "in a branch or loop")


def test_c24_a_tensor_that_only_the_first_turn_has(device):
    """Its memory would be given to what the body makes."""

    def f(x, p):
        box = [x * 3]

        def turn(i, a):
            a = a + (box.pop() if box else 0)
            return i + 1, a + torch.zeros(4, device=x.device) + 5

        return pg.while_loop(lambda i, a: i < 3, turn, (torch.zeros((), device=x.device), x))

    assert_runs_live(plain(f), flips(device), "in a branch or loop")


def test_c24_a_graph_that_the_first_turn_frees(device):
    def make():
        w = nn.Parameter(ramp(device, 4) / 4)
        w.grad = torch.zeros_like(w)

        def f(x, p):
            loss = (w * x).exp().sum()

            def turn(i):
                loss.backward()
                return i + 1

            pg.while_loop(lambda i: i < p, turn, torch.zeros((), device=x.device))
            return loss.detach()

        return f, w

    both = side_by_side(make)
    assert_runs_live(both, flips(device), "lets go of a tensor in a loop's body")


def test_c24_a_history_that_a_branch_goes_on_with(device):
    def make():
        w = nn.Parameter(ramp(device, 4) / 4)

        def f(x, p):
            y = w * x

            def one():
                y.mul_(2)

            pg.cond(p > 0, one, lambda: None)
            y.sum().backward()
            return y.detach()

        return f, w

    assert_runs_live(side_by_side(make), flips(device), "changes a tensor in place in a branch")


def test_c24_a_gradient_that_a_branch_makes(device):
    def make():
        w = nn.Parameter(ramp(device, 4))

        def f(x, p):
            w.grad = None

            def one():
                w.grad = x * 2

            pg.cond(p > 0, one, lambda: None)
            return x + (w.grad is None)

        return f, w

    assert_runs_live(side_by_side(make), flips(device), "changes w.grad in a branch or loop", "set_to_none=False")


def raises(x):
    raise ValueError("no")


def left_off(x):
    torch.set_grad_enabled(False)
    return x * 2


def in_inference(x):
    with torch.inference_mode():
        return x * 2


def with_attributes(x):
    y = x * 2
    y.tag = 1
    return y


@pg.live
def marked(x):
    return x + 1


def keeps_it():
    kept = set()

    def f(x):
        kept.add(len(kept))
        return x + 1

    return f


def kept_elsewhere(x):
    """Where nothing leads to by name."""
    weakref.finalize(EFFECTS, int, x * 2).atexit = False
    return x + 1


OTHERS = {
    "type": (lambda x: x + 1, lambda x: (x + 1).double(), "dtype torch.float32 and torch.float64"),
    "shape": (lambda x: x + 1, lambda x: x[:2] + 1, "shape (4,) and (2,)"),
    "strides": (lambda x: x.view(2, 2) + 1, lambda x: (x.view(2, 2) + 1).t().contiguous().t(), "strides (2, 1) and (1, 2)"),
    "inference": (in_inference, lambda x: x * 2, "is_inference() True and False"),
    "kind": (lambda x: nn.Parameter(x * 2, requires_grad=False), lambda x: x * 2, "Parameter"),
    "attributes": (with_attributes, lambda x: x * 2, "which has attributes"),
    "structure": (lambda x: x + 1, lambda x: (x + 1,), "something else than tensors"),
    "number": (lambda x: (x + 1, 3), lambda x: (x + 1, 4), "something else than tensors"),
    "exception": (raises, lambda x: x * 2, "whether it is taken or not: no"),
    "mode": (left_off, lambda x: x * 2, "changes a mode"),
    "what runs live": (lambda x: marked(x), lambda x: x * 2, "live in a branch or loop"),
    "number on the host": (lambda x: x * x.sum().item(), lambda x: x * 2, ""),
    "output": (lambda x: (print(end=""), x)[1], lambda x: x * 2, "print()"),
    "what is kept": (keeps_it(), lambda x: x * 2, "outlives the call"),
    "what is kept elsewhere": (kept_elsewhere, lambda x: x * 2, "keeps a tensor that it makes"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_c24_what_branches_may_not_do(device, name):
    one, other, words = OTHERS[name]

    def f(x, p):
        return pg.cond(p > 0, one, other, x)

    def catching(x, p):
        try:
            return f(x, p)
        except ValueError:
            return x
        finally:
            torch.set_grad_enabled(True)

    assert_runs_live(plain(catching if name in ("exception", "mode") else f), flips(device), words)


def test_c24_a_tensor_from_outside_is_passed_or_cloned(device):
    assert_runs_live(plain(lambda x, p: pg.cond(p > 0, lambda: x, lambda: x + 1)), flips(device), "pass it as an operand")


def test_c24_a_tensor_from_outside_as_the_next_state(device):
    """Live it is the state from then on, which a turn writes."""

    def f(x, p):
        made = x * 3

        def turn(i, a):
            a.add_(1)
            return i + 1, made

        return pg.while_loop(lambda i, a: i < p + 2, turn, (torch.zeros((), device=x.device), x)), made

    assert_runs_live(plain(f), flips(device), "pass it as an operand")


def test_c24_a_body_that_returns_the_tensor_alone(device):
    def f(x):
        return pg.while_loop(lambda x: x.sum() < 20, lambda x: x + 1, (x,))

    assert_runs_live(plain(f), [(ramp(device, 4, start=n),) for n in range(4)], "return a tuple of one, (x,)")


def test_c24_a_number_that_each_turn_changes(device):
    def f(x, p):
        return pg.while_loop(lambda i, a: a.sum() < 50, lambda i, a: (i + 1, a + 1), (0, x))

    assert_runs_live(plain(f), flips(device), "keep in tensors what changes")


@pytest.mark.parametrize(
    ("pred", "said"), [(lambda x: x > 0, RuntimeError), (lambda x: None, TypeError), (lambda x: "yes", TypeError)]
)
def test_c24_what_nobody_can_go_on_by(device, pred, said):
    f = pg.record(lambda x: pg.cond(pred(x), lambda: x, lambda: x + 1))
    for _ in range(3):
        with pytest.raises(said):
            f(ramp(device, 4))


def test_c24_arguments_that_are_no_functions(device):
    x = ramp(device, 2)
    with pytest.raises(TypeError, match="false_fn must be callable, not Tensor"):
        pg.cond(True, torch.sin, x)
    with pytest.raises(TypeError, match=r"branches\[1\] must be callable, not int"):
        pg.switch(0, [torch.sin, 3], x)
    with pytest.raises(ValueError, match="branches is empty"):
        pg.switch(0, [], x)
    with pytest.raises(TypeError, match="index must be of an integer type"):
        pg.switch(x[0], [torch.sin], x)
    with pytest.raises(TypeError, match="body_fn must be callable, not tuple"):
        pg.while_loop(torch.sin, (), x)
    with pytest.raises(TypeError, match="n must be of an integer type"):
        pg.repeat(x[0], torch.sin, x)


def test_c24_a_failed_capture_leaves_nothing(device):
    """What both branches have written and drawn is as before."""

    def make():
        total = torch.zeros(4, device=device)

        def f(x, p):
            def one():
                return total.add_(torch.rand(4, device=x.device)).sum()

            def other():
                total.mul_(3)
                raise ValueError("no")

            return pg.cond(p > 0, one, other)

        return f, total

    both = side_by_side(make)
    for x, _ in flips(device):
        both(x, torch.ones((), device=device))
    assert counts(both)[1:] == (0, 0)
