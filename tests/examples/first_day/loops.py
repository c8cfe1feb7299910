"""Loops: of other packages, and what happens between the steps."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.examples.first_day import Made, classifier, first_day, labelled, loss_of, mlp, update


@first_day(needs="accelerate")
def p13_accelerate(mended):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, opt = accelerator.prepare(*classifier())

    def step(f, i):
        loss = F.cross_entropy(f(labelled(i)[0]), labelled(i)[1])
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
        return loss.detach()

    return Made(net, step)


class Lit(nn.Module):
    """As a LightningModule."""

    def __init__(self):
        super().__init__()
        self.net = mlp(6, 16, 3)

    def training_step(self, batch, number):
        return loss_of(self.net, *batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters())


@first_day()
def p14_lightning(mended):
    module = Lit()
    opt = module.configure_optimizers()
    return Made(module.net, lambda f, i: update(opt, module.training_step(labelled(i), i)))


@first_day()
def p19b_bfloat16(mended):
    net, opt = classifier()

    def train_step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, x, y)
        return update(opt, loss)

    return Made(train_step, lambda f, i: f(*labelled(i)))


@first_day()
def p22_groups_of_weights(mended):
    net = mlp(6, 16, 3)
    decay, none = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": none, "weight_decay": 0.0}], lr=1e-3)

    def train_step(x, y):
        return update(opt, loss_of(net, x, y))

    def step(f, i):
        opt.param_groups[0]["lr"] = 1e-3 / (i + 1)
        opt.param_groups[0]["weight_decay"] = 0.1 / (i + 1)
        return f(*labelled(i))

    return Made(train_step, step)


@first_day()
def p26_evaluates_with_a_smaller_last_batch(mended):
    net = mlp(6, 16, 3).eval()

    def right(x, y):
        with torch.no_grad():
            return (net(x).argmax(1) == y).sum()

    return Made(right, lambda f, i: f(*labelled(i, 3 if i % 4 == 3 else 8)))


@first_day()
def p29_goes_on_from_a_checkpoint(mended):
    net, opt = classifier()
    kept: dict[str, Any] = {}

    def train_step(x, y):
        return update(opt, loss_of(net, x, y))

    def step(f, i):
        if i == 5:
            kept.update(net=net.state_dict(), opt=opt.state_dict())
            net.load_state_dict(kept["net"])
            opt.load_state_dict(kept["opt"])
        return f(*labelled(i))

    return Made(train_step, step)


@first_day()
def p30_serves_from_threads(mended):
    net = mlp(6, 16, 3).eval()

    def answer(x):
        with torch.no_grad():
            return net(x).softmax(1)

    def step(f, i):
        found = [None] * 2
        for n, size in enumerate((1, 4)):
            thread = threading.Thread(target=lambda n=n, size=size: found.__setitem__(n, f(labelled(i, size)[0])))
            thread.start()
            thread.join()
        return found

    return Made(answer, step)


@first_day(told="PG101", needs="transformers", cut=True)
def p37_transformers_trainer(mended):
    from transformers import BertConfig, BertForSequenceClassification

    from tests.examples.first_day.models import TINY, mask_of, tokens

    net = BertForSequenceClassification(BertConfig(**TINY))
    opt = torch.optim.AdamW(net.parameters())

    def step(f, i):
        x, y = tokens(i)
        return update(opt, f(input_ids=x, attention_mask=mask_of(x, mended), labels=y).loss)  # what `compute_loss` does

    return Made(net, step)


@first_day()
def p38_unfreezes(mended):
    body, head = mlp(6, 16, 16), nn.Linear(16, 3)
    body.requires_grad_(False)
    opt = torch.optim.Adam([*body.parameters(), *head.parameters()])

    def train_step(x, y):
        return update(opt, F.cross_entropy(head(body(x)), y))

    def step(f, i):
        if i == 5:
            body.requires_grad_(True)
        return f(*labelled(i))

    return Made(train_step, step)
