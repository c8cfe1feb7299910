"""Calls that are not looked at, of a function that has no recordings and of which all calls run live.

What has been refused many times in a row will most likely be refused the next time: to look at such a call only tells why it
runs live. So most of them are let pass without a glance, at no more than the cost of a counter, and one in a few is looked at.
A call that could be recorded, and comes among others that cannot, runs live a few times more than it must. Where gradients are
switched on or off, or the witness hears of a change, the next call is looked at.

Sizes that grow have a signature each: there it is what spares each from being taken apart.
"""

from __future__ import annotations

import torch

from ..errors import Refusal
from ..guards import module_epochs

__all__ = ["Rest"]

_ROW = 8  # calls in a row that were looked at and ran live, before any is let pass
_PAUSE = 15  # calls at most that are let pass, or one less in turn: kinds that take turns are all looked at some time...
_LONG_ROW, _LONG_PAUSE = 64, 63  # ...and after so many that were looked at: about a thousand calls, none of which was recorded


class Rest:
    """Of one function. `refusal`: why the calls that are let pass run live; `of`: what was looked at last, by identity."""

    __slots__ = ("_epoch", "_given", "_grad", "_left", "_pause", "_row", "of", "refusal")

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self._epoch = self._row = self._pause = self._given = self._left = self.of = 0
        self._grad = False

    def passes(self) -> bool:
        """Whether this call is let pass."""
        if not self._left or module_epochs.epoch != self._epoch or torch.is_grad_enabled() is not self._grad:
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
            self.refusal, self._epoch, self._grad = refusal, module_epochs.epoch, torch.is_grad_enabled()
            most = _PAUSE if self._row < _LONG_ROW else _LONG_PAUSE
            self._pause = min(2 * self._pause + 1, most)
            self._given = self._left = self._pause - (self._pause == most and self._row % 2)

    def doubt(self) -> None:
        """Something else may become of this one, and of the next ones."""
        self._row = self._row if self._pause else 0
        self._pause //= 4

    def over(self) -> None:
        """All is to be looked at."""
        self._row = self._pause = self._given = self._left = 0
