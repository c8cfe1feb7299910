"""What a drawn program may use, and what can be seen of it: run once plainly, once recorded, everything that its names lead to
is noted after each turn of its loop, bit by bit.

A program is Python text whose loop has the form

    for n in range(12):
        with told():
            ...

`told` notes what the block raises, and goes on: what eager raises, a recorded function has to raise as well. After an exception
no gradients are kept: how far a backward has come is not promised.

Nothing that is noted holds what it was made from, or the next call would find it held.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import io
import linecache
import logging
import math
import operator
import pickle
import random
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph._torch.tensors import says_version
from phonograph.devices import all_devices
from phonograph.engine import budget
from phonograph.python import read_gate

__all__ = ["KEPT", "Ran", "World"]

KEPT = 12
"""How many arguments more may be alive: a recording keeps those that stood where it relies on what stands there."""

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.BuiltinFunctionType)
_LIBRARY = {
    "torch": torch, "nn": nn, "F": F, "pg": pg, "math": math, "copy": copy, "gc": gc, "operator": operator, "random": random,
    "np": np, "collections": collections, "dataclasses": dataclasses, "functools": functools, "checkpoint": checkpoint,
    "contextlib": contextlib, "SimpleNamespace": types.SimpleNamespace, "io": io, "pickle": pickle,
}  # fmt: skip


@dataclasses.dataclass
class Ran:
    """What was seen in each turn, and how much of it was recorded and replayed."""

    turns: list[dict[str, Any]]
    recorded: int
    replayed: int
    alive: list[int]  # how many arguments of calls are, after each turn


class World:
    """One execution of a program: plain, or `recorded` with these options and beside what was seen `plainly`."""

    def __init__(self, device: torch.device, options: dict[str, Any] | None, plainly: Ran | None = None) -> None:
        self.device, self.options, self.plainly = device, options, plainly
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []
        self.functions: list[Any] = []
        self.turns: list[dict[str, Any]] = []
        self.module = types.ModuleType("drawn")
        self.space = vars(self.module)
        self._versions: dict[str, tuple[Any, int]] = {}
        self._others: list[Any] = []  # what was in the pools before

    def run(self, text: str, name: str) -> Ran:
        """Run a program from its beginning. The `name` is that of a file, in which its lines would be."""
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        own = {f.__name__: f for f in (self.told, self.record, self.reset, self.look, self.data, self.classes, self.in_thread)}
        sys.modules["drawn"] = self.module  # where dataclasses look
        self.space |= {**_LIBRARY, **own, "DEVICE": self.device}
        self._given = set(self.space)
        self._others = _in_pools()
        read_gate.gated.clear()
        with warnings.catch_warnings(), _no_failures_of_our_own(), _modes_put_back(), _attempts_are_free():
            warnings.simplefilter("ignore")
            exec(compile(text, name, "exec"), self.space)
            recorded, replayed = self._counts()
            if self.options is not None:
                self._let_go()
        return Ran(self.turns, recorded, replayed, self.alive)

    def _counts(self) -> tuple[int, int]:
        stats = []
        for f in self.functions:
            with contextlib.suppress(TypeError):  # a module that was reset is not recorded any more
                stats.append(pg.stats(f))
        return sum(s.recorded for s in stats), sum(s.replayed for s in stats)

    def _let_go(self) -> None:
        """Once all that a program has made is dropped, nothing of it is in a pool."""
        self.functions.clear()
        self.space.clear()
        self._versions.clear()
        gc.collect()
        left = [one for one in _in_pools() if not any(one is other for other in self._others)]
        assert not left, f"in the pool is left what nobody has: {left}"

    # -- what a program calls

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        said = None
        try:
            yield
        except Exception as error:
            said = _said(error)
        if said is not None:
            self._drop_gradients()
        self.turns.append({"raised": said, **Portrait(self._versions).of(self._shown())})
        self.alive.append(self._still_alive())

    def record(self, f: Any, **options: Any) -> Any:
        if not callable(f):
            raise TypeError("no function")  # or it would give a decorator
        if self.options is None:
            return f
        recorded = pg.record(f, **{"keep": "always", **self.options, **options})
        self.functions.append(recorded)
        return recorded

    def reset(self, f: Any) -> None:
        if self.options is not None:
            with contextlib.suppress(TypeError):  # a module that was reset is not recorded any more
                pg.reset(f)

    def look(self, f: Any) -> None:
        """What is told of it, which changes nothing."""
        if self.options is not None and isinstance(f, pg.Recorded):
            pg.explain(f)
            pg.stats(f)

    def data(self, n: int, rows: int = 3, width: int = 4) -> torch.Tensor:
        """Multiples of 1/8 between -2 and 2."""
        chosen = torch.Generator().manual_seed(n * 100 + rows)
        made = (torch.randint(-16, 17, (rows, width), generator=chosen) / 8).to(self.device)
        if n < 50:  # an argument
            self.made.append(weakref.ref(made))
        return made

    def classes(self, n: int, rows: int = 3) -> torch.Tensor:
        return (self.data(n, rows)[:, 0] * 8).long().remainder(4)

    def in_thread(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function gives in a thread of its own."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append((f(*args, **kwargs), None))
            except Exception as error:
                found.append((None, error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        result, error = found.pop()
        if error is not None:
            raise error
        return result

    # -- what there is to see

    def _still_alive(self) -> int:
        """How many arguments somebody holds. Not many more than plainly, but for garbage."""
        found = sum(ref() is not None for ref in self.made)
        if self.plainly is not None and found > self.plainly.alive[len(self.alive)] + KEPT:
            gc.collect()
            found = sum(ref() is not None for ref in self.made)
        return found

    def _shown(self) -> dict[str, Any]:
        return {name: x for name, x in self.space.items() if name not in self._given and not name.startswith("__")}

    def _drop_gradients(self) -> None:
        for x in list(self._shown().values()):
            for p in x.parameters() if isinstance(x, nn.Module) else []:
                p.grad = None


@contextlib.contextmanager
def _modes_put_back() -> Iterator[None]:
    before = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        gc.get_threshold(),
    )
    try:
        with torch.set_grad_enabled(True):
            yield
    finally:
        gc.set_threshold(*before[3])
        torch._C._set_multithreading_enabled(True)
        torch.set_default_dtype(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.set_float32_matmul_precision(before[2])


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
    assert not failures, failures[0]


@contextlib.contextmanager
def _attempts_are_free() -> Iterator[None]:
    """Whether there was time for a capture would hang on the machine."""
    before, budget.now = budget.now, lambda: 0.0
    try:
        yield
    finally:
        budget.now = before


_PATCHED = (
    "tolist",
    "item",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__format__",
    "__repr__",
    "backward",
    "grad",
)
_UNPATCHED = [vars(kind).get(name) for kind in (torch.Tensor, torch._C.TensorBase) for name in _PATCHED]


def _process() -> tuple[Any, ...]:
    """What a recording changes in the process while it works, and puts back."""
    patched = [vars(kind).get(name) for kind in (torch.Tensor, torch._C.TensorBase) for name in _PATCHED]
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(), torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
        torch.is_anomaly_enabled(), torch.autograd.graph.saved_tensors_hooks is _HOOKS, sys.getprofile() is None,
        sys.gettrace() is None, threading.active_count(), len(gc.callbacks), gc.isenabled(), gc.get_threshold(),
        torch.are_deterministic_algorithms_enabled(), torch._C._is_multithreading_enabled(),
        all(a is b for a, b in zip(patched, _UNPATCHED, strict=True)),
    )  # fmt: skip


_HOOKS = torch.autograd.graph.saved_tensors_hooks


class Portrait:
    """All that some names lead to, as plain values by their paths. Of versions, whether they have moved since the last one."""

    def __init__(self, versions: dict[str, tuple[Any, int]]) -> None:
        self._versions, self._found = versions, dict[str, Any]()
        self._seen: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._alive: list[Any] = []  # what was made to be looked at: its id is nobody else's until the end

    def of(self, names: dict[str, Any]) -> dict[str, Any]:
        for name, x in sorted(names.items()):
            self._visit(name, x)
        self._found |= {"torch's generator": torch.get_rng_state().numpy().tobytes(), "Python's": repr(random.getstate()),
                        "NumPy's": hash(np.random.get_state()[1].tobytes()),
                        "process": _process()}  # fmt: skip
        if torch.cuda.is_initialized():
            self._found["CUDA's generator"] = torch.cuda.get_rng_state().numpy().tobytes()
        return self._found

    def _visit(self, path: str, x: Any) -> None:
        if isinstance(x, _PLAIN):
            self._found[path] = f"{type(x).__name__} {x!r}"
            return
        if id(x) in self._seen:
            self._found[path] = f"is {self._seen[id(x)]}"
            return
        self._seen[id(x)] = path
        self._alive.append(x)
        if isinstance(x, torch.Tensor):
            self._tensor(path, x)
        elif isinstance(x, types.ModuleType):
            pass
        else:
            self._found[path] = "" if callable(x) and not isinstance(x, nn.Module) else type(x).__qualname__
            for name, part in self._parts(x):
                self._visit(f"{path}{name}", part)

    def _parts(self, x: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(x, pg.Recorded):
            yield from self._parts(x.__wrapped__)
        elif isinstance(x, types.MethodType):
            yield ".__self__", x.__self__
        elif isinstance(x, types.FunctionType):
            cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
            yield from ((f"<{name}>", cell.cell_contents) for name, cell in cells if _is_filled(cell))
            yield ".__defaults__", x.__defaults__
        elif isinstance(x, dict):
            yield from ((f"[{key!r}]", part) for key, part in x.items())
        elif isinstance(x, list | tuple | collections.deque):
            yield from ((f"[{i}]", part) for i, part in enumerate(x))
        elif isinstance(x, set | frozenset):
            yield "{}", sorted(map(repr, x))
        elif isinstance(x, np.ndarray):
            yield ".bytes", f"{x.dtype}{x.shape}{x.tolist()}"
        elif isinstance(x, torch.optim.Optimizer):
            yield ".param_groups", x.param_groups
            yield ".state", [(p, x.state[p]) for group in x.param_groups for p in group["params"] if p in x.state]
        elif isinstance(x, torch.utils.hooks.RemovableHandle):
            pass  # numbered throughout the process
        elif isinstance(x, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
            yield ".state_dict()", x.state_dict()
        elif isinstance(x, nn.Module):
            yield ".state", {**dict(x.named_parameters()), **dict(x.named_buffers())}
            yield from ((f".{name}.{key}", v) for name, m in x.named_modules() for key, v in vars(m).items()
                        if not key.startswith("_") and not callable(v))  # fmt: skip
        elif isinstance(x, io.StringIO):
            yield ".getvalue()", x.getvalue()
        elif isinstance(x, type):
            yield from ((f".{key}", v) for key, v in vars(x).items() if isinstance(v, _PLAIN) and not key.startswith("_"))
        else:
            yield from ((f".{key}", part) for key, part in sorted(getattr(x, "__dict__", {}).items()))
            yield from ((f".{key}", getattr(x, key)) for key in getattr(type(x), "__slots__", ()) if hasattr(x, key))

    def _tensor(self, path: str, t: torch.Tensor) -> None:
        try:
            is_leaf = t.is_leaf
        except RuntimeError as error:  # a view of a custom Function's, whose base was written
            self._found[path] = _said(error)
            return
        kind = type(t).__name__, t.dtype, tuple(t.shape), t.stride(), t.requires_grad, is_leaf, t.is_inference()
        start = t.untyped_storage().data_ptr()
        shared = self._storages.setdefault(start, path) if start else ""
        self._found[path] = *kind, shared, str(t.detach().tolist())  # (a text: no number is equal to NaN)
        counted = says_version(t) and not t.is_inference()
        if is_leaf and counted and not path.endswith(".grad") and not (".state[" in path and not t.dim()):
            before = self._versions.get(path, (None, 0))
            self._found[f"{path}: written"] = before[0] is not None and before[0]() is t and before[1] != t._version
            self._versions[path] = weakref.ref(t), t._version
        if is_leaf or t.retains_grad:
            self._visit(f"{path}.grad", t.grad)


def _in_pools() -> list[Any]:
    """What the pools of all devices have in use."""
    for device in all_devices():
        device.pool.sweep()
    return [one for d in all_devices() for one in (*d.pool.recordings, *d.pool.leases, *d.pool.loans)]


def _said(error: Exception) -> str:
    words = re.sub("version [0-9]+|0x[0-9a-f]+", "…", str(error).partition("\n")[0])
    words = re.sub("(?<=a second time)( \\(or directly|: this tensor's).*", "", words)  # of a result it says where that was
    return f"{type(error).__qualname__}: {words}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
