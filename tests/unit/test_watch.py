"""What watches the operators of a capture."""

import gc
import sys
import weakref

import torch
import torch._dynamo.eval_frame

import phonograph as pg
from phonograph._torch.dynamo import ran_compiled
from phonograph.aten.autocast import Casts
from phonograph.capture.breaks import Break
from phonograph.capture.dispatch import OperatorWatch
from phonograph.capture.followed_counts import FollowedCounts
from phonograph.capture.live_results import Form
from phonograph.devices.cpu.device import CpuDevice
from phonograph.guards import attribute_effects
from phonograph.guards.reachable import Reach


def test_it_goes_with_its_capture():
    """Not only when garbage is collected: it has noted tensors, gradients among them, which would seem to be held so long."""
    x = torch.ones(3)
    gc.disable()
    try:
        watch = OperatorWatch(torch.device("cpu"), Reach([("x", x)], frozenset()), [])
        with watch:
            made = x.mul_(2) + 1
        assert list(watch.written.values())
        ref = weakref.ref(watch)
        del watch
        assert ref() is None
    finally:
        gc.enable()
    assert made[0] == 3


def test_it_knows_whether_such_a_call_has_run_live_before(monkeypatch):
    """What two ranks alone share must not begin in a capture."""
    said: list[bool] = []
    monkeypatch.setattr(
        OperatorWatch, "warm", property(lambda self: True, lambda self, value: said.append(value)), raising=False
    )
    for warmup, before in [(0, False), (1, True)]:
        said.clear()
        recorded = pg.record(lambda x: x * 2, warmup=warmup)
        for _ in range(warmup + 1):
            recorded(torch.ones(3))
        assert pg.stats(recorded).recorded == 1
        assert said[1:] == [before]  # the first is what it is made with


def test_what_a_segment_has_launched_is_known_at_its_end():
    """What has an operator is told from what has none before the next segment begins."""

    class Watch(OperatorWatch):
        def cut(self, part, inputs, results):
            self.unnamed = self.origins.unnamed(5)

    watch = Watch(torch.device("cpu"), Reach([], frozenset()), [])
    watch.origins.note("aten::mul", 0, 4, sys._getframe(), None)
    watch.interrupt(Break(Form(torch.ops.aten.nonzero.default, None, ()), None, [], ""), "live", [], [], [])
    assert [*map(list, watch.unnamed)] == [[4]]
    assert [*map(list, watch.origins.unnamed(1))] == [[0]]


def trained(count):
    """A training step of so many parameters and operators, a rate of which is followed."""
    weights = torch.nn.ParameterList([torch.ones(4) for _ in range(count)])
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step(x):
        optimizer.zero_grad()
        for w in weights:
            x = torch.tanh(x * w)
        x.sum().backward()
        optimizer.step()
        return x.detach()

    return step


def counted(monkeypatch, owner, name, result=len):
    """Where calls of a function are counted from now on: what `result` makes of their arguments."""
    plain, calls = getattr(owner, name), []

    def counting(*args, **kwargs):
        calls.append(result(args))
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    return calls


def first_recording(step):
    recorded = pg.record(step, warmup=1)
    for _ in range(2):
        recorded(torch.ones(4))
    assert pg.stats(recorded).recorded == 1
    return recorded


def test_a_first_recording_runs_the_call_once_in_a_capture(monkeypatch):
    captures = counted(monkeypatch, CpuDevice, "capture")
    first_recording(trained(3))
    assert len(captures) == 1


def test_an_operators_arguments_are_searched_for_followed_numbers_only_where_all_its_tensors_stay_the_same(monkeypatch):
    """(Nothing comes of the search where one of them is another in each replay: most operators work on what the call made.)"""
    searched = counted(monkeypatch, FollowedCounts, "stands_among")
    calls = []
    for count in (4, 24):
        searched.clear()
        first_recording(trained(count))
        calls.append(len(searched))
    assert calls[0] == calls[1]


def test_an_operator_gets_a_context_only_where_what_it_calls_goes_another_way(monkeypatch):
    contexts = counted(monkeypatch, Casts, "as_called")
    first_recording(trained(3))
    assert not contexts

    def called_whole(x):  # as torch shows it to a mode in inference mode
        with torch.inference_mode():
            return torch.matmul(x.view(2, 2), x.view(2, 2)).clone()

    first_recording(called_whole)
    assert contexts


def test_a_list_is_compared_once_and_not_for_each_of_its_elements(monkeypatch):
    compared = counted(monkeypatch, attribute_effects, "_is_same")
    calls = []
    for count in (4, 24):
        compared.clear()
        first_recording(trained(count))
        calls.append(len(compared))
    assert calls[0] == calls[1]


def test_code_that_ran_is_known_by_its_identity(monkeypatch):
    """The hash of a code object goes through all its instructions."""

    class Code:
        __hash__ = None

    assert not ran_compiled([Code()])
    compiled = torch._dynamo.eval_frame._TorchDynamoContext.__call__.__code__
    assert ran_compiled([Code(), compiled])
