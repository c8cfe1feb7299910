"""C22: what the host does in a replay is the same however many parameters there are. It is counted, in steps of
the interpreter.

What a tape runs on the CPU is left out: those are its operators. So are the kernels of a GPU whose numbers are set: a
`torch._foreach` operator launches more of them for more tensors.
"""

import functools
import sys

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.devices.cpu.numbers import FollowedNumbers
from phonograph.devices.cpu.program import TapeProgram
from phonograph.devices.cuda.driver import KernelNumbers
from phonograph.devices.cuda.program import GraphProgram
from tests.helpers import reasons

OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adam, fused": functools.partial(torch.optim.Adam, fused=True),
    "adamw, foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}
ROUND = 12  # replays, one of which looks at nothing in turn


def trained(device, optimizer, count, groups=1):
    """A step of so many small parameters, recorded and played, and its weights."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, device=device)) for _ in range(count)]
    chosen = OPTIMIZERS[optimizer]([{"params": weights[i::groups]} for i in range(groups)])

    def step(x):
        chosen.zero_grad()
        loss = (torch.stack(weights) * x).square().mean()
        loss.backward()
        chosen.step()
        return loss.detach()

    recorded = pg.record(step, keep="always")
    for n in range(8):  # RAdam's sixth step takes another branch
        recorded(torch.full((4,), float(n), device=device))
    for player in recorded._shelf:
        player.due = sys.maxsize  # no audit
    return recorded, chosen


def steps_of_the_interpreter(recorded, *xs, but=(TapeProgram.run, KernelNumbers.set)):
    """How many it takes for one replay, without those in some functions."""
    found, left_out = [0], [f.__code__ for f in but]

    def inside(frame):
        while frame is not None and frame.f_code not in left_out:
            frame = frame.f_back
        return frame is not None

    def trace(frame, event, arg):
        if inside(frame):
            return None
        frame.f_trace_opcodes = True
        found[0] += event == "opcode"
        return trace

    before, replayed = sys.gettrace(), pg.stats(recorded).replayed
    sys.settrace(trace)
    try:
        recorded(*xs)
    finally:
        sys.settrace(before)
    assert pg.stats(recorded).replayed == replayed + 1, reasons(recorded)
    return found[0] or sys.maxsize  # (the first time that Python 3.12 is asked for them, it counts none)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c22_a_replay_takes_the_host_as_long_for_many_parameters_as_for_few(device, optimizer, groups):
    x, found = torch.ones(4, device=device), []
    for count in (4, 24):
        recorded, _ = trained(device, optimizer, count, groups)
        found.append(min(steps_of_the_interpreter(recorded, x) for _ in range(ROUND)))
        pg.reset(recorded)
    assert found[0] == found[1]


@pytest.mark.parametrize("optimizer", ["adam", "adamw, foreach", "nadam"])
def test_c22_where_counts_move_the_numbers_are_set_once_and_not_for_each_parameter(device, optimizer, monkeypatch):
    kind = FollowedNumbers if device.type == "cpu" else KernelNumbers
    recorded, chosen = trained(device, optimizer, 24)
    was, given = kind.set, []
    monkeypatch.setattr(kind, "set", lambda self, numbers: given.append(dict(numbers)) or was(self, numbers))
    for _ in range(3):
        recorded(torch.ones(4, device=device))
    assert len(given) == 3, reasons(recorded)
    assert len(given[0]) <= 12  # of 24 parameters
    assert {float(state["step"]) for state in chosen.state.values()} == {11.0}


def test_c22_a_replay_takes_the_host_as_long_for_many_arguments_as_for_few(device):
    found = []
    for count in (2, 12):
        recorded = pg.record(lambda *xs: torch.stack(xs).sum(0), keep="always")
        given = [[torch.full((4,), float(n + i), device=device) for i in range(count)] for n in range(8)]  # all lie elsewhere
        for xs in given:
            recorded(*xs)
        for player in recorded._shelf:
            player.due = sys.maxsize
        runs = TapeProgram.run, GraphProgram.run  # which copy each of them
        found.append(min(steps_of_the_interpreter(recorded, *xs, but=runs) for xs in given))
    assert found[0] == found[1]


def test_c07_memory_that_was_given_back_is_noticed_among_many_arguments(device):
    recorded = pg.record(lambda *xs: torch.stack([x.sum() for x in xs]), keep="always")

    made = []  # all stay, so that none lies where another has been

    def make():
        made.append((torch.ones(2, 3, device=device), torch.ones(8, 2, device=device)[4:, 1], torch.ones(0, device=device)))
        return made[-1]

    for _ in range(4):
        recorded(*make())
    replayed = pg.stats(recorded).replayed
    assert replayed, reasons(recorded)
    for which, nbytes in ((0, 0), (0, 20), (1, 60)):
        xs = make()
        xs[which].untyped_storage().resize_(nbytes)
        assert not recorded._known_calls.find(xs, {})
    xs = make()
    xs[1].untyped_storage().resize_(64)  # as far as its last element
    assert recorded._known_calls.find(xs, {})
