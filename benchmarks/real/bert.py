"""Fine-tuning a BERT of transformers as its course's loop does: warm-up schedule, clipping, accuracy over an epoch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from real import rivals

STEPS, ROUND = 24, 16
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


class Sentences(Dataset):
    """Random words; the label is whether the first word comes before the second."""

    def __init__(self, count: int, length: int, words: int) -> None:
        self.ids = torch.randint(5, words, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = self.ids[at]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[0] < ids[1]).long()}


def run(device: str, record) -> Iterator[object]:
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    config = BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, num_labels=2
    )
    model = BertForSequenceClassification(config).to(device)
    train_loader = DataLoader(Sentences(128, 32, 500), batch_size=16, shuffle=True)
    eval_loader = DataLoader(Sentences(32, 32, 500), batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=10_000)

    model = record(model, fallback="split")  # whether a mask leaves anything out is read on the host

    yield model, optimizer
    for epoch in range(1_000_000):
        model.train()
        total_loss = 0.0
        for batch in train_loader:
            batch = {name: t.to(device) for name, t in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total_loss += loss.item()
            yield loss, outputs.logits
        model.eval()
        correct = 0
        for batch in eval_loader:
            batch = {name: t.to(device) for name, t in batch.items()}
            with torch.no_grad():
                outputs = model(**batch)
            correct += (outputs.logits.argmax(-1) == batch["labels"]).sum().item()
        print(f"epoch {epoch}: loss {total_loss / len(train_loader):.4f}, accuracy {correct / len(eval_loader.dataset):.2f}")
