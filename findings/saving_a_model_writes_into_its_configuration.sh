#!/usr/bin/env bash
# transformers 5.17.0. Saving a model to a checkpoint is no read: it writes into the configuration that the living model goes on
# with. `dtype` was None and is a text afterwards, no torch.dtype; `architectures` was None and is a list, another one after each
# save. What compares, hashes or guards a model's configuration finds it changed by the first checkpoint.
# Seen: dtype None -> 'float32', architectures None -> ['GPT2LMHeadModel'], and after a second save the list is another object.
. "$(dirname "$0")/environment" torch==2.14.1 transformers==5.17.0
python - <<'PY'
import tempfile

from transformers import GPT2Config, GPT2LMHeadModel

sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 50}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
before = dict(vars(model.config))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    after = dict(vars(model.config))
    model.save_pretrained(folder)
changed = {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}
print(changed)
assert changed == {"dtype": (None, "float32"), "architectures": (None, ["GPT2LMHeadModel"])}, changed
assert model.config.architectures == after["architectures"]
assert model.config.architectures is not after["architectures"]
PY
