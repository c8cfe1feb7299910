#!/usr/bin/env bash
# torch 2.14.1, CPU. With torch.autocast entered around a training loop instead of in each step, all steps but the first compute
# with the weights as they were at the first: their casts are kept until the outermost autocast ends, whatever the optimizer
# writes. Nothing is raised, and the parameters do move.
# Seen: outputs 2.0, 2.0, 2.0 around the loop, and 2.0, 0.0, -2.0 with autocast in the step.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import contextlib
import torch


def cast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def outputs(around, within):
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer, seen = torch.optim.SGD(layer.parameters(), lr=1.0), []
    with around():
        for _ in range(3):
            optimizer.zero_grad()
            with within():
                y = layer(torch.ones(1, 2)).sum()
            y.backward()
            optimizer.step()
            seen.append(y.item())
    return seen, layer.weight.tolist()


loop, step = outputs(cast, contextlib.nullcontext), outputs(contextlib.nullcontext, cast)
print("around the loop:", loop, "in the step:", step)
assert loop == ([2.0, 2.0, 2.0], [[-2.0, -2.0]])
assert step == ([2.0, 0.0, -2.0], [[-2.0, -2.0]])
PY
