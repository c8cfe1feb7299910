#!/usr/bin/env bash
# torch 2.14.1, CPU. An optimizer made with fused=False is a fused one after load_state_dict of one that was: which kernels are used
# comes with the state, as the rate does. A group that is added afterwards has the constructor's choice and rate again.
# Seen: fused [True, False] and rates [0.001, 5.0] of the loaded group and of one added later.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch


def made(**how):
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], **how)


optimizer = made(fused=False, lr=5.0)
optimizer.load_state_dict(made(fused=True, lr=0.001).state_dict())
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
fused, rates = ([group[key] for group in optimizer.param_groups] for key in ("fused", "lr"))
print("fused:", fused, "rates:", rates)
assert fused == [True, False]
assert rates == [0.001, 5.0]
PY
