"""A word-level language model with an LSTM, after pytorch/examples: hidden states go on, without their history."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 24, 10
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})
LENGTH, BATCH, WORDS, WIDTH = 12, 16, 400, 128


class RNNModel(nn.Module):
    def __init__(self, words: int, width: int, layers: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.words, self.width, self.layers = words, width, layers
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(words, width)
        self.rnn, self.decoder = nn.LSTM(width, width, layers, dropout=dropout), nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, ids: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return self.decoder(self.drop(output)).view(-1, self.words).log_softmax(1), hidden

    def init_hidden(self, batch: int) -> tuple[Tensor, Tensor]:
        like = next(self.parameters())
        return like.new_zeros(self.layers, batch, self.width), like.new_zeros(self.layers, batch, self.width)


def repackage_hidden(h):
    """The same hidden states, without their history."""
    return h.detach() if isinstance(h, Tensor) else tuple(repackage_hidden(v) for v in h)


def run(device: str, record) -> Iterator[object]:
    corpus = torch.randint(0, WORDS, (BATCH * 601,), generator=torch.Generator().manual_seed(0)).view(BATCH, -1).t().to(device)
    model = RNNModel(WORDS, WIDTH, layers=2).to(device)
    criterion, lr, clip = nn.NLLLoss(), 5.0, 0.25

    model = record(model)

    yield model
    for epoch in range(1_000_000):
        model.train()
        total_loss, hidden = 0.0, model.init_hidden(BATCH)
        for batch, i in enumerate(range(0, len(corpus) - 1, LENGTH)):
            data, targets = corpus[i : i + LENGTH], corpus[i + 1 : i + 1 + LENGTH].reshape(-1)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            total_loss += loss.item()
            if batch % 10 == 0 and batch:
                print(f"| epoch {epoch} | {batch} batches | lr {lr:.2f} | ppl {math.exp(total_loss / 10):8.2f}")
                total_loss = 0.0
            yield loss, hidden
        lr *= 0.9
