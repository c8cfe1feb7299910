"""C9, C11: what lies on the host in a function that is recorded on a GPU: tensors and arrays whose values are the same in each
replay are constants of the recording, and what changes there is noticed. (On the CPU they are tensors like any other.)"""

import gc
import math

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, plain, ramp, reasons

np = pytest.importorskip("numpy")


class Holds:
    def __init__(self, n=8):
        self.table = np.linspace(0.1, 1.0, n)
        self.bands = 2.0 ** torch.linspace(0.0, n - 1, n)
        self.places = [0, 2]
        self.scale = torch.tensor(2.0)
        self.mask = torch.tensor([True, False, True, False])


def embedding(x, h):
    speeds = torch.exp(-math.log(10_000) * torch.arange(2, dtype=torch.float32) / 2).to(x.device)
    return torch.cat([(x[:, None] * speeds).cos(), (x[:, None] * speeds).sin()], -1)


def written_copy(x, h):
    there = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
    there += x
    return there * 2


def written_between(x, h):
    here = torch.zeros(4)
    first = here.to(x.device)
    here += 1
    return x * first + here.to(x.device)


def put_in_place(x, h):
    x = x.clone()
    x[[1, 2]] = torch.tensor([5.0, 6.0], device=x.device)
    x[:2] = torch.ones(2)
    return x


def put_where_a_mask_is(x, h):
    """With a mask on the device, a number, and a tensor of one number that is there on the host."""
    x = x.clone()
    x[x > 2] = 7.0
    x[x < 1] = h.scale
    x[h.mask] = 3.0
    return x


def masked(x, h):
    return x[h.places] if x.device.type == "cpu" else x[h.mask]  # of which nobody knows there how much it selects


def of_ones_own_dtype(x, h):
    return x.double() * torch.arange(4).to(x.device, torch.float64) + torch.full((4,), 0.5, dtype=torch.half).to(x)


def transposed(x, h):
    return torch.arange(8.0).view(2, 4).t().to(x.device) * x[:, None]


