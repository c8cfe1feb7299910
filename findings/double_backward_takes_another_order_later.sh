#!/usr/bin/env bash
# torch 2.14.1, on the CPU. Which of two nodes the backward takes first goes by their sequence numbers, and each thread counts for itself.
# So where nodes come from two threads (create_graph=True on a GPU, whose backward runs in a thread of its own; here it is another
# thread), their order goes by how many nodes each thread has made since it began. One step, with the same numbers, calls its operators
# in one order first and in another some steps later, and its gradient has other last bits.
# Seen: from step 33 on, when the main thread has caught up, the order is another, and 771 of 4,096 numbers of the gradient differ.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import queue
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

asked, given = queue.Queue(), queue.Queue()


def works():
    while True:
        given.put(asked.get()())


threading.Thread(target=works, daemon=True).start()


def elsewhere(function):
    asked.put(function)
    return given.get()


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def step():
    torch.manual_seed(0)
    x = torch.randn(4096, requires_grad=True)
    y = x.sin()
    slope = elsewhere(lambda: torch.autograd.grad((y * y).sum(), x, create_graph=True)[0])
    loss = y.exp().sum() + (x * x.cos()).sum() + slope.tanh().sum()
    with Names() as seen:
        loss.backward()
    return seen.names, x.grad


one = torch.ones(1, requires_grad=True)
elsewhere(lambda: [one.sin() for _ in range(100)])  # the other thread is ahead at first
steps = [step() for _ in range(100)]
names, gradient = steps[0]
others = [n for n, (other, _) in enumerate(steps) if other != names]
differing = int((steps[-1][1] != gradient).sum())
print("the first:", *names, "\nthe last: ", *steps[-1][0])
print("another order since step", min(others), "| of 4,096 numbers differ", differing)
assert others
assert differing
PY
