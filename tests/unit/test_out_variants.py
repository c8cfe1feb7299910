"""An out= overload is used only if it gave the operator's own bytes."""

import torch

from phonograph.devices.cpu import out_variants
from phonograph.devices.cpu.out_variants import Variant, tried, variant_of

aten = torch.ops.aten


def test_the_overload_that_agrees_is_used():
    x = torch.randn(5)
    variant = variant_of(aten.sin.default, 1)
    assert variant is not None
    assert variant.func is aten.sin.out
    assert tried(variant, "sin", (x,), {}, [x.sin()], {}) is variant


def test_one_of_as_many_results():
    assert variant_of(aten.sin.default, 2) is None


def test_one_that_gives_other_bytes_is_not(monkeypatch):
    x = torch.randn(7)
    monkeypatch.setattr(out_variants, "_tried", {})
    assert tried(Variant(aten.cos.out, ("out",), False), "sin", (x,), {}, [x.sin()], {}) is None


def test_one_that_wants_another_size_is_not(monkeypatch):
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    monkeypatch.setattr(out_variants, "_tried", {})
    assert tried(Variant(aten.mm.out, ("out",), False), "mul", (a, b), {}, [(a * b).sum()], {}) is None


def test_it_is_tried_once_for_what_it_may_depend_on(monkeypatch):
    x = torch.randn(5)
    monkeypatch.setattr(out_variants, "_tried", {})
    variant = variant_of(aten.sin.default, 1)
    assert tried(variant, "sin of 5", (x,), {}, [x.sin()], {}) is variant
    assert tried(variant, "sin of 5", (x,), {}, [x.cos()], {}) is variant
    assert tried(variant, "sin of 7", (x,), {}, [x.cos()], {}) is None


def test_none_of_an_operator_that_writes_its_arguments():
    """One that torch has generated works on copies of them, which shows only where they change."""
    assert out_variants._variant(aten._fused_moving_avg_obs_fq_helper.default) is None
