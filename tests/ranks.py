"""Small programs on two ranks, each run as it is and recorded. Run as one of two processes: `python -m tests.ranks RANK BACKEND
FOLDER CASE...`; writes what it has found to `FOLDER/RANK.json`: for each case what differs from the program as it is, the
counts, and the reasons why calls have run live.

`start` starts both, and waits for them.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group  # as many import them: what they are is settled here

from tests import forked

CALLS = 20
STARTING, PATIENCE = 150, 120  # seconds until both processes have imported all that they need, and for the rest


class Case:
    """`make` gives a function, what gives its arguments for the n-th call, and the tensors that it leaves. `only` one rank may
    record it."""

    def __init__(
        self, make: Callable[[], tuple[Any, Callable[[int], list[Any]], Callable[[], list[Any]]]], **options: Any
    ) -> None:
        self.make = make
        self.options = options


def start(
    backend: str, folder: Path, cases: Iterable[str], module: str = "tests.ranks", lasts: float = PATIENCE, **environment: str
) -> list[dict[str, Any]]:  # fmt: skip
    """What both ranks have found, in programs of that module. A process that does not end in time is killed: nothing."""
    if sys.platform == "linux":
        environment = {"GLOO_SOCKET_IFNAME": "lo", **environment}
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(2):
        arguments, log = (str(rank), backend, str(folder), *cases), folder / f"{rank}.log"
        processes.append(forked.start(forked.Module(module), *arguments, stdout=log, stderr=log, env=environment))
    began = time.monotonic()
    while time.monotonic() < began + STARTING and not all((folder / f"{rank}.ready").exists() for rank in range(2)):
        if any(process.poll() is not None for process in processes):
            break
        time.sleep(0.05)
    until = time.monotonic() + lasts
    found = []
    for rank, process in enumerate(processes):
        try:
            status: Any = process.wait(max(0.1, until - time.monotonic()))
        except TimeoutError:
            process.kill()
            process.wait(60)
            status = "did not end"
        told = folder / f"{rank}.json"
        cases_found = json.loads(told.read_text()) if told.exists() else {}
        found.append({"status": status, "log": (folder / f"{rank}.log").read_text()[-3000:], **cases_found})
    return found


# -- the programs


def _device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _numbers(n: int, *shape: int) -> torch.Tensor:
    """Small integers that are others on each rank and in each call."""
    count = torch.Size(shape).numel()
    start = 1 + 100 * dist.get_rank() + 10 * n
    return torch.arange(start, start + count, device=_device(), dtype=torch.float32).reshape(shape)


def _of_x(function: Callable[[torch.Tensor], Any], *shape: int, **options: Any) -> Case:
    """A function of one tensor."""
    return Case(lambda: (function, lambda n: [_numbers(n, *(shape or (4,)))], list), **options)


def all_reduce(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def all_reduce_of_an_argument(x):
    dist.all_reduce(x)
    return x * 2


def all_reduce_max(x):
    y = x * 2
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    return y


def all_reduce_async(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 1
    work.wait()
    return y + z


def all_reduce_while_it_works(x):
    """What it is given is nobody's else, and where that lay is used again while the collective is under way."""
    out = torch.empty(8, device=x.device)
    work = dist.all_gather_into_tensor(out, x * 2, async_op=True)
    z = (x + 1) * (x + 2)
    total = (z * 3).sum()
    work.wait()
    return out + total


def reduces_before_a_branch(x):
    import phonograph as pg

    y = x * 2
    dist.all_reduce(y)
    return pg.cond(y.sum() % 3 > 1, lambda y: y + 1, lambda y: y * 2, y)


def reduces_after_a_loop(x):
    import phonograph as pg

    y = pg.repeat(x[0].long() % 3, lambda y: y + 1, x)
    dist.all_reduce(y)
    return y


def reduces_around_a_branch(x):
    y = reduces_before_a_branch(x)
    dist.all_reduce(y)
    return y


def reduces_in_a_branch(x):
    """All ranks take the same one."""
    import phonograph as pg

    def reduced(y):
        y = y * 1
        dist.all_reduce(y)
        return y

    return pg.cond(x[0] % 3 > 3, lambda y: y * 2, reduced, x)


def two_under_way(x):
    a, b = x * 2, x + 1
    first, second = dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)
    z = x * x
    second.wait()
    b += z
    first.wait()
    return a * b


def never_waits(x):
    dist.all_reduce(x * 2, async_op=True)
    return x + 1


