"""Outputs that are lent, not given: `outputs="borrow"`.

A borrowed output lies in its recording's own memory and nothing protects it there. It is a tensor that looks at its
`Loan` before every use: once a later replay or capture has taken the memory back, using it, or any view of it, raises
`StaleOutput`. It never reads what is there now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from operator import is_

import torch

from .._torch.autograd import bump, share_version
from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.dynamo import not_followed_by_dynamo
from .._torch.modes import without_subclasses
from .._torch.tensors import alias, has_memory, make_subclass
from ..errors import StaleOutput

__all__ = ["Borrowed", "Loan", "plain"]


class Loan:
    """The memory of one borrowed output: [address, address + nbytes), until it is `over`."""

    __slots__ = ("_versions", "address", "name", "nbytes", "over")

    def __init__(self, address: int, nbytes: int, name: str, tensor: torch.Tensor) -> None:
        self.address = address
        self.nbytes = nbytes
        self.name = name
        self.over = False
        self._versions: list[torch.Tensor] = []
        self.lies_there(tensor)

    def lies_there(self, t: torch.Tensor) -> None:
        """A tensor, whom autograd may save, is on this memory. Its version is kept, and neither the tensor nor the memory: what
        `detach` gives shares it with the tensor and may outlive that, and what `data` gives has one of its own."""
        if not t.is_inference() and not any(share_version(t, known) for known in self._versions):
            kept = t.detach()
            kept.data = _nothing(t.dtype, t.device)
            self._versions.append(kept)

    def end(self) -> None:
        """The memory is taken back. Autograd, which may have saved a tensor on it, notices by its version."""
        self.over = True
        bump(self._versions)

    def check(self) -> None:
        if self.over:
            raise StaleOutput(
                f"this output of {self.name} was borrowed, and a later call has overwritten it; clone() what must outlive "
                'the next call, or use outputs="keep"'
            )


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


# What gives access to the memory without a look at the loan each time gets a copy of it.
_EXPOSE = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.untyped_storage, torch.Tensor.storage,
           torch.Tensor.__dlpack__}  # fmt: skip
_NAME_THE_CLASS = {torch.Tensor.__reduce_ex__, torch.Tensor.__repr__, torch.Tensor.__format__}


class Borrowed(torch.Tensor):
    """A tensor on borrowed memory. Views of it are borrowed too; anything computed from it is an ordinary tensor."""

    loan: Loan
    inner: Thing  # the ordinary tensor behind it

    @staticmethod
    def lend(t: torch.Tensor, loan: Loan) -> Borrowed:
        # Autograd knows this tensor, and not the other: not all that takes tensors asks `__torch_function__`.
        known = t.requires_grad or t._is_view()
        lent: Borrowed = t.as_subclass(Borrowed) if known else make_subclass(Borrowed, t)
        lent.loan, lent.inner = loan, t
        return lent

    def __copy__(self) -> Borrowed:
        return Borrowed.lend(alias(plain(self)), self.loan)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        t = plain(self)
        if self.is_leaf:
            t = t.detach().requires_grad_(t.requires_grad)
            t.grad = self.grad
        copied: torch.Tensor = copy.deepcopy(t, memo)
        return copied

    @classmethod
    @not_followed_by_dynamo
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Thing:
        loans: dict[int, Loan] = {}
        change = _own if func in _EXPOSE else plain if func in _NAME_THE_CLASS else _as_it_is
        args, kwargs = _looked_at(args, loans, change), _looked_at(kwargs or {}, loans, change)
        with without_subclasses():
            return _lent(func(*args, **kwargs), loans)


def plain(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or an ordinary tensor behind a borrowed one, with its history.

    Raises:
        StaleOutput: its memory has been taken back.
    """
    if not isinstance(t, Borrowed):
        return t
    t.loan.check()
    with without_subclasses(), torch.enable_grad():  # in no_grad, autograd would give the view no gradient
        bare: torch.Tensor = t.view_as(t) if t.requires_grad else t.inner
        return bare


def _own(t: Borrowed) -> torch.Tensor:
    """The same on a copy of its memory."""
    bare = t.inner.detach()
    with without_subclasses(), torch.no_grad():
        memory = bare.untyped_storage().clone()
        own = torch.empty(0, dtype=bare.dtype, device=bare.device)
        return own.set_(memory, bare.storage_offset(), bare.size(), bare.stride()).requires_grad_(t.requires_grad)


def _as_it_is(t: Borrowed) -> torch.Tensor:
    return t


def _looked_at(value: Thing, loans: dict[int, Loan], change: Callable[[Borrowed], torch.Tensor]) -> Thing:
    """What a function is given, and the loans in it, by their memory."""
    if isinstance(value, Borrowed):
        value.loan.check()
        loans[value.inner.untyped_storage()._cdata] = value.loan
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_looked_at(v, loans, change) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_looked_at(v, loans, change) for v in value))
    if type(value) is dict:
        return {k: _looked_at(v, loans, change) for k, v in value.items()}
    return value


def _lent(value: Thing, loans: dict[int, Loan]) -> Thing:
    """What a function gives, which lies on the memory of these loans or not."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, Borrowed):
            return value
        if not has_memory(value):
            return value.clone()
        loan = loans.get(value.untyped_storage()._cdata)
        if loan is None:
            return value
        loan.lies_there(value)
        return Borrowed.lend(value, loan)
    if isinstance(value, (list, tuple)):
        lent = [_lent(v, loans) for v in value]
        named = hasattr(value, "_fields")
        return value if all(map(is_, lent, value)) else type(value)(*lent) if named else type(value)(lent)
    return value
