"""torch's own databases as cases: what `operators.py` runs.

A *member* is an entry of `op_db`, `module_db` or `optim_db`, a *way* how it is used. A case is a sample of a member in one way:
some calls of one signature, with other values each, played once live and once recorded from equal state. What such a play
shows are its results, its arguments with their gradients, and where all generators stand after each call.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

if "expecttest" not in sys.modules:  # torch's databases ship with torch, and this, of which they need a name, does not
    with contextlib.suppress(ImportError):
        import expecttest  # noqa: F401
    sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).__dict__.setdefault("TestCase", unittest.TestCase)

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

try:
    from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs as optim_inputs
except ImportError:
    optim_inputs = None

__all__ = ["WAYS", "Member", "members"]

for module in [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal.")]:
    if hasattr(module, "wrapper_set_seed"):  # what draws is there in functions that seed, which cannot be recorded
        module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
for devices in (torch.cuda, torch.mtia, torch.xpu):  # `manual_seed` formats the stack for each, in case that it should come
    devices.traceback = types.SimpleNamespace(format_stack=list)

CALLS = 4
STEPS = 7  # of an optimizer
SAMPLES = 4
SEEN = 32  # samples among which those are spread
FLOAT = torch.float32

Play = list[Any]
Record = Callable[[Any], Any]


# ---- what all members have in common -------------------------------------------------------------


def seed(k: int) -> None:
    """Tensors have other values for another `k`; what Python draws (sizes, mostly) is the same."""
    torch.manual_seed(k)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def generators(device: str) -> tuple[object, ...]:
    """Where all generators of the process stand."""
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else ()
    numpy = [part.tobytes() if hasattr(part, "tobytes") else part for part in numpy]
    cuda = [bytes(state.numpy()) for state in torch.cuda.get_rng_state_all()] if device == "cuda" else []
    return bytes(torch.get_rng_state().numpy()), cuda, random.getstate(), numpy


def spread(n: int) -> list[int]:
    """Places of the samples that are taken of `n`."""
    most = min(n, SAMPLES)
    return sorted({i * (n - 1) // max(most - 1, 1) for i in range(most)})


def floating(tree: object, kind: Callable[[torch.Tensor], bool] = lambda t: t.requires_grad) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and kind(t)]


def where(tree: object) -> str:
    """The kind of device on which its tensors are."""
    return next((t.device.type for t in tree_leaves(tree) if isinstance(t, torch.Tensor)), "cpu")


def inexact(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def weights(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What to multiply results with whose gradient is wanted: no two alike, and nothing is drawn for it."""
    return [torch.linspace(0.5, 1.5, t.numel(), device=t.device).reshape(t.shape).to(t.dtype) for t in tensors]


def backward(result: object) -> None:
    tensors = floating(result)
    if tensors:
        torch.autograd.backward(tensors, weights(tensors))


# ---- operators -----------------------------------------------------------------------------------


def _forward(f: Any) -> Any:
    return lambda input, args, kwargs: f(input, *args, **kwargs)


def _whole(f: Any) -> Any:
    def step(input: Any, args: Any, kwargs: Any) -> Any:
        results, inputs = floating(f(input, *args, **kwargs)), floating((input, args, kwargs))
        return results, torch.autograd.grad(results, inputs, weights(results), allow_unused=True)

    return step


def _second(f: Any) -> Any:
    def step(input: Any, args: Any, kwargs: Any) -> Any:
        results, inputs = floating(f(input, *args, **kwargs)), floating((input, args, kwargs))
        first = torch.autograd.grad(results, inputs, weights(results), create_graph=True, allow_unused=True)
        again = floating(first)
        return torch.autograd.grad(again, inputs, weights(again), allow_unused=True) if again else first

    return step