def asks_how_far_it_is(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    return y


def catches_what_fails(x):
    y = x * 2
    try:
        dist.all_reduce(y)
    except RuntimeError:
        return x
    return y


def gives_up_late(x):
    y = x * 2
    dist.all_reduce(y)
    z = y + 1
    return z * (time.time() > 0)


def gathers_in_place(x):
    out = torch.empty(8, device=x.device)
    mine = out.chunk(2)[dist.get_rank()]
    mine.copy_(x * 2)
    dist.all_gather_into_tensor(out, mine)
    return out + 1


def broadcast_of_indices(x):
    """Where nothing has been received, no memory that nobody has written is taken for indices."""
    indices = torch.empty(4, dtype=torch.int64, device=x.device)
    if dist.get_rank() == 1:
        indices.copy_(x.long() % 4)
    dist.broadcast(indices, src=1)
    return x[indices]


def all_reduce_of_integers(x):
    y = x.to(torch.int32)
    dist.all_reduce(y, op=dist.ReduceOp.PRODUCT)
    return y


def all_reduce_coalesced(x):
    a, b = x * 2, (x + 1).view(2, 2)
    dist.all_reduce_coalesced([a, b])
    return a, b


def _reduces_outside():
    total = torch.zeros(4, device=_device())

    def all_reduce_outside(x):
        total.add_(x)
        dist.all_reduce(total)
        return total * 2

    return all_reduce_outside, lambda n: [_numbers(n, 4)], lambda: [total]


def _in_a_subgroup():
    group = dist.new_group([0, 1])

    def in_a_subgroup(x):
        y = x * 2
        dist.all_reduce(y, group=group)
        return y

    return in_a_subgroup, lambda n: [_numbers(n, 4)], list


@functools.cache
def _groups_and_meshes():
    alone = [dist.new_group([rank]) for rank in range(2)]
    return [dist.new_group([0, 1]), alone[dist.get_rank()]], [_mesh(), _mesh()]


def _given_its_group():
    """A process group and a mesh of devices are arguments, as in code that is written for any of them: now all ranks, now each
    its own group."""
    groups, meshes = _groups_and_meshes()

    def given_its_group(x, group, mesh):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        y = x * 2
        dist.all_reduce(y, group=group)
        return y + DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local().sum()

    return given_its_group, lambda n: [_numbers(n, 4), groups[n % 2], meshes[n % 2]], list


def _sends_in_a_subgroup():
    """Who has not talked to each other in a group alone before."""
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.zeros(1, device=_device()), group=group)

    def sends_in_a_subgroup(x):
        y = torch.empty_like(x)
        if dist.get_rank() == 0:
            dist.send(x * 2, 1, group=group)
        else:
            dist.recv(y, 0, group=group)
        return y + 1 if dist.get_rank() else x

    return sends_in_a_subgroup, lambda n: [_numbers(n, 4)], list


def all_gather_into_tensor(x):
    out = torch.empty(8, device=x.device)
    dist.all_gather_into_tensor(out, x * 2)
    return out + 1


def _gathers_outside():
    out = torch.zeros(8, device=_device())

    def gathers_outside(x):
        dist.all_gather_into_tensor(out, x * 2)
        return out.sum()

    return gathers_outside, lambda n: [_numbers(n, 4)], lambda: [out]


def all_gather(x):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x * 2)
    return torch.cat(parts)


def broadcast(x):
    y = x * 2
    dist.broadcast(y, src=1)
    return y


def broadcast_of_an_argument(x):
    dist.broadcast(x, src=0)
    return x * 2


def reduce(x):
    y = x * 2
    dist.reduce(y, dst=0)
    return y if dist.get_rank() == 0 else x


def reduce_scatter_tensor(x):
    out = torch.empty(2, device=x.device)
    dist.reduce_scatter_tensor(out, x * 2)
    return out + 1


def reduce_scatter(x):
    out = torch.empty(2, device=x.device)
    dist.reduce_scatter(out, list((x * 2).chunk(2)))
    return out + 1


def all_to_all_single(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x * 2)
    return out + 1


def all_to_all(x):
    out = [torch.empty(2, device=x.device) for _ in range(2)]
    dist.all_to_all(out, list((x * 2).chunk(2)))
    return torch.cat(out)


