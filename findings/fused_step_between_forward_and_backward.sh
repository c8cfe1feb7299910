#!/usr/bin/env bash
# torch 2.14.1, CPU. A step of a fused optimizer does not move the version of the parameters that it writes. So a step between
# a forward and its backward, for which autograd raises otherwise, goes unnoticed, and the gradient is that of the new weights.
# Seen: SGD, Adam, AdamW, Adagrad raise for foreach=True; for fused=True the gradient of v in v * w is the new w, and no version
# has moved.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch


def stepped(kind, **how):
    v, w = (torch.nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
    optimizer = kind([w], lr=0.5, **how)
    product = (v * w).sum()
    w.grad = torch.ones(3)
    version = w._version
    optimizer.step()
    try:
        product.backward()
    except RuntimeError as e:
        return "raises", w._version > version, "modified by an inplace operation" in str(e)
    return "silent", w._version > version, torch.equal(v.grad, w.detach()) and not torch.equal(v.grad, torch.full((3,), 2.0))


for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    each, fused = stepped(kind, foreach=True), stepped(kind, fused=True)
    print(kind.__name__, "foreach:", each, "fused:", fused)
    assert each == ("raises", True, True)
    assert fused == ("silent", False, True)
PY
