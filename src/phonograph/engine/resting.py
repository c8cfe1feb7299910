"""Calls that are not looked at, of a function that has no recordings and of which all calls run live.

What has been refused many times in a row will most likely be refused the next time: to look at such a call only tells why it
runs live. So most of them are let pass without a glance, at no more than the cost of a counter, and one in a few is looked at.
A call that could be recorded, and comes among others that cannot, runs live a few times more than it must. Where gradients are
switched on or off, or the witness hears of a change, the next call is looked at.

Sizes that grow have a signature each: there it is what spares each from being taken apart. And where several signatures could
not be recorded, all for one reason, others will most likely not be either: most of these are not tried before they have come
several times.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..call.signature import Call
from ..errors import Refusal
from ..guards import module_epochs as witness
from .standing_refusals import Grounds

__all__ = ["Alike", "Rest"]

_ROW = 8  # calls in a row that were looked at and ran live, before any is let pass
_PAUSE = 15  # calls at most that are let pass, or one less in turn: kinds that take turns are all looked at some time
_ALIKE = 4  # signatures in a row that could not be recorded, for one reason
_UNTRIED = 10  # the next is tried after two, four, at most two to this power that are not


class Rest:
    """Of one function. `refusal`: why the calls that are let pass run live; `of`: what was looked at last, by identity."""

    __slots__ = ("_epoch", "_given", "_grad", "_left", "_pause", "_row", "of", "refusal")

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self._epoch = self._row = self._pause = self._given = self._left = self.of = 0
        self._grad = False

    def passes(self) -> bool:
        """Whether this call is let pass."""
        if not self._left or witness.epoch != self._epoch or torch.is_grad_enabled() is not self._grad:
            return False
        self._left -= 1
        return True

    def looked(self) -> int:
        """A call is looked at: how many there were since the last one that was, with this one."""
        found, self._given, self._left = self._given - self._left + 1, 0, 0
        return found

    def note(self, refusal: Refusal) -> None:
        """It runs live, for good or for a while."""
        self._row += 1
        if self._row >= _ROW:
            self.refusal, self._epoch, self._grad = refusal, witness.epoch, torch.is_grad_enabled()
            self._pause = min(2 * self._pause + 1, _PAUSE)
            self._given = self._left = self._pause - (self._pause == _PAUSE and self._row % 2)

    def doubt(self) -> None:
        """Something else may become of this one, and of the next ones."""
        self._row = self._row if self._pause else 0
        self._pause //= 4

    def over(self) -> None:
        """All is to be looked at."""
        self._row = self._pause = self._given = self._left = 0


class Alike:
    """Signatures of one function that could not be recorded, all for the same reason, and that differ by their tensors only."""

    def __init__(self) -> None:
        self._row = self._untried = 0
        self._refusal: Refusal | None = None
        self._grounds: Grounds | None = None
        self._rest: object = None

    def failed(self, call: Call, refusal: Refusal, grounds: Grounds | None) -> None:
        """Another one could not."""
        before, rest = self._refusal, _but_for_tensors(call)
        same = before is not None and (before.reason, before.where) == (refusal.reason, refusal.where) and rest == self._rest
        self._row, self._untried = self._row + 1 if same else 1, 0
        self._refusal, self._grounds, self._rest = replace(refusal, reach=None, history=None), grounds, rest

    def made(self) -> None:
        """One could."""
        self._row = 0

    def expected(self, call: Call) -> Refusal | None:
        """Why this signature is not tried; None if it is."""
        if self._row < _ALIKE or _but_for_tensors(call) != self._rest:
            return None
        if self._grounds is not None and self._grounds.changed():
            return None
        self._untried += 1
        return self._refusal if self._untried <= 2 ** min(self._row - _ALIKE + 1, _UNTRIED) else None


def _but_for_tensors(call: Call) -> object:
    shape, leaves, *rest = call.key
    return shape, [leaf for i, leaf in enumerate(leaves) if i not in call.places], *rest