FIXED = {
    "a timestep embedding": embedding,
    "a list": lambda x, h: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "a list of booleans": lambda x, h: torch.where(torch.tensor([True, False, True, True], device=x.device), x, -x),
    "a number": lambda x, h: x * torch.tensor(0.1, device=x.device) + torch.as_tensor(3, device=x.device),
    "nan": lambda x, h: x * torch.tensor(math.nan, device=x.device),
    "like another": lambda x, h: x * x.new_tensor([4.0, 3.0, 2.0, 1.0]),
    "moved": lambda x, h: x * torch.linspace(0, 1, 4, device="cpu").to(x),
    "moved to a device": lambda x, h: x * torch.ones(4, device="cpu").to(x.device, non_blocking=True),
    "a list as an index": lambda x, h: x[[0, 2]] * 2,
    "a list that is held as an index": lambda x, h: x[h.places] * 2,
    "an array as an index": lambda x, h: x[np.array([0, 3])] * 2,
    "a tensor as an index": lambda x, h: x[torch.arange(2)] * 2,
    "none": lambda x, h: x * torch.ones(0, device="cpu").to(x.device).sum(),
    "an array": lambda x, h: x * torch.from_numpy(h.table).to(x.device)[:4].float(),
    "an array, taken from": lambda x, h: torch.from_numpy(h.table).to(x.device)[x.long()].float().view(-1, 1) * x,
    "an array that is copied": lambda x, h: x * torch.tensor(h.table, device=x.device)[:4],
    "an array of the call's": lambda x, h: x * torch.from_numpy(np.arange(4.0) + len(h.places)).to(x),
    "bands": lambda x, h: torch.cat([f(x * band) for band in h.bands for f in (torch.sin, torch.cos)]),
    "a number that is held": lambda x, h: torch.where(x > 1, x, h.scale) * h.scale + x.clone().fill_(h.scale),
    "where it is written": written_copy,
    "written between": written_between,
    "put in place": put_in_place,
    "put where a mask is": put_where_a_mask_is,
    "a mask": masked,
    "dtypes": of_ones_own_dtype,
    "strides": transposed,
    "several at once": lambda x, h: torch._foreach_add([x, x * 2], 1)[0] + torch.tensor([[1.0], [2.0]], device=x.device),
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("case", FIXED.values(), ids=list(FIXED))
def test_c09_constants_of_the_host_are_recorded(device, case, inference):
    h = Holds()
    recorded = pg.record(lambda x: case(x, h), warmup=1)
    with torch.inference_mode(inference):
        for i in range(6):
            x = ramp(device, 4, start=i % 3)
            assert_same(recorded(x), case(x, h))
    assert counts(recorded) == (1, 1, 5), pg.explain(recorded)


CHANGES = {
    "in place": lambda h: h.bands.mul_(3),
    "one of them": lambda h: h.bands.__setitem__(3, 7.0),
    "through numpy": lambda h: h.bands.numpy().__setitem__(3, 7.0),
    "by data": lambda h: h.bands.data.copy_(torch.arange(8.0)),
    "another's memory": lambda h: setattr(h.bands, "data", torch.arange(8.0)),
    "another": lambda h: setattr(h, "bands", torch.arange(8.0)),
    "the array": lambda h: h.table.__setitem__(3, 7.0),
    "another array": lambda h: setattr(h, "table", h.table * 3),
    "a list": lambda h: h.places.__setitem__(1, 3),
    "a number": lambda h: h.scale.fill_(5.0),
    "a number through numpy": lambda h: h.scale.numpy().fill(5.0),
}


def all_of_them(x, h):
    x = x * h.bands[3] + torch.from_numpy(h.table)[3].float() + h.bands[:4].to(x.device)
    return x[h.places] * h.scale + torch.tensor(h.places, device=x.device)


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_c09_what_changes_on_the_host_is_noticed_before_the_next_replay(device, change):
    h = Holds()
    recorded = pg.record(lambda x: all_of_them(x, h), warmup=1)
    for i in range(9):
        if i == 4:
            change(h)
        x = ramp(device, 4, start=i)
        assert_same(recorded(x), all_of_them(x, h))
    assert counts(recorded)[2] >= 6, pg.explain(recorded)


def test_c09_a_large_tensor_on_the_host_that_is_written_is_noticed_before_the_next_replay(device):
    large = torch.arange(100_000.0)
    f = lambda x: x * large.to(x.device)[-4:]  # noqa: E731
    recorded = pg.record(f, warmup=1)
    for i in range(8):
        if i == 4:
            large[-1] = 1.0
        x = ramp(device, 4, start=i)
        assert_same(recorded(x), f(x))
    assert counts(recorded)[2] >= 5, pg.explain(recorded)


@may_run_live
def test_c18_a_tensor_on_the_host_that_changes_in_each_call_ends_live(device):
    scale = torch.tensor(2.0)
    f = lambda x: x * scale  # noqa: E731
    recorded = pg.record(f, warmup=1)
    for i in range(40):
        scale.fill_(i)
        x = ramp(device, 4)
        assert_same(recorded(x), f(x))
    assert counts(recorded)[1] <= 12, pg.explain(recorded)


class Counts:
    def __init__(self):
        self.steps = torch.zeros(())
        self.table = np.zeros(4)


WRITES = {
    "in place": lambda x, c: c.steps.add_(1),
    "through numpy": lambda x, c: c.steps.numpy().__iadd__(1.0),
    "an array": lambda x, c: torch.from_numpy(c.table).add_(1),
}


@may_run_live
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_c03_what_a_call_writes_on_the_host_is_written_once_each_call(device, write):
    ours, theirs = Counts(), Counts()

    def f(x, c):
        write(x, c)
        return x * c.steps + float(c.table[0]) if device.type == "cuda" else x * c.steps

    recorded = pg.record(lambda x: f(x, ours), warmup=1)
    for i in range(6):
        x = ramp(device, 4, start=i)
        assert_same(recorded(x), f(x, theirs))
        assert_same(ours.steps, theirs.steps)
        assert ours.table.tolist() == theirs.table.tolist()


@may_run_live
def test_c02_random_numbers_of_the_host_are_no_constants(device):
    f = lambda x: x * torch.rand(4, device="cpu").to(x.device)  # noqa: E731
    recorded = pg.record(f, warmup=1)
    for i in range(6):
        x = ramp(device, 4, start=i)
        state = torch.get_rng_state()
        expected = f(x)
        torch.set_rng_state(state)
        assert_same(recorded(x), expected)


@may_run_live
def test_c09_an_array_that_is_written_while_a_tensor_is_on_it(device):
    def f(x):
        array = np.zeros(4)
        t = torch.from_numpy(array)
        array[1] = 5.0
        return x * t.to(x)

    both = plain(f)
    for i in range(5):
        both(ramp(device, 4, start=i))


@may_run_live
def test_c03_a_result_on_an_arrays_memory_is_on_it_each_time(device):
    table = np.zeros(4)
    recorded = pg.record(lambda x: (x * 2, torch.from_numpy(table)), warmup=1)
    for i in range(5):
        recorded(ramp(device, 4))[1][0] = i
        assert table[0] == i


@may_run_live
def test_c09_a_number_of_an_optimizers_that_becomes_a_constant_of_the_host_is_no_longer_followed(device):
    """ASGD works out numbers on the host, and sends them to the device."""
    ours, theirs = (nn.Linear(4, 2, device=device) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())

    def step_of(model):
        optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, t0=2, foreach=True)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, optimizer

    (ours_step, mine), (plain_step, other) = step_of(ours), step_of(theirs)
    recorded = pg.record(ours_step, warmup=1)
    for i in range(8):
        for optimizer in (mine, other):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
        x = ramp(device, 3, 4, start=i)
        assert_same(recorded(x), plain_step(x))
        assert_same([*ours.parameters()], [*theirs.parameters()])


