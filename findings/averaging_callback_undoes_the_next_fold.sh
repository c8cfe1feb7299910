#!/usr/bin/env bash
# lightning 2.6.6, torch 2.14.1, CPU. A WeightAveraging or EMAWeightAveraging callback that a second Trainer is given, as in a loop
# over folds or seeds, starts a new average from the new model, but remembers at which step it took the last one: until the second
# training is past that step it takes nothing. At the end the average, which is the model as it began, is put into the model: a
# training of as many steps as the first leaves no trace. One that goes on for two steps more has only those two averaged.
# Seen: a weight that goes up by 1 in a step ends at 5.5 after ten (the mean of 1 to 10), at 0.0 after ten of a second Trainer,
# and at 11.5 after twelve of a third (the mean of 11 and 12), where a callback of its own gives 6.5. With an EMA of 0.5: 9.002,
# 0.0, 11.5.
. "$(dirname "$0")/environment" torch==2.14.1 lightning==2.6.6
python - <<'PY' 2>/dev/null
import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Upwards(LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, index):
        return -self.w.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(callback, steps):
    model = Upwards()
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, callbacks=[callback], **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(4)))
    assert trainer.global_step == steps
    return round(model.w.item(), 3)


def three(callback):
    return [trained(callback(), steps) for steps in (10, 10, 12)]


mean, ema = WeightAveraging(), EMAWeightAveraging(decay=0.5)
shared = three(lambda: mean), three(lambda: ema)
own = three(WeightAveraging), three(lambda: EMAWeightAveraging(decay=0.5))
print("one callback for three trainers, mean and EMA:", *shared, "one for each:", *own, flush=True)
assert shared == ([5.5, 0.0, 11.5], [9.002, 0.0, 11.5])
assert own == ([5.5, 5.5, 6.5], [9.002, 9.002, 11.0])
PY
