#!/usr/bin/env bash
# torch 2.14.1, CPU. torch.randn(15) and the first fifteen of torch.randn(16) differ for the same seed: from sixteen elements on
# another algorithm draws. A batch that grows by one may begin with quite other noise. torch.rand does not do so.
# Seen: randn: 15 differ from 16, 16 and 32 agree; rand: 15 and 16 agree.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch


def agree(draw, few, many):
    drawn = []
    for n in (few, many):
        torch.manual_seed(0)
        drawn.append(draw(n)[:few])
    return torch.equal(*drawn)


seen = agree(torch.randn, 15, 16), agree(torch.randn, 16, 32), agree(torch.rand, 15, 16)
print("agree, randn 15 and 16, 16 and 32, rand 15 and 16:", *seen)
assert seen == (False, True, True)
PY
