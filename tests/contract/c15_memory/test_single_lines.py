"""What a wrong line would break, each seen to fail without it."""

import contextlib
import copy
import functools
import gc
import os
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.devices import device_for
from phonograph.devices.cuda import allocator as cuda_memory
from phonograph.testing import assert_same
from tests.contract.shared.memory import filled
from tests.helpers import counts, may_run_live, ramp, side_by_side


@may_run_live
def test_c03_separate_arguments_at_first_and_overlapping_ones_later(device):
    f = pg.record(lambda a, b: (a.add_(1), b * 2)[1], warmup=1)
    for n in range(4):
        assert_same(f(filled(device, n), filled(device, n)), filled(device, 2 * n))
    for n in range(3):
        memory = ramp(device, 6, start=n)
        assert_same(f(memory[:4], memory[:4]), (ramp(device, 4, start=n) + 1) * 2)


def test_c05_a_dropped_result_that_went_to_shared_memory(device, results_are):
    f = pg.record(lambda x: x * 2, warmup=1)
    for n in range(6):
        y = f(filled(device, n))
        y.share_memory_()  # gives it other memory, on the CPU
        assert_same(y, filled(device, 2 * n))
        del y


@may_run_live
def test_c12_a_refused_capture_that_grew_the_dictionaries_of_a_module_and_an_optimizer(device):
    def make():
        model = nn.Linear(3, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.register_buffer("seen", torch.zeros(3, device=device))
        model.register_forward_hook(lambda *args: None)

        def f(x):
            n = len(model._buffers)
            model.register_buffer(f"b{n}", x + n)
            model.add_module(f"m{n}", nn.Identity())
            model.register_forward_pre_hook(lambda *args: None)
            optimizer.register_step_post_hook(lambda *args: None)
            return model(x).sum().item()

        return f, (model, optimizer)

    def shape(state):
        model, optimizer = state
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks)
        return list(model._buffers), list(model._modules), list(model._parameters), hooks

    both = side_by_side(make)
    for n in range(4):
        both(ramp(device, 2, 3, start=n))
        assert shape(both.state) == shape(both.live_state)


