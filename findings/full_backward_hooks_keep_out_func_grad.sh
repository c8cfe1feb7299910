#!/usr/bin/env bash
# torch 2.14.1, CPU. A module with a full backward hook, as profilers and loggers register them, cannot be differentiated by
# torch.func.grad: it raises, and speaks of an autograd.Function without setup_context, of which the user has none.
# Seen: RuntimeError, "In order to use an autograd.Function with functorch transforms ... it must override the setup_context".
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

layer = torch.nn.Linear(2, 1)
parameters = dict(layer.named_parameters())


def slope():
    return torch.func.grad(lambda p: torch.func.functional_call(layer, p, torch.ones(1, 2)).sum())(parameters)["bias"].tolist()


plain = slope()
layer.register_full_backward_hook(lambda *given: None)
try:
    said = slope()
except RuntimeError as e:
    said = str(e)
print("without a hook:", plain, "with one:", said)
assert plain == [1.0]
assert "setup_context" in said
PY
