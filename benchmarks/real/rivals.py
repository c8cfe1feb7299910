"""What people use instead, with the interface of `pg.record`: takes a function or model, gives the faster one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils._pytree import tree_flatten, tree_map_only


class CudaGraphModule:
    """A function captured once, behind static copies of its arguments; its results are copied out.

    It does what tensordict's class of this name does for plain arguments, and is used where that is not installed: live calls
    to warm up, one capture, and then replays, whatever else has changed.
    """

    def __init__(self, function: Callable[..., Any], warmup: int = 2) -> None:
        self.function, self.left = function, warmup
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, _ = tree_flatten((args, kwargs))
        if self.graph is None:
            if self.left:
                return self._warm_up(args, kwargs)
            self._capture(args, kwargs)
        assert self.graph is not None
        for slot, new in zip(self.slots, given, strict=True):
            if isinstance(slot, Tensor):
                slot.copy_(new, non_blocking=True)
        self.graph.replay()
        return tree_map_only(Tensor, lambda t: t.detach().clone(), self.results)

    def _warm_up(self, args: Any, kwargs: Any) -> Any:
        self.left -= 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results = self.function(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        return results

    def _capture(self, args: Any, kwargs: Any) -> None:
        args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        self.slots, _ = tree_flatten((args, kwargs))
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self.function(*args, **kwargs)


@contextmanager
def without_validation() -> Iterator[None]:
    """What users of graphs do: distributions do not look at their arguments' values, which would end a capture."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def cuda_graph_module(function: Callable[..., Any]) -> Any:
    try:
        from tensordict.nn import CudaGraphModule as Theirs
    except ImportError:
        return CudaGraphModule(without_validation()(function))
    return Theirs(without_validation()(function))


def reduce_overhead(function: Any, **_: Any) -> Any:
    return torch.compile(function, mode="reduce-overhead")


def graphed(*example: Tensor) -> Callable[[Any], Any]:
    """`torch.cuda.make_graphed_callables` for a model that is called with tensors like these."""
    return lambda model: torch.cuda.make_graphed_callables(model, tuple(t.clone() for t in example))