@may_run_live
def test_c09_a_scheduler_that_steps_inside_before_the_optimizer(device):
    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def f(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            schedule.step()
            optimizer.step()

        return f, weight

    both = side_by_side(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's: they are called in the wrong order
        for n in range(6):
            both(ramp(device, 3, start=n))
            assert_same(both.state, both.live_state)


@may_run_live
def test_c14_a_recorded_function_in_the_backward_of_another(device):
    """On a GPU backward runs on a thread of autograd's own, while the recording waits for it."""
    inner = pg.record(lambda grad: grad * 3, warmup=1)

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return inner(grad)

    weight = torch.ones(4, device=device, requires_grad=True)
    f = pg.record(lambda x: torch.autograd.grad(Tripled.apply(weight * x).sum(), weight)[0], warmup=1)
    for n in range(5):
        assert_same(f(filled(device, n)), filled(device, 3 * n))


@pytest.mark.parametrize("make", [nn.BatchNorm1d, functools.partial(nn.InstanceNorm1d, affine=True, track_running_stats=True)])
def test_c03_running_statistics_in_inference_mode(device, make):
    """There operators that consist of others are seen as one."""
    norms = [make(3).to(device) for _ in range(2)]
    recorded = pg.record(norms[0], warmup=1)
    for n in range(6):
        torch.manual_seed(n)
        x = torch.randn(4, 3, 5, device=device)
        with torch.inference_mode():
            assert_same(recorded(x), norms[1](x))
        assert_same([*norms[0].buffers()], [*norms[1].buffers()])
    assert counts(recorded) == (1, 1, 5)


@may_run_live
def test_c11_where_with_one_argument_in_inference_mode(device):
    f = pg.record(lambda x: torch.where(x > 0), warmup=1)
    for values in ([1.0, -1, 1], [1.0, -1, 1], [1.0, 1, 1], [-1.0, -1, 1]):
        with torch.inference_mode():
            x = torch.tensor(values, device=device)
            assert_same(f(x), torch.where(x > 0))


@may_run_live
def test_c08_a_cached_tensor_that_the_first_call_made(device):
    """What a warm-up leaves behind on a GPU lies in the memory of the pool, and is no memory of the recording's."""
    factor = [2.0]

    @functools.lru_cache
    def table():
        return torch.full((4,), factor[0], device=device)

    f = pg.record(lambda x: x * table(), warmup=1)
    for n in range(8):
        if n == 5:
            factor[0] = 5.0
            table.cache_clear()
        assert_same(f(filled(device, n)), filled(device, n * factor[0]))


def of_a_package(source):
    """What `source` defines, as code of an installed package: the names that it uses are not looked at."""
    space = {}
    exec(compile(source, "/usr/lib/site-packages/package.py", "exec"), space)
    return space


def test_c09_code_that_a_compiler_wrote_is_no_code_of_the_users(device):
    """It is captured at the first look: `torch.compile` calls functions that nothing names."""
    package = of_a_package("KERNELS = {}\ndef run(x):\n    return KERNELS['c' 'all']([x])\n")
    source = "def call(args):\n    x, = args\n    return getattr(x, 'mul')(2)\n"
    exec(compile(source, "/tmp/torchinductor_me/ab/cab.py", "exec"), package["KERNELS"])
    run = package["run"]
    f = pg.record(lambda x: run(x), warmup=1)
    for n in range(4):
        assert_same(f(filled(device, n)), filled(device, n) * 2)
    assert pg.stats(f).replayed == 3, pg.explain(f)
    assert not f._describer.heard


RATES = """
def adjust(optimizer, rate):
    for group in optimizer.param_groups:
        group['lr'] = rate

def step_with(optimizer, factor):
    group = optimizer.param_groups[0]
    was = group['lr']
    group['lr'] = was * factor
    optimizer.step()
    group['lr'] = was
"""


@may_run_live
@pytest.mark.parametrize("after", [False, True])
def test_c09_a_rate_that_code_of_a_package_sets_inside(device, after):
    adjust = of_a_package(RATES)["adjust"]

    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def f(x, rate):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            if after:
                optimizer.step()
            adjust(optimizer, rate)
            if not after:
                optimizer.step()

        return f, (weight, optimizer)

    both = side_by_side(make)
    for rate in [0.5, 0.5, 0.25, 0.25, 0.5, 0.25, 0.5]:
        both(ramp(device, 3), rate)


@may_run_live
def test_c09_a_rate_that_code_of_a_package_sets_for_a_moment(device):
    step_with = of_a_package(RATES)["step_with"]

    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def f(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            step_with(optimizer, 0.5)

        return f, (weight, optimizer)

    both = side_by_side(make)
    for n in range(6):
        if n == 3:
            for optimizer in (both.state[1], both.live_state[1]):
                optimizer.param_groups[0]["lr"] = 0.25
        both(ramp(device, 3))


@pytest.mark.parametrize("kind", ["fused", "clipped"])
def test_c17_gradients_do_not_wait_for_the_garbage_collector(device, kind):
    """What a capture has noted goes with it."""
    net = nn.Linear(4, 4).to(device)
    fused, plain = functools.partial(torch.optim.AdamW, fused=True), functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = (fused if kind == "fused" else plain)(net.parameters())
    pg.record(net, warmup=1)

    def clip():
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()

    update = pg.record(optimizer.step if kind == "fused" else clip, warmup=1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            net(torch.ones(2, 4, device=device)).sum().backward()
            gradients = [weakref.ref(p.grad) for p in net.parameters()]
            update()
            optimizer.zero_grad()
            assert [g() for g in gradients] == [None, None]
    finally:
        gc.enable()
    assert pg.stats(net).recorded == 1, pg.explain(net)


def test_c15_what_a_warm_up_leaves_behind_is_given_back(cuda):
    """Its backward works in the pool too: what is cached for our stream outside of it, nobody else could use."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(cuda)
    stream = device_for(cuda)._stream.stream.cuda_stream
    before = {s["address"] for s in torch.cuda.memory_snapshot()}  # of other tests, perhaps
    pg.record(net, warmup=1)
    for _ in range(5):
        net.zero_grad()
        net(torch.randn(64, 512, device=cuda)).square().sum().backward()
        outside = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0)]
        assert [s["total_size"] for s in outside if s["stream"] == stream and s["address"] not in before] == []
    assert pg.stats(net).replayed >= 3


_IN_FLIGHT = """
import copy, sys
import torch
from torch import nn
import phonograph as pg
from phonograph.testing import assert_same

torch.manual_seed(0)
theirs = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(512, 512), nn.Tanh()))).cuda()
ours = pg.record(copy.deepcopy(theirs), warmup=1, keep="always")


def step(module, n):
    module.zero_grad()
    torch.manual_seed(n)
    made = [module(torch.randn(3584, 512, device="cuda")) for _ in range(3)]  # 7 MiB of each layer are saved
    sum(out.square().sum() for out in made).backward()
    return [out.detach().clone() for out in made], [p.grad.clone() for p in module.parameters()]


for n in range(4):
    assert_same(step(ours, n), step(theirs, n))
assert pg.stats(ours).replayed > 6, pg.explain(ours)
pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
print(sum(s["total_size"] for s in pools) >> 20)
"""


def _memory_in_flight(settings):
    """MiB of all graphs' memory where three forwards wait for their backwards, in a process with these settings of the
    allocator."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", _IN_FLIGHT], env={**environment, "PYTORCH_CUDA_ALLOC_CONF": settings}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_c15_segments_may_be_expandable(cuda):
    """All recordings have one pool then, too."""
    fixed = _memory_in_flight("expandable_segments:False")
    growing = _memory_in_flight("expandable_segments:True")
    assert growing < 1.2 * fixed + 64, (growing, fixed)


