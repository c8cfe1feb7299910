"""Random programs, their interpreter, and the comparison with eager.

A `Program` is plain data: a few functions, each a list of instructions over tensors, and a list of actions that calls
them, holds and drops their results, and changes the world in between. Its `repr` is Python, so a failing one can be
pasted into a test. `run` executes it with plain or with recorded functions and notes after each action everything that
can be seen; `check` compares the two notes bit by bit.

Instructions are total: whatever their operands are, they compute something (operands that do not fit are reduced to
one number first). So any list of instructions is a program, and any part of one is, which makes shrinking easy. Some
raise all the same, for instance when they write an expanded tensor; then both runs must raise the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.engine import recorder
from phonograph.testing import aliasing, assert_same

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
MAX_ELEMENTS = 64
MAX_HELD = 8
MAX_ACTIONS = 28


# ---------------------------------------------------------------------------------------------------
# Programs as data


class Instruction(NamedTuple):
    """`op` on the values numbered a and b (modulo how many there are), with a small number k; on a GPU, on one of the streams
    that the function has besides the caller's (0)."""

    op: str
    a: int
    b: int = 0
    k: int = 1
    stream: int = 0


class Function(NamedTuple):
    """Instructions, and which values are returned in what form."""

    instructions: tuple[Instruction, ...]
    returns: tuple[int, ...] = (-1,)
    form: str = "one"


class Fresh(NamedTuple):
    """A new input."""

    shape: tuple[int, ...] = (4,)
    dtype: str = "f32"
    layout: str = "plain"


class Held(NamedTuple):
    """A result that is held, counted from the last one; a fresh input if there is none."""

    back: int


class Same(NamedTuple):
    """The first input once more."""


class Call(NamedTuple):
    function: int
    inputs: tuple[Fresh | Held | Same, ...] = (Fresh(),)
    scalar: float | int | bool = 2.0
    mode: str = "plain"
    hold: tuple[int, ...] = ()


class Drop(NamedTuple):
    """Let go of a held result."""

    back: int


class Mutate(NamedTuple):
    """The owner of a held result writes it."""

    back: int


class KeepGradient(NamedTuple):
    """Hold the gradient that the functions accumulate."""


class Change(NamedTuple):
    """Change the state outside; see CHANGES."""

    what: str


class Reset(NamedTuple):
    """`pg.reset` on the recorded side."""

    function: int


Action = Call | Drop | Mutate | KeepGradient | Change | Reset


@dataclasses.dataclass(frozen=True)
class Program:
    functions: tuple[Function, ...]
    actions: tuple[Action, ...]
    seed: int = 0
    warmup: int = 1
    max_recordings: int = 16
    copied: int = 0  # bytes of results up to which they are copied out
    split: bool = False  # recorded in segments


# ---------------------------------------------------------------------------------------------------
# The state that all functions of a program share


OFFSET = 0.5  # which functions read as a global variable


class Cell:
    """A variable of a closure."""

    def __init__(self) -> None:
        number = 0.75

        def read() -> float:
            return number

        def write(new: float) -> None:
            nonlocal number
            number = new

        self.read, self.write = read, write


class State(torch.nn.Module):
    """Weights, a buffer, and Python values; only `trained` requires grad, and only whole steps use it."""

    bias = 0.5

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        values = torch.arange(16, dtype=torch.float32).reshape(4, 4) / 8 - 1
        self.matrix = torch.nn.Parameter(values.to(device), requires_grad=False)
        self.vector = torch.nn.Parameter(values[1].clone().to(device), requires_grad=False)
        self.trained = torch.nn.Parameter(values[2].clone().to(device))
        self.register_buffer("total", torch.zeros(4, device=device))
        self.scale: float = 0.5
        self.flag = False
        self.count = 0
        self.beta = 1.0
        self.kind = "relu"
        self.levels = [0.25, 0.5]
        self.rates = {"a": 0.25, "b": 0.5}
        self.sizes = (1, 2)
        self.inner = SimpleNamespace(depth=1, next=SimpleNamespace(width=0.5))
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.cell = Cell()
        self.drop = torch.nn.Dropout(0.25)
        State.bias = 0.5
        globals()["OFFSET"] = 0.5

    def values(self) -> tuple[Any, ...]:
        """The Python values."""
        return (self.scale, self.flag, self.training, self.count, self.beta, self.kind, *self.levels, *self.rates.items(),
                *self.sizes, self.inner.depth, self.inner.next.width, self.activation, self.cell.read(), self.drop.p, self.bias,
                OFFSET)  # fmt: skip


