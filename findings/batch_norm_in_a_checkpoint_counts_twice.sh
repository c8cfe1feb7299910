#!/usr/bin/env bash
# torch 2.14.1, CPU. A BatchNorm in torch.utils.checkpoint updates its running statistics in the forward and once more where the
# backward recomputes it: a batch counts twice, and evaluation is another than without the checkpoint.
# Seen: two batches counted for one; the running mean has moved by 0.19 of the batch's, and not by 0.1.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch
from torch.utils.checkpoint import checkpoint

norm, x = torch.nn.BatchNorm1d(1), torch.tensor([[1.0], [3.0]], requires_grad=True)
checkpoint(norm, x, use_reentrant=False).square().sum().backward()
print("batches:", norm.num_batches_tracked.item(), "running mean:", norm.running_mean.item())
assert norm.num_batches_tracked == 2
assert torch.allclose(norm.running_mean, torch.tensor([0.19 * 2]))
PY
