"""C9, C11: hooks around warm-ups and captures, and what is refused at once."""

import gc
import inspect
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

import phonograph as pg
from phonograph.testing import assert_same
from phonograph.wrappers import callables as room
from tests.contract.shared.callables import X, beside, counts, grads, perceptron
from tests.helpers import may_run_live, ramp

LIVE = ["forward_pre", "forward", "backward_pre", "backward"]


def noting(seen, returned=None):
    """Hooks of all kinds that note what they are called with."""

    def note(kind):
        def hook(owner, *args):
            from phonograph.engine.current_capture import recording_here

            assert not recording_here()
            seen.append((kind, owner, tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)))
            return returned

        return hook

    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return {kind: {"any name": note(kind.removesuffix("_hooks"))} for kind in kinds}


def test_c09_hooks_run_around_warm_ups_and_captures_only(device):
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([perceptron(device)])
    seen = []
    pg.make_graphed_callables(ours, (torch.ones(4, 8, device=device),), 2, capture_time_hooks=[noting(seen)])
    expected = [LIVE, LIVE, LIVE, LIVE[2:], [], []]  # the recorded backward is captured one call later
    for n, kinds in enumerate(expected):
        found = []
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.zero_grad()
            x, g = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(4, 8, device=device)
            out = m(x)
            out.backward(g)
            found.append((out, x.grad, grads([m])))
        assert_same(*found)
        assert [kind for kind, _, _ in seen] == kinds
        assert all(owner is ours for _, owner, _ in seen)
        got = {kind: args for kind, _, args in seen}
        seen.clear()
        if "forward" in got:
            (result, _, _), _ = found
            assert_same(got["forward_pre"][0][0].detach(), x.detach())
            assert_same([got["forward"][0][0].detach(), got["forward"][1]], [x.detach(), result.detach()])
        if "backward" in got:
            assert_same([tuple(got["backward_pre"][0]), tuple(map(tuple, got["backward"]))], [(g,), ((x.grad,), (g,))])


def test_c09_hooks_that_get_keyword_arguments(device):
    seen = []
    hooks = {
        "forward_pre_hooks": {0: lambda f, args, kwargs: seen.append((args, kwargs)), 1: lambda f, args: seen.append(args)},
        "forward_pre_hooks_with_kwargs": {0: True},
        "forward_hooks": {0: lambda f, args, kwargs, out: seen.append(kwargs), "b": lambda f, args, out: seen.append(out)},
        "forward_hooks_with_kwargs": {0: True},
    }
    double = pg.make_graphed_callables(lambda x, *, scale: x * scale, (X,), 1, sample_kwargs={"scale": 2.0},
                                       capture_time_hooks=hooks)  # fmt: skip
    x = ramp(device, 4, 8)
    out = double(x, scale=2.0)
    assert_same(seen, [((x,), {"scale": 2.0}), (x,), {"scale": 2.0}, out])


def test_c09_hooks_with_several_forwards_in_flight(device):
    """Each belongs to its own call: pre and post of one backward come together, in the order of the backwards."""
    seen = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), 3, capture_time_hooks=noting(seen))
    outs = [net(ramp(device, 4, 8) + n) for n in range(3)]
    seen.clear()
    given = [torch.full((4, 8), float(n), device=device) for n in range(3)]
    for out, g in zip(outs, given, strict=True):
        out.backward(g)
    assert [kind for kind, _, _ in seen] == ["backward_pre", "backward"] * 3
    assert_same([args[0][0] for kind, _, args in seen if kind == "backward_pre"], given)


def test_c09_hooks_run_around_the_first_backward_of_a_call(device):
    seen = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    pg.make_graphed_callables(net, (X,), 1, capture_time_hooks=noting(seen))
    for _ in range(2):
        loss = net(ramp(device, 4, 8)).sum()
        seen.clear()
        for _ in range(3):
            loss.backward(retain_graph=True)
        assert [kind for kind, _, _ in seen] == LIVE[
            2:
        ]  # of the second call, which was captured, around the backward's capture


