"""Sampling from a GPT without a cache: the text grows by one token a call, until the context is full."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from real import rivals
from real.gpt import GPT, GPTConfig

STEPS, ROUND = 120, 60
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


def run(device: str, record) -> Iterator[object]:
    model = GPT(GPTConfig(block_size=32)).to(device)
    model.eval()

    model = record(model)

    yield model
    for sample in range(1_000_000):
        prompt = torch.tensor([[1 + sample % 7, 2, 3]], device=device)
        for text in model.generate(prompt, new=60, temperature=0.8, top_k=20):
            yield text
        print(f"sample {sample}: {text[0, :10].tolist()} ...")
