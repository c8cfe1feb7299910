"""C18: after many calls there is no more of anything than after a few: PHONOGRAPH_SOAK_CALLS=100000 for as many."""

import gc
import os
import random
import sys

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.devices import device_for
from phonograph.python import standing
from tests.faults.injection import Functions
from tests.helpers import may_run_live

CALLS = int(os.environ.get("PHONOGRAPH_SOAK_CALLS", "900"))
SIZES = (2, 3, 4, 5, 7)
SLACK = {"objects": 1500, "bytes of the pool": 1 << 20}
"""What is learnt of operators is a few objects for each size; a recording has more, and some hundred are made each time."""


class Trainer:
    """A model, its optimizer and its recorded step, which has room for three of five sizes."""

    def __init__(self, device):
        self.device = device
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Linear(4, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.count, self.last = 0, None
        self.recorded = pg.record(self.step, keep="always", max_recordings=3)

    def step(self, x, fails=False):
        self.count += 1
        loss = self.net(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = loss.detach()
        if fails:
            raise ValueError("mine")
        return self.last


def calls(device, chosen, n):
    """So many of them, with all that may happen in between."""
    trainer, held = Trainer(device), []
    for _ in range(n):
        x = torch.ones(chosen.choice(SIZES), 4, device=trainer.device)
        what = chosen.randrange(100)
        if what == 0:
            pg.reset(trainer.recorded)
        elif what == 1:
            trainer = Trainer(device)  # the other goes, with its recordings
        elif what < 4:
            with pytest.raises(ValueError, match="mine"):
                trainer.recorded(x, fails=True)
        held = [*held[-2:], trainer.recorded(x)] if what % 3 else []


def settled(device):
    """What there is with one trainer, which has one recording."""
    trainer, x = Trainer(device), torch.ones(2, 4, device=device)
    for _ in range(4):
        trainer.recorded(x)
    for _ in range(3):
        gc.collect()
    with Functions(0, KeyError) as frames:
        trainer.recorded(x)
    ours = device_for(device)
    return {
        "functions in a replay": frames.count,
        "objects": len(gc.get_objects()),
        "bytes of the pool": ours.pool_bytes,
        "recordings": len(ours.pool.recordings),
        "leases": len(ours.pool.leases),
        "changes that stand": len(standing._all),
        "modules": len(sys.modules),
        "callbacks of the collector": len(gc.callbacks),
    }


@pytest.mark.slow
@may_run_live
def test_c18_nothing_grows_with_the_number_of_calls(device):
    chosen = random.Random(0)
    calls(device, chosen, 200)
    before = settled(device)
    for _ in range(3):
        calls(device, chosen, CALLS // 3)
        after = settled(device)
        grown = {name: (before[name], n) for name, n in after.items() if n > before[name] + SLACK.get(name, 0)}
        assert not grown
