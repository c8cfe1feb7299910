"""A new reducer for `DistributedDataParallel`, in the place of one that may be in the middle of a step. The group is of two
ranks that have the same gradients; what it does are operators like others, which a capture sees."""

import contextlib
import gc

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import phonograph as pg
from phonograph._torch.ddp import has_reducer, others_around, reducer_anew
from phonograph.call.live_function import Marked
from phonograph.capture import ddp_reducer as reducers
from phonograph.engine import recorder
from phonograph.errors import Refusal

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without it")
BUCKET = 1500 / 2**20  # MiB


def twins(counts=True):
    class Twins(torch.distributed.ProcessGroup):
        """`counts` what it is to do."""

        def __init__(self):
            super().__init__(0, 2)
            self.reduced, self.others = [], 0

        def _done(self, tensors):
            done = torch.futures.Future()
            done.set_result(tensors)
            return torch._C._distributed_c10d._create_work_from_future(done)

        def allreduce(self, tensors, options=None):
            if counts:
                self.reduced += [t.numel() for t in tensors]
            for t in tensors:
                t.mul_(2)
            return self._done(tensors)

        def broadcast(self, tensors, options=None):
            if counts:
                self.others += 1
            return self._done(tensors)

    return Twins()


def wrapped(group, steps=2, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
    module = DistributedDataParallel(net, process_group=group, init_sync=False, bucket_cap_mb=BUCKET, **options)
    for n in range(steps):
        backward(module, n)
    return module


def backward(module, n, **options):
    torch.manual_seed(n)
    module.zero_grad(**options)
    module(torch.randn(4, 16)).square().mean().backward()


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


def break_off(module, n):
    """A backward that ends in its middle."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("enough")

    handle = module.module[2].register_forward_hook(lambda m, args, y: Fails.apply(y))
    with pytest.raises(ValueError, match="enough"):
        backward(module, n)
    handle.remove()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("none", [True, False])
def test_after_a_broken_off_backward_a_new_reducer_averages_as_the_old_one_did(views, none):
    group, other = twins(), twins()
    module, plain = wrapped(group, gradient_as_bucket_view=views), wrapped(other, gradient_as_bucket_view=views)
    break_off(module, 2)
    with pytest.raises(RuntimeError, match="finished reduction"):
        backward(module, 2)  # as torch leaves it
    group.reduced, other.reduced, group.others, other.others = [], [], 0, 0
    reducer_anew(module)
    for n in range(3, 6):
        backward(module, n, set_to_none=none)
        backward(plain, n, set_to_none=none)
        assert all(map(torch.equal, gradients(module), gradients(plain)))
    assert group.reduced == other.reduced
    assert len(group.reduced) > 3
    assert (group.others, other.others) == (0, 0)  # nothing was agreed on anew


@pytest.mark.parametrize("views", [False, True])
def test_gradients_that_are_there_stay(views):
    module = wrapped(twins(), gradient_as_bucket_view=views)
    before = gradients(module)
    reducer_anew(module)
    assert all(map(torch.equal, gradients(module), before))


def test_the_memory_of_its_buckets_is_what_gradients_come_by():
    module = wrapped(twins(), gradient_as_bucket_view=True)
    buckets = reducer_anew(module)
    backward(module, 3)
    assert {p.grad.untyped_storage().data_ptr() for p in module.parameters()} == {b.data_ptr() for b in buckets}


@pytest.mark.parametrize("views", [False, True])
def test_it_works_where_the_old_one_did(views):
    module = wrapped(twins(), gradient_as_bucket_view=views)
    first = reducer_anew(module)
    second = reducer_anew(module)
    assert len(first) > 1
    assert [b.data_ptr() for b in first] == [b.data_ptr() for b in second]


@pytest.mark.parametrize("views", [False, True])
def test_it_takes_no_memory_but_that_of_a_bucket(views):
    module = wrapped(twins(), gradient_as_bucket_view=views)
    largest, taken = max(p.nbytes for p in module.parameters()), []

    class Taken(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [out] if isinstance(out, torch.Tensor) and out.device.type == "cpu" else []
            made = made if func._schema.returns[0].alias_info is None else []
            taken.extend(t.untyped_storage() for t in made if t.untyped_storage().nbytes() > largest)
            return out

    with Taken():
        reducer_anew(module)
    assert len({storage.data_ptr() for storage in taken}) <= views


def test_hooks_go_on_and_hear_nothing_of_it():
    module, heard = wrapped(twins(), steps=0), []

    def hook(state, bucket):
        heard.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(None, hook)
    for n in range(3):
        heard.clear()
        backward(module, n)
    before = [*heard]
    heard.clear()
    reducer_anew(module)
    assert heard == []
    backward(module, 3)
    assert heard == before
    assert len(before) > 1


def test_a_backward_that_is_not_to_be_averaged_is_not_after_a_forward_that_came_to_nothing():
    group = twins()
    module = wrapped(group)
    module(torch.randn(4, 16))
    reducer_anew(module)
    group.reduced.clear()
    with module.no_sync():
        backward(module, 3)
    assert group.reduced == []


def test_what_others_have_of_it_they_would_lose():
    module = wrapped(twins())
    assert not others_around(module)
    another = DistributedDataParallel(module.module[2], process_group=twins(), init_sync=False)
    assert others_around(module)
    del another
    gc.collect()
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in module.parameters()]
    assert others_around(module)
    del nodes
    reducer_anew(module)
    assert not others_around(module)


def test_one_that_has_not_made_its_first_steps_is_to_make_them_first():
    module = wrapped(twins(), steps=1)
    with pytest.raises(Refusal, match="has not made its first two steps"):
        reducers.Reducers([module], whole=True, part=True)
    for n in range(2):
        backward(module, n)
    reducers.Reducers([module], whole=True, part=True)


def test_parameters_of_two_types_have_their_buckets():
    group = twins()
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16, dtype=torch.float64 if n % 2 else torch.float32) for n in range(6)])
    for n in range(1, 6):
        net[n].register_forward_pre_hook(lambda m, args: (args[0].to(m.weight.dtype),))
    module = DistributedDataParallel(net, process_group=group, init_sync=False, bucket_cap_mb=BUCKET)
    for n in range(3):
        group.reduced.clear()
        backward(module, n)
    before = [*group.reduced]
    assert has_reducer(module)
    assert reducer_anew(module) is not None
    group.reduced.clear()
    backward(module, 3)
    assert group.reduced == before


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize(("part", "options"), [
    (torch.nn.ReLU, {}), (torch.nn.ReLU, {"gradient_as_bucket_view": True}), (lambda: torch.nn.BatchNorm1d(16), {}),
])  # fmt: skip
def test_a_capture_has_what_a_reducer_does(part, options, none):
    def run(record):
        group = twins(counts=False)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16, 16), part(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        module = DistributedDataParallel(net, process_group=group, init_sync=False, bucket_cap_mb=BUCKET, **options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)

        def step(x):
            optimizer.zero_grad(set_to_none=none)
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        called = record(step)
        losses = [called(torch.randn(4, 16, generator=torch.Generator().manual_seed(n))) for n in range(8)]
        return called, [*losses, *module.parameters(), *gradients(module), *module.buffers()]

    _, eager = run(lambda step: step)
    recorded, found = run(lambda step: pg.record(step, keep="always"))
    assert all(map(torch.equal, eager, found))
    assert (pg.stats(recorded).live, pg.stats(recorded).recorded) == (2, 1)


def test_of_what_a_live_call_has_averaged_no_capture_has_to_show_it(monkeypatch):
    captures, run = [], recorder.Capture.run
    monkeypatch.setattr(recorder.Capture, "run", lambda capture: captures.append(capture.request.name) or run(capture))
    monkeypatch.setattr(Marked, "any_made", True)  # live calls are looked at on the CPU too
    module = wrapped(twins(counts=False), steps=0)

    @pg.record(keep="always")
    def step(x):
        module.zero_grad()
        module(x).square().mean().backward()

    for _ in range(5):
        step(torch.ones(4, 16))
    assert (pg.stats(step).live, pg.stats(step).recorded) == (2, 1)
    assert len(captures) == 1


def test_a_recording_is_played_on_where_its_reducer_is_another():
    """It averages by buckets of its own, and another capture of the process makes the reducer anew."""
    group = twins(counts=False)
    module = wrapped(group)

    def step(x):
        module.zero_grad()
        module(x).square().mean().backward()

    recorded = pg.record(step, keep="always")
    for _ in range(4):
        recorded(torch.ones(4, 16))
    assert pg.stats(recorded).recorded == 1
    reducer_anew(module)
    recorded(torch.ones(4, 16))
    expected = gradients(module)
    recorded(torch.ones(4, 16))
    assert pg.stats(recorded).recorded == 1
    assert all(map(torch.equal, gradients(module), expected))


def test_a_capture_that_is_given_up_in_a_backward_leaves_a_reducer_that_averages():
    class Device:
        apart = staticmethod(lambda: contextlib.nullcontext("a stream"))

    group, other = twins(), twins()
    module, plain = wrapped(group), wrapped(other)
    taking_part = reducers.Reducers([module], whole=True, part=True).taking_part

    def capture():
        with taking_part(Device()):
            break_off(module, 2)
            raise LookupError

    with pytest.raises(LookupError):
        capture()
    group.reduced, other.reduced = [], []
    for n in range(3, 6):
        backward(module, n)
        backward(plain, n)
        assert all(map(torch.equal, gradients(module), gradients(plain)))
    assert group.reduced == other.reduced
