#!/usr/bin/env bash
# torch 2.14.1, CPU. OpInfo.sample_inputs, torch's own database of operators for tests, seeds the default generator before each
# sample that it makes: what a test draws between two samples does not depend on the seed that the test has set, and repeats.
# Seen: for sum the same 20 draws for two seeds, 5 of them distinct.
. "$(dirname "$0")/environment" torch==2.14.1 numpy==2.4.6 expecttest==0.3.0
python - <<'PY' 2>/dev/null
import torch
from torch.testing._internal.common_methods_invocations import op_db

operator = next(one for one in op_db if one.name == "sum")


def draws(seed):
    torch.manual_seed(seed)
    return [torch.rand(()).item() for _ in operator.sample_inputs("cpu", torch.float32)]


one, other = draws(5), draws(6)
print("draws:", len(one), "distinct:", len({*one}), "the same for two seeds:", one == other, flush=True)
assert one == other
assert len({*one}) < len(one)
PY
