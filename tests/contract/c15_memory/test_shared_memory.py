"""C12, C14, C15: threads, resets, and memory that is shared."""

import gc
import threading
import time
import warnings

import torch

import phonograph as pg
from phonograph.devices import device_for
from phonograph.testing import assert_same
from tests.contract.shared.memory import filled
from tests.helpers import assert_replays, counts, may_run_live, plain, side_by_side


@may_run_live
def test_c14_a_thread_of_the_functions_own_writes_its_result(device):
    def f(x):
        result = torch.zeros(4, device=device)
        thread = threading.Thread(target=lambda: result.copy_(x))
        thread.start()
        thread.join()
        return result

    f = pg.record(f, warmup=1)
    for n in range(5):
        assert f(filled(device, n)).tolist() == [float(n)] * 4


@may_run_live
def test_c14_a_thread_of_the_functions_own_calls_a_recorded_function(device):
    inner = pg.record(lambda x: x + 1, warmup=1)

    def f(x):
        result = []
        thread = threading.Thread(target=lambda: result.append(inner(x)), daemon=True)
        thread.start()
        thread.join(timeout=2)
        return result[0] * 2

    f = pg.record(f, warmup=1)
    for n in range(4):
        assert f(filled(device, n)).tolist() == [2.0 * (n + 1)] * 4


def test_c12_a_function_is_reset_while_another_thread_waits_to_call_it(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for n in range(4):
        f(filled(device, n))

    begun = threading.Event()

    def slow(x):
        begun.set()
        time.sleep(0.3)
        pg.reset(f)
        return x

    thread = threading.Thread(target=quietly, args=(pg.record(slow, warmup=1), filled(device, 1)))
    thread.start()
    begun.wait()
    try:
        assert f(filled(device, 50)).tolist() == [100.0] * 4
    finally:
        thread.join()


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*args)


def test_cublas_has_its_workspace_by_itself(cuda):
    """And not in the middle of what a large temporary has left, which would need as much again."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, device=cuda)
    large = 128 << 20

    def f(x):
        one = torch.ones(large, dtype=torch.uint8, device=cuda)[0].float()
        return x @ weight * one

    recorded = pg.record(f)
    for _ in range(4):
        x = torch.randn(64, 64, device=cuda)
        assert_same(recorded(x), f(x))
    assert pg.stats(recorded).replayed == 3
    assert pg.stats(recorded).pool_bytes < large + (64 << 20)


def test_a_capture_needs_no_more_memory_than_the_call_before_it(cuda):
    """What the warm-up call took is enough for the slots as well: it has kept places for them."""

    def f(x):
        y = x.repeat(16, 1)
        return (y * 2 + x.repeat(16, 1)).sum()

    x = torch.randn(2048, 1536, device=cuda)  # 12 MiB, and three times 192
    recorded = pg.record(f, warmup=1)
    recorded(x)
    before = device_for(cuda).pool_bytes
    torch.testing.assert_close(recorded(x), f(x))
    assert pg.stats(recorded).recorded == 1
    assert device_for(cuda).pool_bytes == before >= 3 * 192 << 20


def test_c15_a_capture_finds_the_memory_of_its_warm_up_where_recordings_have_gone(cuda):
    """What they leave is given back before the warm-up call, and not between it and the capture."""

    def f(x):
        y = x.repeat(16, 1)
        return (y * 2 + x.repeat(16, 1)).sum()

    x = torch.randn(2048, 1536, device=cuda)
    expected = f(x)
    for _ in range(2):  # the second time a recording has gone
        recorded = pg.record(f, warmup=1)
        recorded(x)
        before = torch.cuda.memory_stats(cuda)["num_device_alloc"]
        result = recorded(x)
        assert torch.cuda.memory_stats(cuda)["num_device_alloc"] - before <= 1  # for the result, perhaps; none of 192 MiB
        torch.testing.assert_close(result, expected)
        assert pg.stats(recorded).recorded == 1
        del recorded
        gc.collect()
        torch.cuda.empty_cache()


def test_c15_a_warm_function_takes_the_result_of_a_cold_one(device):
    f, g = plain(lambda x: x * 2), plain(lambda y: y + 1)
    for n in range(4):
        f(filled(device, n))
    for n in range(6):
        g(f(filled(device, n)))
    assert_replays(g, f(filled(device, 9)))


def test_c10_verify_while_results_are_held(device):
    def make():
        w = torch.ones(2, device=device)
        return lambda x: (w.add_(x) * 2, torch.rand(2, device=device)), w

    both = side_by_side(make, verify=2, hold=True)
    for _ in range(8):
        both(torch.ones(2, device=device))
    assert counts(both)[2] >= 6


def test_c10_verify_of_one_element_whose_stride_is_two(device):
    def f(x):
        return torch.as_strided(x * 2, (1,), (2,))

    recorded = pg.record(f, verify=1)
    for n in range(5):
        assert_same(recorded(filled(device, n)), f(filled(device, n)))
