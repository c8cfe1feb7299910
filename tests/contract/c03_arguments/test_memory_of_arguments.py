"""C3: arguments whose memory is shared, moved, or given back."""

from functools import partial

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests import forked
from tests.contract.shared.memory import filled
from tests.helpers import counts, may_run_live, plain, side_by_side


@may_run_live
def test_c03_two_arguments_that_share_numpys_memory():
    numpy = pytest.importorskip("numpy")
    f = pg.record(lambda a, b: (a.add_(1), b * 2)[1], warmup=1)
    for _ in range(5):
        array = numpy.ones(3, numpy.float32)
        assert f(torch.from_numpy(array), torch.from_numpy(array)).tolist() == [4.0] * 3


@may_run_live
def test_c03_an_argument_that_shares_numpys_memory_with_state():
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(3, numpy.float32)
    state = torch.from_numpy(array)
    f = pg.record(lambda x: (state.add_(1), x * 2)[1], warmup=1)
    for n in range(5):
        assert f(torch.from_numpy(array)).tolist() == [2.0 * (n + 2)] * 3


@may_run_live
def test_c03_an_argument_that_is_written_and_has_the_memory_of_an_array(device):
    """Of which the function makes a tensor by itself."""
    numpy = pytest.importorskip("numpy")
    if torch.device(device).type != "cpu":
        pytest.skip("arrays lie on the host")

    def run(record):
        array = numpy.zeros(3, numpy.float32)
        step, found = record(lambda x, y: y.add_(x) + torch.from_numpy(array)), []
        for n in range(20):
            y = torch.from_numpy(array) if n % 5 == 4 else torch.from_numpy(array.copy())
            found.append(step(torch.full((3,), n + 1.0), y).clone())
        return found, step

    (live, _), (ours, step) = run(lambda f: f), run(partial(pg.record, keep="always"))
    for was, now in zip(live, ours, strict=True):
        assert_same(was, now)
    assert pg.stats(step).replayed >= 4, pg.explain(step)


@pytest.mark.parametrize("grad", [True, False])
def test_c03_an_argument_that_compiled_code_writes(cuda, grad):
    """Its kernels are no operators."""

    def make():
        torch._dynamo.reset()
        return torch.compile(lambda x, y: (x.add_(y), x * 2)[1])

    both = side_by_side(make)
    xs = [filled(cuda, 0) for _ in range(2)]
    with torch.set_grad_enabled(grad):
        for n in range(6):
            versions = [x._version for x in xs]
            results = [f(x, filled(cuda, n)) for f, x in zip((both.recorded, both.live), xs, strict=True)]
            assert_same(*results)
            assert_same(*xs)
            assert xs[0]._version > versions[0] or not n
    assert counts(both) == (1, 1, 5)


def test_c03_an_argument_that_a_triton_kernel_writes(cuda):
    pytest.importorskip("triton")
    from tests.contract.kernels import add_one

    state = filled(cuda, 0)

    def f(x):
        made = x * 2
        for t in (x, made, state):
            add_one[(1,)](t, t.numel(), block=16)
        return made + x + state

    recorded = pg.record(f, warmup=1)
    x = filled(cuda, 0)
    for n in range(6):
        before = x[0].item()
        assert_same(recorded(x), filled(cuda, 2 * before + 1 + before + 1 + n + 1))
        assert_same(x, filled(cuda, before + 1))
    assert counts(recorded) == (1, 1, 5)


@may_run_live
def test_c03_an_array_of_the_closure_that_is_written_through_a_tensor():
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(3, numpy.float32)
    f = pg.record(lambda x: torch.as_tensor(array).add_(x).clone(), warmup=1)
    for n in range(1, 6):
        assert f(torch.ones(3)).tolist() == [float(n)] * 3
        assert array.tolist() == [float(n)] * 3


