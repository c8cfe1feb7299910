"""How a result that lies on the memory of another tensor is made again, from that tensor.

It may be a view, which autograd follows; detached, so that the two only share their version; or what `.data` gives, which
shares nothing but memory. And a view may have been made in another mode than the call's. torch tells no more than what a
tensor is now: so at the capture each way is tried, and the first that gives such a tensor is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from .._torch.autograd import made_as, original_views, share_version, view_like
from .._torch.tensors import alias, neg_view
from .pool import extent, place_of, unowned

__all__ = ["View", "root"]

_MODES: tuple[Callable[[], AbstractContextManager[object]] | None, ...] = (
    None, torch.no_grad, torch.enable_grad, torch.inference_mode,
)  # fmt: skip


class View(NamedTuple):
    """A way from a tensor to another on its memory. `how` is ``"view"``, ``"detached"`` or ``"data"``; `offset` are bytes.

    No `size`: the same place. No `mode`: that of the call. A `mould` is a view of a tensor with the same metadata, of which
    autograd keeps how it was made.
    """

    how: str
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    span: int = 0  # bytes, from the first to the last element
    lazy: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    mode: Callable[[], AbstractContextManager[object]] | None = None
    mould: torch.Tensor | None = None

    @staticmethod
    def like(mould: torch.Tensor, base: torch.Tensor) -> View | None:
        """For a view with a history: by the very functions that made it. None where these would not."""
        with original_views():
            made = view_like(mould, unowned(base))
        return View("view", mould=made) if place_of(made) == place_of(mould) else None

    @staticmethod
    def between(base: torch.Tensor, t: torch.Tensor) -> View | None:
        """The way from the one to the other, which has no history; None if there is none that can be gone again."""
        lazy = (torch.conj,) * (t.is_conj() != base.is_conj()) + (neg_view,) * (t.is_neg() != base.is_neg())
        place = tuple(t.shape), t.stride(), _byte(t) - _byte(base), t.dtype, extent(t) * t.element_size(), lazy
        ways = [View("view", *place)] if t._is_view() else [View("detached"), View("detached", *place), View("data", *place)]
        for way in ways:
            for mode in _MODES:
                if (found := way._replace(mode=mode))._leads(base, t):
                    return found
        return None

    def _leads(self, base: torch.Tensor, t: torch.Tensor) -> bool:
        try:
            return _seen(self.of(base), base) == _seen(t, base)
        except RuntimeError:  # torch has no such view
            return False

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor on the memory of `base`."""
        if self.mode is None:
            return self._made(base)
        with self.mode():
            return self._made(base)

    def _made(self, base: torch.Tensor) -> torch.Tensor:
        if self.mould is not None:
            return view_like(self.mould, base)
        t = alias(base) if self.how == "data" else base
        if self.size is not None:
            t = self._part(t)
        for bit in self.lazy:
            t = bit(t)
        return t if self.how == "view" else t.detach()

    def _part(self, t: torch.Tensor) -> torch.Tensor:
        """What lies at the place. For another dtype by way of all that lies there, in one dimension."""
        assert self.size is not None
        assert self.dtype is not None
        rest = self.offset
        if t.dtype is not self.dtype:
            first, last = rest // t.element_size(), -((-rest - self.span) // t.element_size())
            rest -= first * t.element_size()
            t = t.as_strided((last - first,), (1,), t.storage_offset() + first)
            if self.how != "view":
                t = t.view(self.dtype)
            elif t.is_complex():  # the only views of another dtype that autograd follows
                t = torch.view_as_real(t).view(-1)
            else:
                t = torch.view_as_complex(t.view(-1, 2))
        return t.as_strided(self.size, self.stride, t.storage_offset() + rest // self.dtype.itemsize)


def root(t: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, for autograd; itself if it is none."""
    return t._base if t._base is not None else t


def _seen(t: torch.Tensor, base: torch.Tensor) -> tuple[object, ...]:
    """What can be seen of a tensor on the memory of another."""
    counted = not (t.is_inference() or base.is_inference())
    of = (root(t) is root(base), made_as(t)) if t._is_view() else None
    return place_of(t), t.storage_offset(), t.requires_grad, t.is_inference(), of, counted and share_version(t, base)


def _byte(t: torch.Tensor) -> int:
    """Where in its storage a tensor begins, in bytes."""
    return int(t.storage_offset()) * t.element_size()
