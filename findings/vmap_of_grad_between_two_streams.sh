#!/usr/bin/env bash
# torch 2.11.0+cu130 on an NVIDIA H200 (driver 580.159.04). torch.vmap around torch.autograd.grad raises where the forward ran
# on another stream than the one that asks: autograd's engine records the use of a gradient on a stream, and what vmap gives has
# no memory. is_grads_batched=True, which hides the batch in another way, gives the Jacobian; so does vmap on the same stream.
# Seen: "same stream: True", "two streams: NotImplementedError: Cannot access storage of BatchedTensorImpl", "is_grads_batched: True".
python3 - <<'PY' || exit 77
import shutil, sys
sys.exit(shutil.which("nvidia-smi") is None)
PY
. "$(dirname "$0")/environment" torch==2.11.0
python - <<'PY'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(77)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).cuda()
rows = torch.eye(3, device="cuda")
x = torch.randn(4, device="cuda", requires_grad=True)
expected = torch.autograd.functional.jacobian(net, x)


def by_vmap(y):
    return torch.vmap(lambda row: torch.autograd.grad(y, x, row, retain_graph=True)[0])(rows)


same = torch.allclose(by_vmap(net(x)), expected)
print("same stream:", same)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    y = net(x)
torch.cuda.current_stream().wait_stream(side)
try:
    raised = f"none, {torch.allclose(by_vmap(y), expected)}"
except NotImplementedError as e:
    raised = f"NotImplementedError: {e}"
print("two streams:", raised)
(together,) = torch.autograd.grad(y, x, rows, is_grads_batched=True)
print("is_grads_batched:", torch.allclose(together, expected))
assert same and torch.allclose(together, expected)
assert raised == "NotImplementedError: Cannot access storage of BatchedTensorImpl", raised
PY