@may_run_live
def test_c03_an_argument_that_is_a_gradient_of_state(device):
    p = torch.ones(2, device=device, requires_grad=True)
    p.grad = torch.ones(2, device=device)
    f = pg.record(lambda g: (g.add_(1), p.grad * 2)[1], warmup=1)
    for _ in range(3):
        assert f(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
    for n in range(1, 4):
        assert f(p.grad).tolist() == [2.0 * (n + 1)] * 2


@may_run_live
@pytest.mark.parametrize("own", ["gradient", "parameter", "buffer", "state of an optimizer", "read"])
def test_c03_an_argument_that_is_new_memory_of_the_functions_own_where_it_had_old(device, own):
    """Which an allocator gives once the old is free. Only the address is what it was."""

    def run(record):
        w = torch.ones(4, device=device, requires_grad=own != "buffer")
        optimizer = torch.optim.SGD([torch.zeros(4, device=device, requires_grad=True)], momentum=0.5)
        (p,) = optimizer.param_groups[0]["params"]
        memory, found = torch.zeros(4, device=device), []

        @record
        def step(x, y):
            if own == "gradient":
                (w * x).sum().backward()
            elif own == "state of an optimizer":
                p.grad = x
                optimizer.step()
            else:
                with torch.no_grad():
                    (y if own == "read" else w).add_(x)
            return (w if own == "read" else y) * 2

        for n in range(14):
            memory.fill_(n)
            new = torch.from_dlpack(memory)
            if own == "gradient":
                w.grad = None
                w.grad = new
            elif own == "state of an optimizer":
                optimizer.state[p].setdefault("momentum_buffer", torch.empty(0)).data = new
            else:
                w.data = new
            found.append(step(torch.full((4,), n + 1.0, device=device), new if n > 8 else new.clone()).detach().clone())
            del new
        return found, step

    (live, _), (ours, step) = run(lambda f: f), run(pg.record)
    for was, now in zip(live, ours, strict=True):
        assert_same(was, now)
    assert pg.stats(step).replayed >= 4, pg.explain(step)


@may_run_live
def test_c03_an_argument_that_lay_alone_where_the_gradient_comes_back(device):
    """What was found once, that it meets nothing there, holds for that call alone."""

    def run(record):
        w, memory, other = torch.ones(4, device=device, requires_grad=True), *torch.zeros(2, 4, device=device).clone().unbind()
        found = []

        @record
        def step(x, y):
            (w * x).sum().backward()
            return y * 2

        def call(n, grad, y):
            w.grad = grad
            found.append(step(torch.full((4,), n + 1.0, device=device), y).detach().clone())

        for n in range(4):
            call(n, torch.from_dlpack(memory), torch.ones(4, device=device))
        for n in range(6):
            call(n, torch.from_dlpack(other), torch.from_dlpack(memory))
        for n in range(6):
            grad = torch.from_dlpack(memory)
            call(n, grad, grad)
        return found

    for was, now in zip(run(lambda f: f), run(pg.record), strict=True):
        assert_same(was, now)


def test_c03_an_argument_where_a_gradient_was(device):
    """Which is free for others once that has gone."""
    w, memory = torch.ones(4, device=device, requires_grad=True), torch.zeros(4, device=device)
    w.grad = torch.from_dlpack(memory)

    @pg.record
    def step(x, y):
        (w * x).sum().backward()
        return y * 2

    for n in range(4):
        step(torch.full((4,), n + 1.0, device=device), torch.ones(4, device=device))
    w.grad = None
    for n in range(6):
        assert step(torch.ones(4, device=device), torch.from_dlpack(memory.fill_(n))).tolist() == [2.0 * n] * 4
    assert pg.stats(step).replayed >= 5, pg.explain(step)


@may_run_live
@pytest.mark.parametrize("how", ["the same tensor", "other memory each time", "other memory where the old one was"])
def test_c03_an_argument_that_a_marked_function_has_come_to_find_elsewhere(device, how):
    """It runs live, and writes there in the middle of the call: what it finds may be another than when that was recorded."""

    def run(record):
        has, found, memory = {"own": torch.zeros(4, device=device)}, [], torch.zeros(4, device=device)

        @pg.live
        def add(x):
            with torch.no_grad():
                has["own"].add_(x)
            return x + 0

        step = record(lambda x, y: add(x * 2) + y * 2)
        for n in range(20):
            memory = memory.fill_(n) if how.endswith("was") else torch.full((4,), float(n), device=device)
            y = memory.clone()
            if how == "the same tensor":
                has["own"] = memory
                y = memory if n > 12 else y
            else:
                has["own"].data = torch.from_dlpack(memory)
                y = torch.from_dlpack(memory) if n > 12 else y
            found.append(step(torch.full((4,), n + 1.0, device=device), y).clone())
        return found, step

    (live, _), (ours, step) = run(lambda f: f), run(partial(pg.record, keep="always"))
    for was, now in zip(live, ours, strict=True):
        assert_same(was, now)
    assert pg.stats(step).replayed >= 4, pg.explain(step)


@may_run_live
@pytest.mark.parametrize("how", [torch.Tensor.detach, torch.Tensor.view_as, torch.from_dlpack])
def test_c03_an_argument_on_the_memory_of_a_step_count(device, how):
    """Which a replay moves on by itself: no operator writes it."""

    def run(record):
        p = torch.zeros(2, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([p], lr=0.5)

        @record
        def step(x, count):
            p.grad = x * 1.0
            optimizer.step()
            return count * 2

        found = []
        for n in range(12):
            own = optimizer.state[p].get("step", torch.zeros(()))
            count = how(own, own) if how is torch.Tensor.view_as else how(own)
            found.append(step(torch.full((2,), n + 1.0), count if n > 6 else count.clone()).clone())
        return found, step

    if torch.device(device).type != "cpu":
        pytest.skip("the other argument lies on the host, as counts do")
    (live, _), (ours, step) = run(lambda f: f), run(pg.record)
    for was, now in zip(live, ours, strict=True):
        assert_same(was, now)
    assert pg.stats(step).replayed >= 4, pg.explain(step)


@may_run_live
def test_c03_a_tensor_of_the_functions_own_on_the_memory_of_a_step_count(device):
    """On another storage, so that it seems to be another tensor."""

    def run(record):
        p, has = torch.zeros(2, device=device, requires_grad=True), {"count": torch.zeros(())}
        optimizer = torch.optim.Adam([p], lr=0.5)

        @record
        def step(x):
            p.grad = x * 1.0
            optimizer.step()
            return has["count"] * 2

        found = []
        for n in range(12):
            if n == 3:
                has["count"] = torch.from_dlpack(optimizer.state[p]["step"])
            found.append(step(torch.full((2,), n + 1.0, device=device)).clone())
        return found

    for was, now in zip(run(lambda f: f), run(pg.record), strict=True):
        assert_same(was, now)


@may_run_live
def test_c03_an_argument_on_the_memory_of_a_gradient_that_lies_elsewhere_each_time(device):
    """Each has a storage of its own, so that nobody seems to have the gradient."""

    def run(record):
        w, found = torch.nn.Parameter(torch.ones(4, device=device)), []

        @record
        def step(x, y):
            (w * x).sum().backward()
            return y * 2

        for n in range(20):
            memory = torch.full((4,), float(n), device=device)
            w.grad = None
            w.grad = torch.from_dlpack(memory) if n > 12 else memory.clone()
            y = torch.from_dlpack(memory) if n > 12 else memory
            found += [step(torch.full((4,), n + 1.0, device=device), y).clone(), w.grad.clone()]
        return found, step

    (live, _), (ours, step) = run(lambda f: f), run(pg.record)
    for was, now in zip(live, ours, strict=True):
        assert_same(was, now)
    assert pg.stats(step).replayed >= 4, pg.explain(step)


def test_c03_a_view_of_an_earlier_result_is_written(device):
    f, g = plain(lambda x: x * 2), plain(lambda view: view.add_(1))
    for n in range(7):
        y = f(filled(device, n))
        g(y.each(lambda y: y[1:3]))
        y.check()


@may_run_live
def test_c03_autograd_notices_what_a_replay_writes_through_data_or_not(device):
    """Eager's version counters: `.data` hides a write from autograd, recorded as well as live."""
    w = torch.ones(2, device=device, requires_grad=True)
    f = pg.record(lambda x: w.data.add_(x), warmup=1)
    for n in range(1, 6):
        loss = (w * w).sum()
        f(torch.ones(2, device=device))
        w.grad = None
        loss.backward()
        assert w.grad.tolist() == [2.0 * (n + 1)] * 2


@may_run_live
def test_c03_an_argument_made_in_inference_mode(device):
    w = torch.ones(2, device=device, requires_grad=True)
    f = pg.record(lambda x: torch.autograd.grad((x * w).sum(), w)[0], warmup=1)
    with torch.inference_mode():
        x = torch.ones(2, device=device) * 2
    for _ in range(4):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            f(x)


@may_run_live
@pytest.mark.parametrize("set_to_none", [False, True])
def test_c06_a_gradient_of_an_argument_is_read_or_dropped(device, set_to_none):
    @torch.no_grad()
    def update(p):
        p.sub_(0.5 * p.grad)
        if set_to_none:
            p.grad = None

    update = pg.record(update, warmup=1)
    w = torch.ones(3, device=device, requires_grad=True)
    for n in range(5):
        w.grad = filled(device, n, 3)
        update(w)
        assert (w.grad is None) == set_to_none
    assert w.tolist() == [1 - 0.5 * (0 + 1 + 2 + 3 + 4)] * 3


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_c03_a_place_for_an_argument_is_aligned_as_the_argument(device, first):
    """So that kernels go by the same widest loads; each alignment is a signature of its own."""
    recorded, memory = pg.record(lambda x: x * 2), torch.arange(16.0, device=device)
    for _ in range(4):
        x = memory[first : first + 8]
        assert_same(recorded(x), x * 2)
    ((slot,),) = [player.recording.slots for player in recorded._shelf]
    assert slot.tensor.data_ptr() % 16 == x.data_ptr() % 16 == 4 * first


# ---------------------------------------------------------------------------------------------------
# Memory that was freed. In a process of its own: what reads it may be the end of that.

_FREED = """
import sys, torch, phonograph as pg
from torch import nn

device = torch.device(sys.argv[1])
x = torch.ones(4, 4, device=device)

def freed(*size, left=0, **kind):
    t = torch.ones(size, device=device, **kind)
    t.untyped_storage().resize_(left)
    return t

def check(function, *arguments, replayed, live=1, **options):
    f = pg.record(function, warmup=1, **options)
    for _ in range(5):
        found = f(x, *arguments)
        assert torch.equal(found[0] if type(found) is tuple else found, x * 2), found
    assert (pg.stats(f).live, pg.stats(f).replayed) == (live, replayed), (pg.stats(f), pg.explain(f))

import warnings
warnings.simplefilter("ignore", pg.RunsLive)
"""

FREED = {
    "an argument": "check(lambda x, t: x * 2, freed(3000), replayed=0, live=5)",
    "one within another": "check(lambda x, t: x * 2, [{'t': freed(3000)}], replayed=0, live=5)",
    "a parameter": "check(lambda x, t: x * 2, nn.Parameter(freed(3000)), replayed=0, live=5)",
    "what is returned": "check(lambda x, t: (x * 2, t), freed(3000), replayed=0, live=5)",
    "a part": "check(lambda x, t: x * 2, freed(3000, left=400), replayed=0, live=5)",
    "what a view shows": """
whole = torch.ones(3000, device=device)
view = whole[2000:]
whole.untyped_storage().resize_(400)
check(lambda x, t: x * 2, view, replayed=0, live=5)""",
    "beside what a view shows": """
whole = torch.ones(3000, device=device)
view = whole[:50]
whole.untyped_storage().resize_(400)
check(lambda x, t: x * 2, view, replayed=4)""",
    "freed later, and there again": """
t = torch.ones(3000, device=device)
f = pg.record(lambda x, t: x * 2, warmup=1)
for size in 12000, 12000, 12000, 0, 0, 400, 0, 12000, 12000:
    t.untyped_storage().resize_(size)
    assert torch.equal(f(x, t), x * 2)
assert (pg.stats(f).live, pg.stats(f).replayed) == (5, 4), pg.stats(f)""",
    "outside": "t = freed(3000); check(lambda x: x * 2 if t is not None else x, replayed=4)",
    "outside, compared": "t = freed(3000); check(lambda x: (x * 2, t), replayed=4, verify=1)",
    "outside, audited": "t = freed(3000); check(lambda x: x * 2 if t is not None else x, replayed=4, audit=1)",
    "a weight": """
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
net[1].weight.untyped_storage().resize_(0)
check(lambda x: (x * 2, net[0](x)), replayed=4)""",
    "a gradient": """
w = nn.Parameter(torch.ones(4, 4, device=device))
unused = nn.Parameter(torch.ones(3000, device=device))
unused.grad = freed(3000)
def step(x):
    (w * x).sum().backward()
    return x * 2, unused.shape
check(step, replayed=4)
check(step, replayed=4, verify=1)""",
    "an argument's gradient": """
t = torch.ones(3000, device=device, requires_grad=True)
t.grad = freed(3000)
check(lambda x, t: x * 2, t, replayed=4)""",
}


def test_c03_memory_that_was_freed_and_that_the_call_does_not_read(device):
    programs = (f"print({kind!r}, flush=True)\n{program}\n" for kind, program in FREED.items())
    ended = forked.run(_FREED + "".join(programs), str(device))
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (0, [*FREED], "")
