"""What is known of an optimizer before its first step."""

import pytest
import torch
from torch.optim import lr_scheduler

from phonograph.state.capturable import states_to_come


def made(kind=torch.optim.Adam, **options):
    weight, unused = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))
    weight.grad = torch.randn_like(weight)
    return kind([weight, unused], lr=0.1, **options), 2 * weight.nbytes


def test_states_are_expected_before_the_first_step_only():
    optimizer, nbytes = made()
    assert states_to_come(optimizer.step, [optimizer]) == nbytes
    optimizer.step()
    assert states_to_come(optimizer.step, [optimizer]) == 0


def test_a_scheduler_that_was_made_first_is_in_nobodys_way():
    optimizer, nbytes = made()
    lr_scheduler.StepLR(optimizer, 1)
    assert states_to_come(optimizer.step, [optimizer]) == nbytes


@pytest.mark.parametrize("what", ["a function", "a step of another", "two", "none", "zero_grad", "a step of one's own"])
def test_none_are_expected_of_anything_else(what):
    optimizer, _ = made()
    other, _ = made(torch.optim.SGD)

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    own, nbytes = made(Own)

    def step():
        optimizer.step()

    function, reached, expected = {
        "a function": (step, [optimizer], 0),
        "a step of another": (other.step, [optimizer], 0),
        "two": (optimizer.step, [optimizer, other], 0),
        "none": (optimizer.step, [], 0),
        "zero_grad": (optimizer.zero_grad, [optimizer], 0),
        "a step of one's own": (own.step, [own], nbytes),
    }[what]
    assert states_to_come(function, reached) == expected
