#!/usr/bin/env bash
# torch 2.14.1. A tensor that was made in inference mode, and whose .data is set to an ordinary tensor afterwards, is none of
# inference mode by is_inference(), and has no version counter either: asking for _version raises, as for one of inference mode.
# Seen: is_inference() is False, and _version raises RuntimeError.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch

with torch.inference_mode():
    t = torch.zeros(3)
t.data = torch.ones(3)
try:
    said = f"version {t._version}"
except RuntimeError as e:
    said = str(e)
print("is_inference", t.is_inference(), "|", said)
assert not t.is_inference()
assert said == "Inference tensors do not track version counter."
PY
