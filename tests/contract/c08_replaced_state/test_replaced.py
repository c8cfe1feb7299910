"""C8: state outside the arguments is seen where it is written, and noticed where it is replaced."""

import dataclasses
import functools
from collections import deque

import pytest
import torch

import phonograph as pg
from phonograph.testing import Pair
from tests.contract.shared.recognising import Cell, Net, new_like
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, ramp, side_by_side


def net_pair(device, **options):
    def make():
        net = Net(device)
        return lambda x: net(x), net

    return side_by_side(make, **options)


def test_c08_in_place_changes_are_seen_without_a_new_recording(device):
    both = net_pair(device)
    for _ in range(3):
        both(torch.randn(2, 4, device=device))
    for change in [
        lambda net: net.first.weight.mul_(2),
        lambda net: net.shift.add_(1),
        lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
        lambda net: net.layers[0].weight[1].zero_(),
        lambda net: net.gain.data.normal_(),
        lambda net: net.extra[0].fill_(3),
    ]:
        both.change(change)
        assert_replays(both, torch.randn(2, 4, device=device))
    assert counts(both)[:2] == (1, 1)


REPLACEMENTS = {
    "p.data": lambda net: setattr(net.first.weight, "data", new_like(net.first.weight)),
    "p.data of the last layer": lambda net: setattr(net.layers[1].bias, "data", new_like(net.layers[1].bias)),
    "p.data, transposed at one address": lambda net: setattr(net.first.weight, "data", net.first.weight.data.t()),
    "p.set_": lambda net: net.first.weight.set_(new_like(net.first.weight)),
    "swap_tensors": lambda net: torch.utils.swap_tensors(
        net.first.weight, torch.nn.Parameter(new_like(net.first.weight), requires_grad=False)
    ),
    "a new parameter": lambda net: setattr(
        net.first, "weight", torch.nn.Parameter(new_like(net.first.weight), requires_grad=False)
    ),
    "load_state_dict(assign=True)": lambda net: net.load_state_dict(
        {k: new_like(v) for k, v in net.state_dict().items()}, assign=True
    ),
    "to(float64)": lambda net: net.to(torch.float64),
    "to(float64) and back": lambda net: net.to(torch.float64).to(torch.float32),
    "_apply": lambda net: net._apply(lambda t: t * 3),
    "a new buffer": lambda net: setattr(net, "shift", new_like(net.shift)),
    "a buffer's data": lambda net: setattr(net.shift, "data", new_like(net.shift)),
    "a buffer's set_": lambda net: net.shift.set_(new_like(net.shift)),
    "no bias any more": lambda net: setattr(net.first, "bias", None),
    "a tensor in a list": lambda net: net.extra.__setitem__(0, new_like(net.extra[0])),
    "the list of tensors": lambda net: setattr(net, "extra", [new_like(net.extra[0])]),
    "a tensor of another size": lambda net: net.extra.__setitem__(0, net.extra[0][:1] * 5),
    "data of a tensor in a list": lambda net: setattr(net.extra[0], "data", new_like(net.extra[0])),
    "a submodule": lambda net: setattr(net, "first", torch.nn.Linear(4, 4, device=net.shift.device)),
    "a layer in a list": lambda net: net.layers.__setitem__(1, torch.nn.Linear(4, 4, device=net.shift.device)),
    "a layer appended": lambda net: net.layers.append(torch.nn.Linear(4, 4, device=net.shift.device)),
    "a layer removed": lambda net: net.layers.__delitem__(0),
    "layers in another order": lambda net: setattr(net, "layers", torch.nn.ModuleList(list(net.layers)[::-1])),
    "two weights swapped": lambda net: _swap_data(net.first.weight, net.layers[0].weight),
    "vector_to_parameters": lambda net: torch.nn.utils.vector_to_parameters(
        torch.randn(sum(p.numel() for p in net.parameters()), device=net.shift.device), net.parameters()
    ),
    "a parametrization": lambda net: torch.nn.utils.parametrize.register_parametrization(net.first, "weight", Doubling()),
    "pruning": lambda net: prune_half(net.first),
}


