#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1 with torch 2.14.1, CPU. RotaryEmbedding keeps what it has rotated by for the positions seen so far.
# Frequencies that are loaded after a first call stand in its state dict, and are not used.
# Seen: equal frequencies, rotations that differ by up to 1.0 from those of the module that was loaded.
. "$(dirname "$0")/environment" torch==2.14.1 einops==0.8.2 rotary-embedding-torch==0.9.1
python - <<'PY'
import torch
from rotary_embedding_torch import RotaryEmbedding

torch.manual_seed(0)
x = torch.randn(1, 1, 6, 4)
theirs, early, late = RotaryEmbedding(4, theta=100.0), RotaryEmbedding(4), RotaryEmbedding(4)
early.rotate_queries_or_keys(x)
for each in (early, late):
    each.load_state_dict(theirs.state_dict())
wanted = theirs.rotate_queries_or_keys(x)
off = [float((each.rotate_queries_or_keys(x) - wanted).abs().max()) for each in (late, early)]
print("same frequencies:", torch.equal(early.freqs, theirs.freqs), "off without a call before, and with one:", *off)
assert torch.equal(early.freqs, theirs.freqs)
assert off[0] == 0 and off[1] > 0.1
PY
