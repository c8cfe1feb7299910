#!/usr/bin/env bash
# torch 2.14.1, CPU. What torch.func.grad gives for a sum is one number expanded to the input's shape: to clip or scale it in place
# raises, where .grad of the same sum after backward() can be written.
# Seen: stride (0,), and "unsupported operation: more than one element of the written-to tensor refers to a single memory location".
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

gradient = torch.func.grad(torch.sum)(torch.ones(2))
try:
    gradient.clamp_(max=0.5)
    said = ""
except RuntimeError as e:
    said = str(e).partition(".")[0]
x = torch.ones(2, requires_grad=True)
x.sum().backward()
x.grad.clamp_(max=0.5)
print("stride:", gradient.stride(), "raises:", said)
assert gradient.stride() == (0,)
assert "more than one element of the written-to tensor" in said
PY