def _swap_data(one, other):
    one.data, other.data = other.data, one.data


def prune_half(linear):
    from torch.nn.utils import prune

    prune.custom_from_mask(linear, "weight", (linear.weight > 0).float())


class Doubling(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


@may_run_live
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_c08_replaced_state_is_noticed_before_the_next_replay(device, replace):
    both = net_pair(device)
    with torch.no_grad():
        for _ in range(4):
            both(torch.randn(2, 4, device=device))
        both.change(replace)
        dtype = both.state.first.weight.dtype
        for _ in range(4):
            # An inputs' dtype that no longer fits raises on both sides: that is a result as well.
            both.outcome(torch.randn(2, 4, device=device, dtype=dtype))
            both.outcome(torch.randn(2, 4, device=device))


@pytest.mark.parametrize("name", ["p.data", "a new buffer", "a tensor in a list", "load_state_dict(assign=True)"])
def test_c08_after_a_replacement_it_settles_again(device, name):
    both = net_pair(device)
    assert_settles(both, torch.randn(2, 4, device=device))
    both.change(REPLACEMENTS[name])
    assert_settles(both, torch.randn(2, 4, device=device))


@may_run_live
def test_c08_one_of_very_many_weights_is_replaced(device):
    """Too many to look at each before every replay."""

    def make():
        net = torch.nn.Sequential(*(torch.nn.Linear(2, 2, device=device) for _ in range(100))).requires_grad_(False)
        return lambda x: net(x), net

    both = side_by_side(make)
    for _ in range(3):
        both(torch.randn(2, 2, device=device))
    for i in [99, 0, 57]:
        for change in [
            lambda net, i=i: setattr(net[i].weight, "data", new_like(net[i].weight)),
            lambda net, i=i: setattr(net[i], "bias", torch.nn.Parameter(new_like(net[i].bias), False)),
            lambda net, i=i: net[i].bias.set_(new_like(net[i].bias)),
        ]:
            both.change(change)
            both(torch.randn(2, 2, device=device))


def test_c08_weights_that_alternate_between_two_storages(device):
    both = net_pair(device)
    weights = [Pair.of(torch.randn(4, 4, device=device)) for _ in range(2)]
    for n in range(10):
        both.state.first.weight.data = weights[n % 2].recorded
        both.live_state.first.weight.data = weights[n % 2].live
        both(torch.randn(2, 4, device=device))


def test_c08_a_freed_weight_whose_memory_is_taken_by_another_tensor(device):
    both = net_pair(device)
    taken = []
    for _ in range(8):
        both(torch.randn(2, 4, device=device))
        both.change(lambda net: setattr(net.first.weight, "data", new_like(net.first.weight)))
        taken.append(torch.full((4, 4), float("nan"), device=device))


HOLDERS = {
    "closure": lambda d: _rebinding_closure(d),
    "attribute": lambda d: _with_state(Cell(w=ramp(d, 3)), lambda s, x: x * s.w, lambda s, w: setattr(s, "w", w)),
    "deep attribute": lambda d: _with_state(
        Cell(a=Cell(b=Cell(w=ramp(d, 3)))), lambda s, x: x * s.a.b.w, lambda s, w: setattr(s.a.b, "w", w)
    ),
    "dictionary": lambda d: _with_state({"w": ramp(d, 3)}, lambda s, x: x * s["w"], lambda s, w: s.update(w=w)),
    "list": lambda d: _with_state([ramp(d, 3)], lambda s, x: x * s[0], lambda s, w: s.__setitem__(0, w)),
    "nested containers": lambda d: _with_state(
        {"l": [(ramp(d, 3),)]}, lambda s, x: x * s["l"][0][0], lambda s, w: s["l"].__setitem__(0, (w,))
    ),
    "deque": lambda d: _with_state(deque([ramp(d, 3)]), lambda s, x: x * s[0], lambda s, w: s.__setitem__(0, w)),
    "dataclass": lambda d: _with_state(Prompt(ramp(d, 3)), lambda s, x: x * s.value, lambda s, w: setattr(s, "value", w)),
    "slots": lambda d: _with_state(Slotted(ramp(d, 3)), lambda s, x: x * s.w, lambda s, w: setattr(s, "w", w)),
}


@dataclasses.dataclass
class Prompt:
    value: torch.Tensor


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def __eq__(self, other):
        return True

    __hash__ = None


def _with_state(state, compute, replace):
    return (lambda x: compute(state, x)), Cell(replace=functools.partial(replace, state))


def _rebinding_closure(device):
    w = ramp(device, 3)

    def replace(new):
        nonlocal w
        w = new

    return (lambda x: x * w), Cell(replace=replace)


@may_run_live
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_c08_a_tensor_that_is_replaced_where_the_function_finds_it(device, holder):
    both = SideBySideOfCells(lambda: holder(device))
    for n in range(8):
        both(ramp(device, 3))
        if n > 2:
            both.replace(lambda n=n: ramp(device, 3, start=n))
            both(ramp(device, 3))


class SideBySideOfCells:
    """`side_by_side` where the state is reached through its `replace` only."""

    def __init__(self, make):
        self.cells = []

        def remembering():
            function, cell = make()
            self.cells.append(cell)
            return function

        self.both = side_by_side(remembering)

    def __call__(self, *args):
        return self.both(*args)

    def replace(self, new):
        for cell in self.cells:
            cell.replace(new())


GLOBAL_TENSOR = torch.zeros(3)


def test_c08_a_global_tensor_is_replaced(device, monkeypatch):
    f = pg.record(lambda x: x + GLOBAL_TENSOR, warmup=1)
    for n in range(8):
        monkeypatch.setitem(globals(), "GLOBAL_TENSOR", torch.full((3,), float(n // 2), device=device))
        assert f(torch.ones(3, device=device)).tolist() == [1.0 + n // 2] * 3


@may_run_live
def test_c08_state_that_is_created_by_the_first_call(device):
    def make():
        cache = {}

        def f(x):
            if "w" not in cache:
                cache["w"] = x * 2
            return x + cache["w"]

        return f, cache

    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 3, start=n))
    both.change(lambda cache: cache.clear())
    for n in range(4):
        both(ramp(device, 3, start=n))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_c08_hooks_that_come_and_go(device, register):
    def hook(module, *inputs_and_outputs):
        last = inputs_and_outputs[-1]
        return tuple(t * 3 for t in last) if isinstance(last, tuple) else last * 3

    both = net_pair(device)
    handles = []
    for n in range(12):
        if n == 4:
            both.change(lambda net: handles.append(getattr(net.first, register)(hook)))
        if n == 8:
            for handle in handles:
                handle.remove()
        both(torch.randn(2, 4, device=device))


@may_run_live
def test_c08_a_global_module_hook(device):
    both = net_pair(device)
    for n in range(9):
        if n == 3:
            handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 2)
        if n == 6:
            handle.remove()
        both(torch.randn(2, 4, device=device))


def test_c08_a_lora_swap(device):
    class Lora(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(4, 4, device=device)
            self.adapters = {name: torch.randn(2, 4, 4, device=device) for name in ("a", "b")}
            self.active = "a"
            self.requires_grad_(False)

        def forward(self, x):
            down, up = self.adapters[self.active]
            return self.base(x) + x @ down @ up

    def make():
        net = Lora()
        return net.forward, net

    both = side_by_side(make)
    for active in "aaabbbabab":
        both.change(lambda net, active=active: setattr(net, "active", active))
        both(torch.randn(2, 4, device=device))
    both.change(lambda net: net.adapters.update(b=torch.randn(2, 4, 4, device=device)))
    both(torch.randn(2, 4, device=device))