def gather(x):
    out = [torch.empty_like(x) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(x * 2, out, dst=0)
    return torch.cat(out) if out is not None else x


def scatter(x):
    out = torch.empty(2, device=x.device)
    dist.scatter(out, list((x * 2).chunk(2)) if dist.get_rank() == 0 else None, src=0)
    return out


def functional_all_reduce(x):
    return _functional().all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def functional_view(x):
    return _functional().all_reduce(x * 2, "sum", dist.group.WORLD).view(2, 2) + 1


def functional_all_gather(x):
    return _functional().all_gather_tensor(x * 2, 0, dist.group.WORLD) + 1


def functional_reduce_scatter(x):
    return _functional().reduce_scatter_tensor(x * 2, "sum", 0, dist.group.WORLD) + 1


def functional_all_to_all(x):
    return _functional().all_to_all_single(x * 2, None, None, dist.group.WORLD) + 1


def functional_broadcast(x):
    return _functional().broadcast(x * 2, 1, dist.group.WORLD) + 1


def functional_coalesced(x):
    a, b = _functional().all_reduce_coalesced([x * 2, x + 1], "sum", dist.group.WORLD)
    return a * b


def functional_while_it_works(x):
    y = _functional().all_reduce(x * 2, "sum", dist.group.WORLD)
    z = (x + 1) * (x + 2)
    return y + z.sum()


def functional_operators(x):
    """As compiled code calls them: into given tensors, in place, several at once."""
    operators, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    total = x * 2
    operators.wait_tensor(operators.all_reduce_(total, "sum", group))
    out = x.new_empty(8)
    operators.wait_tensor(operators.all_gather_into_tensor_out(x * 2, 2, group, out=out))
    a, b = operators.all_gather_into_tensor_coalesced([x * 2, x + 1], 2, group)
    z = x.cos()
    a, b = operators.wait_tensor(a), operators.wait_tensor(b)
    c, d = map(operators.wait_tensor, operators.reduce_scatter_tensor_coalesced([x * 2, x + 1], "sum", 2, group))
    turned = operators.wait_tensor(operators.all_reduce(x.view(2, 2).t(), "sum", group))
    return total + z, out + a + b, c * d, turned


def functional_is_returned(x):
    return _functional().all_reduce(x * 2, "sum", dist.group.WORLD)


def differentiable(x):
    from torch.distributed.nn import functional

    w = torch.ones(4, device=x.device, requires_grad=True)
    loss = functional.all_reduce(w * x).square().sum()
    (grad,) = torch.autograd.grad(loss, w)
    return loss.detach(), grad


def redistributes(x):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    spread = DTensor.from_local(x * 2, _mesh(), [Shard(0)])
    return spread.redistribute(_mesh(), [Replicate()]).to_local() + 1


def sends(x):
    y = torch.empty_like(x)
    if dist.get_rank() == 0:
        dist.send(x * 2, 1)
        dist.recv(y, 1)
    else:
        dist.recv(y, 0)
        dist.send(x * 2, 0)
    return y + 1


def sends_a_batch(x):
    y, peer = torch.empty_like(x), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x * 2, peer), dist.P2POp(dist.irecv, y, peer)]):
        work.wait()
    return y + 1


def sends_both_ways(x):
    y, peer = torch.empty_like(x), 1 - dist.get_rank()
    if dist.get_backend() == "nccl":  # where both would wait for the other, outside of a group
        return sends(x)
    sent, received = dist.isend(x * 2, peer), dist.irecv(y, peer)
    received.wait()
    sent.wait()
    return y + 1


def coalesces(x):
    a, b = x * 2, x + 1
    device = x.device if x.is_cuda else None  # gloo knows the other way only
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    return a * b


def is_refused_within_a_group(x):
    """What has begun there, or is only collected, is no part of what comes after."""
    a, b = x * 2, x + 1
    device = x.device if x.is_cuda else None
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(a)
        n = int(time.time() > 0)
        dist.all_reduce(b)
    manager.wait()
    return a * b * n


def barrier(x):
    y = x * 2
    dist.barrier()
    return y


def gathers_objects(x):
    found = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    return x * sum(found)


def _uses_a_store():
    store = dist.distributed_c10d._get_default_store()

    def uses_a_store(x):
        store.add("counted", 1)
        return x * 2

    return uses_a_store, lambda n: [_numbers(n, 4)], list


def _waits_for_what_began_outside():
    y = _numbers(0, 4)
    works = []

    def waits_for_what_began_outside(x):
        works[0].wait()
        return y + x

    def arguments(n):
        y.copy_(_numbers(n, 4))
        works[:] = [dist.all_reduce(y, async_op=True)]
        return [_numbers(n, 4)]

    return waits_for_what_began_outside, arguments, lambda: [y]


def _network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(_device())
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)


def _training(step: Any, net: torch.nn.Module) -> tuple[Any, Any, Any]:
    return step, lambda n: [_numbers(n, 2, 4) / 100], lambda: [*net.parameters(), *(p.grad for p in net.parameters())]


