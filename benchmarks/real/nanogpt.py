"""Training a GPT as nanoGPT does: accumulated gradients, cosine learning rate by hand, clipping, evaluation now and then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch

from real import rivals
from real.gpt import GPT, GPTConfig

STEPS, ROUND = 24, 10
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})

batch_size, gradient_accumulation_steps, grad_clip = 8, 4, 1.0
learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-3, 1e-4, 10, 2000
eval_interval, eval_iters, log_interval = 10, 2, 5


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    share = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * share)) * (learning_rate - min_lr)


def run(device: str, record) -> Iterator[object]:
    text = np.random.default_rng(0).integers(0, 96, size=20_000, dtype=np.uint16)
    data = {"train": text[:18_000], "val": text[18_000:]}
    model = GPT(GPTConfig(dropout=0.1)).to(device)
    optimizer = model.configure_optimizers(weight_decay=0.1, lr=learning_rate, betas=(0.9, 0.99))
    raw_model, block = model, model.config.block_size
    autocast = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()

    model = record(model)

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data[split]) - block, (batch_size,))
        x = torch.stack([torch.from_numpy(data[split][i : i + block].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[split][i + 1 : i + 1 + block].astype(np.int64)) for i in starts])
        if device == "cuda":
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x.to(device), y.to(device)

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        out = {}
        model.eval()
        for split in data:
            losses = torch.zeros(eval_iters)
            for k in range(eval_iters):
                with autocast:
                    _, loss = model(*get_batch(split))
                losses[k] = loss.item()
            out[split] = losses.mean().item()
        model.train()
        return out

    yield raw_model, optimizer
    X, Y = get_batch("train")  # noqa: N806
    for iter_num in range(1_000_000):
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0:
            losses = estimate_loss()
            print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        for _ in range(gradient_accumulation_steps):
            with autocast:
                logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")  # noqa: N806
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % log_interval == 0:
            print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, lr {lr:.2e}")
        yield loss, logits[0, -1]
