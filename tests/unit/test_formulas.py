"""What is worked out of numbers that are known later only."""

import math
import operator

import pytest

from phonograph.values.formulas import Given, Worked, written


def test_what_is_written_out_is_what_each_formula_gives():
    step, beta, touched = Given(0, touched := set()), Given(1, touched), touched
    power = Worked(operator.pow, beta, step)
    formulas = [
        Worked(operator.sub, 1, power),
        Worked(math.sqrt, Worked(operator.sub, 1, power)),
        Worked(operator.neg, step),
        Worked(bool, Worked(operator.lt, step, 3.0)),
        step,
    ]
    values = (7.0, 0.999)
    assert written(formulas)(values) == tuple(formula(values) for formula in formulas)
    assert touched == {0, 1}
    assert written([])(values) == ()


def test_what_several_share_is_worked_out_once():
    asked = []
    shared = Worked(lambda x: asked.append(x) or x, Given(0, set()))
    assert written([Worked(operator.add, shared, 1.0), Worked(operator.mul, shared, shared)])((3.0,)) == (4.0, 9.0)
    assert asked == [3.0]


def test_formulas_that_nobody_else_has():
    assert written(Worked(operator.neg, x) for x in range(300))(()) == tuple(-x for x in range(300))


def test_formulas_may_be_nested_deeply():
    count = Given(0, set())
    for _ in range(5000):
        count = Worked(operator.add, count, 1.0)
    assert written([count])((1.0,)) == (5001.0,)


def test_it_raises_what_a_formula_raises():
    with pytest.raises(ZeroDivisionError):
        written([Worked(operator.truediv, 1.0, Given(0, set()))])((0.0,))
