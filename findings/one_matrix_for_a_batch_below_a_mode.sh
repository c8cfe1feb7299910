#!/usr/bin/env bash
# torch 2.14.1. A batch of matrices times a batch of one matrix takes another way once any TorchDispatchMode is active, even one
# that only looks: one mm of all rows, where without it bmm is called. On a GPU the last bits differ (by 3e-5 to 1e-4 on an H200).
# Seen: bmm without, mm below a mode; bmm below it too where the batches are equal.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY' 2>/dev/null
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Looks(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ways(points, rotation):
    with torch.profiler.profile() as alone:
        points @ rotation
    with Looks() as below:
        points @ rotation
    return sorted({"aten::mm", "aten::bmm"} & {e.name for e in alone.events()}), sorted({"mm", "bmm"} & below.names)


one = ways(torch.randn(5, 7, 3), torch.randn(1, 3, 3))
five = ways(torch.randn(5, 7, 3), torch.randn(5, 3, 3))
print("one matrix: alone", one[0], "below a mode", one[1], "| five: alone", five[0], "below a mode", five[1])
assert one == (["aten::bmm"], ["mm"])
assert five == (["aten::bmm"], ["bmm"])
PY