def _autocast(f: Any) -> Any:
    def call(input: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast(where((input, args, kwargs)), torch.bfloat16):
            return f(input, *args, **kwargs)

    return call


def _out(f: Any) -> Any:
    return lambda input, args, kwargs, out: f(input, *args, **kwargs, out=out)


def _vmap(f: Any) -> Any:
    def call(input: Any, args: Any, kwargs: Any) -> Any:
        places = tree_map(lambda x: 0 if isinstance(x, torch.Tensor) else None, (input, args, kwargs))
        return torch.vmap(lambda i, a, k: f(i, *a, **k), in_dims=places, randomness="different")(input, args, kwargs)

    return call


def _forward_mode(f: Any) -> Any:
    def call(input: Any, args: Any, kwargs: Any) -> Any:
        with forward_ad.dual_level():
            input, args, kwargs = tree_map(_dual, (input, args, kwargs))
            result = f(input, *args, **kwargs)
            return [forward_ad.unpack_dual(t).tangent for t in tree_leaves(result) if isinstance(t, torch.Tensor)]

    return call


def _dual(x: object) -> object:
    if not isinstance(x, torch.Tensor) or not inexact(x):
        return x
    return forward_ad.make_dual(x, weights([x])[0])


OPERATOR_WAYS: dict[str, Callable[[Any], Any]] = {
    "forward": _forward, "pair": _forward, "whole": _whole, "autocast": _autocast, "inference": _forward, "out": _out,
    "vmap": _vmap, "second": _second, "forward mode": _forward_mode,
}  # fmt: skip
MODULE_WAYS = ("forward", "pair", "whole", "autocast", "inference")
OPTIMIZER_WAYS = ("whole", "step")
WAYS = (*OPERATOR_WAYS, "step")


class Member:
    """An entry of a database."""

    name: str
    ways: tuple[str, ...]

    def __init__(self, info: Any, device: str) -> None:
        self.info, self.device = info, device

    def count(self, way: str) -> int:
        """How many cases there are."""
        raise NotImplementedError

    def play(self, way: str, i: int, record: Record) -> Play:
        """The `i`-th case from its beginning, with what is recorded given to `record`."""
        raise NotImplementedError


class Operator(Member):
    def __init__(self, info: Any, device: str) -> None:
        super().__init__(info, device)
        self.name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        kinds = info.supported_dtypes(device)
        order = [FLOAT, torch.float64, torch.complex64, torch.bfloat16, torch.int64, torch.bool, *sorted(kinds, key=str)]
        self.dtype = next(kind for kind in order if kind in kinds) if kinds else None
        differs = self.dtype in info.supported_backward_dtypes(device) and info.supports_autograd
        without = {
            "pair": not differs, "whole": not differs, "second": not (differs and info.supports_gradgrad),
            "forward mode": not (differs and info.supports_forward_ad), "out": not info.supports_out,
        }  # fmt: skip
        self.differs = differs
        self._number: int | None = None  # of samples
        self.ways = tuple(way for way in OPERATOR_WAYS if not without.get(way)) if kinds else ()

    def _samples(self, k: int, way: str, places: list[int]) -> Iterator[Any]:
        """Those at these places, made with other values for another `k`."""
        seed(k)
        grads = self.differs and way in ("pair", "whole", "second", "inference")
        # Not by way of `sample_inputs`, which seeds before each of them.
        found = self.info.sample_inputs_func(self.info, self.device, self.dtype, grads)
        yield from (sample for i, sample in enumerate(itertools.islice(found, max(places) + 1)) if i in places)

    def _places(self, way: str) -> list[int]:
        if self._number is None:
            self._number = sum(1 for _ in self._samples(0, way, [*range(SEEN)]))
        return spread(self._number)

    def count(self, way: str) -> int:
        return len(self._places(way))

    def play(self, way: str, i: int, record: Record) -> Play:
        function = self.info.op
        recorded, seen, place = record(OPERATOR_WAYS[way](function)), [], self._places(way)[i]
        for k in range(CALLS):
            (sample,) = self._samples(k, way, [place])
            given = self._given(function, way, (sample.input, sample.args, sample.kwargs))
            seed(100 + k)
            with torch.inference_mode(way == "inference"):
                result = recorded(*given)
            stand = generators(self.device)
            if way == "pair":
                backward(result)
            seen.append((result, given, stand))
        return seen

    def _given(self, function: Any, way: str, given: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        if way == "out":
            input, args, kwargs = given
            like = function(input, *args, **kwargs)
            return *given, tree_map(lambda t: torch.full_like(t, 1) if isinstance(t, torch.Tensor) else t, like)
        if way == "vmap":
            return tree_map(lambda x: torch.stack([x, x]) if isinstance(x, torch.Tensor) else x, given)
        return given


# ---- modules -------------------------------------------------------------------------------------


class Module(Member):
    ways = MODULE_WAYS

    def __init__(self, info: Any, device: str) -> None:
        super().__init__(info, device)
        self.name = info.name
        self.dtype = FLOAT if FLOAT in info.dtypes else next(iter(info.dtypes))

    def _inputs(self, k: int, way: str) -> list[Any]:
        seed(k)
        training = way not in ("forward", "inference")
        options = {"device": self.device, "dtype": self.dtype, "requires_grad": way in ("pair", "whole"), "training": training}
        return [one for one in self.info.module_inputs_func(self.info, **options) if one.forward_input is not None]

    def count(self, way: str) -> int:
        return len(spread(len(self._inputs(0, way))))

    def play(self, way: str, i: int, record: Record) -> Play:
        inputs = self._inputs(0, way)
        place, built = spread(len(inputs))[i], []
        made = inputs[place].constructor_input
        seed(0)
        model = self.info.module_cls(*made.args, **made.kwargs).to(self.device).to(self.dtype)
        model.train(way not in ("forward", "inference"))
        call, seen = record(model if way == "pair" else _use(model, way)), built
        for k in range(CALLS):
            given = self._inputs(k, way)[place].forward_input
            seed(100 + k)
            with torch.inference_mode(way == "inference"):
                result = call(*given.args, **given.kwargs)
            stand = generators(self.device)
            if way == "pair":
                backward(result)
            seen.append((result, given.args, given.kwargs, stand))
        return [*seen, dict(model.named_parameters()), dict(model.named_buffers())]


def _use(model: torch.nn.Module, way: str) -> Any:
    def whole(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        backward(result)
        return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, result)

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(where(args), torch.bfloat16):
            return whole(*args, **kwargs)

    return {"whole": whole, "autocast": cast}.get(way, lambda *args, **kwargs: model(*args, **kwargs))


# ---- optimizers ----------------------------------------------------------------------------------


class Optimizer(Member):
    ways = OPTIMIZER_WAYS

    def __init__(self, info: Any, device: str) -> None:
        super().__init__(info, device)
        self.name = info.name

    def _inputs(self) -> list[Any]:
        if optim_inputs is None:
            return list(self.info.optim_inputs_func(self.device))
        return list(optim_inputs(self.device, FLOAT, self.info, skip=("differentiable",)))

    def count(self, way: str) -> int:
        return len(spread(len(self._inputs())))

    def play(self, way: str, i: int, record: Record) -> Play:
        inputs = self._inputs()
        chosen, sparse = inputs[spread(len(inputs))[i]], self.info.only_supports_sparse_grads
        seed(0)
        first = torch.nn.Embedding(8, 4, sparse=True) if sparse else torch.nn.Linear(8, 4, bias=False)
        model = torch.nn.Sequential(*([first] if sparse else [first, torch.nn.Tanh(), torch.nn.Linear(4, 2, bias=False)]))
        model.to(self.device)
        optimizer = self.info.optim_cls(model.parameters(), **chosen.kwargs)
        step = record(optimizer_step(model, optimizer, way, closure=self.info.step_requires_closure))
        seen: Play = []
        for k in range(STEPS):
            seed(k)
            x = torch.randint(8, (5,), device=self.device) if sparse else torch.randn(5, 8, device=self.device)
            if way == "step":
                gradients_of(model, optimizer, x)
            seen.append((step(x), generators(self.device)))
        return [*seen, dict(model.named_parameters()), optimizer]


def gradients_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def optimizer_step(model: Any, optimizer: Any, way: str, *, closure: bool) -> Any:
    def whole(x: torch.Tensor) -> Any:
        if closure:
            return optimizer.step(lambda: gradients_of(model, optimizer, x))
        loss = gradients_of(model, optimizer, x)
        optimizer.step()
        return loss

    def step(x: torch.Tensor) -> Any:
        optimizer.step(*([lambda: gradients_of(model, optimizer, x)] if closure else []))

    return whole if way == "whole" else step


# ---- all of them ---------------------------------------------------------------------------------


def members(device: str) -> dict[str, Member]:
    """All by their names, each behind that of its database."""
    found: dict[str, Member] = {}
    for group, kind, infos in (("op", Operator, op_db), ("module", Module, module_db), ("optim", Optimizer, optim_db)):
        for info in infos:
            member = kind(info, device)
            name = f"{group}:{member.name}"
            while name in found:
                name += "'"
            found[name] = member
    return found
