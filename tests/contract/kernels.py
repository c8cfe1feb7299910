"""Triton kernels, for the tests on a GPU. Imported where Triton is there."""

import triton
import triton.language as tl


@triton.jit
def add_one(x, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def add_number(x, n, number, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, tl.load(x + at, mask=at < n) + number, mask=at < n)
