#!/usr/bin/env bash
# torch 2.14.1, CPU. A learning rate that is a tensor is the same object in all parameter groups that take it from the
# constructor. A scheduler writes into it for each group in turn, so that all groups have what the last one was given.
# Seen: [0.01, 0.01] for a tensor, [0.1, 0.01] for a float.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch


def rates(lr):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=lr)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 1.0, lambda epoch: 0.1])
    return [round(float(group["lr"]), 4) for group in optimizer.param_groups]


number, tensor = rates(0.1), rates(torch.tensor(0.1))
print("as a float:", number, "as a tensor:", tensor)
assert number == [0.1, 0.01]
assert tensor == [0.01, 0.01]
PY
