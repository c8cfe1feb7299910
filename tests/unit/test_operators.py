"""What is known of an operator before it runs."""

import pytest
import torch

from phonograph.aten.operators import meaning

aten = torch.ops.aten


@pytest.mark.parametrize(
    "func",
    [aten.add.out, aten.topk.values, aten._foreach_add.List_out, aten.split_copy.Tensor_out,
     aten._fused_moving_avg_obs_fq_helper.default],
    ids=str,
)  # fmt: skip
def test_these_may_give_what_they_write_another_size(func):
    assert meaning(func).resizes


@pytest.mark.parametrize(
    "func", [aten.add.Tensor, aten.add_.Tensor, aten._foreach_add_.List, aten._fused_adamw_.default], ids=str
)
def test_these_do_not(func):
    assert not meaning(func).resizes


@pytest.mark.parametrize(
    "func",
    [aten.add_.Tensor, aten.add.out, aten.native_batch_norm.default, aten.as_strided.default, aten.native_dropout.default,
     aten._fused_adamw_.default],
    ids=str,
)  # fmt: skip
def test_of_these_more_has_to_be_known_than_what_they_read(func):
    assert not meaning(func).plain


@pytest.mark.parametrize("func", [aten.add.Tensor, aten.mm.default, aten.view.default, aten.cat.default], ids=str)
def test_these_only_read(func):
    assert meaning(func).plain
