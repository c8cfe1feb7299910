#!/usr/bin/env bash
# torch 2.14.1, CPU. torch.nn.MultiheadAttention for a sequence of which all keys are masked: NaN with need_weights=True, a number
# with need_weights=False, in training; in evaluation without gradients both are NaN. Padding a batch with an empty sequence is
# safe or not by whether somebody looks at the weights.
# Seen: [True, False] are NaN in training, [True, True] in evaluation.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

torch.manual_seed(0)
attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
x, all_masked = torch.randn(1, 3, 8), torch.ones(1, 3, dtype=torch.bool)


def is_nan():
    ways = (attention(x, x, x, key_padding_mask=all_masked, need_weights=need)[0] for need in (True, False))
    return [bool(y.isnan().any()) for y in ways]


training = is_nan()
attention.eval()
with torch.no_grad():
    evaluated = is_nan()
print("NaN with weights and without, in training:", training, "in evaluation:", evaluated)
assert training == [True, False]
assert evaluated == [True, True]
PY
