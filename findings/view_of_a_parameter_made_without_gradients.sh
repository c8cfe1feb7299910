#!/usr/bin/env bash
# torch 2.14.1. A view of a leaf that was made under no_grad says that it requires a gradient and that it is a leaf. A loss of it
# can be differentiated, and nobody gets the gradient: neither the view nor the tensor that it is a view of. detach() followed by
# requires_grad_() gives a leaf that does.
# Seen: requires_grad True, is_leaf True, both gradients None after backward().
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

weight = torch.ones(3, requires_grad=True)
with torch.no_grad():
    view = weight.view(3)
(view * 2).sum().backward()
print("requires_grad", view.requires_grad, "is_leaf", view.is_leaf, "gradients", view.grad, weight.grad)
assert view.requires_grad
assert view.is_leaf
assert view.grad is None
assert weight.grad is None

leaf = weight.detach().requires_grad_()
(leaf * 2).sum().backward()
assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
PY
