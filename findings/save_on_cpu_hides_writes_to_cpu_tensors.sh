#!/usr/bin/env bash
# torch 2.14.1, CPU. Within torch.autograd.graph.save_on_cpu a tensor that is on the CPU already is kept as it is, with no copy and
# without its version: a write to it before the backward, for which autograd raises otherwise, gives a wrong gradient silently.
# Seen: plain, RuntimeError; within save_on_cpu 5.4366 for the derivative of exp at 1, which is 2.7183.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import contextlib
import math
import torch


def slope(saving):
    x = torch.ones(1, requires_grad=True)
    with saving:
        y = x.exp()
    with torch.no_grad():
        y.mul_(2)
    try:
        y.backward()
    except RuntimeError as e:
        return "raises" if "modified by an inplace operation" in str(e) else str(e)
    return x.grad.item()


plain, saved = slope(contextlib.nullcontext()), slope(torch.autograd.graph.save_on_cpu())
print("plain:", plain, "within save_on_cpu:", saved)
assert plain == "raises"
assert math.isclose(saved, 2 * math.e, rel_tol=1e-5)
PY
