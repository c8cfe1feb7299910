"""Random training loops around recorded models, their interpreter, and the comparison with eager.

A `Training` is plain data, as a `programs.Program` is: a few small models, each of which is recorded with its backward, and a
list of steps over them: forwards, alone, in chains and several in flight; backwards in any order, optimizer steps, and
changes of the models in between. `check` runs it twice, with the models live and recorded, and compares after each step
everything that can be seen, bit by bit.

Four rules keep to what is promised.

* A step on which eager raises has no result that could be compared. Recorded models must raise the same, but where a
  recording still has what eager has not: a copy of an input that was written, what was saved for another result, the gradients
  of a part with `use_reentrant=True` that has no parameters. Both then begin anew: no graphs, no gradients, fresh buffers.
* Where three gradients and more meet at a tensor in one backward, eager adds them up in an order of its own. A backward
  through several calls runs only if no more than two do.
* Where parts are recomputed, nobody looks at the gradient of one result with respect to another: that is an error.
* What was written or used up since a forward makes most backwards raise. They are left out, unless a step asks for it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph._torch.modules import goes_through
from phonograph.devices import device_for
from phonograph.testing import aliasing, assert_same
from tests.fuzz.programs import Choose, noted, results_up_to, shrunk

WIDTH = 4
MAX_HELD = 6
MAX_KEPT = 6
MAX_STEPS = 60
RATE = 0.05


# ---------------------------------------------------------------------------------------------------
# Programs as data


class Model(NamedTuple):
    """Layers by their names, how they are put together (see `Net`), and whether all but the first are recomputed."""

    layers: tuple[str, ...] = ("linear",)
    form: str = "plain"
    recompute: str = ""
    warmup: int = 1
    max_recordings: int = 16


class Fresh(NamedTuple):
    """A new input."""

    rows: int = 3
    grad: bool = False


class Output(NamedTuple):
    """A held output, counted from the last one; a new input if there is none."""

    back: int = 0
    detach: bool = False


class Same(NamedTuple):
    """The last input once more."""


class Forward(NamedTuple):
    """Call a model and hold what it returns."""

    model: int = 0
    source: Fresh | Output | Same = Fresh()
    mode: str = "plain"


class Backward(NamedTuple):
    """From held outputs. `again`: even if their graph was used up, or what it has saved was written."""

    backs: tuple[int, ...] = (0,)
    loss: str = "square"
    retain: bool = False
    again: bool = False


class Drop(NamedTuple):
    """Let go of a held output, whose backward may never run."""

    back: int = 0


class ZeroGrad(NamedTuple):
    to_none: bool = True


class Step(NamedTuple):
    """One of the optimizers."""

    optimizer: int = 0


class Schedule(NamedTuple):
    """Its scheduler."""

    optimizer: int = 0


class Clip(NamedTuple):
    """`clip_grad_norm_` of all parameters."""


class KeepGradient(NamedTuple):
    """Of a parameter, counted through all models, or a clone of it."""

    parameter: int = 0
    clone: bool = False


class Hook(NamedTuple):
    """Give a parameter a hook; the second time, take it away."""

    parameter: int = 0
    kind: str = "scale"


class Look(NamedTuple):
    """At the gradient of a held output, on which another result of its call may depend: by `retain_grad`, or a hook."""

    back: int = 0
    kind: str = "retain"


class Freeze(NamedTuple):
    """A parameter; the second time, undo it."""

    parameter: int = 0


class WriteInput(NamedTuple):
    """The caller writes its last input: autograd is told, or not, or the input is given other memory."""

    how: str = "in place"


class WriteOutput(NamedTuple):
    """The caller writes a held output; autograd is told, or not."""

    back: int = 0
    grad: bool = False


class Change(NamedTuple):
    """Of a model; see CHANGES."""

    what: str = "eval"
    model: int = 0


class Copy(NamedTuple):
    """A deep copy takes a model's place."""

    model: int = 0


class Reset(NamedTuple):
    """`pg.reset`, after which a module is not recorded; and record it anew."""

    model: int = 0
    again: bool = True


