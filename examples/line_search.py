"""Fit a logistic regression by gradient descent with a line search: two loops whose length nobody knows, in one launch.

    python examples/line_search.py

The outer loop goes on until the gradient is small, the inner one halves the step until the loss has come down enough. Live
they are Python's `while`, which looks at a number on the host in each turn. The weights must equal the live ones, bit for bit.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.nn.functional as F
from torch import Tensor

import phonograph as pg

ROWS, FEATURES, MOST = 256, 16, 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def fit(x: Tensor, y: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor]:
    """(inputs (ROWS, FEATURES), labels (ROWS,), tolerance ()) -> the weights (FEATURES,), and how many turns it took."""

    def loss(w: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x @ w, y) + 1e-3 * w.square().sum()

    def gradient(w: Tensor) -> Tensor:
        return x.T @ (torch.sigmoid(x @ w) - y) / len(y) + 2e-3 * w

    def too_far(step: Tensor, w: Tensor, g: Tensor, here: Tensor) -> Tensor:
        return loss(w - step * g) > here - 0.5 * step * g.square().sum()

    def halve(step: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return step * 0.5, *others

    def goes_on(w: Tensor, g: Tensor, turns: Tensor) -> Tensor:
        return (g.norm() > tolerance) & (turns < MOST)

    def descend(w: Tensor, g: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step, *_ = pg.while_loop(too_far, halve, (w.new_full((), 64.0), w, g, loss(w)))
        w = w - step * g
        return w, gradient(w), turns + 1

    w = x.new_zeros(FEATURES)
    w, _, turns = pg.while_loop(goes_on, descend, (w, gradient(w), torch.zeros((), dtype=torch.int64, device=x.device)))
    return w, turns


def problems(count: int = 12) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in range(count):
        x = torch.randn(ROWS, FEATURES, generator=generator)
        y = (x @ torch.randn(FEATURES, generator=generator) + torch.randn(ROWS, generator=generator) > 0).float()
        found.append((x.to(DEVICE), y.to(DEVICE), torch.tensor(1e-2 / (n % 3 + 1), device=DEVICE)))
    return found


def solved(fit: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], name: str) -> list[tuple[Tensor, Tensor]]:
    for problem in problems(3):  # warm, and recorded
        fit(*problem)
    begin = time.perf_counter()
    found = [fit(*problem) for problem in problems()]
    turns = sum(int(turns) for _, turns in found)
    print(f"{name:9s} {turns / (time.perf_counter() - begin):8,.0f} turns/s")
    return found


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    recorded = pg.record(fit, keep="always")  # how long a call takes depends on the problem: times prove nothing
    live, ours = solved(fit, "live"), solved(recorded, "recorded")
    print("turns:", *(int(turns) for _, turns in live))
    print(pg.stats(recorded))
    assert all(torch.equal(a, b) for one, other in zip(live, ours, strict=True) for a, b in zip(one, other, strict=True))
    print("bitwise equal")
