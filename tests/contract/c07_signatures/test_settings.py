"""C7: settings of the process."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import globals_as_before  # noqa: F401
from tests.helpers import counts, may_run_live, plain, ramp


@may_run_live
def test_c07_the_precision_of_matrix_products(device):
    f = pg.record(lambda x: (x @ x, torch.backends.cuda.matmul.fp32_precision), warmup=1)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ["ieee"] * 4 + ["tf32"] * 3 + ["ieee"]:
            torch.backends.cuda.matmul.fp32_precision = precision
            assert f(torch.ones(2, 2, device=device))[1] == precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


ATTENTIONS = torch._C._get_sdp_priority_order()


@pytest.mark.parametrize(
    ("read", "change"),
    [
        pytest.param(lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
                     lambda on: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", on), id="sums in float16"),
        pytest.param(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
                     torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, id="sums of attention"),
        pytest.param(lambda: torch.backends.mkldnn.deterministic,
                     lambda on: setattr(torch.backends.mkldnn, "deterministic", on), id="deterministic on the CPU"),
        pytest.param(lambda: torch._C._get_sdp_priority_order() == sorted(ATTENTIONS),
                     lambda on: torch._C._set_sdp_priority_order(sorted(ATTENTIONS) if on else ATTENTIONS),
                     id="the order of attention's kernels"),
    ],
)  # fmt: skip
def test_c07_settings_of_which_kernels_are_used(device, read, change):
    f = pg.record(lambda x: (x * 2, read())[1], warmup=1)
    try:
        for on in [False] * 3 + [True] * 3 + [False, True]:
            change(on)
            assert f(torch.ones(2, device=device)) is on
        assert counts(f) == (2, 2, 6)
    finally:
        change(False)


def test_c07_a_setting_that_the_first_call_decides(device):
    """As the first call of attention on a GPU decides on an order of its kernels: later calls are no untraced."""
    f = pg.record(lambda x: (torch._C._set_sdp_priority_order(sorted(ATTENTIONS)), x * 2)[1], warmup=1)
    try:
        for n in range(4):
            assert_same(f(torch.full((2,), float(n), device=device)), torch.full((2,), 2.0 * n, device=device))
        assert counts(f) == (1, 1, 3)
    finally:
        torch._C._set_sdp_priority_order(ATTENTIONS)


@may_run_live
def test_c07_the_way_of_attention_in_inference(device):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, device=device).eval()
    f = pg.record(lambda x: (layer(x), torch.backends.mha.get_fastpath_enabled())[1], warmup=1)
    try:
        with torch.no_grad():
            for enabled in [True] * 4 + [False] * 3 + [True]:
                torch.backends.mha.set_fastpath_enabled(enabled)
                assert f(torch.ones(2, 3, 8, device=device)) is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@may_run_live
def test_c07_the_number_of_threads(device):
    f = pg.record(lambda x: x * torch.get_num_threads(), warmup=1)
    before = torch.get_num_threads()
    try:
        for threads in [1, 1, 1, 2, 2, 1]:
            torch.set_num_threads(threads)
            assert_same(f(ramp(device, 4)), ramp(device, 4) * threads)
    finally:
        torch.set_num_threads(before)


@may_run_live
def test_c09_a_grad_mode_that_the_function_sets(device):
    f = pg.record(lambda x: (torch.set_grad_enabled(False), x * 2)[1], warmup=1)
    for _ in range(5):
        torch.set_grad_enabled(True)
        f(torch.ones(2, device=device))
        now = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert not now


@may_run_live
def test_c09_a_default_dtype_that_the_function_sets(device):
    f = pg.record(lambda x: (torch.set_default_dtype(torch.float64), x * 2)[1], warmup=1)
    for _ in range(5):
        torch.set_default_dtype(torch.float32)
        f(torch.ones(2, device=device))
        now = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        assert now is torch.float64


def test_c07_memory_that_determinism_fills(device):
    both = plain(lambda x: (torch.empty(4, device=device), x + 1))
    torch.use_deterministic_algorithms(True)
    try:
        for n in range(5):
            both(ramp(device, 4, start=n))
    finally:
        torch.use_deterministic_algorithms(False)


@may_run_live
def test_c09_the_seed_that_the_generator_was_given(device):
    f = pg.record(lambda x: x * (torch.initial_seed() % 7), warmup=1)
    for seed in [3, 3, 3, 5, 5]:
        torch.manual_seed(seed)
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (seed % 7))
