"""C2: generators and devices by every name that a program has for them, states that generators exchange, and what else there
is that draws. A GPU is `cuda:0` and `cuda` here, the CPU `cpu` and `cpu:0`: a generator has the name that it was made with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.pytest_plugin import device_or_skip
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, reasons

GPU = [pytest.param(name, marks=pytest.mark.cuda) for name in ("cuda:0", "cuda")]


@pytest.fixture(params=["cpu", "cpu:0", *GPU])
def device(request) -> torch.device:
    """A device by one of its names."""
    device_or_skip(request.param.partition(":")[0])
    return torch.device(request.param)


@pytest.fixture(params=GPU)
def cuda(request) -> torch.device:
    """The GPU by one of its names."""
    device_or_skip("cuda")
    return torch.device(request.param)


def stands(*generators: torch.Generator) -> list[Any]:
    return [g.get_state() for g in generators]


def default_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


class Sampler:
    """An object of the user's with a generator of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.device = generator.device

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, generator=self.generator, device=self.device)


WAYS: dict[str, Callable[[torch.Generator, torch.device], Callable[[torch.Tensor], torch.Tensor]]] = {
    "closure": lambda g, device: lambda x: x + torch.rand(4, generator=g, device=device),
    "self": lambda g, device: Sampler(g).draw,
    "default": lambda g, device: lambda x, g=g: torch.empty_like(x).uniform_(generator=g) + x,
    "container": lambda g, device: (lambda held: lambda x: x + torch.randn(4, generator=held["g"][0], device=device))(
        {"g": [g]}
    ),
    "in place": lambda g, device: lambda x: x + torch.empty(4, device=device).normal_(generator=g),
    "two draws": lambda g, device: (
        lambda x: torch.bernoulli(x / 2, generator=g) + torch.randperm(4, generator=g, device=device)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_c02_a_generator_by_any_name(device, way):
    mine, live = (torch.Generator(device).manual_seed(5) for _ in range(2))
    function, expected = pg.record(WAYS[way](mine, device), warmup=1), WAYS[way](live, device)
    x, note = torch.ones(4, device=device), None
    for n in range(14):
        assert_same((function(x), stands(mine)), (expected(x), stands(live)))
        if n == 4:
            for g in (mine, live):
                g.manual_seed(9)
        if n == 6:
            note = mine.get_state()
        if n in (8, 10):
            for g in (mine, live):
                g.set_state(note)
        if n in (5, 9):
            assert_same(*(torch.rand(3, generator=g, device=device) for g in (mine, live)))
        if n == 11 and device.type == "cuda":
            for g in (mine, live):
                g.set_offset(64)
    assert counts(function)[2] >= 12, pg.explain(function)


def test_c02_a_generator_as_an_argument_by_any_name(device):
    mine, live = (torch.Generator(device).manual_seed(5) for _ in range(2))
    function = pg.record(lambda x, g: x + torch.rand(4, generator=g, device=device), warmup=1)
    x = torch.ones(4, device=device)
    for _ in range(6):
        assert_same((function(x, mine), stands(mine)), (x + torch.rand(4, generator=live, device=device), stands(live)))
        assert_same(function(x, g=mine), x + torch.rand(4, generator=live, device=device))
    assert counts(function) == (2, 2, 10), pg.explain(function)


def test_c02_two_generators_and_the_default_one_by_turns(device):
    def make(a, b):
        def f(x):
            y = x + torch.rand(4, generator=a, device=device)
            return F.dropout(y, 0.5) + torch.rand(4, generator=b, device=device) * torch.rand_like(x)

        return f

    mine, live = ([torch.Generator(device).manual_seed(n) for n in (5, 5)] for _ in range(2))
    function, expected = pg.record(make(*mine), warmup=1), make(*live)
    x = torch.ones(4, device=device)
    for n in range(9):
        found = []
        for f, generators in ((function, mine), (expected, live)):
            torch.manual_seed(n // 3)
            found.append((f(x), stands(*generators, default_of(device)), torch.rand(2, device=device)))
            if n == 5:
                generators[1].manual_seed(8)
        assert_same(*found)
    assert counts(function) == (1, 1, 8), pg.explain(function)


@pytest.mark.parametrize("own", [True, False])
def test_c02_a_function_without_tensors_that_draws(device, own):
    """Nothing but the operators says where it works."""
    mine, live = (torch.Generator(device).manual_seed(5) if own else None for _ in range(2))
    function = pg.record(lambda: torch.randn(4, generator=mine, device=device), warmup=1)
    found = []
    for f in (function, lambda: torch.randn(4, generator=live, device=device)):
        torch.manual_seed(3)
        found.append([(f(), torch.rand(2, device=device)) for _ in range(8)])
    assert_same(*found)
    assert counts(function)[2] >= 6, pg.explain(function)


@may_run_live
def test_c02_a_call_with_tensors_of_the_host_that_draws_on_the_device(cuda):
    def f(x):
        return (x.to(cuda) * torch.rand(4, device=cuda)).cpu()

    function, found = pg.record(f, warmup=1), []
    for g in (function, f):
        torch.manual_seed(3)
        found.append([(g(torch.ones(4)), torch.rand(2, device=cuda)) for _ in range(6)])
    assert_same(*found)
    assert "works on cuda:0" in reasons(function)


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("default", [False, True])
def test_c02_two_states_of_one_generator(cuda, default, exchanges):
    """As torch tests `graphsafe_set_state`: one draw from a clone of the state, two from the state itself."""

    def made():
        g = default_of(cuda) if default else torch.Generator(cuda)
        g.manual_seed(0)
        return g, g.graphsafe_get_state(), g.clone_state()

    def draw(g, old, new):
        if not exchanges:
            return [torch.rand(5, device=cuda, generator=each) for each in (new, old, old)]
        g.graphsafe_set_state(new)
        first = torch.rand(5, device=cuda, generator=g)
        g.graphsafe_set_state(old)
        return [first, *(torch.rand(5, device=cuda, generator=g) for _ in range(2))]

    found = []
    for record in (True, False):
        states = made()
        closed = lambda states=states: draw(*states)  # noqa: E731
        function = pg.record(closed, warmup=1) if record else closed
        found.append([(function(), [g.get_offset() for g in states]) for _ in range(6)])
        if record:
            assert counts(function)[2] >= 4, pg.explain(function)
    assert_same(*found)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("made", ["cloned", "new"])
@pytest.mark.parametrize("moves", ["set_state", "manual_seed", "set_offset", "draws"])
def test_c02_a_state_that_is_moved_on_between_the_calls(cuda, made, moves, alone):
    """As Transformer Engine's and Megatron's trackers have them. `alone`: nothing is drawn from another."""
    default = default_of(cuda)

    def make(other):
        def f(x):
            own = default.graphsafe_get_state()
            default.graphsafe_set_state(other)
            y = F.dropout(x, 0.5)
            default.graphsafe_set_state(own)
            return y if alone else y + torch.rand_like(x)

        return f

    x, found = torch.ones(64, device=cuda), []
    for record in (True, False):
        torch.manual_seed(1)
        other = default.clone_state() if made == "cloned" else torch.Generator(cuda)
        other.manual_seed(2)
        note = other.get_state()
        function = pg.record(make(other), warmup=1) if record else make(other)
        results = []
        for n in range(9):
            results.append((function(x), other.get_offset(), default.get_offset()))
            if n % 3 == 2:
                move = {
                    "set_state": lambda other=other, note=note: other.set_state(note),
                    "manual_seed": lambda other=other, n=n: other.manual_seed(n),
                    "set_offset": lambda other=other, n=n: other.set_offset(4 * n),
                    "draws": lambda other=other: torch.rand(99, generator=other, device=cuda),
                }
                move[moves]()
        found.append(results)
        if record:
            assert counts(function) == (1, 1, 8), pg.explain(function)
    assert_same(*found)


def test_c02_two_handles_of_one_state_that_get_another_together(cuda):
    def make(one, same):
        return lambda x: x + torch.rand(4, generator=one, device=cuda) * torch.rand(4, generator=same, device=cuda)

    x, found = torch.ones(4, device=cuda), []
    for record in (True, False):
        one = torch.Generator(cuda).manual_seed(1)
        same, other = one.graphsafe_get_state(), one.clone_state()
        function = pg.record(make(one, same), warmup=1) if record else make(one, same)
        results = [(function(x), one.get_offset()) for _ in range(4)]
        for g in (one, same):
            g.graphsafe_set_state(other)
        results += [(function(x), one.get_offset(), other.get_offset()) for _ in range(4)]
        found.append(results)
    assert_same(*found)


@contextlib.contextmanager
def with_state_of(default: torch.Generator, other: torch.Generator) -> Iterator[None]:
    own = default.graphsafe_get_state()
    default.graphsafe_set_state(other)
    try:
        yield
    finally:
        default.graphsafe_set_state(own)


@may_run_live
@pytest.mark.parametrize("around", ["checkpoint", "fork", "state"])
def test_c02_a_place_in_the_numbers_of_another_state(cuda, around):
    """A state that was read while the generator had another's is a place in the numbers of that."""
    default, weight = default_of(cuda), torch.ones(64, device=cuda, requires_grad=True)

    def make(other):
        def f(x):
            y = F.dropout(x, 0.5)
            with with_state_of(default, other):
                if around == "checkpoint":
                    y = checkpoint(lambda h: F.dropout(h * weight, 0.5), y, use_reentrant=False)
                elif around == "fork":
                    with torch.random.fork_rng(devices=[cuda]):
                        y = y + torch.rand_like(x)
                else:
                    state = torch.cuda.get_rng_state(cuda)
                    y = y + torch.rand_like(x)
            if around == "state":
                torch.cuda.set_rng_state(state, cuda)
            y = y + F.dropout(x, 0.5)
            return (y, *torch.autograd.grad(y.sum(), weight)) if around == "checkpoint" else y

        return f

    x, found = torch.ones(64, device=cuda), []
    for record in (True, False):
        torch.manual_seed(1)
        other = default.clone_state().manual_seed(2)
        function = pg.record(make(other), warmup=1) if record else make(other)
        found.append([(function(x), other.get_offset(), default.get_offset()) for _ in range(6)])
    assert_same(*found)


@pytest.mark.parametrize("way", ["fork", "module", "string"])
def test_c02_states_read_and_set_of_a_gpu_by_any_name(cuda, way):
    name = str(cuda) if way == "string" else cuda

    def f(x):
        if way == "fork":
            with torch.random.fork_rng(devices=[name]):
                y = x + torch.rand_like(x)
            return y * torch.rand_like(x)
        module = torch.get_device_module(cuda) if way == "module" else torch.cuda
        state = module.get_rng_state(name)
        y = torch.rand_like(x)
        module.set_rng_state(state, name)
        return y + torch.rand_like(x)

    x, found = torch.ones(64, device=cuda), []
    function = pg.record(f, warmup=1)
    for g in (function, f):
        torch.manual_seed(4)
        found.append([(g(x), torch.rand(2, device=cuda)) for _ in range(6)])
    assert_same(*found)
    assert counts(function) == (1, 1, 5), pg.explain(function)


def test_c07_a_device_by_two_names_is_no_wrong_number(device):
    """As an argument, and as a value that code reads."""
    whole = torch.device(device.type, 0)
    function = pg.record(lambda x, d: x.to(d) + torch.ones(4, device=d) * torch.arange(4.0, device=str(d)), warmup=1)
    for n in range(12):
        assert_same(
            function(torch.full((4,), float(n), device=device), (device, whole)[n % 2]), torch.arange(4.0, device=device) + n
        )
    assert counts(function)[2] >= 8


@may_run_live
def test_c14_the_current_stream_as_any_accelerator_has_it(cuda):
    """`torch.Stream`, and not `torch.cuda.Stream`: a live call that names it stays on it."""
    stream = torch.Stream(device=cuda)

    def f(x):
        torch.cuda._sleep(20_000_000)
        y = x + 1
        with stream:
            return y * 2

    function = pg.record(f, warmup=2)
    for n in range(5):
        with stream:
            found = function(torch.full((1 << 20,), float(n), device=cuda))
        stream.synchronize()
        assert_same(found, torch.full((1 << 20,), 2.0 * (n + 1), device=cuda))


# ---------------------------------------------------------------------------------------------------
# C2: what cuDNN draws by itself, for the dropout of recurrent layers, from where it has begun


def trained(kind: type[nn.RNNBase], device: torch.device, recorded: str, **options: Any) -> Any:
    """Losses, weights and what a generator draws next, after a dozen steps with dropout between the layers."""
    torch.manual_seed(0)
    rnn, head = kind(6, 8, num_layers=2, dropout=0.5).to(device), nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.1)
    if recorded in ("model", "model beside"):
        rnn = pg.record(rnn, **options)
    generator = torch.Generator(device).manual_seed(1)

    def step(x, y):
        optimizer.zero_grad()
        hidden, _ = rnn(x)
        noise = torch.rand(2, generator=generator, device=device).mean()
        loss = F.mse_loss(head(hidden[-1]) + noise, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    function = pg.record(step, **options) if recorded == "step" else step
    beside: Any = lambda x: F.dropout(x, 0.5) + torch.rand(6, generator=generator, device=device)  # noqa: E731
    beside = pg.record(beside, **options) if recorded in ("beside", "model beside") else beside
    losses = []
    for n in range(12):
        x = torch.linspace(-1, 1, 5 * 3 * 6, device=device).reshape(5, 3, 6) * (n + 1)
        losses.append((function(beside(x), torch.ones(3, 1, device=device)), beside(x)))
        if n == 5:
            rnn.eval()
            losses.append(rnn(x)[0].detach())
            rnn.train()
        if n == 8:
            torch.manual_seed(n)
    return losses, [p.detach().clone() for p in optimizer.param_groups[0]["params"]], torch.rand(3, device=device)


@may_run_live
@pytest.mark.parametrize("recorded", ["model", "step", "beside", "model beside"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_c02_recurrent_layers_with_dropout(device, kind, recorded):
    assert_same(trained(kind, device, recorded), trained(kind, device, ""))


@may_run_live
@pytest.mark.parametrize("options", [{"verify": 2}, {"fallback": "split"}, {"warmup": 1}], ids=str)
def test_c02_recurrent_layers_beside_what_is_verified_or_split(device, options):
    assert_same(trained(nn.LSTM, device, "model beside", **options), trained(nn.LSTM, device, ""))
