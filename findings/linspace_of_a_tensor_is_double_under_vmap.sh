#!/usr/bin/env bash
# torch 2.14.1. torch.linspace from a tensor of single precision gives single precision; the same under torch.vmap gives double.
# Seen: float32 alone, float64 under vmap.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

starts = torch.tensor([1.0, 2.0])
alone = [torch.linspace(start, 4.0, 5) for start in starts]
mapped = torch.vmap(lambda start: torch.linspace(start, 4.0, 5))(starts)
print("alone", alone[0].dtype, "under vmap", mapped.dtype)
assert alone[0].dtype == torch.float32
assert mapped.dtype == torch.float64
assert torch.equal(torch.stack(alone), mapped.float())
PY