def _gives_back_all_memory(other, x):
    if x.is_cuda:
        torch.cuda.empty_cache()


def _captures(other, x):
    other(x.detach()[..., :8])


def _captures_with_its_backward(other, x):
    with torch.enable_grad():
        torch.autograd.grad(other(x.detach()[..., :8]).sum(), other.weight)


def _drops_recordings(other, x):
    other(x.detach()[..., :8])
    with contextlib.suppress(TypeError):  # the live one
        pg.reset(other)


def _raises(other, x):
    raise KeyError


IN_A_BACKWARD = [_gives_back_all_memory, _captures, _captures_with_its_backward, _drops_recordings, _raises]


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("does", IN_A_BACKWARD)
def test_c12_what_hooks_do_in_the_backward_of_a_warm_up(device, does, first):
    """In that, or in the first that is captured or played."""
    torch.manual_seed(0)
    theirs, other = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device), nn.Linear(8, 8).to(device)
    ours = pg.record(copy.deepcopy(theirs), warmup=1)
    others = pg.record(copy.deepcopy(other), warmup=0), other
    for n in range(6):
        found = []
        for module, other in zip((ours, theirs), others, strict=True):
            module.zero_grad()
            torch.manual_seed(n)
            out = module(torch.randn(32, 64, device=device))
            hook = functools.partial(does, other)
            handles = [p.register_post_accumulate_grad_hook(hook) for p in module.parameters()] if n == first else []
            fails = n == first and does is _raises
            with pytest.raises(KeyError) if fails else contextlib.nullcontext():
                out.square().sum().backward()
            for handle in handles:
                handle.remove()
            found.append((out.detach(), None if fails else [p.grad for p in module.parameters()]))
        assert_same(*found)
        del found
    assert pg.stats(ours).replayed >= 3, pg.explain(ours)


@pytest.mark.parametrize("entries", [100_000, 2])
@may_run_live
def test_c05_while_memory_is_profiled(cuda, entries):
    """The allocator's history is the user's: it is read and left as it is. With too few entries a call runs live."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64)).to(cuda)
    theirs = copy.deepcopy(model)

    def step(model, x):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        return y.detach()

    torch.cuda.memory._record_memory_history(max_entries=entries, clear_history=True)
    try:
        torch.empty(1 << 20, device=cuda)
        begin = torch.cuda.memory._snapshot()["device_traces"][cuda.index or 0]
        ours = pg.record(functools.partial(step, model), warmup=1)
        held = []
        for n in range(8):
            x = torch.full((32, 64), n / 8, device=cuda)
            held.append((ours(x), step(theirs, x)))
            for result, expected in held:
                assert_same(result, expected)
        trace = torch.cuda.memory._snapshot()["device_traces"][cuda.index or 0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    if entries == 2:
        assert len(trace) == 2
        assert "history" in pg.explain(ours), pg.explain(ours)
    else:
        assert trace[: len(begin)] == begin
        assert pg.stats(ours).replayed >= 6, pg.explain(ours)


def test_c05_placeholders_are_no_peak(cuda):
    """What a capture takes to lead the allocator counts as allocated: it must not be all that is free in the pool."""

    def f(x, w):
        y = x
        for _ in range(4):
            y = (y @ w).tanh()
        return y.sum()

    x, w = torch.randn(8192, 1024, device=cuda), torch.randn(1024, 1024, device=cuda)
    f(x, w)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f(x, w)
    live = torch.cuda.max_memory_allocated() - before
    g = pg.record(f, warmup=1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        g(x, w)
    assert pg.stats(g).replayed == 2, pg.explain(g)
    slots = x.nbytes + w.nbytes
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * live + slots + (34 << 20)  # cuBLAS has a workspace


def test_what_a_checkpoint_keeps_is_in_nobodys_way(cuda):
    """What its parts have of the forward lasts as long as the recording: the backward lies in the same pool all the same, and
    not in another of the same size."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

        def forward(self, x):
            by = x.cos()
            for part in self.parts:
                x = checkpoint(lambda y, part=part: part(y).tanh() * by, x, use_reentrant=False)
            return x.square().mean()

    x = torch.randn(4096, 1024, device=cuda)
    first = pg.record(lambda x: (x * 2).sum())
    for _ in range(2):
        first(x)
    before = pools_in_use()
    live = Net().to(cuda)
    recorded = pg.record(copy.deepcopy(live))
    for n in range(4):
        for net in (recorded, live):
            net.zero_grad()
            net(x * n).backward()
        for p, q in zip(recorded.parameters(), live.parameters(), strict=True):
            assert_same(p.grad, q.grad)
    assert pg.stats(recorded).replayed == 3
    assert pools_in_use() <= before