def _new_values(t: torch.Tensor) -> torch.Tensor:
    return t.flip(0).clone() * 0.75 + 0.125


CHANGES: dict[str, Callable[[State], object]] = {
    "scale": lambda s: setattr(s, "scale", 1.5 - s.scale),
    "scale, int": lambda s: setattr(s, "scale", 1),
    "flag": lambda s: setattr(s, "flag", not s.flag),
    "train": lambda s: s.train(not s.training),
    "vector.data": lambda s: setattr(s.vector, "data", _new_values(s.vector)),
    "matrix.data": lambda s: setattr(s.matrix, "data", _new_values(s.matrix)),
    "matrix transposed": lambda s: setattr(s.matrix, "data", s.matrix.data.t()),
    "new parameter": lambda s: setattr(s, "vector", torch.nn.Parameter(_new_values(s.vector), requires_grad=False)),
    "new buffer": lambda s: setattr(s, "total", _new_values(s.total)),
    "in place": lambda s: s.matrix.mul_(-1),
    "load_state_dict": lambda s: s.load_state_dict({k: _new_values(v) for k, v in s.state_dict().items()}),
    "assign": lambda s: s.load_state_dict({k: _new_values(v) for k, v in s.state_dict().items()}, assign=True),
    "gradient to none": lambda s: setattr(s.trained, "grad", None),
    "gradient to zero": lambda s: s.trained.grad is None or s.trained.grad.zero_(),
    "freeze": lambda s: s.trained.requires_grad_(not s.trained.requires_grad),
    "draw": lambda s: torch.rand(3, device=s.total.device),
    "seed": lambda s: torch.manual_seed(99),
}

PYTHON: dict[str, Callable[[State], object]] = {
    "anneal": lambda s: setattr(s, "beta", s.beta * 0.75),
    "global": lambda s: globals().__setitem__("OFFSET", 1.25 - OFFSET),
    "class": lambda s: setattr(State, "bias", 1.25 - State.bias),
    "closure": lambda s: s.cell.write(1.25 - s.cell.read()),
    "entry of a list": lambda s: s.levels.__setitem__(1, 1.25 - s.levels[1]),
    "list": lambda s: setattr(s, "levels", s.levels[::-1]),
    "longer list": lambda s: s.levels.append(0.125),
    "entry of a dict": lambda s: s.rates.__setitem__("a", 1.25 - s.rates["a"]),
    "new key": lambda s: s.rates.setdefault("c", 3.0),
    "tuple": lambda s: setattr(s, "sizes", s.sizes[::-1]),
    "attribute": lambda s: setattr(s.inner, "depth", 3 - s.inner.depth),
    "deep attribute": lambda s: setattr(s.inner.next, "width", s.inner.next.width + 0.25),
    "new object": lambda s: setattr(s.inner, "next", SimpleNamespace(width=1.25 - s.inner.next.width)),
    "text": lambda s: setattr(s, "kind", "tanh" if s.kind == "relu" else "relu"),
    "function": lambda s: setattr(s, "activation", torch.relu if s.activation is torch.tanh else torch.tanh),
    "probability": lambda s: setattr(s.drop, "p", 0.75 - s.drop.p),
    "eval of a part": lambda s: s.drop.train(not s.drop.training),
}
"""Changes of Python state."""
CHANGES |= PYTHON


# ---------------------------------------------------------------------------------------------------
# Instructions


