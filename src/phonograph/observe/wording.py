"""Numbers as a reader wants them."""

from __future__ import annotations

__all__ = ["counted", "mebibytes", "seconds", "times"]


def counted(n: int, what: str) -> str:
    """1 call, 2,000 calls"""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def seconds(x: float) -> str:
    """Three digits, in the unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if x * factor >= 1:
            return f"{_digits(x * factor)} {unit}"
    return f"{x * 1e6:.2f} µs" if x else "0"


def mebibytes(n: int) -> str:
    return f"{_digits(n / 2**20)} MiB" if n >= 1 << 20 else f"{_digits(n / 2**10)} KiB" if n >= 1 << 10 else f"{n} bytes"


def times(x: float) -> str:
    return f"{_digits(x)} ×"


def _digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"
