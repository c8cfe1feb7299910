"""Steps of `DistributedDataParallel` on two ranks, as `tests.ranks` runs its programs: `python -m tests.ranks_ddp RANK BACKEND
FOLDER CASE...`."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.ranks import Case

CALLS = 8
BUCKET = 400 / 2**20  # MiB: some buckets for this network


def _network(*parts: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 16), torch.nn.GELU(), *(part() for part in parts), torch.nn.Linear(16, 16), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).to(ranks._device())


def _trained(wrapped: Any, optimizer: Any, step: Any) -> tuple[Any, Any, Any]:
    def left() -> list[Any]:
        states = [optimizer.state.get(p, {}) for p in wrapped.parameters()] if optimizer is not None else []
        own = tuple([v.clone() for state in states for v in state.values()])
        return [*wrapped.parameters(), *(p.grad for p in wrapped.parameters()), *wrapped.buffers(), own]

    return step, lambda n: [ranks._numbers(n, 6, 4) / 100], left


def _step(
    net: torch.nn.Module, *, fused: bool = True, none: bool = True, clipped: bool = False, hook: Any = None, micro: int = 1,
    bf16: bool = False, zero: bool = False, before: Callable[[Any, int], None] | None = None, **options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    wrapped = DistributedDataParallel(net, bucket_cap_mb=BUCKET, **options)
    if hook is not None:
        wrapped.register_comm_hook(*hook)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01, fused=True)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, fused=fused)

    def step(x):
        optimizer.zero_grad(set_to_none=none)
        total = torch.zeros((), device=x.device)
        for i, part in enumerate(x.chunk(micro)):
            with wrapped.no_sync() if i < micro - 1 else contextlib.nullcontext():
                with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                    loss = wrapped(part).float().square().mean() / micro
                loss.backward()
            total += loss.detach()
        if clipped:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.01)
        optimizer.step()
        return total

    found = _trained(wrapped, None if zero else optimizer, step)
    if before is None:
        return found

    def arguments(n: int) -> list[Any]:
        before(wrapped, n)
        return found[1](n)

    return step, arguments, found[2]


def _compresses() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook


class _Recomputed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)


class _Asks(torch.autograd.Function):
    """Looks at a value on the host, in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if grad.sum().item() > 1e9 else grad


class _AsksOn(torch.nn.Module):
    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def forward(self, x):
        return _Asks.apply(x) if self.here else x


def _then_accumulates(wrapped: Any, n: int) -> None:
    """Before the capture and after it: a forward that nobody differentiates, and a backward that is not to be averaged."""
    x = ranks._numbers(n, 6, 4) / 100
    wrapped(x)
    if n > 1:
        with wrapped.no_sync():
            wrapped(x).square().mean().backward()


def _steps_outside(wrapped: Any, n: int) -> None:
    """Live steps between replays leave averaged gradients."""
    if n == 5:
        wrapped.zero_grad()
        wrapped(ranks._numbers(n, 6, 4) / 100).square().mean().backward()


def _loads(wrapped: Any, n: int) -> None:
    if n == 5:
        wrapped.load_state_dict({name: t.clone() + 0.5 for name, t in wrapped.state_dict().items()})


def _compresses_later(wrapped: Any, n: int) -> None:
    if n == 5:
        wrapped.register_comm_hook(None, _compresses())


def _averages_in_another_group(wrapped: Any, n: int) -> None:
    """As where ranks have come or gone: here each goes on alone."""
    if n == 0:
        wrapped.alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    if n == 5:
        wrapped._update_process_group(wrapped.alone)


def _another_batch() -> tuple[Any, Any, Any]:
    step, arguments, left = _step(_network())
    return step, lambda n: [x[:4] if n in (4, 5) else x for x in arguments(n)], left


