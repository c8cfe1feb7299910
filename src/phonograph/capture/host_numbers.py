"""Python code of a captured call that goes on by a number of a tensor: which a replay cannot do.

A number may be handed on unread (`numeral`), may end a segment (`decided`), or is only asked for by a check that raises: such a
check each replay makes as well (`checks`). All else is refused.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Set
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from .._torch.dynamic import Thing
from .._torch.modes import without_modes
from .._torch.tensors import has_memory, is_ordinary, storage_id
from ..aten import operators
from ..errors import Decides, Refusal
from ..guards.reachable import Reach
from ..python.handlers import comes_to_something
from ..python.origin import users_line
from ..values.host_scalars import READS_NUMBER, Noted, Numeral, Site, listable, readable, site_of
from ..values.wording import COMPILED, source_of
from .numbers_in_tensors import NumbersInTensors
from .random_states import RandomStates
from .refusals import Refusals
from .value_checks import Check

__all__ = ["CHECKS", "HostNumbers"]

CHECKS = "a check of torch's"  # in reasons


class HostNumbers(NumbersInTensors, Refusals, RandomStates):
    """Answers code of one call that asks for numbers on the host."""

    def __init__(self, device: torch.device, reach: Reach) -> None:
        self.device = device
        self.outermost: CodeType | None = None
        """The code that runs the call; what is called by it is the call's."""
        self.numerals: list[weakref.ref[Numeral]] | None = None
        """Those made in this call, where it may hand on numbers."""
        self.would_refuse: list[Refusal] = []
        """How the first of the reads would be refused for which they stand."""
        self.steps_whole = False
        """Whether a step that a scaler may skip is captured where it can be, rather than cut out."""
        self.insists = False
        """Whether a call that writes what it has read will do so again: the last one was refused, and many do so but once, to
        begin with."""
        self.decisive: Set[Site] = frozenset()
        """Where numbers are read by which the call goes on."""
        self.deciding: Callable[[torch.Tensor, Site], object] | None = None
        """Ends a segment there; returns the number."""
        self.noted: Callable[[Site], object] | None = None
        """What the live call before has read there."""
        self.goes_by: Callable[..., None] | None = None
        """Ends a segment where the call goes on by what a formula makes of numbers in tensors."""
        self._generators_catch = reach.mentions.generators_catch

    # -- numbers

    def numeral(self, t: torch.Tensor, site: Site) -> Numeral | None:
        """What stands for the number in this tensor, if the call may hand it on without knowing it."""
        return self._noted(t, site) if self.numerals is not None and readable(t, self.device) else None

    def _noted(self, t: torch.Tensor, site: Site, *now: object) -> Numeral:
        assert self.numerals is not None
        if not self.would_refuse:
            self.would_refuse.append(self.placed(operators.reads_value(), sys._getframe(2)))
        refuses, said = functools.partial(self.reads_number, site), source_of(READS_NUMBER.name())
        return Numeral.of(t.detach().clone(), Noted(self.numerals, refuses, self._goes_by, said, users_line()), *now)

    def read_later(self, t: torch.Tensor, frame: FrameType) -> Numeral | None:
        """The same, for a frame that makes it a float or a whole number; None if it has to read it."""
        site = site_of(frame)
        if self.fixed(t) is not None:
            return None
        return self.compared(t, site) if site in self.decisive else self.numeral(t, site)

    def listed(self, t: torch.Tensor, site: Site) -> object:
        """The same for `tolist`: lists of such. None if they are many, or the call may not hand them on."""
        if self.numerals is None or not listable(t, self.device):
            return None
        return [self.listed(row, site) for row in t.unbind()] if t.dim() else self.numeral(t, site)

    def reads_number(self, site: Site, name: str = READS_NUMBER.name()) -> NoReturn:
        """The call goes on by a number that is read at this site, by an operator of this name."""
        raise self.located(_decides(name, site))

    def told(self, name: str, frame: FrameType) -> Refusal:
        refusal = operators.reads_value(name) if self.numerals is None or not self.insists else _decides(name, site_of(frame))
        refusal.final = self.insists
        return self.placed(refusal, frame)

    def compared(self, t: torch.Tensor, site: Site) -> Numeral | None:
        """What stands for the number in this tensor, if it is known that the call goes on by it, and it is a float: that is
        hardly ever the same again, but what the call decides by it may be."""
        if site not in self.decisive or not readable(t, self.device) or not t.is_floating_point() or self.numerals is None:
            return None
        assert self.noted is not None
        return self._noted(t, site, self.noted(site))

    def _goes_by(self, *what: Any) -> None:
        assert self.goes_by is not None
        self.goes_by(*what)

    def decided(self, t: torch.Tensor, site: Site) -> Thing:
        """The number in this tensor, which is read at this site, if it is known that the call goes on by it; else None."""
        if site not in self.decisive or not readable(t, self.device):
            return None
        assert self.deciding is not None
        return self.deciding(t, site)

    def reads_on_host(self, t: torch.Tensor, said: str) -> None:
        """The values of a tensor are read on the host."""

    # -- checks

    def answered(self, t: torch.Tensor, frame: FrameType) -> bool | None:
        """What this frame is told that asks for the truth of a tensor, if it is code that only raises then; None if it has to
        read it.

        Raises:
            Refusal: something would have to be done after the exception.
        """
        check = Check.asked(frame, self.outermost)
        if check is None or t.numel() != 1 or not has_memory(t):
            return None
        if check.again and (not is_ordinary(t) or self.fixed(t) is not None):  # it may answer otherwise; or it is one answer
            return None
        if not self.takes(check):
            return None
        if t.device != self.device:  # made of numbers, here: its value is built in, or an operator is refused that reads it
            if not t.is_cpu or self.known.get(storage_id(t), ""):
                return None
            with without_modes():
                return bool(READS_NUMBER(t))
        return self.checks(check, t)

    def takes(self, check: Check) -> bool:
        """Whether each replay can make this check as a live call does."""
        return not check.again

    def checks(self, check: Check, answer: torch.Tensor) -> bool:
        """Have this looked at in each replay. Returns what the call goes on with."""
        if self.caught(any_kind=False):
            raise self.located(Refusal(f"{CHECKS} may raise depending on data, and an except or finally clause or a context "
                                       "manager of yours is around it",
                                       "let the exception out, and catch it around the call"))  # fmt: skip
        return check.good

    # -- exceptions

    def caught(self, *, any_kind: bool) -> bool:
        """Whether something would have to be done after an exception that is raised here, of a kind that operators raise, or of
        any: a replay knows of no code that would do it."""
        return self.forked() or self.comes_to_users(any_kind=any_kind)

    def comes_to_users(self, *, any_kind: bool) -> bool:
        """Whether such an exception would come to code of the user's."""
        return self._generators_catch or comes_to_something(sys._getframe(1), self.outermost, any_kind=any_kind)


def _decides(name: str, site: Site) -> Decides:
    """The refusal of an operator of this name, which reads a number at this site by which the call goes on."""
    found = operators.reads_value(name)
    refusal = Decides(found.reason, f"{found.remedy}; or {COMPILED}")
    refusal.site, refusal.of_values = site, True
    return refusal