class Draw(NamedTuple):
    """The caller draws random numbers of its own."""


Action = (
    Forward | Backward | Drop | ZeroGrad | Step | Schedule | Clip | KeepGradient | Hook | Look | Freeze | WriteInput
    | WriteOutput | Change | Copy | Reset | Draw
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Training:
    models: tuple[Model, ...]
    actions: tuple[Action, ...]
    seed: int = 0
    optimizer: str = "sgd"
    optimizers: int = 1
    record_step: bool = False
    scarce: bool = False  # whether recordings share memory
    copied: int = 0  # bytes of results up to which they are copied out
    split: bool = False  # recorded in segments


# ---------------------------------------------------------------------------------------------------
# Models


class Tokens(nn.Module):
    """An embedding of the numbers in the input, rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x.detach().clamp(-4, 4) * 2).round().long() + 8).mean(1)


class Scale(nn.Module):
    """Its weight is saved for the backward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Slope(torch.autograd.Function):
    """Its gradient is what it has saved, whatever comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        slope = x.cos()
        ctx.save_for_backward(slope)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope


class Slope(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slope.apply(x)  # type: ignore[no-untyped-call]


NOTED: list[Any] = []  # of the machine that runs; only marked functions know of it


@pg.live
def _note(x: torch.Tensor) -> None:
    NOTED.append(x.detach().double().sum().item())


@pg.live
def _gains(x: torch.Tensor) -> torch.Tensor:
    NOTED.append(len(x))
    return x.detach().mean(0) + len(NOTED) % 3


class Noted(nn.Module):
    """Marked functions in the forward, in the backward, or both."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "gives":
            return x * _gains(x)
        if self.where == "forward":
            _note(x)
        x = x * 1.5
        if self.where == "hook" and x.requires_grad:
            x.register_hook(_note)
        return _NotedSlope.apply(x) if self.where == "backward" else x  # type: ignore[no-untyped-call]


class _NotedSlope(_Slope):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _note(grad)
        (slope,) = ctx.saved_tensors
        return grad * slope * _gains(grad)


class Masked(nn.Module):
    """Writes where a mask says, which counts on the host, also in its backward: two columns, or as many as it gives."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.values = nn.Parameter(torch.linspace(0.5, 1.5, count or 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        sums = x.detach().sum(0)
        mask = sums > -1
        if self.count:
            mask = torch.zeros_like(mask).index_fill_(0, sums.argsort()[: self.count], True)
        y[:, mask] = self.values
        return y


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.5),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "scale": Scale,
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "embedding": Tokens,
    "relu": nn.ReLU,
    "slope": Slope,
    "relu in place": lambda: nn.ReLU(inplace=True),
    **{f"noted, {where}": functools.partial(Noted, where) for where in ("forward", "gives", "hook", "backward")},
    "masked": lambda: Masked(2),
    "masked, varying": lambda: Masked(0),
}
LIVE = ("noted, forward", "noted, gives", "noted, hook", "noted, backward", "masked", "masked", "masked, varying")
IN_BACKWARD = ("slope", *LIVE)  # what runs there and cannot run twice


RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "both": lambda hidden, y: (hidden, y),
    "view": lambda hidden, y: (y.view(-1, WIDTH), y),
    "detached": lambda hidden, y: (y, y.detach()),
}


class Net(nn.Module):
    """Layers one after the other. Forms: `plain`; `residual`; `twice`, over and over again; `both`, which also returns what
    the first layer gives; `view` and `detached`, which also return the same once more so."""

    def __init__(self, model: Model, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.form = model.form
        self.recompute = model.recompute if len(model.layers) > 1 else ""

    def forward(self, x: torch.Tensor) -> Any:
        hidden, y = self._through(x)
        if self.form == "twice":
            hidden, y = self._through(y)
        elif self.form == "residual":
            y = x + y
        return RESULTS.get(self.form, lambda hidden, y: y)(hidden, y)

    def _through(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layers[0](x)
        if self.recompute:
            return hidden, checkpoint(self._rest, hidden, use_reentrant=self.recompute == "reentrant")
        return hidden, self._rest(hidden)

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def _written(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.75)


def _new_storage(net: nn.Module) -> None:
    for p in list(net.parameters())[:1]:
        p.data = p.data * 0.75 + 0.125


def _state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v * 0.75 + 0.125 if v.is_floating_point() else v + 1 for k, v in net.state_dict().items()}


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "eval": lambda m: m.train(not m.training),
    "data": _new_storage,
    "in place": _written,
    "load": lambda m: m.load_state_dict(_state(m)),
    "assign": lambda m: m.load_state_dict(_state(m), assign=True),
}
WRITE = ("in place", "load")  # what forwards have saved

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, RATE, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, RATE),
}

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "square": lambda t: t.square().mean(),
    "sum": lambda t: t.sum(),
    "weighted": lambda t: (t * torch.linspace(-1, 1, t.numel(), device=t.device).view_as(t)).sum(),
}


# ---------------------------------------------------------------------------------------------------
# Running a program


class Holding(NamedTuple):
    """An output, its number, and the calls in its history."""

    tensor: torch.Tensor
    number: int
    calls: frozenset[int]


class Ran(NamedTuple):
    """What was seen after each step, on which of them it raised what, and how much was replayed."""

    trace: list[Any]
    raised: dict[int, Exception]
    recorded: int = 0
    forwards: int = 0
    backwards: int = 0

    @property
    def replayed(self) -> int:
        return self.forwards + self.backwards


class Machine:
    """One execution of a program. `raised`: on which steps eager did."""

    def __init__(self, program: Training, device: torch.device, eager: Ran | None) -> None:
        torch.manual_seed(program.seed)
        NOTED.clear()
        self.program = program
        self.device = device
        self.eager = eager
        shared = nn.Linear(WIDTH, WIDTH)
        made = {"shared": lambda: shared, **LAYERS}
        self.nets = [Net(model, [made[name]() for name in model.layers]).to(device) for model in program.models]
        self.recorded: list[Any] = []
        for i in range(len(self.nets)):
            self._record(i)
        self.optimizers, self.schedules, self.steps = self._made_optimizers()
        self.step = 0
        self.raised: dict[int, Exception] = {}
        self.hooks: dict[tuple[int, str], Any] = {}
        self.heard: Counter[str] = Counter()
        self.alive: list[Any] = []  # what is known by its id
        self.uses: list[Counter[Any]] = []  # by call: how often it uses each parameter and each output
        self._begin()

    def _begin(self) -> None:
        self.inputs: list[Holding] = []
        self.held: list[Holding] = []
        self.kept: list[torch.Tensor] = []
        self.spent = set(range(len(self.uses)))  # calls whose graph is used up, or whose weights were written

    def _record(self, i: int) -> None:
        if self.eager is not None:
            model = self.program.models[i]
            fallback: Any = "split" if self.program.split else "auto"
            pg.record(self.nets[i], warmup=model.warmup, max_recordings=model.max_recordings, fallback=fallback)
            self.recorded.append(pg.api._recorded(self.nets[i]))

    def _made_optimizers(self) -> tuple[list[Any], list[Any], list[Any]]:
        optimizers, seen, count = [], set[int](), self.program.optimizers
        for i in range(count):
            own = [p for net in self.nets[i::count] for p in net.parameters() if id(p) not in seen]
            seen |= {*map(id, own)}
            unique = list(dict.fromkeys(own))
            if unique:
                optimizers.append(OPTIMIZERS[self.program.optimizer](unique))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.75) for o in optimizers]
        steps = [o.step for o in optimizers]
        if self.program.record_step and self.eager is not None:
            steps = [pg.record(step) for step in steps]
        return optimizers, schedules, steps

    def run(self) -> Ran:
        trace = []
        for action in self.program.actions:
            self.step += 1
            trace.append((f"{self.step}: {action}", self._perform(action)))
        backwards = [b for f in self.recorded for b in f._backwards]
        forwards, backwards = [*map(pg.stats, self.recorded)], [*map(pg.stats, backwards)]
        return Ran(trace, self.raised, sum(s.recorded for s in forwards), sum(s.replayed for s in forwards),
                   sum(s.replayed for s in backwards))  # fmt: skip

    def _perform(self, action: Action) -> Any:
        """Performs one step; returns what there is to see afterwards."""
        theirs = None if self.eager is None else self.eager.raised.get(self.step)
        ours: Exception | None = None
        outcome = None
        try:
            outcome = getattr(self, f"_{type(action).__name__.lower()}")(action)
        except Exception as error:
            self.raised[self.step] = ours = error.with_traceback(None)  # it would keep what the step had at hand
        if self.eager is not None and type(ours) is not type(theirs) and (ours is not None or not self._may_pass(theirs)):
            raise AssertionError(f"at step {self.step}, {action}: raised {ours!r}, and live {theirs!r}")
        if ours is not None or theirs is not None:
            outcome = None
            self._recover()
        return self._seen(outcome)

    def _may_pass(self, error: Exception | None) -> bool:
        """Whether a recorded model may do what raises this in eager."""
        several = any(model.form in RESULTS for model in self.program.models)
        return "use_reentrant=True" in str(error) or (several and "second time" in str(error))

    def _recover(self) -> None:
        """After a step that was not finished."""
        self._begin()
        torch.manual_seed(self.step)
        for p in self._all():
            p.grad = None
        with torch.no_grad():
            for net in self.nets:
                for buffer in net.buffers():
                    buffer.fill_(1)
        self.heard.clear()
        NOTED.clear()

    def _all(self) -> list[torch.Tensor]:
        """All parameters there are or have been."""
        stepped = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        return list(dict.fromkeys([*(p for net in self.nets for p in net.parameters()), *stepped]))

    def _one(self, number: int) -> torch.Tensor:
        every = self._all()
        return every[number % len(every)] if every else torch.zeros(())

    def _at(self, number: int) -> int:
        return number % len(self.nets)

    # -- the steps

    def _forward(self, action: Forward) -> Any:
        i = self._at(action.model)
        source, net = self._input(action.source), self.nets[i]
        self.inputs.append(source)
        del self.inputs[:-MAX_HELD]
        version = source.tensor._version
        with torch.no_grad() if action.mode == "no_grad" else contextlib.nullcontext():
            results = net(source.tensor)
        if source.tensor._version != version:
            self._wrote()
        calls = source.calls
        if action.mode == "plain":
            self.uses.append(self._used(i, source))
            calls |= {len(self.uses) - 1}
        for t in results if isinstance(results, tuple) else (results,):
            self.held.append(self._holding(t, calls))
        del self.held[:-MAX_HELD]

    def _used(self, i: int, source: Holding) -> Counter[Any]:
        """How often a call uses what gets gradients: upper bounds."""
        model, used = self.program.models[i], Counter[Any]()
        for layer in self.nets[i].layers:  # type: ignore[union-attr]
            for p in layer.parameters():
                self.alive.append(p)
                used[id(p)] += 2 if model.form == "twice" else 1
        used["value", source.number] = 2 if model.form == "residual" else 1
        return used

    def _holding(self, t: torch.Tensor, calls: frozenset[int]) -> Holding:
        self.alive.append(None)
        return Holding(t, len(self.alive), calls if t.requires_grad else frozenset())

    def _input(self, source: Fresh | Output | Same) -> Holding:
        if isinstance(source, Same) and self.inputs and not self.inputs[-1].calls & self.spent:
            return self.inputs[-1]
        if isinstance(source, Output) and self.held:
            found = self.held[-1 - source.back % len(self.held)]
            if source.detach or found.calls & self.spent:
                return self._holding(found.tensor.detach(), frozenset())
            return found
        fresh = source if isinstance(source, Fresh) else Fresh()
        generator = torch.Generator().manual_seed(self.program.seed * 1000 + self.step)
        numbers = torch.randn(fresh.rows, WIDTH, generator=generator).to(self.device)
        return self._holding(numbers.requires_grad_(fresh.grad), frozenset())

    def _backward(self, action: Backward) -> Any:
        roots = self._roots(action)
        if not roots:
            return None
        losses = [LOSSES[action.loss](root.tensor) for root in roots]
        calls = frozenset[int]().union(*(root.calls for root in roots))
        if not action.retain:
            self.spent |= calls
        if action.loss == "weighted" and len(losses) > 1:
            torch.autograd.backward(losses, retain_graph=action.retain)
        elif action.loss == "sum" and self.step % 3 == 0:
            leaves = [p for p in [*self._all(), *(h.tensor for h in self.inputs)] if p.requires_grad]
            found = torch.autograd.grad(sum(losses), leaves, retain_graph=action.retain, allow_unused=True)
            self._keep(*(g for g in found[-2:] if g is not None))
            return [None if g is None else noted(g) for g in found]
        else:
            loss = sum(losses)
            loss.backward(retain_graph=action.retain)  # type: ignore[union-attr]
            self._keep(loss)
        return None

    def _roots(self, action: Backward) -> list[Holding]:
        """The outputs from which a backward runs."""
        roots = []
        for i in sorted({back % len(self.held) for back in action.backs} if self.held else ()):
            root = self.held[-1 - i]
            if root.tensor.requires_grad and (action.again or not root.calls & self.spent):
                roots.append(root)
        while roots and self._crowded(roots):
            roots.pop()
        return roots

    def _crowded(self, roots: list[Holding]) -> bool:
        """Whether more than two gradients meet somewhere outside of the models."""
        calls = frozenset[int]().union(*(root.calls for root in roots))
        total = sum((self.uses[c] for c in calls), Counter(("value", root.number) for root in roots))
        return len(calls) > 1 and max(total.values()) > 2

    def _keep(self, *tensors: Any) -> None:
        self.kept += tensors
        del self.kept[:-MAX_KEPT]

    def _drop(self, action: Drop) -> None:
        if self.held:
            del self.held[-1 - action.back % len(self.held)]

    def _zerograd(self, action: ZeroGrad) -> None:
        for o in self.optimizers:
            o.zero_grad(set_to_none=action.to_none)

    def _step(self, action: Step) -> None:
        if self.steps:
            self.steps[action.optimizer % len(self.steps)]()
            self._wrote()

    def _schedule(self, action: Schedule) -> None:
        if self.schedules:
            self.schedules[action.optimizer % len(self.schedules)].step()

    def _clip(self, action: Clip) -> None:
        self._keep(torch.nn.utils.clip_grad_norm_(self._all(), 0.5))

    def _keepgradient(self, action: KeepGradient) -> None:
        grad = self._one(action.parameter).grad
        if grad is not None:
            self._keep(grad.clone() if action.clone else grad)

    def _hook(self, action: Hook) -> None:
        p = self._one(action.parameter)
        key = id(p), action.kind
        if key in self.hooks:
            self.hooks.pop(key).remove()
        elif p.requires_grad:
            self.alive.append(p)
            self.hooks[key] = HOOKS[action.kind](p, self.heard)

    def _look(self, action: Look) -> None:
        runs = any(layer in IN_BACKWARD for model in self.program.models for layer in model.layers)
        if self.held and not runs and not any(net.recompute for net in self.nets):
            t = self.held[-1 - action.back % len(self.held)].tensor
            if t.requires_grad and not t.is_leaf:
                if action.kind == "retain":
                    t.retain_grad()
                else:
                    t.register_hook(lambda grad: grad * 0.5)

    def _freeze(self, action: Freeze) -> None:
        p = self._one(action.parameter)
        p.requires_grad_(not p.requires_grad)

    def _writeinput(self, action: WriteInput) -> None:
        if self.inputs:
            written = self.inputs[-1].tensor
            with torch.no_grad():
                if action.how == "other memory":
                    written.data = written.data * 0.5
                else:
                    (written.data if action.how == "unseen" else written).mul_(0.5)
            if action.how == "in place":
                self._wrote()

    def _wrote(self) -> None:
        """What forwards have saved."""
        self.spent |= set(range(len(self.uses)))

    def _writeoutput(self, action: WriteOutput) -> None:
        if self.held:
            i = -1 - action.back % len(self.held)
            with contextlib.nullcontext() if action.grad else torch.no_grad():
                self.held[i].tensor.mul_(0.5)
            if any(self.held[i].tensor.data_ptr() == h.tensor.data_ptr() for h in self.inputs):
                self._wrote()

    def _change(self, action: Change) -> None:
        CHANGES[action.what](self.nets[self._at(action.model)])
        if action.what in WRITE:
            self._wrote()

    def _copy(self, action: Copy) -> None:
        i = self._at(action.model)
        self.nets[i] = copy.deepcopy(self.nets[i])

    def _reset(self, action: Reset) -> None:
        i = self._at(action.model)
        if self.eager is not None:
            if goes_through(self.nets[i]) is not None:
                pg.reset(self.nets[i])
            if action.again:
                self._record(i)

    def _draw(self, action: Draw) -> None:
        self._keep(torch.rand(2, device=self.device))

    # -- what there is to see

    def _seen(self, outcome: Any) -> Any:
        parameters = self._all()
        grads = [p.grad for p in parameters]
        inputs = [h.tensor for h in self.inputs]
        return {
            "outcome": outcome,
            "held": [(noted(h.tensor), h.tensor.is_leaf) for h in self.held],
            "looked at": [_looked_at(h.tensor) for h in self.held],
            "inputs": [(noted(t), t.grad if t.grad is None else noted(t.grad)) for t in inputs if t.is_leaf],
            "kept": [*map(noted, self.kept)],
            "parameters": [*map(noted, parameters)],
            "gradients": [None if g is None else noted(g) for g in grads],
            "buffers": [noted(b) for net in self.nets for b in net.buffers()],
            "optimizers": [copy.deepcopy(o.state_dict()) for o in self.optimizers],
            "heard": sorted(self.heard.items()),
            "noted": [*NOTED],
            "generator": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state(),
            "shared": sorted(aliasing({"held": [h.tensor for h in self.held], "kept": self.kept, "gradients": grads})),
        }


def _looked_at(t: torch.Tensor) -> Any:
    """Its gradient, if somebody wanted that to be kept."""
    try:
        return noted(t.grad) if t.retains_grad and t.grad is not None else None
    except RuntimeError as error:  # a view that was made in an autograd function, and written since
        return type(error)


def _scale(p: torch.Tensor, heard: Counter[str]) -> Any:
    return p.register_hook(lambda grad: None if grad is None else grad * 0.5)


def _count(p: torch.Tensor, heard: Counter[str]) -> Any:
    def hook(grad: torch.Tensor | None) -> None:
        if grad is not None:
            heard[str(tuple(p.shape))] += 1

    return p.register_hook(hook)


def _added(p: torch.Tensor, heard: Counter[str]) -> Any:
    def hook(t: torch.Tensor) -> None:
        if t.grad is not None:
            heard["added"] += 1
            t.grad.mul_(0.5)

    return p.register_post_accumulate_grad_hook(hook)


HOOKS: dict[str, Callable[[torch.Tensor, Counter[str]], Any]] = {"scale": _scale, "count": _count, "added": _added}


def run(program: Training, device: torch.device, eager: Ran | None = None) -> Ran:
    """Execute a program from its beginning: live, or recorded if it is told what eager did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with results_up_to(program.copied), _memory_is(device, scarce=program.scarce), _no_failures_of_our_own():
            return Machine(program, device, eager).run()


@contextlib.contextmanager
def _memory_is(device: torch.device, *, scarce: bool) -> Iterator[None]:
    """Recordings share memory once there is not enough for all; real sizes are not ours."""
    found: Any = device_for(device)
    before, found.roomy = found.roomy, 0 if scarce else found.roomy
    try:
        yield
    finally:
        found.roomy = before


@contextlib.contextmanager
def _no_failures_of_our_own() -> Iterator[None]:
    """A failure of phonograph's own becomes a live call, and an error in the log."""
    failures: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: failures.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("phonograph")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not failures, failures


def check(program: Training, device: torch.device) -> Ran:
    """Run a program live and recorded, and compare.

    Raises:
        AssertionError: at the first step after which something differs.
    """
    eager = run(program, device)
    recorded = run(program, device, eager)
    gc.collect()
    assert_same(recorded.trace, eager.trace, "after step ")
    return recorded


# ---------------------------------------------------------------------------------------------------
# Making programs


def make_program(choose: Choose) -> Training:
    """A random program; `choose` picks an element of a sequence (the simplest first, for shrinking)."""
    split, marked = choose(((False, False), (False, False), (False, True), (True, True)))
    models = _without_accidents([_model(choose, marked) for _ in range(choose((1, 2, 2, 3)))])
    palette = _Palette(choose, len(models))
    block = palette.block(choose)
    actions: list[Action] = []
    for _ in range(choose((6, 7, 8, 9))):
        for action in block:
            actions.append(action)
            actions.extend(palette.interlude(choose))
    return Training(
        models,
        tuple(actions[:MAX_STEPS]),
        seed=choose(range(100)),
        optimizer=choose(tuple(OPTIMIZERS)),
        optimizers=choose((1, 1, 2)),
        record_step=choose((False, True)),
        scarce=choose((False, True)),
        copied=choose((0, 65536)),
        split=split,
    )


def _model(choose: Choose, marked: bool) -> Model:
    common = ("linear", "linear", "tanh", "dropout", "norm", "scale", "batch", "embedding", "shared", "relu", "slope")
    common += (*common, "relu in place", *(LIVE if marked else ()))
    layers = tuple(choose(common) for _ in range(choose((1, 2, 3, 4))))
    form = choose(("plain", "plain", "residual", "twice", "both", "view", "detached"))
    recompute = choose(("", "", "", "plain", "reentrant"))
    return Model(layers, form, recompute, choose((1, 0, 1, 0, 2)), choose((16, 16, 16, 2)))


def _without_accidents(models: list[Model]) -> tuple[Model, ...]:
    """Where no gradient comes back to a part with `use_reentrant=True`, eager goes on with zeros, and a recording does not; and
    what such a part makes of its own input in place, or a view of that, eager must not be asked about any more."""
    nested = any(model.recompute == "reentrant" for model in models)
    viewed = any(model.form == "view" for model in models)
    instead = {"embedding": "linear"} if nested else {}
    instead |= {"relu in place": "relu"} if nested or viewed else {}
    return tuple(model._replace(layers=tuple(instead.get(name, name) for name in model.layers)) for model in models)


class _Palette:
    """The few batch sizes and modes of one program: so that calls come back, and are replayed."""

    def __init__(self, choose: Choose, models: int) -> None:
        self.models = models
        self.rows = [choose((3, 3, 3, 5, 5, 2, 2, 1)) for _ in range(choose((1, 1, 2)))]
        self.grad = choose((False, True))
        self.modes = [choose(("plain", "plain", "plain", "no_grad")) for _ in range(choose((1, 2)))]

    def block(self, choose: Choose) -> list[Action]:
        """What is repeated: forwards and backwards in some order, and mostly a step after them."""
        block: list[Action] = []
        for _ in range(choose((1, 2, 3))):
            block.append(self.forward(choose))
            if choose((True, False)):
                block.extend(self.backwards(choose))
        block.extend(self.backwards(choose))
        block.extend(Clip() for _ in range(choose((0, 0, 1))))
        block.extend(Step(choose((0, 1))) for _ in range(choose((1, 1, 0, 2))))
        block.extend(Schedule(choose((0, 1))) for _ in range(choose((0, 0, 1))))
        if choose((True, True, True, False)):
            block.insert(choose((0, len(block))), ZeroGrad(choose((True, True, False))))
        if choose((False, False, True)):
            place = choose(range(len(block)))
            block[place:place] = self.event(choose, choose(EVENTS))
        return block

    def forward(self, choose: Choose) -> Forward:
        kind = choose(("fresh", "fresh", "output", "output", "same"))
        source: Any = Same()
        if kind == "fresh":
            source = Fresh(choose(self.rows), self.grad)
        elif kind == "output":
            source = Output(choose((0, 0, 1, 2)), choose((False, False, True)))
        return Forward(choose(range(self.models)), source, choose(self.modes))

    def backwards(self, choose: Choose) -> Iterator[Backward]:
        backs = tuple(choose((0, 1, 2)) for _ in range(choose((1, 1, 2))))
        loss, again = choose(tuple(LOSSES)), choose((False,) * 15 + (True,))
        if choose((False, False, False, True)):
            yield Backward(backs, loss, retain=True)
        yield Backward(backs, loss, again=again)

    def interlude(self, choose: Choose) -> Iterator[Action]:
        """Mostly nothing; otherwise something happens between two steps of the loop."""
        yield from self.event(choose, choose(("",) * 60 + EVENTS))

    def event(self, choose: Choose, kind: str) -> Iterator[Action]:
        model, parameter, back = choose(range(self.models)), choose(range(8)), choose((0, 1, 2))
        if kind == "forward":
            yield self.forward(choose)
        elif kind == "backward":
            yield from self.backwards(choose)
        elif kind == "rows":
            yield Forward(model, Fresh(choose((5, 3, 2)), self.grad))
        elif kind == "drop":
            yield Drop(back)
        elif kind == "zero":
            yield ZeroGrad(choose((True, False)))
        elif kind == "step":
            yield Step(choose((0, 1)))
        elif kind == "keep":
            yield KeepGradient(parameter, choose((False, True)))
        elif kind == "hook":
            yield Hook(parameter, choose(tuple(HOOKS)))
        elif kind == "look":
            yield Look(back, choose(("retain", "scale")))
        elif kind == "freeze":
            yield Freeze(parameter)
        elif kind == "input":
            yield WriteInput(choose(("in place", "unseen", "other memory")))
        elif kind == "output":
            yield WriteOutput(back, choose((False, True)))
        elif kind == "change":
            yield Change(choose(tuple(CHANGES)), model)
        elif kind == "copy":
            yield Copy(model)
        elif kind == "reset":
            yield Reset(model, choose((True, True, False)))
        elif kind == "draw":
            yield Draw()


EVENTS = ("forward", "backward", "rows", "drop", "zero", "step", "keep", "keep", "hook", "look", "look", "freeze", "input",
          "output", "output", "change", "change", "copy", "reset", "draw")  # fmt: skip


def shrink(program: Training, fails: Callable[[Training], bool]) -> Training:
    """A smaller program that still fails: without steps, layers and options that are not needed."""
    return shrunk(program, _smaller, fails)


def _smaller(program: Training) -> Iterator[Training]:
    actions, models = program.actions, program.models
    for size in (8, 4, 2, 1):
        for i in reversed(range(0, len(actions) - size + 1, size)):
            yield dataclasses.replace(program, actions=actions[:i] + actions[i + size :])
    for i in range(len(models) if len(models) > 1 else 0):
        yield dataclasses.replace(program, models=models[:i] + models[i + 1 :])
    for i, model in enumerate(models):
        less = [model._replace(layers=model.layers[:j] + model.layers[j + 1 :]) for j in range(len(model.layers))]
        simpler = [model._replace(**{name: default}) for name, default in Model._field_defaults.items() if name != "layers"]
        for candidate in (*(m for m in less if m.layers), *(m for m in simpler if m != model)):
            yield dataclasses.replace(program, models=(*models[:i], candidate, *models[i + 1 :]))
    for field in dataclasses.fields(program):
        if field.default is not dataclasses.MISSING and getattr(program, field.name) != field.default and field.name != "seed":
            yield dataclasses.replace(program, **{field.name: field.default})
    for i, action in enumerate(actions):
        for name, default in action._field_defaults.items():
            if getattr(action, name) != default:
                yield dataclasses.replace(
                    program, actions=(*actions[:i], action._replace(**{name: default}), *actions[i + 1 :])
                )
