"""C6: training steps with branches and loops, recorded beside a twin that has Python's `if` and `for` in their place."""

import torch
from torch import nn

import phonograph as pg
from tests.contract.shared.training_loops import SGD
from tests.helpers import reasons, side_by_side

FLAGS = (1, 0, 1, 1, 0, 0, 1, 0, 0, 1)
"""Whether the first body is taken, call by call; of several bodies, which one."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 2)


class Plain:
    """What is called in the place of branches by the twin."""

    @staticmethod
    def cond(pred, true_fn, false_fn, *operands):
        return true_fn(*operands) if pred else false_fn(*operands)

    @staticmethod
    def switch(index, branches, *operands):
        return branches[index](*operands)

    @staticmethod
    def while_loop(cond_fn, body_fn, state, max_iterations):
        for _ in range(max_iterations):
            if not cond_fn(*state):
                break
            state = body_fn(*state)
        return state

    @staticmethod
    def repeat(n, body_fn, state):
        for _ in range(n):
            state = body_fn(state)
        return state


def training(device, loss, optimizer=SGD, *, to_none=False, given=True, make=Net, twin=Plain):
    """Makes a training step with this loss: first of the twin, then of what is recorded."""
    forms = iter((twin, pg))

    def made():
        by, model = next(forms), make().to(device)
        updates = optimizer(model.parameters())
        for p in model.parameters() if given and not to_none else ():
            p.grad = torch.zeros_like(p)

        def step(x, flag):
            updates.zero_grad(set_to_none=to_none)
            found = loss(by, model, x, flag)
            found.backward()
            updates.step()
            return found.detach()

        return step, (model, updates)

    return made


def trains(device, loss, *options, replays=4, flags=FLAGS, **named):
    """Train beside the twin, by each of these flags. Gradients are `given` before, or go each time (`to_none`)."""
    both = side_by_side(training(device, loss, *options, **named))
    generator = torch.Generator().manual_seed(4)
    for flag in flags:
        both(torch.randn(5, 6, generator=generator).to(device), torch.tensor(flag, device=device))
    stats = pg.stats(both.recorded)
    assert stats.replayed >= replays, reasons(both.recorded)
    assert stats.recorded <= 2
    return both