@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_c06_constants_of_the_host_with_a_backward(device, backward):
    ours, theirs = (nn.Linear(4, 4, device=device) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    h = Holds()

    class Model(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = self.inner(x)[:, [0, 2]] * h.bands[2]
            return x * torch.tensor([0.5, 2.0], device=x.device) + torch.from_numpy(h.table)[:2].to(x)

    model, plain_model = Model(ours), Model(theirs)

    def step(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    f = pg.record(lambda x: step(model, x), warmup=1) if backward == "inside" else pg.record(model, warmup=1)
    for i in range(6):
        x = ramp(device, 3, 4, start=i)
        for m in (model, plain_model):
            m.zero_grad()
        assert_same(f(x) if backward == "inside" else step(f, x), step(plain_model, x))
        assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    assert counts(f)[2] >= 4, pg.explain(f)


def test_c17_memory_of_constants_goes_with_the_recording(device):
    if device.type != "cuda":
        pytest.skip("there is none")
    table = np.zeros(1 << 20)
    recorded = pg.record(lambda x: x * torch.from_numpy(table).to(x.device)[:4], warmup=1)
    for _ in range(2):
        recorded(ramp(device, 4))
    before = torch.cuda.memory_allocated()
    recorded(ramp(device, 4))
    pg.reset(recorded)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before - table.nbytes, pg.explain(recorded)


@may_run_live
def test_c11_a_tensor_on_the_host_that_is_too_large_is_refused_with_what_to_do(device):
    if device.type != "cuda":
        pytest.skip("there it is a tensor like any other")
    large = torch.zeros(20 << 20)
    recorded = pg.record(lambda x: x * large[:4].to(x.device), warmup=1)
    for _ in range(3):
        recorded(ramp(device, 4))
    assert "more than 64 MiB" in reasons(recorded)
    assert "move it to the device" in reasons(recorded)


COPIES = {
    "to": lambda x: (x * 2).to("cpu", non_blocking=True),
    "several": lambda x: torch._foreach_copy_([torch.empty(4, pin_memory=x.is_cuda)], [x * 2], non_blocking=True),
}


@may_run_live
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("copy", COPIES.values(), ids=list(COPIES))
def test_c11_what_is_copied_to_the_host_is_no_constant(device, copy, inference):
    def f(x):
        here = copy(x)
        here = here if isinstance(here, torch.Tensor) else here[0]
        if here.device != x.device:
            torch.cuda.current_stream().synchronize()
        return x + here.to(x.device)

    recorded = pg.record(f, warmup=1)
    with torch.inference_mode(inference):
        for i in range(5):
            x = ramp(device, 4, start=i)
            assert_same(recorded(x), x * 3)


@may_run_live
def test_c09_compiled_code_that_reads_what_is_on_the_host(device):
    h = Holds()
    compiled = torch.compile(lambda x: x * h.scale)
    recorded = pg.record(compiled, warmup=1)
    for i in range(9):
        if i == 5:
            h.scale.fill_(9.0)
        x = ramp(device, 4, start=i)
        assert_same(recorded(x), x * h.scale)
