#!/usr/bin/env bash
# torch 2.14.1, CPU. torch.optim.swa_utils.AveragedModel with an exponential average and use_buffers=True averages whole numbers,
# too, and cuts off what is behind the point: the count of a BatchNorm falls behind for ever, and with a decay of 0.999 it stays
# at nothing for 1,000 steps.
# Seen: after 30 updates the count is 20 for a decay of 0.9, 0 or 1 for 0.999; the model's is 30.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def count(decay):
    model = torch.nn.BatchNorm1d(2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    for _ in range(30):
        model(torch.randn(4, 2))
        averaged.update_parameters(model)
    return averaged.module.num_batches_tracked.item(), model.num_batches_tracked.item()


fast, slow = count(0.9), count(0.999)
print("averaged and the model's, decay 0.9:", fast, "decay 0.999:", slow)
assert fast == (20, 30)
assert slow[0] <= 1
PY
