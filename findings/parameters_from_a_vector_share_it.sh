#!/usr/bin/env bash
# torch 2.14.1, CPU. torch.nn.utils.vector_to_parameters makes the parameters views of the vector, where load_state_dict copies: a
# vector of the best weights so far, once put back, is trained along with them.
# Seen: after one step of SGD the vector is not what it was.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

layer = torch.nn.Linear(2, 1)
best = parameters_to_vector(layer.parameters()).detach().clone()
as_it_was = best.clone()
vector_to_parameters(best, layer.parameters())
layer(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(layer.parameters(), lr=1.0).step()
print("then:", as_it_was.tolist(), "after a step:", best.tolist())
assert torch.allclose(best, as_it_was - 1)
PY
