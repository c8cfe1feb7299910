"""Outputs that are lent, not given: `outputs="borrow"`.

A borrowed output lies in its recording's own memory and nothing protects it there. It is a tensor that looks at its
`Loan` before every use: once a later replay or capture has taken the memory back, using it, or any view of it, raises
`StaleOutput`. It never reads what is there now.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import StaleOutput
from .torch_private import alias, bump, share_version

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
            kept.data = torch.empty(0, dtype=t.dtype, device=t.device)
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


# What gives access to the memory without a look at the loan each time gets a copy of it.
_EXPOSE = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.untyped_storage, torch.Tensor.storage,
           torch.Tensor.__dlpack__}  # fmt: skip


class Borrowed(torch.Tensor):
    """A tensor on borrowed memory. Views of it are borrowed too; anything computed from it is an ordinary tensor."""

    loan: Loan
    inner: Any

    @staticmethod
    def lend(t: torch.Tensor, loan: Loan) -> Borrowed:
        lent: Borrowed = torch.Tensor._make_subclass(Borrowed, t)
        lent.loan, lent.inner = loan, t
        return lent

    def __copy__(self) -> Borrowed:
        return Borrowed.lend(alias(plain(self)), self.loan)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return plain(self).clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        loans: dict[int, Loan] = {}
        if func in _EXPOSE:
            args = tuple(plain(a).clone() if isinstance(a, Borrowed) else a for a in args)
        bare_args, bare_kwargs = _bare(args, loans), _bare(kwargs or {}, loans)
        with torch._C.DisableTorchFunctionSubclass():
            return _lent(func(*bare_args, **bare_kwargs), loans)


def plain(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the ordinary tensor behind a borrowed one.

    Raises:
        StaleOutput: its memory has been taken back.
    """
    if isinstance(t, Borrowed):
        t.loan.check()
        inner: torch.Tensor = t.inner
        return inner
    return t


def _bare(value: Any, loans: dict[int, Loan]) -> Any:
    if isinstance(value, Borrowed):
        inner = plain(value)
        loans[inner.untyped_storage()._cdata] = value.loan
        return inner
    if type(value) in (list, tuple):
        return type(value)(_bare(v, loans) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_bare(v, loans) for v in value))
    if type(value) is dict:
        return {k: _bare(v, loans) for k, v in value.items()}
    return value


def _lent(value: Any, loans: dict[int, Loan]) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, Borrowed) and value.layout is torch.strided:
        loan = loans.get(value.untyped_storage()._cdata)
        if loan is None:
            return value
        loan.lies_there(value)
        return Borrowed.lend(value, loan)
    if type(value) in (list, tuple):
        return type(value)(_lent(v, loans) for v in value)
    return value