class Parts(nn.Module):
    """Several results: one leads to the other, and one has parameters of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        h = self.first(x)
        return h, self.second(h.tanh()) + y, self.third(y) * x


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_c09_hooks_of_a_call_with_several_results(device, used):
    """In a live call as in a recorded one: each once, with the gradients of the results and of both arguments."""
    seen, net = [], Parts().to(device)
    pg.make_graphed_callables(net, (X, X), 1, capture_time_hooks=noting(seen))
    for _ in range(2):
        x, y = (ramp(device, 4, 8).requires_grad_() for _ in range(2))
        out = net(x, y)
        seen.clear()
        given = [torch.full((4, 8), 1.0 + i, device=device) for i in range(3)]
        torch.autograd.backward([out[i] for i in used], [given[i] for i in used])
        assert [kind for kind, _, _ in seen] == LIVE[2:]
        of_arguments, of_results = seen[1][2]
        assert_same(of_arguments, (x.grad, y.grad))
        plain = [i for i in used if i > 0 or 1 not in used]  # what leads to another result has more of a gradient in eager
        assert_same([of_results[i] for i in plain], [given[i] for i in plain])


def test_c17_a_warm_up_with_hooks_whose_backward_never_runs(device):
    for make in (lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Parts):
        net = make().to(device)
        pg.make_graphed_callables(net, (X, X)[: 2 if make is Parts else 1], 3, capture_time_hooks=noting([]))
        args = [ramp(device, 4, 8).requires_grad_() for _ in range(2 if make is Parts else 1)]
        net(*args)
        gone = weakref.ref(net)
        del net
        gc.collect()
        assert gone() is None


def test_c09_hooks_that_prepare_the_weights(device):
    """What they are for: weights are in place for a run and a capture only, as with those that are gathered and freed."""
    net = nn.Linear(8, 8).to(device)
    full, log = net.weight.detach().clone(), []

    def gather(module, *_):
        module.weight.data.copy_(full)
        log.append("gather")

    def free(module, *_):
        module.weight.data.zero_()
        log.append("free")

    hooks = {"forward_pre_hooks": {0: gather}, "forward_hooks": {0: free},
             "backward_pre_hooks": {0: gather}, "backward_hooks": {0: free}}  # fmt: skip
    free(net)
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), 1, capture_time_hooks=[hooks])
    for n in range(5):
        x = (ramp(device, 4, 8) + n).requires_grad_()
        around = len(log)
        if n >= 2:  # at a replay it is the caller's business
            gather(net)
        net(x).sum().backward()
        assert_same(x.grad, full.sum(0).expand(4, 8).contiguous(), "", tolerance=1e-6)
        assert log[around:].count("gather") == {0: 2, 1: 2}.get(n, 1)
        free(net)


@may_run_live
def test_c12_hooks_come_in_pairs_where_a_capture_fails(device):
    seen = []
    live = pg.make_graphed_callables(lambda x: x * x.sum().item(), (X,), 1, capture_time_hooks=noting(seen))
    for _ in range(6):
        live(ramp(device, 4, 8))
    kinds = [kind for kind, _, _ in seen]
    assert len(kinds) >= 4
    assert kinds == ["forward_pre", "forward"] * (len(kinds) // 2)
    assert pg.stats(live).live == 6


@pytest.mark.parametrize("kind", ["forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"])
@pytest.mark.parametrize("warmup", [1, 0])
def test_c13_a_hook_that_returns_something_is_an_error(device, kind, warmup):
    net = nn.Linear(8, 8).to(device)
    hooks = {kind: {0: lambda *args: args}}
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), warmup, capture_time_hooks=[hooks])
    with pytest.raises(RuntimeError, match="must return None"):
        net(ramp(device, 4, 8).requires_grad_()).sum().backward()


def test_c13_an_exception_of_a_hook_reaches_the_caller(device):
    def fail(*_):
        raise KeyError("mine")

    f = pg.make_graphed_callables(torch.sin, (X,), 1, capture_time_hooks={"forward_pre_hooks": {0: fail}})
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            f(ramp(device, 4, 8))


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_c01_hooks_before_and_after_all_warm_ups(device, iterations):
    """Once each: before the first warm-up of any, after the last of all."""
    events = []
    nets = [nn.Linear(8, 8).to(device) for _ in range(2)]
    for i, net in enumerate(nets):
        net.register_forward_hook(lambda *_, i=i: events.append(i) if not pg.stats(nets[i]).recorded else None)
    x = ramp(device, 4, 8)
    pg.make_graphed_callables(tuple(nets), ((x,), (x,)), iterations, pre_warmup_hook=lambda: events.append("before"),
                              post_warmup_hook=lambda: events.append("after"))  # fmt: skip
    if iterations == 0:
        assert events == ["before", "after"]
        return
    assert events == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)  # the forward hook appends
        for _ in range(iterations):
            nets[1](nets[0](x))
    assert events == ["before", *[0, 1] * iterations, "after"]


# ---------------------------------------------------------------------------------------------------
# What is refused at once


def none(*_):
    """Takes anything."""


LINEAR = nn.Linear(8, 8)


ONE, TWO = (LINEAR, (X,)), ((LINEAR, F.mse_loss), ((X,), (X, X)))


WRONG = {
    "a list of callables": (([LINEAR], (X,)), {}, TypeError, "not list"),
    "no callables": (((), ()), {}, ValueError, "empty"),
    "not a function": ((("x",), ((X,),)), {}, TypeError, "not str"),
    "a tensor for a tuple": ((LINEAR, X), {}, TypeError, "sample_args"),
    "tensors for tuples": (((LINEAR,), (X,)), {}, TypeError, "sample_args"),
    "samples for some": ((TWO[0], ((X,),)), {}, ValueError, "sample_args has 1 entries and must have 2"),
    "too many arguments": ((LINEAR, (X, X)), {}, TypeError, "sample 0 does not fit"),
    "too few arguments": ((LINEAR, ()), {}, TypeError, "sample 0 does not fit"),
    "keywords for some": (TWO, {"sample_kwargs": ({},)}, ValueError, "sample_kwargs has 1"),
    "keywords that are none": (ONE, {"sample_kwargs": {1: X}}, TypeError, "sample_kwargs"),
    "an unknown keyword": (ONE, {"sample_kwargs": {"shift": X}}, TypeError, "sample 0 does not fit"),
    "fewer than no warm-ups": (ONE, {"num_warmup_iters": -1}, ValueError, "num_warmup_iters"),
    "half a warm-up": (ONE, {"num_warmup_iters": 0.5}, TypeError, "num_warmup_iters"),
    "a flag": (ONE, {"allow_unused_input": None}, TypeError, "allow_unused_input"),
    "a pool": (ONE, {"pool": "mine"}, TypeError, "pool"),
    "reuse without an order": (ONE, {"_reuse_graph_input_output_buffers": True}, ValueError, "_order"),
    "chunks without an order": (ONE, {"_num_layers_per_chunk": [1]}, ValueError, "_order"),
    "hooks for some": (TWO, {"capture_time_hooks": [{}]}, ValueError, "capture_time_hooks has 1"),
    "hooks of another kind": (ONE, {"capture_time_hooks": [{"forwards": {}}]}, ValueError, "forwards"),
    "hooks that are no dict": (ONE, {"capture_time_hooks": [[none]]}, TypeError, "dict"),
    "hooks without names": (ONE, {"capture_time_hooks": {"forward_hooks": none}}, TypeError, "forward_hooks"),
    "hooks that are no functions": (ONE, {"capture_time_hooks": {"backward_hooks": {0: 1}}}, TypeError, "backward_hooks"),
    "hooks for one callable twice": (
        ((LINEAR, LINEAR), ((X,), (X,))), {"capture_time_hooks": [None, {"forward_hooks": {0: none}}]}, ValueError, "twice",
    ),
    "a warm-up hook": (ONE, {"pre_warmup_hook": 1}, TypeError, "pre_warmup_hook"),
    "warm-ups twice": (ONE, {"warmup": 1}, TypeError, "warmup"),
    "an unknown option": (ONE, {"num_warmups": 1}, TypeError, "num_warmups"),
    "an option of pg.record": (ONE, {"fallback": "eager"}, ValueError, "fallback"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "kind", "says"), WRONG.values(), ids=WRONG)
def test_c11_wrong_arguments_are_refused_at_once(args, options, kind, says):
    with pytest.raises(kind, match=says):
        pg.make_graphed_callables(*args, **options)
    with pytest.raises(TypeError, match=r"pg\.record"):
        pg.stats(LINEAR)  # and nothing was recorded


WRONG_ORDERS = {
    "fractions": ([1, 1.5, -1, -1.5], 1, TypeError, "ints"),
    "bools": ([True, -1], 1, TypeError, "ints"),
    "zero": ([1, 0, -1], 1, ValueError, "same number"),
    "empty": ([], 1, ValueError, "same number"),
    "forwards only": ([1, 1], 1, ValueError, "same number"),
    "a backward too few": ([1, 1, -1], 1, ValueError, "same number"),
    "a chunk left out": ([1, 3, -3, -1], 2, ValueError, "same number"),
    "a chunk with more": ([1, 2, 2, -2, -2, -1], 2, ValueError, "same number"),
    "backward first": ([1, -1, -1, 1], 1, ValueError, "before its forward"),
    "callables that cannot be shared out": ([1, 2, -2, -1], 3, ValueError, "whole number"),
}


@pytest.mark.parametrize(("order", "callables", "kind", "says"), WRONG_ORDERS.values(), ids=WRONG_ORDERS)
def test_c11_an_order_that_is_none(order, callables, kind, says):
    with pytest.raises(kind, match=says):
        pg.make_graphed_callables((LINEAR,) * callables, ((X,),) * 12, _order=order)


@pytest.mark.parametrize(("layers", "kind"), [([1, 1], ValueError), ([3], ValueError), ([0, 3], ValueError), (2, ValueError),
                                              ([1.5, 1.5], TypeError), ("12", TypeError)])  # fmt: skip
def test_c11_layers_of_chunks_that_do_not_agree(layers, kind):
    with pytest.raises(kind, match="_num_layers_per_chunk"):
        pg.make_graphed_callables((LINEAR,) * 3, ((X,),) * 3, _order=[1, 2, -2, -1], _num_layers_per_chunk=layers)


def test_c11_samples_of_an_order():
    """One for each layer and micro-batch: by chunk, in these by micro-batch, in these by layer."""
    one, two = nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
    samples, order = [(X,), (X, X), (X, X), (X,), (X, X), (X, X)], [1, 1, -1, -1]
    made = pg.make_graphed_callables((one, two, two), samples, _order=order)
    assert made == (one, two, two) * 2
    layers = nn.Linear(8, 8), nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
    made = pg.make_graphed_callables(layers, [(X,)] * 4 + [(X, X)] * 2, _order=[1, 2, 1, 2, -2, -2, -1, -1],
                                     _num_layers_per_chunk=[2, 1])  # fmt: skip
    assert made == (*layers[:2], *layers[:2], layers[2], layers[2])
    with pytest.raises(ValueError, match="must have 6"):
        pg.make_graphed_callables((one, two, two), samples[:3], _order=order)
    with pytest.raises(TypeError, match="sample 1 does not fit"):
        pg.make_graphed_callables((one, two, two), sorted(samples, key=len), _order=order)


LOW_PRECISION = sorted(room._TRANSFORMER_ENGINE)


@pytest.mark.parametrize("option", LOW_PRECISION)
def test_c11_options_of_a_library_that_is_not_installed(option, monkeypatch):
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"{option}.*Transformer Engine, which is not installed"):
        pg.make_graphed_callables(*ONE, **{option: True})
    monkeypatch.setattr(room, "find_spec", lambda name: object())
    with pytest.raises(NotImplementedError, match=option):
        pg.make_graphed_callables(*ONE, **{option: True})
    net = nn.Linear(8, 8)
    assert pg.make_graphed_callables(net, (X,), **{option: False}) is net


def test_the_signature_begins_as_torchs_does():
    """As that of a later release: what an earlier one does not have yet comes last."""
    ours = list(inspect.signature(pg.make_graphed_callables).parameters.values())
    theirs = list(inspect.signature(torch.cuda.make_graphed_callables).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    others = [p.name for p in ours[len(theirs) :] if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    assert others in ([], ["capture_error_mode", "enable_annotations"])


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_mode_of_capturing(device, mode):
    x = torch.ones(3, device=device)
    f = pg.make_graphed_callables(lambda x: x * 2, (x,), 1, False, None, mode)
    for n in range(3):
        assert_same(f(x + n), (x + n) * 2)
    assert counts(f) == (1, 1, 2)


def test_what_is_no_mode_and_annotations():
    with pytest.raises(ValueError, match="capture_error_mode must be one of global, thread_local, relaxed, not 'local'"):
        pg.make_graphed_callables(lambda x: x, (torch.ones(1),), capture_error_mode="local")
    with pytest.raises(TypeError, match="enable_annotations must be a bool"):
        pg.make_graphed_callables(lambda x: x, (torch.ones(1),), enable_annotations=1)
    with pytest.raises(NotImplementedError, match="does not annotate kernels"):
        pg.make_graphed_callables(lambda x: x, (torch.ones(1),), enable_annotations=True)
