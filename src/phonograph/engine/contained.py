"""Failures of phonograph's own, which are no answer to a call: logged, and the call runs live."""

from __future__ import annotations

from types import TracebackType

from ..errors import NotPutBack, Refusal
from ..guards.carried_state import Carries
from ..python.standing import stands, unwind
from ..statistics import logger
from ..values.keys import NoSignature
from ..values.pytree import Opens
from ..values.wording import failure, innermost

__all__ = ["Contained"]

_REPORT = "the call has run live; please report it; until then mark the part that it is about @pg.live, or set PHONOGRAPH=off"
_OTHERS = (Refusal, NoSignature, Carries, Opens, NotPutBack, Warning)
"""Answers; what has to be told; and warnings, which the user may have turned into errors."""


class Contained:
    """While entered, an exception refuses the call, and leaves nothing standing. `doing`: what is done there, for the log."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        self._before = stands()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            unwind(self._before)
        if not isinstance(error, Exception) or isinstance(error, _OTHERS):
            return
        where, *_ = innermost(error.__traceback__)
        known = failure(error, "")
        if known is not None:
            raise Refusal(*known, where, final=False) from None
        logger.error("phonograph itself failed when it %s", self._doing, exc_info=error)
        reason = f"phonograph itself failed when it {self._doing} ({type(error).__name__}: {error})"
        raise Refusal(reason, _REPORT, where, final=False) from None
