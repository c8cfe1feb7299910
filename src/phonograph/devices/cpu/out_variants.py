"""Operators that write to memory of the tape's own: the `out=` overload in place of the one that was noted.

A replay has a place for every result, so that an operator need not allocate one. For most operators there is an overload
that writes to a given tensor. That it computes the same is a convention and no law: `binary_cross_entropy.out` uses `out`
as a buffer of another shape before it has the result, and cannot if the memory is fixed. So an overload is used only after
it was tried: beside the operator itself, on the same inputs, into memory of exactly the size that a replay would give it,
with the same bytes as the outcome.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..._torch.dynamic import Args, Kwargs
from ..._torch.operators import OpOverload, is_composite
from ..._torch.tensors import storage_at
from ...memory.pool import row_of_bytes
from ...python.identity import identity

__all__ = ["Variant", "tried", "variant_of"]


class Variant(NamedTuple):
    """An overload that writes its results to tensors given by these names, or to one list of them."""

    func: OpOverload
    names: tuple[str, ...]
    one_list: bool

    def outs(self, results: Sequence[torch.Tensor]) -> dict[str, object]:
        """The results as its keyword arguments."""
        return {self.names[0]: list(results)} if self.one_list else dict(zip(self.names, results, strict=True))


_tried: dict[object, Variant | None] = {}


def variant_of(func: OpOverload, results: int) -> Variant | None:
    """The overload of `func` that could be one for so many results."""
    variant = _variant(func)
    return variant if variant is not None and (variant.one_list or len(variant.names) == results) else None


def tried(
    variant: Variant, key: object, args: Args, kwargs: Kwargs, results: list[torch.Tensor],
    before: dict[torch.Generator, torch.Tensor],
) -> Variant | None:  # fmt: skip
    """This variant of an operator, if it gives these `results` for these arguments. It is tried once for each `key`: the
    operator, and all that its behaviour may depend on besides the values.

    Inputs are only read. `before` are the states of the random generators before the operator ran; they are left as they are.
    """
    if key not in _tried:
        plain = not any(t.is_conj() or t.is_neg() or t.layout is not torch.strided for t in results)
        _tried[key] = variant if plain and _agrees(variant, args, kwargs, results, before) else None
    return _tried[key]


def _variant(func: OpOverload) -> Variant | None:
    known = _variants.get(identity(func))
    if known is None:
        known = _variants[identity(func)] = func, _found(func)
    return known[1]


_variants: dict[int, tuple[object, Variant | None]] = {}  # by identity: an overload's own hash is Python code


def _found(func: OpOverload) -> Variant | None:
    if is_composite(func):
        return None  # seen whole in inference mode only; what its out variant does to a buffer is another matter
    if any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments):
        return None  # a variant that torch has generated writes to copies of them (`_fused_moving_avg_obs_fq_helper`)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    if any(name == "reduction" for name, _ in wanted):
        return None  # losses are the ones that work in `out` before they reduce, and warn of it
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [a for a in other._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write]
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if a not in outs]
        if outs and rest == wanted:
            return Variant(other, tuple(a.name for a in outs), str(outs[0].type).startswith("List"))
    return None


def _agrees(
    variant: Variant, args: Args, kwargs: Kwargs, results: list[torch.Tensor], before: dict[torch.Generator, torch.Tensor]
) -> bool:
    memory = [torch.full((t.untyped_storage().nbytes(),), 0xA5, dtype=torch.uint8, device="cpu") for t in results]
    fixed = [storage_at(m.data_ptr(), m.nbytes, m.device) for m in memory]
    scratch = [torch.empty(0, dtype=t.dtype, device="cpu").set_(s, t.storage_offset(), t.size(), t.stride())
               for t, s in zip(results, fixed, strict=True)]  # fmt: skip
    after = {g: g.get_state() for g in before}
    for g, state in before.items():
        g.set_state(state)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of having resized `out`
            variant.func(*args, **kwargs, **variant.outs(scratch))
        drawn = all(torch.equal(g.get_state(), state) for g, state in after.items())
    except (RuntimeError, TypeError, NotImplementedError):  # it wants memory that it can resize, say
        return False
    finally:
        for g, state in after.items():
            g.set_state(state)
    return drawn and all(map(_same_bytes, results, scratch))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.stride() != b.stride():
        return False
    rows = [*map(row_of_bytes, (a, b))] if a.numel() else []
    return not rows or torch.equal(*rows)
