#!/usr/bin/env bash
# torch 2.14.1, on the CPU. An operator of torch._foreach_* that writes in place moves the version counters of its tensors on. Below
# any TorchDispatchMode, one that only hands over to the operator, it does not: what a backward has saved and these operators have
# overwritten is not noticed then, and the gradient is another one, without a word.
# Seen: version 1 without a mode and 0 below one; backward raises without, and gives 0.9 and not 1.0 below.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HandsOver(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def seen(mode):
    x, factor = torch.ones(1, requires_grad=True), torch.ones(1)
    y = x * factor
    with mode:
        torch._foreach_mul_([factor], 0.9)
    try:
        y.backward()
    except RuntimeError as e:
        return factor._version, "modified by an inplace operation" in str(e)
    return factor._version, round(float(x.grad), 3)


plainly, below = seen(nullcontext()), seen(HandsOver())
print("without a mode", plainly, "| below one", below)
assert plainly == (1, True)
assert below == (0, 0.9)
PY
