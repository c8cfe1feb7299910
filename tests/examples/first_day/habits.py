"""Steps with something in them that one wants to know, or that decides how to go on."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.examples.first_day import Made, classifier, first_day, labelled, loss_of, mlp, update


@first_day(told="PG101 PG301 PG1401", cut=True)
def p01_prints_its_loss(mended):
    net, opt = classifier()

    def train_step(x, y, step):
        loss = update(opt, loss_of(net, x, y))
        if step % 2 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        return loss

    def mended_step(x, y):
        return update(opt, loss_of(net, x, y))

    if mended:
        return Made(mended_step, lambda f, i: f(*labelled(i)))
    return Made(train_step, lambda f, i: f(*labelled(i), i))


@first_day(told="PG101", cut=True)
def p02_stops_early(mended):
    net, opt = classifier()
    best = {"loss": float("inf"), "bad": 0}

    def train_step(x, y):
        loss = update(opt, loss_of(net, x, y))
        if loss.item() < best["loss"]:
            best["loss"], best["bad"] = loss.item(), 0
        else:
            best["bad"] += 1
        return best["bad"] > 3

    def mended_step(x, y):
        return update(opt, loss_of(net, x, y))

    return Made(mended_step if mended else train_step, lambda f, i: f(*labelled(i)))


@first_day(told="PG101", cut=True)
def p03_keeps_lists(mended):
    net, opt = classifier()
    losses: list[Any] = []

    def train_step(x, y):
        loss = update(opt, loss_of(net, x, y))
        losses.append(loss.item())
        return loss

    def mended_step(x, y):
        loss = update(opt, loss_of(net, x, y))
        losses.append(loss)
        return loss

    return Made(mended_step if mended else train_step, lambda f, i: f(*labelled(i)))


@first_day(told="PG101", cut=True)
def p04_counts_right_answers(mended):
    net, opt = classifier()
    counts = {"right": 0, "all": 0}

    def train_step(x, y):
        out = net(x)
        loss = update(opt, F.cross_entropy(out, y))
        counts["right"] += (out.argmax(1) == y).sum().item()
        counts["all"] += len(y)
        return loss

    def mended_step(x, y):
        out = net(x)
        return update(opt, F.cross_entropy(out, y)), (out.argmax(1) == y).sum()

    return Made(mended_step if mended else train_step, lambda f, i: f(*labelled(i)))


@first_day(told="PG101", needs="tqdm")
def p05_shows_a_bar(mended):
    import io

    from tqdm import tqdm

    net, opt = classifier()
    bar = tqdm(total=100, file=io.StringIO())

    def train_step(x, y):
        loss = update(opt, loss_of(net, x, y))
        bar.set_postfix(loss=loss.item())
        bar.update(1)
        return loss

    def mended_step(x, y):
        return update(opt, loss_of(net, x, y))

    return Made(mended_step if mended else train_step, lambda f, i: f(*labelled(i)))


@first_day()
def p20_accumulates(mended):
    net, opt = classifier()

    def train_step(x, y, step):
        loss = loss_of(net, x, y) / 2
        loss.backward()
        if (step + 1) % 2 == 0:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return Made(train_step, lambda f, i: f(*labelled(i), i))


class Trainer:
    def __init__(self):
        self.net, self.opt = classifier()
        self.step = 0

    def train_step(self, x, y):
        loss = loss_of(self.net, x, y) / 2
        loss.backward()
        self.step += 1
        if self.step % 2 == 0:
            self.opt.step()
            self.opt.zero_grad()
        return loss.detach()


@first_day()
def p20b_counts_its_steps(mended):
    trainer = Trainer()
    return Made(trainer.train_step, lambda f, i: f(*labelled(i)))


@first_day()
def p21_steps_its_scheduler(mended):
    net, opt = classifier()
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.99**epoch)

    def train_step(x, y):
        loss = update(opt, loss_of(net, x, y))
        scheduler.step()
        return loss

    return Made(train_step, lambda f, i: f(*labelled(i)))


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    number: int
    path: str


@first_day()
def p27_takes_a_batch_with_an_id(mended):
    net, opt = classifier()

    def train_step(batch):
        return update(opt, loss_of(net, batch.x, batch.y))

    return Made(train_step, lambda f, i: f(Batch(*labelled(i), i, f"images/{i}.png")))


@first_day(told="PG401")
def p28_flips_at_random(mended):
    net, opt = classifier()
    random.seed(0)

    def train_step(x, y):
        if random.random() < 0.5:
            x = x.flip(1)
        return update(opt, loss_of(net, x, y))

    def mended_step(x, y, flip):
        if flip:
            x = x.flip(1)
        return update(opt, loss_of(net, x, y))

    if mended:
        return Made(mended_step, lambda f, i: f(*labelled(i), random.random() < 0.5))
    return Made(train_step, lambda f, i: f(*labelled(i)))


@first_day()
def p28b_draws_noise(mended):
    net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    opt = torch.optim.Adam(net.parameters())

    def train_step(x, y):
        return update(opt, loss_of(net, x + 0.1 * torch.randn_like(x), y))

    def seeded(f, i):
        torch.manual_seed(i)
        return f(*labelled(i))

    return Made(train_step, seeded)


@first_day()
def p34_looks_for_nan(mended):
    net, opt = classifier()

    def train_step(x, y, step):
        loss = loss_of(net, x, y)
        if torch.isnan(loss):
            raise RuntimeError("diverged")
        update(opt, loss)
        if step % 50 == 0:
            time.sleep(0)
        return loss.detach()

    return Made(train_step, lambda f, i: f(*labelled(i), i))


@first_day(told="PG101 PG602")
def p35_runs_a_whole_epoch(mended):
    net, opt = classifier()
    loader = DataLoader(TensorDataset(*labelled(0, n=24)), batch_size=8)

    def train_epoch(loader):
        total = 0.0
        for x, y in loader:
            total = total + update(opt, loss_of(net, x, y))
        return total

    def mended_step(x, y):
        return update(opt, loss_of(net, x, y))

    if mended:
        return Made(mended_step, lambda f, i: [f(x, y) for x, y in loader])
    return Made(train_epoch, lambda f, i: f(loader))


class MeanMetric:
    """As that of torchmetrics."""

    def __init__(self):
        self.total, self.count, self.updates = torch.zeros(()), torch.zeros(()), 0

    def update(self, value):
        self.updates += 1
        if torch.isnan(value).any():
            raise RuntimeError("Encountered `nan` values in tensor")
        self.total = self.total + value
        self.count = self.count + 1


@first_day()
def p36_updates_a_metric(mended):
    net, opt = classifier()
    metric = MeanMetric()

    def train_step(x, y):
        loss = update(opt, loss_of(net, x, y))
        metric.update(loss)
        return loss

    return Made(train_step, lambda f, i: f(*labelled(i)))


@first_day(told="PG101", cut=True)
def p19_scales_its_loss(mended):
    net = mlp(6, 16, 3)
    opt = torch.optim.Adam(net.parameters(), fused=mended)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train_step(x, y):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, x, y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    return Made(train_step, lambda f, i: f(*labelled(i)))
