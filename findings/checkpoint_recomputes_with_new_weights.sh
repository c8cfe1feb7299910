#!/usr/bin/env bash
# torch 2.14.1, CPU. A weight that is written between a forward and its backward, for which autograd raises otherwise, goes unnoticed
# where torch.utils.checkpoint lies between: it recomputes with the new weight, and the gradient belongs to no forward that ran.
# Seen: plain, RuntimeError; in a checkpoint the slope of (3 w)^2 in x is 150, that of w = 5, for an output of w = 2.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch
from torch.utils.checkpoint import checkpoint


def slope(through):
    w, x = torch.nn.Parameter(torch.tensor(2.0)), torch.tensor(3.0, requires_grad=True)
    y = through(lambda x: (x * w).square(), x)
    with torch.no_grad():
        w.fill_(5.0)
    try:
        y.backward()
    except RuntimeError as e:
        return y.item(), "raises" if "modified by an inplace operation" in str(e) else str(e)
    return y.item(), x.grad.item()


plain, recomputed = slope(lambda f, x: f(x)), slope(lambda f, x: checkpoint(f, x, use_reentrant=False))
print("plain:", plain, "in a checkpoint:", recomputed)
assert plain == (36.0, "raises")
assert recomputed == (36.0, 150.0)
PY
