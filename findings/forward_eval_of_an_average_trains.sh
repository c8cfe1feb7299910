#!/usr/bin/env bash
# ema-pytorch 0.8.3 with torch 2.14.1, CPU. EMA.forward_eval notes the mode of the averaged model and puts it back afterwards, and
# sets no other in between. The copy of a model that is trained is in training mode: validated through forward_eval it drops out,
# normalizes by the batch at hand, and moves its running statistics by the validation data. After ema.eval() it does none of it.
# Seen: two calls on the same input differ and the running mean moves; after eval() both are equal and it stays.
. "$(dirname "$0")/environment" torch==2.14.1 numpy==2.4.6 ema-pytorch==0.8.3
python - <<'PY'
import torch
from ema_pytorch import EMA

torch.manual_seed(0)
ema = EMA(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)), update_after_step=0, update_every=1)
ema.update()
x, statistics = torch.randn(32, 4) + 3, ema.ema_model[0].running_mean


def validated():
    before = statistics.clone()
    same = torch.equal(ema.forward_eval(x), ema.forward_eval(x))
    return same, torch.equal(statistics, before)


at_first = validated()
ema.eval()
then = validated()
print("outputs equal, statistics as they were:", at_first, "after eval():", then)
assert at_first == (False, False)
assert then == (True, True)
PY
