#!/usr/bin/env bash
# torch 2.14.1. An attribute that is set on what torch.jit.trace gives does not stand in the module's own dictionary: it goes to
# the script module within, and vars(module), which tools read and write, knows nothing of it.
# Seen: module.note reads back, and "note" is not in vars(module).
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

module = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
module.note = "kept"
plain = torch.nn.Linear(2, 2)
plain.note = "kept"
print("reads back:", module.note, "| in its dictionary:", "note" in vars(module), "| of an ordinary module:", "note" in vars(plain))
assert module.note == "kept"
assert "note" in vars(plain)
assert "note" not in vars(module)
PY
