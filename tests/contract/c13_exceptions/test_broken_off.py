"""C13: where an exception ends a replay (an operator that raises, Ctrl-C), what is left is a state that eager goes through."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import phonograph as pg
from phonograph.devices.cpu.program import TapeProgram
from phonograph.testing import assert_same
from tests.helpers import reasons


class Trainer:
    def __init__(self, optimizer, device):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).to(device)
        self.optimizer = optimizer(self.net.parameters(), lr=0.1)
        self.steps = 0

    def step(self, x):
        self.steps += 1
        loss = self.net(x).pow(2).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self):
        with _disable_current_modes(), torch.no_grad():
            kept = [self.optimizer.state[p] for p in self.net.parameters()]
            return [self.steps, *[t.clone() for t in self.net.state_dict().values()],
                    *[v.clone() if isinstance(v, torch.Tensor) else v for s in kept for v in s.values()]]  # fmt: skip


def adam(parameters, lr):
    return torch.optim.AdamW(parameters, lr)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def call(n, device):
    return torch.arange(6.0, device=device).reshape(2, 3).cos() + n


def warm(step, device):
    for n in range(4):
        step(call(n, device))


def is_one_of(states, found):
    def same(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return any(len(s) == len(found) and all(map(same, s, found)) for s in states)


def states_of_eager(optimizer, device):
    """Those that a step goes through, from operator to operator."""
    trainer = Trainer(optimizer, device)
    warm(trainer.step, device)
    states = [trainer.state()]

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            states.append(trainer.state())
            return func(*args, **(kwargs or {}))

    with Looks():
        trainer.step(call(4, device))
    return [*states, trainer.state()]


def breaking(program, n, error, *, after):
    """Let the n-th operator of a tape raise, or what comes after it."""

    def raises():
        if after:
            real[0]()
        program.calls[n] = real[0]
        raise error("injected")

    def sets(numbers):
        program.calls[n], program.set_numbers = real[0], follows
        found = follows(numbers)
        real[0], program.calls[n] = program.calls[n], raises
        return found

    real, follows = [program.calls[n]], program.set_numbers
    program.calls[n], program.set_numbers = raises, sets


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_c13_a_replay_that_an_operator_breaks_off(optimizer, error):
    device = torch.device("cpu")
    states, n, count = states_of_eager(optimizer, device), 0, 1
    while n < count:
        trainer = Trainer(optimizer, device)
        recorded = pg.record(trainer.step, keep="always")
        warm(recorded, device)
        (player,) = recorded._shelf
        count = len(player.recording.program.calls)
        breaking(player.recording.program, n, error, after=error is KeyboardInterrupt)
        with pytest.raises(error, match="injected"):
            recorded(call(4, device))
        assert is_one_of(states, trainer.state()), (n, count)
        assert pg.stats(recorded).replayed == 3, reasons(recorded)
        n += 1
    assert count > 20


@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_c13_a_replay_that_is_interrupted_when_it_has_been_launched(device, optimizer):
    """The host counts what the device does."""
    trainer, other = Trainer(optimizer, device), Trainer(optimizer, device)
    recorded = pg.record(trainer.step, keep="always")
    warm(recorded, device)
    (player,) = recorded._shelf
    program = player.recording.program
    if isinstance(program, TapeProgram):
        breaking(program, len(program.calls) - 1, KeyboardInterrupt, after=True)
    else:
        real = program._launch

        def launches():
            real()
            program._launch = real
            raise KeyboardInterrupt("injected")

        program._launch = launches
    with pytest.raises(KeyboardInterrupt, match="injected"):
        recorded(call(4, device))
    warm(other.step, device)
    other.step(call(4, device))
    assert_same(trainer.state(), other.state())
    assert_same(recorded(call(5, device)), other.step(call(5, device)))
    assert_same(trainer.state(), other.state())


def test_c13_a_replay_that_is_interrupted_before_it_begins(device):
    """Nothing has happened, and gradients that were dropped before stay so."""
    trainer, other = Trainer(adam, device), Trainer(adam, device)
    recorded = pg.record(trainer.step, keep="always")
    warm(recorded, device)
    (player,) = recorded._shelf
    real, before = player._run, trainer.state()

    def run(sources):
        player._run = real
        raise KeyboardInterrupt("injected")

    player._run = run
    with pytest.raises(KeyboardInterrupt, match="injected"):
        recorded(call(4, device))
    assert_same(trainer.state(), before)
    assert [p.grad for p in trainer.net.parameters()] == [None] * 6
    warm(other.step, device)
    assert_same(recorded(call(4, device)), other.step(call(4, device)))
    assert_same(trainer.state(), other.state())