def _averages_gradients():
    net, optimizer = _network()

    def averages_gradients(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
        return loss.detach()

    return _training(averages_gradients, net)


def _averages_in_hooks():
    net, optimizer = _network()

    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= 2

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(average)

    def averages_in_hooks(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _training(averages_in_hooks, net)


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def _row_parallel(inner: bool = False):
    net, optimizer = _network()
    net.register_forward_hook(lambda module, args, y: _Reduced.apply(y))
    called = _recorded(net) if inner else net

    def row_parallel(x):
        optimizer.zero_grad()
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _training(row_parallel, net)


def _recomputes():
    """A part with a collective is run again in the backward."""
    from torch.utils.checkpoint import checkpoint

    net, optimizer = _network()

    def part(x):
        return _Reduced.apply(net(x)).sin()

    def recomputes(x):
        optimizer.zero_grad()
        loss = checkpoint(part, x, use_reentrant=False).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _training(recomputes, net)


class _ReducedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def _column_parallel_module():
    """The forward does not communicate, the backward does, and is recorded by itself."""
    net, optimizer = _network()
    net.register_forward_pre_hook(lambda module, args: _ReducedBackward.apply(args[0]))
    before = torch.nn.Linear(4, 4).to(_device())
    called = _recorded(net)

    def column_parallel(x):
        optimizer.zero_grad()
        before.zero_grad()
        loss = called(before(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), before.weight.grad

    return _training(column_parallel, net)


def _logs_and_reduces():
    """A value is read on the host, and the operator that does so may run between segments."""
    seen = []

    def logs_and_reduces(x):
        y = x * 2
        seen.append(y.sum().item())
        dist.all_reduce(y)
        return y * seen[-1]

    return logs_and_reduces, lambda n: [_numbers(n, 4)], list


def _mixture_of_experts():
    net, optimizer = _network()

    def mixture_of_experts(x):
        optimizer.zero_grad()
        sent = _functional().all_to_all_single_autograd(x, None, None, dist.group.WORLD)
        done = _functional().all_to_all_single_autograd(net(sent + 0), None, None, dist.group.WORLD)
        loss = (done + 0).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _training(mixture_of_experts, net)


def _pipeline(inner: bool = False):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).to(_device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    stage = PipelineStage(_recorded(net) if inner else net, dist.get_rank(), 2, _device())
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)

    def pipeline(x):
        optimizer.zero_grad()
        losses = []
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            schedule.step(target=x * 0, losses=losses)
        optimizer.step()
        return [loss.detach() for loss in losses]

    return _training(pipeline, net)


def _data_parallel(inner: bool = False):
    net, optimizer = _network()
    called = torch.nn.parallel.DistributedDataParallel(_recorded(net) if inner else net)

    def data_parallel(x):
        optimizer.zero_grad()
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _training(data_parallel, net)


def _sharded():
    from torch.distributed.fsdp import fully_shard

    net, optimizer = _network()
    fully_shard(net, mesh=_mesh())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)

    def sharded(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return sharded, lambda n: [_numbers(n, 2, 4) / 100], lambda: [p.to_local() for p in net.parameters()]


def _reduces_live():
    import phonograph as pg

    @pg.live
    def reduced(y):
        dist.all_reduce(y)

    def reduces_live(x):
        y = x * 2
        reduced(y)
        return y + 1

    return reduces_live, lambda n: [_numbers(n, 4)], list


def _averages_gradients_live():
    import phonograph as pg

    net, optimizer = _network()
    seen = []

    @pg.live
    def average(loss):
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
        if len(seen) % 2 == 0:
            seen.append(loss.item())

    def averages_gradients_live(x):
        optimizer.zero_grad()
        loss = net(x).square().mean() / 2
        loss.backward()
        logged = loss.detach().clone()
        average(logged)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return logged

    return _training(averages_gradients_live, net)


def _accumulates():
    """Two micro-batches, of which only the last communicates, and a loss that is logged every second step."""
    net, optimizer = _network()
    net.append(torch.nn.Dropout(0.25))
    losses = []

    def accumulates(x, last):
        loss = net(x).square().mean() / 2
        loss.backward()
        if last:
            for p in net.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def arguments(n):
        torch.manual_seed(n)
        return [_numbers(n, 2, 4) / 100, n % 2 == 1]

    return accumulates, arguments, lambda: [*net.parameters(), *losses]


def _notes_after_reducing():
    import phonograph as pg

    seen = []

    @pg.live
    def note(y):
        seen.append(y.sum().item())

    def notes_after_reducing(x):
        y = x * 2
        dist.all_reduce(y)
        note(y)
        return y + 1

    return notes_after_reducing, lambda n: [_numbers(n, 4)], list


def _logs_after_reducing():
    """A number that is only kept."""
    seen = []

    def logs_after_reducing(x):
        y = x * 2
        dist.all_reduce(y)
        seen.append(y.sum().item())
        return y + 1

    return logs_after_reducing, lambda n: [_numbers(n, 4)], lambda: [torch.tensor(seen)]


def _decides(after: bool) -> Case:
    """The call goes on by what each rank finds by itself, and which is otherwise in a few calls, others on each rank."""

    def make() -> tuple[Any, Any, Any]:
        def decides(x):
            y = x * 2
            if after:
                dist.all_reduce(y)
            if (x.max() > 1e6).item():
                y = y - 1
            dist.all_reduce(y)
            return y

        return decides, lambda n: [_numbers(n, 4) + 1e7 * (n == 8 or n == 12 - 2 * dist.get_rank())], list

    return Case(make, fallback="split")


def _goes_on_after_reducing():
    """Before a number by which it goes on, tensors of all kinds arrive, and are written again; where it is another one than
    before, nothing of that is done twice."""
    outside, group = torch.zeros(4, device=_device()), dist.group.WORLD.group_name

    def goes_on_after_reducing(x):
        dist.all_reduce(x)
        y, gathered = x * 2, torch.empty(8, device=x.device)
        work = dist.all_gather_into_tensor(gathered, y, async_op=True)
        outside.add_(x)
        work.wait()
        dist.all_reduce(outside)
        outside.div_(2)
        z = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(y, "sum", group))
        y.add_(1)
        if (outside.max() > 1e6 + 1e6 * dist.get_rank()).item():
            z = z - 1
            outside.zero_()
        dist.all_reduce(z)
        return y, z, gathered

    def arguments(n):
        return [_numbers(n, 4) + (n == 8) * 1e6 + (n == 12) * 6e5]

    return goes_on_after_reducing, arguments, lambda: [outside]


def _decides_in_training():
    """Gradients are averaged, and a step is left out where they are too large."""
    net, optimizer = _network()

    def decides_in_training(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if (norm < 100).item():
            optimizer.step()
        return loss.detach(), norm

    step, arguments, state = _training(decides_in_training, net)
    return step, lambda n: [arguments(n)[0] * (1000 if n in (8, 12) else 1)], state


def _decides_in_a_wrapper(make: Callable[[], tuple[Any, Any, Any]]) -> Case:
    """The same after what communicates within torch's own wrappers."""

    def made() -> tuple[Any, Any, Any]:
        step, arguments, state = make()

        def decides_in_a_wrapper(x):
            loss = step(x)
            total = loss * 2
            dist.all_reduce(total)
            return loss if (total < 1e6).item() else -loss

        return decides_in_a_wrapper, lambda n: [arguments(n)[0] * (1e6 if n in (8, 12) else 1)], state

    return Case(made, fallback="split")


def _gives_another_shape():
    """A marked function, after something has arrived, which it does on one rank only."""
    import phonograph as pg

    seen = []

    @pg.live
    def chosen(y):
        seen.append(y.sum().item())
        return y[: 3 if len(seen) % CALLS == 9 and dist.get_rank() else 2].clone()

    def gives_another_shape(x):
        y = x * 2
        dist.all_reduce(y)
        total = chosen(y).sum()
        dist.all_reduce(total)
        return total

    return gives_another_shape, lambda n: [_numbers(n, 4)], lambda: [torch.tensor(seen)]


def _pins_memory_beside():
    """It is captured again and again, while a thread pins memory, and much that is live is under way."""
    ended = threading.Event()
    other = torch.ones(1 << 16, device=_device())

    def pin():
        while not ended.wait(0.001):
            t = torch.empty(1 << 20)
            if _device().type == "cuda":
                t.pin_memory()

    threading.Thread(target=pin, daemon=True).start()

    def arguments(n):
        if n % 2 == 0 and _now[-1] is not None:
            import phonograph as pg

            pg.reset(_now[-1])
        for _ in range(30 if _device().type == "cuda" else 3):
            dist.all_reduce(other, op=dist.ReduceOp.MAX)
        if n == CALLS - 1:
            ended.set()
        return [_numbers(n, 4)]

    return all_reduce, arguments, list


def _differs_by_rank():
    """One rank gets another shape in a call, and its recordings are dropped in another."""

    def differs_by_rank(x):
        y = x.sum() * 2
        dist.all_reduce(y)
        return y * x

    def arguments(n):
        recorded = _now[-1]
        if dist.get_rank() == 1 and n == 3 and recorded is not None:
            import phonograph as pg

            pg.reset(recorded)
        return [_numbers(n, 3 if dist.get_rank() == 1 and n == 2 else 4)]

    return differs_by_rank, arguments, list


def _fails_on_one_rank(how: str) -> Case:
    """Rank 1 is refused while it is captured: by an operator that no graph can have, or as memory runs out. Or it raises."""

    def make() -> tuple[Any, Any, Any]:
        from phonograph.devices.cuda.driver import is_capturing

        calls: list[int] = []

        def fails_on_one_rank(x):
            y = x * 2
            dist.all_reduce(y)
            if dist.get_rank() == 1:
                if how == "raises":
                    calls.append(1)
                    if len(calls) in (2, 3):
                        raise ArithmeticError("of the function's own")
                if how == "memory" and x.is_cuda and is_capturing(torch.cuda.current_stream().cuda_stream):
                    raise torch.OutOfMemoryError("CUDA out of memory, says this test")
                if how == "value":
                    y = y + y.nonzero().shape[0] - 4
            return y + 1

        return fails_on_one_rank, lambda n: [_numbers(n, 4)], list

    return Case(make)


def _evicts_on_one_rank():
    """Rank 1 has two signatures in turn, and room for one."""

    def evicts_on_one_rank(x, number):
        y = x * 2
        dist.all_reduce(y)
        return y + number

    return evicts_on_one_rank, lambda n: [_numbers(n, 4), n % 2 if dist.get_rank() == 1 else 0], list


def _skewed():
    """Each rank runs live in calls that it chooses by chance, or drops its recordings, or is late. Large buffers, and small
    ones, which NCCL treats in other ways."""
    chance = random.Random(dist.get_rank())

    def skewed(x):
        results = []
        for y in (x, x[:4]):
            gathered, scattered = torch.empty(2 * len(y), device=y.device), torch.empty(len(y) // 2, device=y.device)
            dist.all_gather_into_tensor(gathered, y * 2)
            dist.reduce_scatter_tensor(scattered, y * 2)
            results += [all_reduce(y), all_to_all_single(y), gathered, scattered]
        return results

    def arguments(n):
        time.sleep(chance.random() / 200)
        os.environ["PHONOGRAPH"] = "off" if chance.random() < 0.3 else "on"
        if chance.random() < 0.1 and _now[-1] is not None:
            import phonograph as pg

            pg.reset(_now[-1])
        large = torch.arange(16 << 20 if _device().type == "cuda" else 64, device=_device()) % 251
        return [large + 13.0 * dist.get_rank() + n]

    return skewed, arguments, list


# The functions of the table in docs/several-gpus.md, each with one use of collectives; and those that no graph has.
FUNCTIONS = (
    "all_reduce", "all_reduce_of_an_argument", "all_reduce_outside", "all_reduce_max", "all_reduce_async", "in_a_subgroup",
    "all_gather_into_tensor", "gathers_outside", "all_gather", "broadcast", "reduce", "reduce_scatter_tensor",
    "all_to_all_single", "functional_all_reduce", "functional_all_gather", "functional_reduce_scatter", "functional_all_to_all",
    "functional_broadcast", "differentiable", "redistributes", "averages_gradients", "averages_in_hooks", "row_parallel",
    "mixture_of_experts", "sends", "barrier", "sends_a_batch", "coalesces",
)  # fmt: skip
NOT_IN_GRAPHS = {"barrier": "barrier", "coalesces": "_coalescing_manager"}

CASES = {
    **{f.__name__: _of_x(f) for f in (
        all_reduce, all_reduce_of_an_argument, all_reduce_max, all_reduce_async, all_gather_into_tensor, all_gather, broadcast,
        broadcast_of_an_argument, reduce, reduce_scatter_tensor, reduce_scatter, all_to_all_single, all_to_all, gather, scatter,
        functional_all_reduce, functional_view, functional_all_gather, functional_reduce_scatter, functional_all_to_all,
        functional_broadcast, functional_coalesced, functional_is_returned, differentiable, redistributes, sends, sends_a_batch,
        coalesces, barrier, gathers_objects, all_reduce_while_it_works, two_under_way, never_waits, asks_how_far_it_is,
        catches_what_fails, gathers_in_place, broadcast_of_indices, all_reduce_of_integers, all_reduce_coalesced,
        sends_both_ways, functional_while_it_works, functional_operators, is_refused_within_a_group,
    )},
    **{f.__name__: _of_x(f) for f in (
        reduces_before_a_branch, reduces_after_a_loop, reduces_around_a_branch, reduces_in_a_branch,
    )},
    "recorded_on_one_rank": _of_x(all_reduce, only=1),
    "gives_up_late": _of_x(gives_up_late, only=1),
    "all_reduce_outside": Case(_reduces_outside),
    "in_a_subgroup": Case(_in_a_subgroup),
    "given_its_group": Case(_given_its_group),
    "gathers_outside": Case(_gathers_outside),
    "uses_a_store": Case(_uses_a_store),
    "waits_for_what_began_outside": Case(_waits_for_what_began_outside),
    "averages_gradients": Case(_averages_gradients),
    "averages_in_hooks": Case(_averages_in_hooks),
    "row_parallel": Case(_row_parallel),
    "recomputes": Case(_recomputes),
    "row_parallel_module": Case(lambda: _row_parallel(inner=True), inner=True),
    "column_parallel_module": Case(_column_parallel_module, inner=True),
    "pipeline_of_recorded_stages": Case(lambda: _pipeline(inner=True), inner=True),
    "data_parallel_of_a_recorded_module": Case(lambda: _data_parallel(inner=True), inner=True),
    "for_the_first_time": Case(_in_a_subgroup, warmup=0),
    "sends_for_the_first_time": Case(_sends_in_a_subgroup, warmup=0),
    "splits_at_a_collective": _of_x(functional_all_reduce, fallback="split", split_at=["_c10d_functional::all_reduce",
                                                                     "_c10d_functional::wait_tensor"]),
    "splits": Case(_logs_and_reduces, fallback="split"),
    "mixture_of_experts": Case(_mixture_of_experts),
    "pipeline": Case(_pipeline),
    "data_parallel": Case(_data_parallel),
    "sharded": Case(_sharded),
    "reduces_live": Case(_reduces_live, keep="always"),
    "averages_gradients_live": Case(_averages_gradients_live, keep="always"),
    "accumulates": Case(_accumulates),
    "notes_after_reducing": Case(_notes_after_reducing),
    "verified": _of_x(all_reduce, verify=2),
    "differs_by_rank": Case(_differs_by_rank),
    "logs_after_reducing": Case(_logs_after_reducing, fallback="split"),
    "decides_after_reducing": _decides(after=True),
    "decides_before_reducing": _decides(after=False),
    "goes_on_after_reducing": Case(_goes_on_after_reducing, fallback="split"),
    "decides_in_training": Case(_decides_in_training, fallback="split"),
    "decides_after_data_parallel": _decides_in_a_wrapper(lambda: _data_parallel()),
    "decides_after_sharded": _decides_in_a_wrapper(lambda: _sharded()),
    "gives_another_shape": Case(_gives_another_shape, keep="always"),
    "pins_memory_beside": Case(_pins_memory_beside),
    "raises_on_one_rank": _fails_on_one_rank("raises"),
    "is_refused_on_one_rank": _fails_on_one_rank("value"),
    "runs_out_of_memory_on_one_rank": _fails_on_one_rank("memory"),
    "skewed": Case(_skewed),
    "evicts_on_one_rank": Case(_evicts_on_one_rank, max_recordings=1),
}  # fmt: skip


# -- running them

_COMPARED = "results", "arguments", "state", "versions"
_now: list[Any] = []  # what is recorded at the moment, for cases that do something to it
_inner: list[Any] = []
_kept: list[Any] = []  # recordings that are there when the group ends


def _functional() -> Any:
    import torch.distributed._functional_collectives as functional

    return functional


@functools.cache
def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(_device().type, (2,))


def _recorded(net: torch.nn.Module) -> Any:
    import phonograph as pg

    if _now and _now[-1] is not None:
        pg.record(net, keep="always")
        _inner[:] = [net]
    return net


def _run(case: Case, record: bool) -> tuple[list[Any], Any]:
    import phonograph as pg

    _now.append(True if record else None)
    function, arguments, state = case.make()
    recorded = function
    options = {name: value for name, value in case.options.items() if name != "only"}
    if record and not options.get("inner") and case.options.get("only", dist.get_rank()) == dist.get_rank():
        recorded = pg.record(function, **options)
    _now[-1] = recorded if record and recorded is not function else None
    found = []
    for n in range(CALLS):
        args = arguments(n)
        versions = _versions(args, state)
        try:
            result = recorded(*args)
        except ArithmeticError as e:  # the program's own
            result = str(e)
        # What an optimizer remembers comes with its first step.
        moved = [now != was for now, was in zip(_versions(args, state), versions, strict=False)]
        kinds = [type(x).__name__ for x in _leaves(result)]
        found.append(([*map(_values, _leaves(result)), kinds], [*map(_values, args)], [*map(_values, state())], moved))
    _now.pop()
    return found, _inner[0] if record and case.options.get("inner") else recorded


def _leaves(result: Any) -> list[Any]:
    return [x for part in result for x in _leaves(part)] if isinstance(result, (tuple, list)) else [result]


def _values(x: Any) -> Any:
    if hasattr(x, "to_local"):
        return type(x).__name__, str(x.placements), x.requires_grad, _values(x.to_local())
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _versions(args: list[Any], state: Callable[[], list[Any]]) -> list[int]:
    """Of gradients, none: they are others in each call."""
    tensors = [t for t in (*args, *state()) if isinstance(t, torch.Tensor)]
    gradients = {id(t.grad) for t in tensors if t.is_leaf}
    return [t._version for t in tensors if id(t) not in gradients]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(a == b)
    alike = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return alike and torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def _told(case: Case) -> dict[str, Any]:
    import phonograph as pg

    try:
        eager, _ = _run(case, record=False)
    except RuntimeError as e:
        return {"wrong": [traceback.format_exc()[-1500:]], "reasons": "", "unable": str(e)}
    found, recorded = _run(case, record=True)
    wrong = [f"call {n}: {name}" for n, (a, b) in enumerate(zip(eager, found, strict=True))
             for name, x, y in zip(_COMPARED, a, b, strict=True) if not _same(x, y)]  # fmt: skip
    _kept.append(recorded)
    if case.options.get("only", dist.get_rank()) != dist.get_rank():
        return {"wrong": wrong, "live": CALLS, "recorded": 0, "replayed": 0, "reasons": "", "refusals": {}}
    stats = pg.stats(recorded)
    return {"wrong": wrong, "live": stats.live, "recorded": stats.recorded, "replayed": stats.replayed,
            "reasons": pg.explain(recorded), "refusals": dict(stats.refusals)}  # fmt: skip


# -- how processes end


def _another() -> Any:
    """A recorded function that communicates, called a few times."""
    import phonograph as pg

    recorded = pg.record(lambda x: all_reduce(x))
    for n in range(CALLS):
        recorded(_numbers(n, 4))
    return recorded


def _anew(folder: Path, rank: int, backend: str) -> dict[str, Any]:
    """Destroy the group while recordings are there, make another, and go on with the same function."""
    import phonograph as pg

    recorded = _another()
    before = pg.stats(recorded)
    destroy_process_group()
    init_process_group(backend, init_method=f"file://{folder}/another", rank=rank, world_size=2)
    wrong = []
    for n in range(CALLS):
        expected = all_reduce(_numbers(n, 4))
        if not torch.equal(recorded(_numbers(n, 4)), expected):
            wrong.append(f"call {n}")
    after = pg.stats(recorded)
    return {"wrong": wrong, "live": after.live - before.live, "recorded": after.recorded - before.recorded,
            "replayed": after.replayed - before.replayed, "reasons": pg.explain(recorded)}  # fmt: skip


def _is_of_another_release() -> dict[str, Any]:
    """One rank is, and where a recording is made, all see that."""
    import phonograph as pg
    from phonograph import version
    from phonograph.distributed import agreement

    if dist.get_rank():
        version.__version__ = "0.0.0"
    if dist.get_backend() == "gloo":  # which has no graphs: there it does not matter
        return {"wrong": [], "reasons": agreement.unlike(agreement.own((0, 0)))}
    recorded = pg.record(all_reduce)
    for n in range(CALLS):
        recorded(_numbers(n, 4))
    stats = pg.stats(recorded)
    return {"wrong": [], "live": stats.live, "reasons": pg.explain(recorded)}


def _steady() -> dict[str, Any]:
    """What is asked of torch and of the store in a step that is replayed, and in one that is not."""
    from torch.profiler import ProfilerActivity, profile

    import phonograph as pg
    from phonograph._torch import process_groups as torch_process_groups

    own, asked = torch_process_groups.default_store, []
    torch_process_groups.default_store = lambda: asked.append(1) or own()  # type: ignore[func-returns-value]
    found: dict[str, Any] = {"wrong": [], "reasons": ""}
    for kind in ("eager", "recorded"):
        _now.append(None)
        function, arguments, _ = _averages_gradients()
        _now.pop()
        step = pg.record(function) if kind == "recorded" else function
        for n in range(6):
            step(*arguments(n))
        asked.clear()
        cuda = [ProfilerActivity.CUDA] * (dist.get_backend() == "nccl")
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as told:
            for n in range(4):
                step(*arguments(n))
            if cuda:
                torch.cuda.synchronize()
        events = [event for event in told.key_averages() if event.count]
        found[kind] = {
            "operators": sum(event.count for event in events if event.key.startswith("c10d::")),
            "kernels": sum(event.count for event in events if event.key.startswith("ncclDevKernel")),
            "store": len(asked),
        }
    found["replayed"] = pg.stats(step).replayed
    torch_process_groups.default_store = own
    return found


def _peer_is_missing() -> dict[str, Any]:
    """A rank does not come to a collective: its peer's replay raises what eager does."""
    import phonograph as pg

    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    raised = []

    def reduced(x):
        y = x * 2
        dist.all_reduce(y, group=group)
        return y

    recorded = pg.record(reduced)
    for n in range(CALLS):
        recorded(_numbers(n, 4))
    if dist.get_rank() == 0:
        try:
            recorded(_numbers(0, 4))
        except RuntimeError as e:
            raised.append(str(e))
    stats = pg.stats(recorded)
    return {"wrong": [], "raised": raised, "live": stats.live, "recorded": stats.recorded, "replayed": stats.replayed,
            "reasons": pg.explain(recorded)}  # fmt: skip


def _in_a_cycle() -> dict[str, Any]:
    """A recording that is garbage, and not collected, when its group is destroyed."""
    gc.disable()
    circle: list[Any] = [_another()]
    circle.append(circle)
    return {"wrong": [], "reasons": ""}


ALONE = {"in_a_cycle": _in_a_cycle, "peer_is_missing": _peer_is_missing, "steady": _steady,
         "is_of_another_release": _is_of_another_release}  # fmt: skip


def main(rank: int, backend: str, folder: Path, cases: list[str], programs: Mapping[str, Case] = CASES) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for module in ("torch._dynamo", "torch.distributed.tensor", "phonograph"):  # which take long, and are needed
        importlib.import_module(module)
    (folder / f"{rank}.ready").touch()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name in cases:
        began = time.monotonic()
        try:
            if name == "anew":
                found[name] = _anew(folder, rank, backend)
            elif name in ALONE:
                found[name] = ALONE[name]()
            elif name != "exits":
                found[name] = _told(programs[name])
        except BaseException:
            found[name] = {"wrong": [traceback.format_exc()[-1500:]], "reasons": ""}
        found.setdefault(name, {})["seconds"] = time.monotonic() - began
        (folder / f"{rank}.json").write_text(json.dumps(found))
    if "exits" in cases:
        _kept.append(_another())
    else:
        destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*CASES])
