"""Functions that are recorded again and again in one place, each of which goes before it was played: ``pg.record(f)(x)`` in a
loop."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from ..errors import Refusal
from ..python.origin import users_line
from ..statistics import Counters

if TYPE_CHECKING:
    from .recorded import Recorded

__all__ = ["made_anew"]

_EARLIER = 7  # in a row that went like this
_WARM = 2  # calls at most that one of them had: it might be played in the next
_PLACES = 256  # that are remembered

_made: OrderedDict[object, list[tuple[weakref.ref[object], Counters]]] = OrderedDict()
"""By the code that is recorded and the line where it is: the last ones, and what they have counted. Empty: it has been said."""


def made_anew(function: object, recorded: Recorded[..., object], counters: Counters) -> Refusal | None:
    """What there is to be said where a function, or a module, is recorded once more."""
    function = getattr(function, "__func__", function)
    where = users_line()
    key = getattr(function, "__code__", type(function)), where
    before = _made.get(key)
    if before == []:
        return None
    _made[key] = earlier = [*(before or ()), (weakref.ref(recorded), counters)][-_EARLIER - 1 :]
    _made.move_to_end(key)
    if len(_made) > _PLACES:
        _made.popitem(last=False)
    gone = [ref() is None and 0 < c.calls == c.live <= _WARM and not c.refusals for ref, c in earlier[:-1]]
    if len(gone) < _EARLIER or not all(gone):
        return None
    earlier.clear()
    return Refusal("is recorded anew each time that this line runs, and each goes before it was played",
                   "make it once, outside of the loop or function, and call that", where)  # fmt: skip
