"""Operators of linear algebra that look at a status on the host, only in order to raise.

They consist of one that computes, and leaves the status on the device (`linalg.cholesky_ex`), and of a look at it
(`_linalg_check_errors`), or are told by an argument to look. A capture has the first part; a run looks at the status when it
has ended. By then it has gone on with numbers that no live call has: so nothing may come that stops the GPU for such numbers.
"""

from __future__ import annotations

import torch

from ..._torch.dynamic import Args, Kwargs
from ...aten.operators import operands
from ...capture.value_checks import Check

__all__ = ["CONSISTING", "LOOKS", "TOLD", "check_of", "indices_of", "looks", "stops_by_values"]

LOOKS = "aten::_linalg_check_errors"
CONSISTING = frozenset(f"aten::{name}" for name in (
    "linalg_cholesky", "linalg_inv", "inverse", "linalg_solve", "linalg_solve_ex", "linalg_lu_factor", "linalg_ldl_factor",
    "linalg_tensorinv", "linalg_tensorsolve", "linalg_matrix_power", "matrix_power"))  # fmt: skip
"""Operators that consist of both, which are seen in inference mode."""
TOLD = "check_errors"
"""The argument that tells the others to look at their own last result."""
_LEAVE = frozenset(f"aten::{name}" for name in (
    "linalg_cholesky_ex", "linalg_inv_ex", "linalg_lu_factor_ex", "linalg_ldl_factor_ex", "_linalg_solve_ex"))  # fmt: skip
# Their kernels assert that floating-point numbers are in range, or masks...
_STOPPED = ("aten::bernoulli", "aten::multinomial", "aten::poisson", "aten::binomial", "aten::binary_cross_entropy",
            "aten::_assert", "aten::masked_scatter")  # fmt: skip
# ...and theirs that integers are.
_BY_INDICES = tuple(f"aten::{name}" for name in (
    "embedding", "_embedding", "index", "_index", "_unsafe_index", "gather", "scatter", "take", "put", "nll_loss",
    "cross_entropy", "multi_margin", "multilabel_margin", "max_unpool", "one_hot", "segment_reduce",
))  # fmt: skip
_SINGULAR: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def check_of(name: str, where: str) -> Check:
    """The check of the status that the operator of this name leaves, called at this line."""
    text = f"{name}: the algorithm failed, mostly because the input is singular or not positive-definite"
    return Check(False, _SINGULAR, text, where)


def looks(name: str, kwargs: Kwargs) -> bool:
    """Whether an operator does, called with these."""
    return name == LOOKS or name in CONSISTING or (name in _LEAVE and bool(kwargs.get(TOLD)))


def stops_by_values(name: str, args: Args) -> bool:
    """Whether an operator may stop the GPU (by an assertion) for floating-point numbers that are not as they should be."""
    if name == "aten::bernoulli_":  # by a number, or by those in a tensor
        return len(args) > 1 and isinstance(args[1], torch.Tensor)
    if name == "aten::bernoulli":
        return len(args) == 1 or isinstance(args[1], torch.Tensor)
    return name.startswith(_STOPPED) and name != "aten::binary_cross_entropy_with_logits"


def indices_of(name: str, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The integers for which an operator may stop the GPU likewise."""
    found = operands(args, kwargs) if name.startswith(_BY_INDICES) else []
    return [t for t in found if not (t.dtype is torch.bool or t.is_floating_point() or t.is_complex())]
