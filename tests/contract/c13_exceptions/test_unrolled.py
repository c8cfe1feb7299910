"""What raises where a call is several steps: a step, arguments that do not fit, options that are wrong."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.fx import record_graph
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp

K = 4


@may_run_live
def test_c13_an_exception_in_a_step(device):
    """What the steps before it did is done, as in a loop."""
    total = torch.zeros(3, device=device)

    def step(x, limit):
        total.add_(x)
        if total.sum() > limit:
            raise OverflowError("too much")
        return x * 2

    recorded = pg.record(step, steps=K)
    x = torch.ones(K, 3, device=device)
    for _ in range(2):
        total.zero_()
        recorded(x, 100)
        total.zero_()
        with pytest.raises(OverflowError, match="too much"):
            recorded(x, 7)
        assert_same(total, torch.full((3,), 3.0, device=device))


SHAPES = {"another": (K + 1, 3), "scalar": (), "none": (0, 3)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_c13_another_leading_dimension(device, shape):
    """The error names the argument, before anything runs, in each phase."""
    ran = torch.zeros(1, device=device)

    def step(x, inner):
        ran.add_(1)
        return x + inner["y"]

    recorded = pg.record(step, steps=K)
    good = torch.ones(K, 3, device=device)
    for n in range(3):
        with pytest.raises(ValueError, match=rf"steps={K}: inner has a tensor of shape .*leading dimension is not {K}"):
            recorded(good, {"y": torch.ones(shape, device=device)})
        assert ran.item() == n * K
        recorded(good, inner={"y": good})


def test_c13_another_leading_dimension_of_what_has_no_name(device):
    """`shared` takes names of parameters."""
    step, good = pg.record(lambda x, *others: x + others[0], steps=K), torch.ones(K, 3, device=device)
    with pytest.raises(ValueError, match=r"argument 1 has a tensor .*as it is: let its parameter have a name, for shared=\)"):
        step(good, good[0])
    with pytest.raises(ValueError, match=r"shared='x'\)"):
        step(good[0], good)


def test_c13_results_that_cannot_be_stacked(device):
    def step(n, x):
        n.append(0)
        return (x,) if len(n) == 2 else x

    with pytest.raises(ValueError, match=r"result of step 1 has another structure than that of step 0 \(results=\"last\""):
        pg.record(step, steps=K)([], ramp(device, K, 3))


WRONG = {
    "no steps": ({"steps": 0}, ValueError, "steps must be at least 1"),
    "carry alone": ({"carry": "x"}, ValueError, "carry needs steps"),
    "unknown": ({"steps": 2, "carry": "z"}, ValueError, "carry names 'z', which is no parameter; there are: x, y"),
    "unknown shared": ({"steps": 2, "shared": ["z"]}, ValueError, "shared names 'z'"),
    "both": ({"steps": 2, "carry": "x", "shared": "x"}, ValueError, "carry and shared both name 'x'"),
    "results": ({"steps": 2, "results": "all"}, ValueError, "results must be 'stack' or 'last'"),
    "kind": ({"steps": 2, "carry": 3}, TypeError, "carry must be the name of a parameter"),
    "shapes": ({"steps": 2, "shapes": {"x": {0: [2]}}}, ValueError, "steps and shapes"),
}


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG)
def test_c13_options_that_are_wrong(options, error, message):
    with pytest.raises(error, match=message):
        pg.record(lambda x, y: x + y, **options)


def test_c13_carry_and_results_that_do_not_fit_the_result(device):
    with pytest.raises(TypeError, match="carry takes item 0 of the result, which is a Tensor"):
        pg.record(lambda x: x * 2, steps=2, carry=["x"])(ramp(device, 3))
    with pytest.raises(TypeError, match="needs a result of 2 items, not Tensor"):
        pg.record(lambda x: x * 2, steps=2, results=("last", "stack"))(ramp(device, 2, 3))
    with pytest.raises(TypeError, match=r"record_graph\(\) got an unexpected keyword argument 'steps'"):
        record_graph(lambda x: x * 2, (ramp(device, 3),), steps=2)
    with pytest.raises(TypeError, match="record the step that calls the module"):
        pg.record(nn.Linear(2, 2), steps=2)
