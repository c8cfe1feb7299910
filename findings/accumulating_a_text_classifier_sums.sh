#!/usr/bin/env bash
# transformers 5.17.0, accelerate 1.15.0, torch 2.14.1, CPU. Whether Trainer averages over gradient_accumulation_steps depends on
# the class of the model. Where a forward takes further keywords, Trainer hands it the number of labels and leaves the dividing to
# it. That of BertForSequenceClassification takes them and returns a plain mean: the gradient of an update, and the loss in the log,
# are as many times too large as there are micro-batches. ViTForImageClassification divides by what it was given where an image has
# one label, and does not where it has several. A clipped norm and SGD's rate then mean something else.
# Seen: eight examples as one batch and as four of two, loss and norm of the gradient of four over those of one: 4 and 4 for Bert,
# 1 and 1 for ViT, 4 and 4 for ViT with several labels.
. "$(dirname "$0")/environment" torch==2.14.1 transformers==5.17.0 accelerate==1.15.0
python - <<'PY'
import tempfile

import torch
from transformers import (
    BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification,
)

shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
torch.manual_seed(0)
one = torch.arange(8) % 3
several = torch.eye(3)[one]
words, images = torch.randint(3, 50, (8, 6)), torch.randn(8, 3, 8, 8)


def text():
    return BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=8, **shape))


def image():
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **shape))


def update(made, name, inputs, labels, micro_batches):
    torch.manual_seed(1)
    examples = [{name: given, "labels": label} for given, label in zip(inputs, labels)]
    with tempfile.TemporaryDirectory() as folder:
        how = {"output_dir": folder, "max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
        how |= {"per_device_train_batch_size": 8 // micro_batches, "gradient_accumulation_steps": micro_batches}
        trainer = Trainer(made(), TrainingArguments(disable_tqdm=True, log_level="error", **how), train_dataset=examples)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [float(trainer.state.log_history[0][key]) for key in ("loss", "grad_norm")]


seen = {}
for case, *given in (
    ("Bert", text, "input_ids", words, one),
    ("ViT", image, "pixel_values", images, one),
    ("ViT, several labels", image, "pixel_values", images, several),
):
    whole, parts = update(*given, 1), update(*given, 4)
    seen[case] = [round(part / all_, 3) for part, all_ in zip(parts, whole)]
    print(f"{case}: loss and norm, one batch: {whole}, four: {parts}, {seen[case]} times")
assert seen == {"Bert": [4.0, 4.0], "ViT": [1.0, 1.0], "ViT, several labels": [4.0, 4.0]}
PY