def test_what_is_recorded_next_finds_room_where_others_were(cuda):
    """As long as a small recording needs the pool, all of it stays: a large one lies there, and not in another of that size."""
    x = torch.randn(4096, 1024, device=cuda)
    small = pg.record(lambda x: (x * 2).sum())
    for _ in range(3):
        small(x)
    before = pools_in_use()
    for scale in range(2):
        large = pg.record(lambda x, scale=scale: (x.repeat(16, 1) * scale).sum())
        for _ in range(3):
            assert_same(large(x), (x.repeat(16, 1) * scale).sum())
        assert pg.stats(large).replayed == 2
        assert pools_in_use() <= before
        pg.reset(large)
    assert pg.stats(small).pool_bytes > 16 * x.nbytes


@pytest.mark.parametrize("dropped", ["a function", "a model", "an output that was held", "a loss that was held"])
@pytest.mark.parametrize("audit", [0, 1])
def test_c15_the_pool_goes_with_the_last_that_needs_it(cuda, dropped, audit):
    """Not only where `reset` was asked for it, nor only if nothing was held then; also after a capture that came to nothing."""
    device = device_for(cuda)
    gc.collect()
    device._memory.begin_anew()  # others may have the pool of before
    x, model, held = torch.randn(4096, 1024, device=cuda), dropped in ("a model", "a loss that was held"), None
    f = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()).to(cuda) if model else lambda x: x * 2 + 1
    f = pg.record(f, audit=audit)
    for _ in range(4):
        held = None
        held = f(x)
        if model:
            held = held.square().mean()
            held.backward()
    assert pg.stats(f).replayed == 3
    pool = device._memory.anchor.handle
    if "held" in dropped:
        pg.reset(f)
    else:
        held = None
    del f
    if held is not None:
        device.tidy()
        assert tuple(pool) in pools_in_use()
        held = None
    gc.collect()
    device.tidy()
    assert tuple(pool) not in pools_in_use()


@pytest.mark.parametrize("room", ["plenty", "none on the device", "none allowed"])
def test_an_optimizers_states_fill_no_segment_that_is_larger_than_they_are(cuda, monkeypatch, room):
    """They stay; and what is as large as that segment would need another. But a live call is not to run out of memory."""
    if room == "none on the device":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 80 << 30))
    if room == "none allowed":
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: 0.0)
    asked, before = [], cuda_memory.hold_large
    monkeypatch.setattr(cuda_memory, "hold_large", lambda *given: asked.append(given) or before(*given))
    weight, scale = nn.Parameter(torch.randn(64, 64, device=cuda)), nn.Parameter(torch.randn(64, device=cuda))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.Adam([weight, scale])
    update = pg.record(optimizer.step)
    for _ in range(3):
        update()
    assert pg.stats(update).replayed == 2
    ((_, most, allowed),) = asked
    assert most == 2 * weight.nbytes
    assert (allowed > 0) is (room == "plenty")


def pools_in_use():
    """The private pools of the allocator that have memory."""
    gc.collect()
    torch.cuda.empty_cache()
    return {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()} - {(0, 0)}
