#!/usr/bin/env bash
# torch 2.14.1, CPU. torch.autograd.grad of a sum of two inputs gives one tensor twice, which is the caller's grad_outputs as well:
# who scales the first gradient in place has scaled the second. backward() gives each .grad memory of its own.
# Seen: the second gradient, and the given one, are 10 after the first was multiplied by 10.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

a, b, given = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
first, second = torch.autograd.grad(a + b, (a, b), given)
first.mul_(10)
(a + b).backward(torch.ones(2))
a.grad.mul_(10)
print("by grad:", second.tolist(), given.tolist(), "by backward:", b.grad.tolist())
assert second.tolist() == given.tolist() == [10.0, 10.0]
assert b.grad.tolist() == [1.0, 1.0]
PY
