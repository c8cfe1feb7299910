"""The fast path of functions that write state outside, as every training step does."""

import pytest
import torch

from phonograph import recorded
from phonograph.testing import Pair
from tests.helpers import assert_replays, counts, may_run_live, side_by_side


def ramp():
    return torch.arange(1.0, 4.0)


def test_a_training_step_is_recognised_without_taking_its_arguments_apart(monkeypatch):
    described = []
    describe = recorded.describe
    monkeypatch.setattr(recorded, "describe", lambda *call: described.append(call) or describe(*call))

    def make():
        weight = torch.nn.Parameter(ramp())
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = (weight * x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = side_by_side(make)
    for _ in range(4):
        both(ramp())
    before = len(described)
    for _ in range(4):
        assert_replays(both, ramp())
    assert len(described) == before


@may_run_live
@pytest.mark.parametrize("like", ["itself", "a view"])
def test_state_among_the_arguments_is_noticed_after_many_replays(like):
    def make():
        state = torch.zeros(3)

        def step(x):
            state.add_(x)
            return x + state

        return step, state

    both = side_by_side(make)
    for _ in range(5):
        both(ramp())
    live, states = counts(both)[0], Pair(both.state, both.live_state)
    for _ in range(2):
        both(states if like == "itself" else states.each(lambda state: state[:]))
    assert counts(both)[0] == live + 2
