"""What can go wrong, and what to do about it. Each docstring is the error's page in the documentation."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .reasons import code_of

__all__ = ["Again", "Attached", "Elsewhere", "Mismatch", "NotPutBack", "Overlooked", "PhonographError", "Refusal", "RunsLive",
           "Stale", "StaleOutput", "Unpadded", "Unrecordable", "Unseen"]  # fmt: skip


class PhonographError(Exception):
    """Base of every error that phonograph itself raises."""


class Unrecordable(PhonographError):
    """The function cannot be recorded, and ``fallback="error"`` asked to be told so.

    Cause: something in the call needs the host while it runs (``.item()``), has a shape that depends on data
    (``nonzero``), or has an effect that a replay cannot repeat (``print``). The message names the operator, your
    source line and the remedy. With the default ``fallback="auto"`` the same call is cut there if that pays, or runs
    live with one `RunsLive` warning.
    """


class StaleOutput(PhonographError):
    """An output of ``outputs="borrow"`` was read after a later replay had overwritten its memory.

    Cause: ``outputs="borrow"`` hands out the recording's own memory without protecting it. Remedy: ``.clone()`` what
    must outlive the next call, or use the default ``outputs="keep"``.
    """


class Mismatch(PhonographError):
    """``verify=N`` compared a replay with a live run, and they differ.

    Cause: the function reads something that cannot be noticed cheaply (docs/limits.md) and that changed. Remedy: pass
    it as an argument, or ``pg.reset(f)`` after changing it.
    """


class NotPutBack(PhonographError):
    """A change made by a call could not be undone (by its capture, say, a dry run), so the call cannot run live either.

    Cause: Ctrl-C or a lack of memory in two places at once; or an object of yours whose attribute cannot be set back. The
    message names the exception. Remedy: go on from a saved state of your program.
    """


class Stale(UserWarning):
    """An audit found that a recording differs from what the function does now: something that it reads changed unnoticed.

    Cause: the function reads what Python does not show (docs/limits.md): a file, the environment, an object of an extension.
    The message names the first operator that differs, your source line, and the number of replays since the last audit, whose
    results may be those of before the change. The recording is dropped, and this call runs live. Remedy: pass what changed as
    an argument, or ``pg.reset(f)`` after changing it. ``audit=1`` audits each replay, and so finds the change at once.
    """


class RunsLive(UserWarning):
    """A recorded function runs live, or its arguments are not padded (``shapes=``). Warned once for each function and
    reason."""


class Overlooked(Exception):
    """Code runs in a capture that was left out when the function was looked at, for want of `names`, or because nothing leads
    to the functions, classes or objects `met`. Never reaches the user: the capture is taken back, and made again."""

    def __init__(self, names: frozenset[str], met: Iterable[object] = ()) -> None:
        super().__init__(names)
        self.names = names
        self.met = tuple(met)


@dataclass(eq=False)
class Refusal(Exception):
    """Why a call cannot be recorded.

    ``reason`` names the cause, ``where`` the user's own line (``file:line``), ``remedy`` what to do. ``final`` says
    that trying again would give the same answer, `this_call` that it concerns no other call, `failed` that an exception
    ended the capture: if the live run raises as well, that is the answer to the call. `operator` is what cannot be captured,
    and could run between two segments, `reach` what the call could get at, `places` what it has asked besides, and `decided`
    what it has decided by numbers that are followed.
    """

    reason: str
    remedy: str = ""
    where: str = ""
    final: bool = True
    this_call: bool = False
    failed: bool = False
    history: Any = None
    operator: Any = None
    reach: Any = None
    places: Any = ()
    decided: Any = None

    measures = False
    """Whether nothing stands in the way: the call runs live to be timed."""
    told = True
    """Whether it is worth a warning: there is something to mend."""
    counts: Any = ()
    """Where numbers lie, and their names: they stand in the way, and the next capture follows them."""
    of_values = False
    """Whether code looks at what a tensor holds, or has a shape that depends on it."""
    around: Any = None
    """The module around what cannot run between two segments, and which itself could."""
    cutting = False
    """Whether it stands in the way of cutting the call into segments, or of handing on numbers."""

    def __str__(self) -> str:
        return self._said(self.remedy)

    @property
    def brief(self) -> str:
        """One sentence, with one thing to do, which helps most often. `explain` has the others."""
        return self._said(self.remedy.partition("; or ")[0])

    def _said(self, remedy: str) -> str:
        place = f" at {self.where}" if self.where else ""
        advice = f" ({remedy})" if remedy else ""
        code = code_of(self.reason)
        return f"{self.reason}{place}{advice}{f' [{code}]' if code else ''}"

    def at(self, where: str) -> Refusal:
        """The same, as it is told to the user: with this line, if it has none of its own."""
        if self.where or not where:
            return self
        told = self.but(where=where)
        told.drop_references()
        return told

    def but(self, **changes: object) -> Refusal:
        """The same, but for these changes. (Its class may be made from something else than what it says.)"""
        other = copy.copy(self)
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def __copy__(self) -> Refusal:
        """(An exception is copied by its constructor, which is given what came by place alone.)"""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        return other

    def plain(self) -> Refusal:
        """What it says, and nothing else."""
        return Refusal(self.reason, self.remedy, self.where)

    def drop_references(self) -> None:
        """Refer to no frame any more: a refusal is kept, and must not keep the arguments of the call alive."""
        self.__traceback__ = self.__cause__ = self.__context__ = self.reach = self.decided = self.around = None
        self.places = self.counts = ()


class Decides(Refusal):
    """The call goes on by a number that it reads of a tensor, at this `site` (`numerals.Site`)."""

    site: Any = None


class Unpadded(Refusal):
    """Why a call is recorded with its own sizes, and not padded to those of ``shapes=``."""


class Elsewhere(Refusal):
    """An operator was about to work on another `device` than that of the call."""

    device: Any = None


class Again(Refusal):
    """A capture has met something of which it had to know before: it has come to nothing, and the next one will know."""


class Attached(Refusal):
    """A result's backward would run outside: the call has to be captured with what autograd saves for that."""


class OnlyNow(Refusal):
    """What this call does, and no other of its kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.this_call = True


class Unseen(Refusal):
    """Something has to run for the first time (nothing is known yet of what an operator gives there): the call has to be a live
    one."""
