#!/usr/bin/env bash
# torch 2.14.1, CPU. The constructor of OneCycleLR writes max_lr / div_factor over the initial rate of each group. SequentialLR
# begins with that rate: a phase before the one cycle, that is to hold or warm up the optimizer's rate, has a twenty-fifth of it,
# though its own base_lrs say otherwise. CyclicLR and LambdaLR in the same place leave it as it was.
# Seen: held at 1.0 for three steps, the rates are 0.04 before OneCycleLR, 1.0 before CyclicLR and LambdaLR; warmed up from 0.1 to
# 1.0 they are 0.004, 0.016, 0.028 before OneCycleLR and 0.1, 0.4, 0.7 before LambdaLR.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch
from torch.optim.lr_scheduler import ConstantLR, CyclicLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR


def held(optimizer):
    return ConstantLR(optimizer, factor=1.0)


def warmed_up(optimizer):
    return LinearLR(optimizer, start_factor=0.1, total_iters=3)


def rates(before, later):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    first = before(optimizer)
    scheduler, seen = SequentialLR(optimizer, [first, later(optimizer)], milestones=[3]), []
    assert first.base_lrs == [1.0]
    for _ in range(3):
        seen.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
    return seen


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=10)


def cyclic(optimizer):
    return CyclicLR(optimizer, base_lr=0.1, max_lr=1.0)


def of_a_function(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


hold = [rates(held, later) for later in (one_cycle, cyclic, of_a_function)]
warm = [rates(warmed_up, later) for later in (one_cycle, of_a_function)]
print("held, before one cycle, cyclic, a function:", *hold)
print("warmed up, before one cycle, a function:", *warm)
assert hold == [[0.04] * 3, [1.0] * 3, [1.0] * 3]
assert warm == [[0.004, 0.016, 0.028], [0.1, 0.4, 0.7]]
PY
