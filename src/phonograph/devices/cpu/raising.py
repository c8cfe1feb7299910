"""Operators that look at values on the CPU and raise an exception: indices out of range, singular matrices, divisions by 0."""

from __future__ import annotations

from functools import cache

import torch

from ..._torch.dynamic import Args

__all__ = ["may_raise"]

_RAISING = tuple(f"aten::{name}" for name in (
    "embedding", "index", "gather", "scatter", "take", "put", "nll_loss", "linalg_", "_linalg_", "cholesky", "inverse",
    "triangular_solve", "lu_", "ormqr", "geqrf", "multinomial", "poisson", "binomial", "binary_cross_entropy",
    "_assert", "floor_divide", "remainder", "fmod", "multi_margin_loss", "multilabel_margin_loss", "one_hot",
    "_ctc_loss", "segment_reduce", "bincount", "masked_scatter", "_embedding_bag", "bernoulli", "normal", "max_unpool", "histc",
    "repeat_interleave",
))  # fmt: skip
_BY_NUMBERS = frozenset({"aten::bernoulli_", "aten::normal_"})  # which are no data, but for tensors among them


def may_raise(name: str, args: Args) -> bool:
    """Whether an operator may raise depending on data."""
    if name in _BY_NUMBERS:
        return any(isinstance(x, torch.Tensor) for x in args[1:])
    return _is_raising(name)


@cache
def _is_raising(name: str) -> bool:
    return name.startswith(_RAISING) and name != "aten::linalg_vector_norm"
