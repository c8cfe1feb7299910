#!/usr/bin/env bash
# torch 2.14.1, CPU (x86-64). F.linear of a three-dimensional input that is not contiguous gives other last bits in inference mode
# once any TorchDispatchMode is active; with gradients it gives the same bits.
# Seen: differs by 3.6e-07 in inference mode, equal outside of it.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AsItIs(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)
x = torch.randn(8, 64, 3).transpose(1, 2)
layer = torch.nn.Linear(64, 96)


def both():
    plain = layer(x)
    with AsItIs():
        return plain, layer(x)


trained = torch.equal(*both())
with torch.inference_mode():
    plain, below = both()
print("equal with gradients:", trained, "in inference mode:", torch.equal(plain, below), "off by", float((plain - below).abs().max()))
assert trained
assert not torch.equal(plain, below)
assert torch.allclose(plain, below, atol=1e-5)
PY
