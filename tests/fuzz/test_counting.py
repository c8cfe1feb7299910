"""Random functions that advance numbers, decide and compute by them, set truths and texts: recorded and live side by side.

PHONOGRAPH_FUZZ_COUNTING functions (24), one a seed from PHONOGRAPH_FUZZ_SEED (0) on.
"""

import math
import os
import random
from types import SimpleNamespace

import pytest
import torch

import phonograph as pg
from tests.helpers import may_run_live

FIRST, HOW_MANY = (int(os.environ.get(f"PHONOGRAPH_FUZZ_{name}", n)) for name, n in (("SEED", 0), ("COUNTING", 24)))
RAISED = (ZeroDivisionError, OverflowError, ValueError, TypeError)


class Source:
    """Of one function."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.choice = self.random.choice

    def whole(self, depth=2):
        if depth == 0 or self.random.random() < 0.3:
            return self.choice(["s.n", "s.m", "s.d['k']", str(self.random.randint(0, 5))])
        a, b, by, c = self.whole(depth - 1), self.whole(depth - 1), self.choice("235"), self.condition(depth - 1)
        return self.choice([f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} // {by})", f"({a} % {by})", f"({a} % {b})",
                            f"({a} & {b})", f"({a} | {b})", f"({a} ^ {b})", f"({a} >> 1)", f"max({a}, {b})", f"min({a}, {b})",
                            f"abs({a})", f"({a} if {c} else {b})"])  # fmt: skip

    def real(self, depth=2):
        if depth == 0 or self.random.random() < 0.25:
            return self.choice(["s.f", "0.5", "s.d['g']", "1.5"])
        a, b, i, c = self.real(depth - 1), self.real(depth - 1), self.whole(depth - 1), self.condition(depth - 1)
        return self.choice([f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} / {i})", f"({i} / 7)", f"(0.9 ** {i})",
                            f"({a} * {i})", f"min({a}, {b})", f"math.cos({a})", f"math.cos({i})",
                            f"({a} if {c} else {b})"])  # fmt: skip

    def condition(self, depth=1):
        sign = self.choice(["==", "<", ">=", "!="])
        return self.choice([f"{self.whole(depth)}", f"({self.real(depth)} < {self.real(depth)})", "s.flag",
                            f"({self.whole(depth)} in (1, 2, 3))",
                            f"({self.whole(depth)} {sign} {self.whole(depth)})"])  # fmt: skip

    def statement(self, indent=1):
        i, x, c, c2, mode = self.whole(), self.real(), self.condition(), self.condition(), self.choice(["'a'", "'b'", "None"])
        lines = self.choice([
            ["s.n = s.n + 1"], ["s.n += 2"], [f"s.m = {i} % 7"], ["s.d['k'] += 1"], [f"s.f = 0.5 * s.f + 0.01 * ({x})"],
            [f"s.d['g'] = {x} * 0.1"], [f"s.flag = bool({c})"], ["s.flag = not s.flag"], [f"s.mode = {mode}"],
            ["if s.mode == 'a':", "    y = y + 1"], ["try:", f"    y = y * {x}", "except ZeroDivisionError:", "    y = y + 3"],
            [f"y = y + {i}"], [f"for _ in range({i} % 3):", "    y = y * 1.5"], [f"y = y * ({x})"],
            [f"y = torch.add(y, s.p, alpha={x})"], [f"s.p.mul_({x} * 0.01)"], None, None,
        ])  # fmt: skip
        if lines is None:
            lines = [f"if {c2}:", *self.statement(1), "else:", *self.statement(1)]
        return ["    " * indent + line for line in lines]

    def text(self):
        body = [line for _ in range(self.random.randint(2, 7)) for line in self.statement()]
        return "\n".join(["def f(x):", "    y = x * 1", *body, "    return y"])


def state(device):
    return SimpleNamespace(n=1, m=2, d={"k": 0, "g": 0.25}, f=0.5, flag=False, mode=None, p=torch.ones(3, device=device))


def outcome(f, x, s):
    try:
        found = f(x).tolist()
    except RAISED as e:
        found = type(e).__name__
    return repr((found, s.n, s.m, s.d, s.f, s.flag, s.mode, s.p.tolist()))


@may_run_live
@pytest.mark.parametrize("seed", range(FIRST, FIRST + HOW_MANY))
def test_c09_random_functions_that_count_do_what_eager_does(device, seed):
    text, sides = Source(seed).text(), []
    code = compile(text, f"{__file__}.{seed}", "exec")
    for _ in range(2):
        names = {"s": state(device), "torch": torch, "math": math}
        exec(code, names)
        sides.append((names["f"], names["s"]))
    (ours, mine), (plain, theirs) = sides
    recorded = pg.record(ours)
    for n in range(16):
        for s in (mine, theirs):
            if n == 9:
                s.n = 40
            if n == 12:
                s.flag, s.f = not s.flag, 0.75
        x = torch.rand(3)
        assert outcome(recorded, x.to(device), mine) == outcome(plain, x.to(device), theirs), f"call {n} of\n{text}"
