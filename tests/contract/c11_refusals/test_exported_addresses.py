"""C11: the address of a tensor goes to code outside torch, which no operator tells of."""

import ctypes

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, here, may_run_live, ramp, reasons

HANDS_OUT = "hands the address of a tensor to code outside torch"


def copied(to, of, nbytes, stream=None):
    """Copy memory past torch: on a GPU on its current stream, if on no other."""
    if of.device.type == "cpu":
        ctypes.memmove(to.data_ptr(), of.data_ptr(), nbytes)
        return
    stream = stream or torch.cuda.current_stream()
    cuda = ctypes.CDLL("libcuda.so.1")
    where = ctypes.c_uint64(to.data_ptr()), ctypes.c_uint64(of.data_ptr())
    assert cuda.cuMemcpyDtoDAsync_v2(*where, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream)) == 0


def overwritten(x):
    made, half = x * 2, x / 2
    copied(made, half, x.nbytes)
    return made + 1


class Library:
    """As one of others, which keeps an address before it hands it on."""

    def __init__(self, t):
        self.address = t.data_ptr()

    def read(self, count):
        return list((ctypes.c_float * count).from_address(self.address))


WRITES = {
    "of a tensor that the call makes": overwritten,
    "of the argument": lambda x: (copied(x, x + 1, x.nbytes), x * 2)[1],
    "of a storage": lambda x: (copied(x.storage(), x + 1, x.nbytes), x * 2)[1],
    "by the class": lambda x: (ctypes.memset(torch.Tensor.data_ptr(x), 0, 4), x * 2)[1],
    "with an offset": lambda x: (ctypes.memset(x.data_ptr() + 4, 0, 4), x * 2)[1],
}


@may_run_live
@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_c11_memory_that_is_written_by_its_address_on_the_cpu(write):
    f, cpu = pg.record(write, warmup=1), torch.device("cpu")
    for n in range(5):
        assert_same(f(ramp(cpu, 3, start=n)), write(ramp(cpu, 3, start=n)))
    assert HANDS_OUT in reasons(f)


@may_run_live
def test_c11_memory_that_is_read_by_its_address_on_the_cpu():
    def reads(x):
        made = x * 2
        return x + Library(made).read(3)[1]

    f, cpu = pg.record(reads, warmup=1), torch.device("cpu")
    for n in range(5):
        assert_same(f(ramp(cpu, 3, start=n)), ramp(cpu, 3, start=n) + 2.0 * (n + 1))
    assert HANDS_OUT in reasons(f)


@may_run_live
@pytest.mark.parametrize("size", [3, 1 << 15])
def test_c11_memory_outside_that_is_written_by_an_address_from_before_the_call(size):
    """As by an extension that calls no operator."""
    read, written = torch.zeros(size), torch.zeros(size)
    addresses = written.data_ptr(), read.data_ptr(), 4 * size

    def f(x):
        read.copy_(x)
        ctypes.memmove(*addresses)
        return written * 2

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        x = torch.full((size,), float(n))
        assert_same(recorded(x), x * 2)
    assert "changes the memory of written without an operator" in reasons(recorded)


@may_run_live
def test_c12_what_is_added_to_memory_outside_without_an_operator():
    counted = torch.zeros(3)
    cells = (ctypes.c_float * 3).from_address(counted.data_ptr())

    def f(x):
        cells[0] += 1
        return counted + x

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        assert_same(recorded(torch.ones(3)), torch.tensor([n + 2.0, 1.0, 1.0]))


@may_run_live
def test_c11_memory_in_a_capsule(device):
    def f(x):
        made = x * 2
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(made)).mul_(3)
        return made + 1

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 6 + 1)
    assert "hands the memory of a tensor to code outside torch (to_dlpack)" in reasons(recorded)


@may_run_live
def test_c11_the_line_is_told_that_hands_out_an_address():
    def f(x):
        line.append(here(1))
        ctypes.memset(x.data_ptr() + 4, 0, 4)
        return x * 2

    line = []
    recorded = pg.record(f, warmup=1, fallback="error")
    recorded(torch.ones(3))
    with pytest.raises(pg.Unrecordable, match=HANDS_OUT) as told:
        recorded(torch.ones(3))
    assert line[0] in str(told.value)
    assert "@pg.live" in str(told.value)


def test_c11_the_same_in_a_marked_function(device):
    @pg.live
    def write(to, of):
        copied(to, of, of.nbytes)

    def f(x):
        made, half = x * 2, x / 2
        write(made, half)
        return made + 1

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) / 2 + 1)
    assert counts(recorded) == (1, 1, 4)


def one_of(x, y):
    return x.data_ptr()


def remembered(x, y):
    seen = {}
    for t in (x, y, x.view(3)):
        address = t.data_ptr()
        if address not in seen:
            seen[address] = len(seen)
    return x * len(seen)


COMPARED = {
    "with another": lambda x, y: x + y if x.data_ptr() == y.data_ptr() else x - y,
    "in a function of its own": lambda x, y: x + y if one_of(x, y) != one_of(y, x) else x - y,
    "in a set": lambda x, y: x * len({t.data_ptr() for t in (x, y, x.view(3))}),
    "as a key": remembered,
    "in a tuple": lambda x, y: x * 2 if (x.data_ptr(), x.shape) == (y.data_ptr(), y.shape) else y * 3,
    "aligned": lambda x, y: x + y if x.data_ptr() % 4 == 0 else y * 3,
}


@pytest.mark.parametrize("compare", COMPARED.values(), ids=COMPARED)
def test_c11_an_address_that_is_only_compared(device, compare):
    f = pg.record(compare, warmup=1)
    for n in range(5):
        given = ramp(device, 3, start=n), ramp(device, 3, start=2 * n)
        assert_same(f(*given), compare(*given))
    assert counts(f) == (1, 1, 4)


def test_c11_what_others_launch_on_the_stream_of_the_call(cuda):
    state = torch.zeros(3, device=cuda)

    def f(x):
        made = x * 2
        copied(state, made, x.nbytes)
        copied(x, state, x.nbytes)
        return made + state

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        x = ramp(cuda, 3, start=n)
        assert_same(recorded(x), ramp(cuda, 3, start=n) * 4)
        assert_same(x, ramp(cuda, 3, start=n) * 2)
        assert_same(state, x)
    assert counts(recorded) == (1, 1, 4)


@may_run_live
def test_c11_what_others_launch_on_a_stream_of_their_own(cuda):
    theirs = torch.cuda.Stream()
    kept, source = torch.zeros(3, device=cuda), torch.ones(3, device=cuda)

    def f(x):
        copied(kept, source, x.nbytes, theirs)
        return x * 2

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        assert_same(recorded(ramp(cuda, 3, start=n)), ramp(cuda, 3, start=n) * 2)
    assert "launches nothing on the stream of the call" in reasons(recorded)


@may_run_live
def test_c11_a_kernel_of_warps(device):
    warp = pytest.importorskip("warp")
    warp.init()

    @warp.kernel
    def twice(a: warp.array(dtype=float)):
        a[warp.tid()] = a[warp.tid()] * 2.0

    kept = torch.zeros(3, device=device)
    theirs = warp.from_torch(kept)  # its address is theirs before the call

    def f(x):
        kept.copy_(x)
        warp.launch(twice, dim=3, inputs=[theirs], device=theirs.device)
        return kept + 1

    recorded = pg.record(f, warmup=1)
    for n in range(5):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2 + 1)
    assert pg.stats(recorded).recorded == 0
