#!/usr/bin/env bash
# torch 2.14.1 (2.11.0 too), on the CPU. Autograd adds the gradients of a tensor up in the order of its nodes' numbers, the last one
# first. Each thread counts its own: where threads share the forward, the order is not that of the forward, but hangs on how many
# operators each thread has run before. (A backward with create_graph=True on a GPU runs on a thread of autograd's, so the nodes it
# makes are numbered apart from the program's.)
# Seen: the gradient of 1e8 x + x - 1e8 x in float32 is 1.0 where the worker that makes the middle term is new, and 0.0 where it has
# run ten operators before.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
from concurrent.futures import ThreadPoolExecutor

import torch


def gradient(before):
    x = torch.ones(1, requires_grad=True)
    with ThreadPoolExecutor(1) as worker:
        worker.submit(lambda: [x * 2 for _ in range(before)]).result()
        first = x * 1e8
        middle = worker.submit(lambda: x * 1.0).result()
        last = x * -1e8
    (first + middle + last).backward()
    return x.grad.item()


found = [gradient(before) for before in (0, 10, 1000)]
print("after 0, 10 and 1000 operators of the worker:", found)
assert found == [1.0, 0.0, 0.0]
PY
