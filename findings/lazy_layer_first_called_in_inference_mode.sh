#!/usr/bin/env bash
# torch 2.14.1, CPU. A LazyLinear whose first call is in inference mode (to find out shapes, say) has a weight that never trains:
# it says requires_grad, the backward passes, its gradient stays None, and the optimizer skips it. Its bias trains.
# Seen: requires_grad True and True, gradient of the weight None, of the bias 1.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

layer = torch.nn.LazyLinear(2)
with torch.inference_mode():
    layer(torch.ones(1, 3))
layer(torch.ones(1, 3)).sum().backward()
print("requires_grad:", layer.weight.requires_grad, layer.bias.requires_grad, "gradients:", layer.weight.grad, layer.bias.grad)
assert layer.weight.requires_grad
assert layer.weight.grad is None
assert layer.bias.grad.tolist() == [1.0, 1.0]
PY
