"""Methods that are recorded with `steps=`, and copies of them."""

import copy
import pickle
from dataclasses import dataclass

import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import ramp, reasons

K = 4


@dataclass(eq=False)
class Trainer:
    """A dataclass with a tensor among its fields: as the method's own object it is no batch."""

    total: torch.Tensor
    scale: float = 2.0

    @pg.record(steps=K)
    def step(self, x):
        self.total.add_(x.sum())
        return x * self.scale

    def plain(self, x):
        return x.sum() * self.scale


def test_c16_methods(device):
    trainers = [Trainer(torch.zeros((), device=device)), Trainer(torch.zeros((), device=device), 3.0)]
    for n in range(4):
        for trainer in trainers:
            x = ramp(device, K, 3, start=n)
            before = trainer.total.clone()
            assert_same((trainer.step(x), trainer.total), (x * trainer.scale, before + x.sum()))
    assert pg.stats(Trainer.step).replayed >= 6
    assert pg.stats(trainers[0].step).steps == K
    copied = copy.deepcopy(trainers[0])
    assert_same(copied.step(x), x * 2)
    assert not torch.equal(copied.total, trainers[0].total)
    trainers[1].scale = 5.0
    assert_same(trainers[1].step(x), x * 5)


def test_c16_bound_methods_copies_and_pickles(device):
    trainer = Trainer(torch.zeros((), device=device))
    recorded = pg.record(trainer.plain, steps=K)
    x = ramp(device, K, 3)
    for each in (recorded, copy.deepcopy(recorded), pickle.loads(pickle.dumps(recorded))):
        for _ in range(3):
            assert_same(each(x), x.sum(1) * 2)
        assert pg.stats(each).replayed == 2, reasons(each)
    again = pg.record(recorded)
    assert_same(again(x), x.sum() * 2)  # recorded once more, a call is a step
