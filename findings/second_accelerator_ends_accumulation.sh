#!/usr/bin/env bash
# accelerate 1.15.0, transformers 5.17.0, torch 2.14.1, CPU. The number of micro-batches to accumulate belongs to the process and
# not to the Accelerator that it was given to. A second one, made for an evaluation, say, sets it back to 1 for the first: each
# micro-batch is then an update of its own, with a gradient that is not divided. A transformers.Trainer makes an Accelerator, and
# its mere construction does the same, even with gradient_accumulation_steps=4 of its own. Another mixed_precision is refused in
# the same place; this passes without a word.
# Seen: two updates of eight micro-batches in the first epoch, eight in the second, and 1 where gradient_accumulation_steps was 4.
. "$(dirname "$0")/environment" torch==2.14.1 transformers==5.17.0 accelerate==1.15.0
for second in accelerator trainer; do
  python - "$second" <<'PY'
import sys
import tempfile

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
layer = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(layer.weight)
batches = torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=1)
layer, optimizer, batches = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0), batches)


def epoch():
    weights = [layer.weight.item()]
    for x in batches:
        with accelerator.accumulate(layer):
            accelerator.backward(-layer(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(layer.weight.item())
    return sum(old != new for old, new in zip(weights, weights[1:])), weights[-1] - weights[0]


first = epoch()
if sys.argv[1] == "accelerator":
    Accelerator(cpu=True)
else:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        how = {"output_dir": folder, "use_cpu": True, "report_to": [], "gradient_accumulation_steps": 4}
        Trainer(torch.nn.Linear(1, 1), TrainingArguments(**how))
second = epoch()
steps = accelerator.gradient_accumulation_steps
print(f"updates and way, before: {first}, with another {sys.argv[1]}: {second}, gradient_accumulation_steps: {steps}")
assert first == (2, 2.0)
assert second == (8, 8.0)
assert steps == 1
try:
    Accelerator(cpu=True, mixed_precision="bf16")
except ValueError:
    pass
else:
    raise AssertionError("another mixed_precision was taken")
PY
done