def _fit(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """b, or one number made of it where it does not broadcast to a's shape. (Functions with an except clause are not recorded
    in segments.)"""
    sizes = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return b if b.dim() <= a.dim() and all(m in (1, n) for n, m in sizes) else b.sum()


def _matmul(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """Of multiples of 1/8, so that the sums are exact: which kernel adds in which order depends on alignment."""
    exact = (a.clamp(-64, 64) * 8).round() / 8
    return exact @ s.matrix.to(a.dtype) if a.dim() and a.shape[-1] == 4 else exact


def _grad_step(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """Forward, backward and an update of the vector."""
    if torch.is_inference_mode_enabled():
        return a
    with torch.enable_grad():
        w = s.vector.detach().requires_grad_()
        loss = torch.tanh(w * a.detach().sum().to(w.dtype)).square().mean()
        (gradient,) = torch.autograd.grad(loss, w)
    s.vector.data.sub_(gradient, alpha=0.25)
    return loss.detach()


def _backward(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """Accumulates into the gradient of `trained`."""
    if torch.is_inference_mode_enabled() or not s.trained.requires_grad:
        return a
    with torch.enable_grad():
        loss = torch.tanh(s.trained * a.detach().sum().to(s.trained.dtype)).square().sum()
        loss.backward()
    return loss.detach()


def _descend(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """A step of gradient descent, after which the gradient is zeroed, dropped or left."""
    if s.trained.grad is not None:
        with torch.no_grad():
            s.trained.sub_(s.trained.grad, alpha=0.25)
        if k == 1:
            s.trained.grad = None
        elif k == 2:
            s.trained.grad.zero_()
    return a + s.trained.detach().sum().to(a.dtype)


def _count(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    s.count += 1
    return a + s.count


def _cond(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    return pg.cond(a.sum() > k, lambda a: a.tanh() + k, lambda a: a - _fit(b, a), a)


def _cond_returns(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """An operand, or part of one, or twice the same."""
    first, second = pg.cond((a * k).sum() < 1, lambda a, b: (a, b.flatten()[:1]), lambda a, b: (a, b.flatten()[1:2] * 2), a, b)
    return first.mul_(0.5) if first.numel() > k else second


def _cond_writes(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """What is outside, what the function has made, and what it was given."""
    made = a.sin()

    def one(a: torch.Tensor) -> torch.Tensor:
        s.total.mul_(0.5).add_(k)
        made.mul_(2)
        return made * a

    def other(a: torch.Tensor) -> torch.Tensor:
        a.mul_(0.5)
        return made.add_(1) - s.total.sum().to(a.dtype)

    return pg.cond(a.sum() > s.total[0], one, other, a) + made


def _cond_draws(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    return pg.cond(
        a.sum() > 0, lambda a: F.dropout(a * 1.0, 0.5, s.training), lambda a: a + torch.rand(k, device=a.device)[0], a
    )


def _switch(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """With a branch that has a branch and a loop in it."""
    inner = [lambda a: a * 0.5, lambda a: _cond(s, a, b, k), lambda a: _while(s, a, b, k), lambda a: a + s.scale]
    return pg.switch(a.sum().clamp(-2, 9).to(torch.int64) % 7 - 1, inner, a)


def _while(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """Until a value says so, or three times; what it adds up is outside."""
    start = torch.zeros((), dtype=torch.int32, device=a.device)

    def turn(i: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s.total.add_(i)
        return i + 1, _fit(b, a) * 0.5 + a * 0.75, b

    return pg.while_loop(lambda i, a, b: (i < 3) & (a.abs().sum() > k), turn, (start, a, b))[1]


def _repeat(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    times = a.sum().clamp(0, 3).to(torch.int64) if k == 1 else k
    return pg.repeat(times, lambda x: {"a": x["b"], "b": x["a"].add_(k).clamp(-64, 64)}, {"a": a, "b": a * 2})["a"]


def _written(c: torch.Tensor, k: int) -> torch.Tensor:
    c.view(-1)[: k + 1] = 0.5
    return c


LOG: list[Any] = []  # of the machine that runs; only marked functions know of it


@pg.live
def _logs(a: torch.Tensor, k: int) -> None:
    LOG.append((k, a.detach().double().sum().item()))


@pg.live
def _gives(a: torch.Tensor, k: int) -> torch.Tensor:
    LOG.append(a.detach().flatten().tolist())
    return torch.rand(4, device=a.device) + len(LOG) % 5 * k


@pg.live
def _varies(a: torch.Tensor, k: int) -> torch.Tensor:
    LOG.append(k)
    return a.new_full((4 if len(LOG) % 9 else 3,), float(len(LOG) % 5))


@pg.live
def _writes(s: State, a: torch.Tensor, k: int) -> torch.Tensor:
    LOG.append(s.scale)
    a.mul_(0.5).add_(len(LOG) % 3)
    return a


@pg.live
def _writes_unseen(a: torch.Tensor, k: int) -> None:
    LOG.append(k)
    a.data.mul_(0.5)


@pg.live
def _keeps(a: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """What no one else writes but the function itself."""
    LOG.append(a)
    return {"a": a, "b": a.detach() + k}


@pg.live
def _sees_gradients(s: State) -> None:
    LOG.append(None if s.trained.grad is None else s.trained.grad.tolist())


def _marked(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The instruction gives what the marked function gives, or what it was given."""

    def run(s: State, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
        found = call(s, a, k)
        return a if found is None else found

    return run


OPS: dict[str, Callable[[State, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "add": lambda s, a, b, k: a + _fit(b, a),
    "sub": lambda s, a, b, k: a - _fit(b, a) * k,
    "mul": lambda s, a, b, k: (a * _fit(b, a)).clamp(-64, 64),
    "attr": lambda s, a, b, k: a * s.scale,
    "flag": lambda s, a, b, k: a + k if s.flag else a.neg(),
    "coefficient": lambda s, a, b, k: a * s.beta + k * (1 - s.beta),
    "temperature": lambda s, a, b, k: (a / s.beta).softmax(-1) if a.dim() else a / s.beta,
    "global": lambda s, a, b, k: a + OFFSET,
    "class": lambda s, a, b, k: a - s.bias,
    "closure": lambda s, a, b, k: a * s.cell.read(),
    "entry": lambda s, a, b, k: a * s.levels[k % 2] + s.rates["a" if k == 1 else "b"],
    "entries": lambda s, a, b, k: a + sum(s.levels) * len(s.rates),
    "tuple": lambda s, a, b, k: a.flatten()[: s.sizes[0] + k],
    "attributes": lambda s, a, b, k: a * s.inner.depth + s.inner.next.width,
    "text": lambda s, a, b, k: getattr(a, s.kind)(),
    "function": lambda s, a, b, k: s.activation(a),
    "module": lambda s, a, b, k: s.drop(a),
    "tanh": lambda s, a, b, k: a.tanh(),
    "relu": lambda s, a, b, k: a.relu() + k,
    "exp": lambda s, a, b, k: a.abs().neg().exp(),
    "clone": lambda s, a, b, k: a.clone(),
    "cast": lambda s, a, b, k: a.to(list(DTYPES.values())[k % 3]),
    "matmul": _matmul,
    "sum": lambda s, a, b, k: a.sum(),
    "sum rows": lambda s, a, b, k: a.sum(0) if a.dim() else a + 1,
    "mean": lambda s, a, b, k: a.mean(-1, keepdim=True) if a.dim() else a - 1,
    "max": lambda s, a, b, k: a.amax(-1) if a.dim() else a,
    "softmax": lambda s, a, b, k: a.softmax(-1) if a.dim() else a.sigmoid(),
    "cumsum": lambda s, a, b, k: a.flatten().cumsum(0),
    "sort": lambda s, a, b, k: a.flatten().sort(descending=bool(k % 2)).values,
    "cat": lambda s, a, b, k: torch.cat([a.flatten(), b.flatten().to(a.dtype)]),
    "stack": lambda s, a, b, k: torch.stack([a, a + k]),
    "where": lambda s, a, b, k: torch.where(a > _fit(b, a), a, a.new_full((), k)),
    "write": lambda s, a, b, k: _written(a.flatten().clone(), k),
    "new": lambda s, a, b, k: torch.full((4,), float(k), device=a.device),
    "flat": lambda s, a, b, k: a.reshape(-1),
    "transposed": lambda s, a, b, k: a.mT if a.dim() >= 2 else a[None],
    "every second": lambda s, a, b, k: a[::2] if a.dim() else a,
    "row": lambda s, a, b, k: a[k % len(a)] if a.dim() and len(a) else a,
    "tail": lambda s, a, b, k: a.flatten()[k:],
    "expanded": lambda s, a, b, k: a.expand(2, *a.shape),
    "alias": lambda s, a, b, k: a.detach(),
    "dropout": lambda s, a, b, k: F.dropout(a, 0.5, s.training),
    "rand": lambda s, a, b, k: a + torch.rand_like(a),
    "randn": lambda s, a, b, k: torch.randn(4, device=a.device) * k,
    "write a": lambda s, a, b, k: a.add_(_fit(b, a).to(a.dtype).clone()),
    "halve a": lambda s, a, b, k: a.mul_(0.5),
    "zero row of a": lambda s, a, b, k: a[:1].zero_() if a.dim() else a.zero_(),
    "copy to a": lambda s, a, b, k: a.copy_(_fit(b, a).clone()),
    "total": lambda s, a, b, k: s.total.mul_(0.5).add_(a.sum().to(s.total.dtype)),
    "vector": lambda s, a, b, k: s.vector.mul_(0.5).add_(k),
    "gradient step": _grad_step,
    "backward": _backward,
    "descend": _descend,
    "marked, logs": _marked(lambda s, a, k: _logs(a, k)),
    "marked, gives": _marked(lambda s, a, k: _gives(a, k=k)),
    "marked, varies": _marked(lambda s, a, k: _varies(a, k)),
    "marked, writes": _marked(lambda s, a, k: _writes(s, a, k)),
    "marked, writes unseen": _marked(lambda s, a, k: _writes_unseen(a, k)),
    "marked, keeps": _marked(lambda s, a, k: _keeps(a + 1, k)["b" if k == 1 else "a"]),
    "marked, sees gradients": _marked(lambda s, a, k: _sees_gradients(s)),
    "cond": _cond,
    "cond, returns": _cond_returns,
    "cond, writes": _cond_writes,
    "cond, draws": _cond_draws,
    "switch": _switch,
    "while": _while,
    "repeat": _repeat,
    "item": lambda s, a, b, k: a * a.sum().clamp(-4, 4).item(),
    "mask": lambda s, a, b, k: a[a > 0],
    "count": _count,
}
RARE = ("item", "mask", "count")
MARKED = tuple(op for op in OPS if op.startswith("marked"))
COMMON = tuple(op for op in OPS if op not in RARE and op not in MARKED)


def interpret(function: Function, state: State, inputs: tuple[torch.Tensor, ...], scalar: float) -> Any:
    """The function that is recorded, or not."""
    values = [*inputs, inputs[0] * scalar, state.vector, state.matrix, state.total]
    streams = _streams(inputs[0].device) if any(i.stream for i in function.instructions) else ()
    before = 0
    try:
        for op, a, b, k, stream in function.instructions:
            if not streams:
                result = OPS[op](state, values[a % len(values)], values[b % len(values)], k)
            else:
                _follow(streams[stream], streams[before])
                before = stream
                with torch.cuda.stream(streams[stream]):
                    result = OPS[op](state, values[a % len(values)], values[b % len(values)], k)
            values.append(result if result.numel() <= MAX_ELEMENTS else result.flatten()[:MAX_ELEMENTS])
    finally:  # also where an operator raises: what comes next, on the first, looks at what the others have written
        if streams:
            _follow(streams[0], streams[before])
    results = [values[i % len(values)] for i in function.returns]
    return FORMS[function.form](results)


_OTHER_STREAMS: list[torch.cuda.Stream] = []


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The caller's and two others, on a GPU."""
    if device.type != "cuda":
        return []
    while len(_OTHER_STREAMS) < 2:
        _OTHER_STREAMS.append(torch.cuda.Stream(device))
    return [torch.cuda.current_stream(device), *_OTHER_STREAMS]


def _follow(stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
    if stream != before:
        stream.wait_stream(before)


FORMS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "one": lambda results: results[0],
    "list": lambda results: results,
    "tuple": lambda results: (*results, None),
    "dict": lambda results: {"results": results, "count": len(results)},
}


def results_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a result of any form."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return list(value["results"])
    return [t for t in value if t is not None]


# ---------------------------------------------------------------------------------------------------
# Running a program


class Holding(NamedTuple):
    """A held result, and whether it was computed in inference mode (it may be written only there)."""

    tensor: torch.Tensor
    inference: bool


class Ran(NamedTuple):
    """What was seen after each action, and how much of it was replayed."""

    trace: list[Any]
    recorded: int
    replayed: int


class Machine:
    """One execution of a program."""

    def __init__(self, program: Program, record: bool, device: torch.device) -> None:
        torch.manual_seed(program.seed)
        LOG.clear()
        self.program = program
        self.device = device
        self.state = State(device)
        self.held: list[Holding] = []
        self.functions = [self._function(f, record) for f in program.functions]
        self.step = 0

    def _function(self, function: Function, record: bool) -> Callable[..., Any]:
        state = self.state

        def run(*inputs: torch.Tensor, scalar: float) -> Any:
            return interpret(function, state, inputs, scalar)

        program = self.program
        options: Any = {}
        if program.split:  # as it is asked for, or, as nothing is measured here, wherever something needs the host
            options = {"fallback": "split"} if program.seed % 2 else {"fallback": "auto", "keep": "always"}
        return pg.record(run, warmup=program.warmup, max_recordings=program.max_recordings, **options) if record else run

    def perform(self, action: Action) -> Any:
        """Performs one action; returns what there is to see afterwards."""
        self.step += 1
        try:
            outcome = getattr(self, f"_{type(action).__name__.lower()}")(action)
        except Exception as error:
            outcome = f"{type(error).__qualname__}: {error}"
        return self._seen(outcome)

    def _call(self, call: Call) -> Any:
        with MODES[call.mode]():
            inputs: list[torch.Tensor] = []
            for i, source in enumerate(call.inputs):
                inputs.append(inputs[0] if isinstance(source, Same) and inputs else self._input(source, i))
            function = self.functions[call.function % len(self.functions)]
            results = results_of(function(*inputs, scalar=call.scalar))
        outcome = [noted(t) for t in (*results, *inputs)]
        shared = sorted(aliasing({"results": results, "inputs": inputs, "state": self.state}))
        for i in call.hold:
            self.held.append(Holding(results[i % len(results)], call.mode == "inference"))
        del self.held[:-MAX_HELD]
        return outcome, shared

    def _input(self, source: Fresh | Held | Same, i: int) -> torch.Tensor:
        if isinstance(source, Held) and self.held:
            tensor, inference = self._holding(source.back)
            return tensor.clone() if inference and not torch.is_inference_mode_enabled() else tensor
        fresh = source if isinstance(source, Fresh) else Fresh()
        generator = torch.Generator().manual_seed(self.program.seed * 1000 + self.step * 10 + i)
        return LAYOUTS[fresh.layout](_numbers(generator, fresh, self.device))

    def _holding(self, back: int) -> Holding:
        return self.held[-1 - back % len(self.held)]

    def _drop(self, drop: Drop) -> None:
        if self.held:
            del self.held[-1 - drop.back % len(self.held)]

    def _mutate(self, mutate: Mutate) -> None:
        if self.held:
            with torch.inference_mode():
                self._holding(mutate.back).tensor.mul_(0.5).add_(1)

    def _keepgradient(self, keep: KeepGradient) -> None:
        if self.state.trained.grad is not None:
            self.held.append(Holding(self.state.trained.grad, inference=False))
            del self.held[:-MAX_HELD]

    def _change(self, change: Change) -> None:
        CHANGES[change.what](self.state)

    def _reset(self, reset: Reset) -> None:
        function = self.functions[reset.function % len(self.functions)]
        if isinstance(function, pg.Recorded):
            pg.reset(function)

    def _seen(self, outcome: Any) -> Any:
        state = self.state
        return {
            "outcome": outcome,
            "held": [noted(h.tensor) for h in self.held],
            "state": {name: noted(t) for name, t in state.state_dict(keep_vars=True).items()},
            "gradient": None if state.trained.grad is None else noted(state.trained.grad),
            "values": state.values(),
            "generator": _generator_state(self.device),
            "log": [noted(entry) if isinstance(entry, torch.Tensor) else entry for entry in LOG],
            "shared": sorted(aliasing({"held": [h.tensor for h in self.held], "state": state})),
        }


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() >= 2 else t,
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "expanded": lambda t: t[:1].expand(t.shape),
}


def _numbers(generator: torch.Generator, fresh: Fresh, device: torch.device) -> torch.Tensor:
    """Multiples of 1/8 between -2 and 2."""
    numbers = torch.randint(-16, 17, fresh.shape, generator=generator)
    return (numbers / 8).to(device, DTYPES[fresh.dtype])


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def noted(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], bool]:
    """A tensor as it is now: a copy, its strides, and whether it requires grad."""
    return tensor.detach().clone(), tensor.stride(), tensor.requires_grad


def run(program: Program, record: bool, device: torch.device) -> Ran:
    """Execute a program from its beginning, with recorded or with plain functions."""
    machine = Machine(program, record, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        with results_up_to(program.copied):
            trace = [(str(action), machine.perform(action)) for action in program.actions]
    stats = [pg.stats(f) for f in machine.functions if isinstance(f, pg.Recorded)]
    return Ran(trace, sum(s.recorded for s in stats), sum(s.replayed for s in stats))


@contextlib.contextmanager
def results_up_to(nbytes: int) -> Iterator[None]:
    """What is handed out in the recording's own memory, and what is copied, is decided by size; real sizes are not ours."""
    before, recorder.SMALL = recorder.SMALL, nbytes
    try:
        yield
    finally:
        recorder.SMALL = before


def check(program: Program, device: torch.device) -> Ran:
    """Run a program recorded and live, and compare.

    Raises:
        AssertionError: at the first action after which something differs.
    """
    live = run(program, False, device)
    recorded = run(program, True, device)
    gc.collect()
    assert_same(recorded.trace, live.trace, "after action ")
    return recorded


# ---------------------------------------------------------------------------------------------------
# Making programs


def make_program(choose: Choose) -> Program:
    """A random program; `choose` picks an element of a sequence (the simplest first, for shrinking)."""
    split, marked = choose(((False, False), (False, False), (False, True), (True, True)))
    functions = tuple(_function(choose, marked) for _ in range(choose(range(2, 5))))
    palette = _Palette(choose)
    # A loop, as real programs have one: the same few calls again and again, so that they are replayed.
    block = [palette.call(choose, len(functions)) for _ in range(choose((1, 2, 3)))]
    actions: list[Action] = []
    always = choose(("", "", "", "", "anneal", *PYTHON))  # changes between all calls
    for _ in range(choose((5, 6, 7))):
        for call in block:
            actions += [Change(always), call] if always else [call]
            actions.extend(_interlude(choose, len(functions)))
    seed, warmup, most = choose(range(100)), choose((1, 1, 1, 0, 2)), choose((16, 16, 16, 2))
    return Program(functions, tuple(actions[:MAX_ACTIONS]), seed, warmup, most, choose((0, 0, 100, 65536)), split)


def _function(choose: Choose, marked: bool) -> Function:
    streams = choose(((0,), (0,), (0,), (0, 1), (0, 0, 1, 2)))
    instructions = tuple(_instruction(choose, marked, streams) for _ in range(choose(range(1, 7))))
    returns = tuple(choose((-1, -2, 0, -3, 1, 2, 3, 4)) for _ in range(choose((1, 1, 2, 3))))
    return Function(instructions, returns, choose(tuple(FORMS)) if len(returns) > 1 else choose(("one", "one", "list")))


def _instruction(choose: Choose, marked: bool, streams: Sequence[int]) -> Instruction:
    op = choose(MARKED) if marked and choose(range(5)) == 4 else choose(RARE) if choose(range(25)) == 24 else choose(COMMON)
    # Mostly the value just computed: -1 is the last one.
    return Instruction(op, choose((-1, -1, 0, -2, 1, 2, 3, 4)), choose((0, 1, -2, 2, 3)), choose((1, 2, 3)), choose(streams))


class _Palette:
    """The few shapes, dtypes, numbers and modes of one program: so that calls come back, and are replayed."""

    def __init__(self, choose: Choose) -> None:
        def some(options: Sequence[T]) -> list[T]:
            return [choose(options) for _ in range(choose((1, 1, 2)))]

        self.shapes = some(((4,), (2, 4), (4, 4), (1, 4), (3, 4), (2, 2, 4)))
        self.dtypes = some(("f32", "f32", "f64", "bf16"))
        self.layouts = some(("plain", "plain", "transposed", "every second", "offset", "expanded"))
        self.scalars = some((2.0, 1, True, 1.0, -0.5, 0))
        self.modes = some(("plain", "no_grad", "inference"))

    def call(self, choose: Choose, functions: int) -> Call:
        inputs = tuple(self._source(choose) for _ in range(choose((1, 2))))
        hold = choose(((), (0,), (0,), (1,), (0, 1)))
        return Call(choose(range(functions)), inputs, choose(self.scalars), choose(self.modes), hold)

    def _source(self, choose: Choose) -> Fresh | Held | Same:
        kind = choose(("fresh", "fresh", "fresh", "held", "held", "same"))
        if kind == "held":
            return Held(choose(range(3)))
        if kind == "same":
            return Same()
        return Fresh(choose(self.shapes), choose(self.dtypes), choose(self.layouts))


def _interlude(choose: Choose, functions: int) -> Iterator[Action]:
    """Mostly nothing; otherwise something happens between two calls."""
    kind = choose(("",) * 10 + ("drop", "mutate", "keep", "change", "change", "python", "python", "reset"))
    if kind == "drop":
        yield Drop(choose(range(3)))
    elif kind == "mutate":
        yield Mutate(choose(range(3)))
    elif kind == "keep":
        yield KeepGradient()
    elif kind == "change":
        yield Change(choose(tuple(CHANGES)))
    elif kind == "python":
        yield Change(choose(tuple(PYTHON)))
    elif kind == "reset":
        yield Reset(choose(range(functions)))


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails: without actions, instructions and results that are not needed."""
    return shrunk(program, _smaller, fails)


def shrunk(program: T, smaller: Callable[[T], Iterator[T]], fails: Callable[[T], bool]) -> T:
    """The smallest that is found by taking a `smaller` one that still fails, again and again."""
    while (found := next(filter(fails, smaller(program)), None)) is not None:
        program = found
    return program


def _smaller(program: Program) -> Iterator[Program]:
    actions, functions = program.actions, program.functions
    for i in reversed(range(len(actions))):
        yield dataclasses.replace(program, actions=actions[:i] + actions[i + 1 :])
    for i, f in enumerate(functions):
        for j in range(len(f.instructions)):
            less = f._replace(instructions=f.instructions[:j] + f.instructions[j + 1 :])
            yield dataclasses.replace(program, functions=(*functions[:i], less, *functions[i + 1 :]))
