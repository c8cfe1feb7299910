"""Random training steps with branches and loops, recorded beside a live twin.

(Where a body returns its operand, both copy it. Python's `if` does not, and may add gradients up in another order.)

PHONOGRAPH_FUZZ_BRANCHING programs (20) from seed PHONOGRAPH_FUZZ_SEED (0). A program is a tree of expressions over a few
weights: products, sums, dropout, branches in branches, loops, weights and tensors that several bodies use.
"""

import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from tests.contract.shared.branches import trains
from tests.helpers import reasons

COUNT = int(os.environ.get("PHONOGRAPH_FUZZ_BRANCHING", "20"))
SEED = int(os.environ.get("PHONOGRAPH_FUZZ_SEED", "0"))


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.scales = nn.ParameterList([torch.randn(6) for _ in range(2)])


class Drawn:
    """A program: what is drawn is drawn once, and each call makes the same of it."""

    def __init__(self, seed):
        self.seed = seed
        self.__name__ = f"seed {seed}"

    def __call__(self, by, m, x, flag):
        draw = random.Random(self.seed)
        h = m.layers[0](x)
        for _ in range(draw.randint(1, 3)):
            h = self.more(draw, 3, by, m, flag)(h)
        for p in m.parameters():  # each gets a gradient, from outside as well
            h = h + p.sum() * 0.01
        return h.square().mean() + (h * x).mean()

    def more(self, draw, depth, by, m, flag):
        """A function of one tensor."""
        kind = draw.choice(["layer", "scale", "often", "then", "add", "dropout", "norm"] + ["cond"] * 3 * (depth > 0)
                           + ["switch", "while", "closure"] * (depth > 1))  # fmt: skip
        layer, scale, limit = draw.choice(m.layers), draw.choice(m.scales), draw.uniform(-0.3, 0.3)

        def part():
            return self.more(draw, depth - 1, by, m, flag)

        if kind == "layer":
            return lambda h: torch.tanh(layer(h))
        if kind == "scale":
            return lambda h: h * scale + scale.sin()
        if kind == "often":
            return lambda h: h * h.sigmoid() + h.sin() * 0.5 + h
        if kind == "dropout":
            return lambda h: F.dropout(h, 0.3)
        if kind == "norm":
            return lambda h: F.layer_norm(h, (6,), scale)
        if kind in ("then", "add"):
            a, b = part(), part()
            return (lambda h: b(a(h))) if kind == "then" else (lambda h: a(h) + b(h) / 2)
        if kind == "cond":
            a, b = part(), part()
            return lambda h: by.cond(h.mean() > limit, lambda h: a(h) * 1, lambda h: b(h) * 1, h)
        if kind == "switch":
            parts = [part() for _ in range(3)]
            bodies = [lambda h, p=p: p(h) * 1 for p in parts]
            return lambda h: by.switch((h[0, 0] > 0).long() + flag, bodies, h)
        if kind == "while":
            a = part()
            return lambda h: by.while_loop(
                lambda h: h.mean() > limit, lambda h: (a(h) * 0.5 + h * 0.1,), (h,), max_iterations=2
            )[0]
        a, b = part(), part()

        def closure(h):
            g = torch.cos(h)
            return by.cond(flag > 0, lambda: a(g) + h, lambda: b(h) * g)

        return closure


@pytest.mark.parametrize("seed", range(SEED, SEED + COUNT))
def test_c06_random_steps_with_branches(device, seed):
    both = trains(device, Drawn(seed), flags=(1, 0, 1, 0, 0, 1, 1), make=Weights, replays=0, twin=pg)
    assert pg.stats(both.recorded).replayed >= 2, reasons(both.recorded)
