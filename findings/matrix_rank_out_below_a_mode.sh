#!/usr/bin/env bash
# torch 2.14.1, CPU. torch.linalg.matrix_rank(x, out=out) returns out as it was, and leaves it so, while any TorchDispatchMode is
# active.
# Seen: the rank of a unit matrix of five rows is 5 without a mode, and 0, what out had in it, with one that changes nothing.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AsItIs(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def rank():
    out = torch.zeros((), dtype=torch.int64)
    return int(torch.linalg.matrix_rank(torch.eye(5), out=out)), int(out)


plain = rank()
with AsItIs():
    below = rank()
print("result and out, without a mode:", plain, "with one:", below)
assert plain == (5, 5)
assert below == (0, 0)
PY