def _evaluates(inside: bool) -> tuple[Any, Any, Any]:
    """What does not average gradients, beside live steps of a wrapper that no graph can have."""
    wrapped = DistributedDataParallel(_network(lambda: torch.nn.BatchNorm1d(16)), find_unused_parameters=True)
    average, optimizer = copy.deepcopy(wrapped.module), torch.optim.SGD(wrapped.parameters(), lr=0.01)

    @torch.no_grad()
    def follows(x):
        for mine, theirs in zip(average.parameters(), wrapped.parameters(), strict=True):
            mine.lerp_(theirs, 0.25)
        wrapped.eval()
        y = (wrapped.module if inside else wrapped)(x)
        wrapped.train()
        return y

    def arguments(n: int) -> list[Any]:
        x = ranks._numbers(n, 6, 4) / 100
        if n != 3:  # that of a wrapper is called twice in a row, and need not broadcast the second time
            optimizer.zero_grad(set_to_none=False)
            wrapped(x).square().mean().backward()
            optimizer.step()
        return [x]

    return follows, arguments, lambda: [*average.parameters(), *wrapped.parameters(), *wrapped.buffers()]


class _Counts:
    """What a communication hook of the user's keeps."""

    def __init__(self) -> None:
        self.calls = 0


def _halves_at_first(state, bucket):  # (a hook's annotations are checked as they are, and here they are texts)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    state.calls += 1
    if state.calls <= 12:
        bucket.buffer().mul_(0.5)
    return allreduce_hook(None, bucket)


def _averages_at_first() -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    return PostLocalSGDState(None, None, 4, post_local_gradient_allreduce=False), post_localSGD_hook


def _averages_seldom() -> tuple[Any, Any, Any]:
    """The wrapper orders its buckets late: after the first step that it averages, which is the fourth."""
    wrapped = DistributedDataParallel(_network(), bucket_cap_mb=BUCKET)

    def step(x):
        loss = wrapped(x).square().mean()
        loss.backward()
        return loss.detach()

    def arguments(n: int) -> list[Any]:
        wrapped.require_backward_grad_sync = n == 3
        return [ranks._numbers(n, 6, 4) / 100]

    return step, arguments, lambda: [p.grad for p in wrapped.parameters()]


CASES = {
    "step": Case(lambda: _step(_network())),
    "step_clipped": Case(lambda: _step(_network(), fused=False, clipped=True)),
    "step_into_views": Case(lambda: _step(_network(), gradient_as_bucket_view=True)),
    "step_into_views_that_stay": Case(lambda: _step(_network(), gradient_as_bucket_view=True, none=False)),
    "step_into_gradients_that_stay": Case(lambda: _step(_network(), none=False)),
    "step_with_buffers": Case(lambda: _step(_network(lambda: torch.nn.BatchNorm1d(16)))),
    "step_compressed": Case(lambda: _step(_network(), hook=(None, _compresses()))),
    "step_in_bf16": Case(lambda: _step(_network(), bf16=True)),
    "step_recomputed": Case(lambda: _step(_network(_Recomputed))),
    "step_accumulating": Case(lambda: _step(_network(), micro=3)),
    "step_of_zero": Case(lambda: _step(_network(), zero=True)),
    "step_refused_in_its_backward": Case(lambda: _step(_network(lambda: _AsksOn(True)))),
    "step_refused_on_one_rank": Case(lambda: _step(_network(lambda: _AsksOn(dist.get_rank() == 1)))),
    "step_beside_others": Case(lambda: _step(_network(), before=_then_accumulates)),
    "step_beside_live_ones": Case(lambda: _step(_network(), before=_steps_outside)),
    "step_of_loaded_weights": Case(lambda: _step(_network(), before=_loads)),
    "step_compressed_beside_later": Case(lambda: _step(_network(), before=_compresses_later)),
    "step_beside_another_group": Case(lambda: _step(_network(), before=_averages_in_another_group)),
    "step_of_another_batch": Case(_another_batch),
    "step_that_asks_for_unused": Case(lambda: _step(_network(), find_unused_parameters=True)),
    "step_that_averages_at_first": Case(lambda: _step(_network(), hook=_averages_at_first())),
    "step_with_a_hook_that_counts": Case(lambda: _step(_network(), hook=(_Counts(), _halves_at_first))),
    "averages_seldom": Case(_averages_seldom),
    "evaluates_what_is_inside": Case(lambda: _evaluates(True)),
    "evaluates": Case(lambda: _evaluates(False)),
    "step_of_a_static_graph": Case(lambda: _step(_network(), static_graph=True)),
}

if __name__ == "__main__":
    ranks.CALLS = CALLS
    ranks.main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*CASES], CASES)
