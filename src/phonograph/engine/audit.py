"""Audits: now and then the Python code of a call runs dry once more, and what it calls is compared with what was recorded.

What a recording relies on is noticed when it changes, as far as Python shows it. A file, the environment, an object of an
extension do not show. So after 8, 64 and 512 replays of a recording, and then after every so many, the call is captured again
as it was the first time, and the capture is given up before it becomes anything: a capture is a dry run, and one that fails
leaves nothing behind. It works in the memory of the very recording, which is about to be played there anyway. What comes of it
is the stream of operators (`capture/digest.py`): another one says that the recording is stale, at which operator, and since
how many replays at most.

An audit takes as long as a capture. It is not made where it would have to do what is no dry run, or would find nothing:

* the call communicates with other ranks: they would have to do the same in the same call, and each counts its own replays;
* a backward that runs outside of the call: what it does autograd has noted in the forward, and its code would have to run in
  the middle of another's;
* a graph that a compiler has made, which reads nothing of Python;
* a backward with `create_graph` on a thread of autograd's: nodes that two threads have made do not run in the same order each
  time;
* dropout between layers of cuDNN's, which a capture makes begin anew;
* arguments that are borrowed, and whatever else concerns this very call: then a later one is looked at.
"""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from ..autograd.backward import Backward
from ..call.signature import Call
from ..capture.digest import Comparison, NotNow, Recompiled, Same
from ..capture.recording import Recording
from ..errors import Overlooked, Refusal, Stale
from ..guards.carried_state import Carries
from ..python.gc_control import uncollected
from ..python.origin import users_level
from ..state.reentrancy import Nested
from ..statistics import logger
from ..values.pytree import Opens
from .capture_terms import calls_graph
from .describer import Describer
from .player import Player
from .recorder import record

__all__ = ["Verdict", "cause", "difference", "due_after", "never", "said", "verdict", "warn"]

_UNNOTICED = "what only an audit has found"
_COMPILED = "code that was compiled anew"
_EARLY = (8, 64, 512)  # replays
_LATER = 8  # replays, after which an audit is tried again that a call has not allowed
_DOUBTS = 3  # audits in turn that an exception has ended
_LOOKS = 8  # as many as a capture has
_REMEDY = "pass what changes as an argument"


def due_after(played: int, every: int) -> int:
    """Replays after which the next audit is."""
    if not every:
        return sys.maxsize
    return min([n for n in (*_EARLY, (played // every + 1) * every) if n > played])


def never(function: object, recording: Recording | None = None) -> str:
    """Why the recordings of a function, or this one, are not audited; "" if they are."""
    if isinstance(function, Backward):
        return "it is a backward that runs outside of the call"
    if calls_graph(function):
        return "it is a compiled graph, which reads nothing of Python"
    if recording is None:
        return ""
    if recording.communicates:
        return "it communicates with other ranks"
    if recording.numbered_apart:
        return "it differentiates a backward, whose order autograd does not keep from call to call"
    return "it drops out between layers of cuDNN's" if recording.table.draws.drops_out else ""


def said(player: Player) -> str:
    """What `explain` says of it."""
    if player.unaudited:
        return f"\n  not audited: {player.unaudited}"
    return f"\n  audited after {player.right} replays" if player.right else ""


def difference(name: str, function: Callable[..., object], call: Call, player: Player, describer: Describer) -> Refusal | None:
    """What the call does now that is not what was recorded; None if there is nothing."""
    recording, device = player.recording, player.device
    retrace = recording.retrace
    if call.borrowed:
        return NotNow()
    if device.pool.loans:
        device.pool.take_back(recording.footprint)
    for _ in range(_LOOKS):
        terms = retrace.again(partial(Comparison, retrace.digest), recording, device)
        try:
            with uncollected():
                reach = describer.reach(call)
                with Nested(), ExitStack() as unplayed:
                    record(name, function, call, reach, device, terms, unplayed)
        except Overlooked as e:
            describer.extend_reach(e)
            continue
        except Refusal as found:
            found.drop_references()  # of what the capture has made
            return None if isinstance(found, Same) else found
        except (Carries, Opens):
            return Refusal("does something else with objects than when it was recorded", _REMEDY)
        finally:
            if terms.tracing is not None:
                terms.tracing.end()
    return Refusal("runs other code than when it was recorded", _REMEDY)


class Verdict(enum.Enum):
    """What becomes of the call, after an audit."""

    PLAY = enum.auto()
    RUN_LIVE = enum.auto()
    STALE = enum.auto()


def verdict(player: Player, found: Refusal | None, every: int) -> Verdict:
    """By what an audit has found. Notes when the next one is."""
    before, player.due = player.due, due_after(player.played, every)
    if found is None:
        player.right, player.doubts = player.played, 0
        return Verdict.PLAY
    if found.this_call:  # which says nothing of others
        player.due = min(player.due, player.played + _LATER)
        return Verdict.PLAY
    if found.failed and player.doubts < _DOUBTS:  # by what this call is given, perhaps: the live call shows it
        player.due, player.doubts = before, player.doubts + 1
        return Verdict.RUN_LIVE
    return Verdict.STALE


def cause(found: Refusal) -> str:
    """What has changed, of a stale recording."""
    return _COMPILED if isinstance(found, Recompiled) else _UNNOTICED


def warn(name: str, found: Refusal, replays: int) -> None:
    """Say that a recording is stale. To be compiled anew, for other sizes say, most code has a better reason than that."""
    if isinstance(found, Recompiled):
        logger.warning("%s runs code that was compiled anew, and is recorded again; a value that the code before took for a "
                       "constant may have been another in the last %d replays", name, replays)  # fmt: skip
        return
    warnings.warn(f"{name} is no longer what was recorded: {found}. Something that it reads has changed unnoticed, in the "
                  f"last {replays} replays: what they gave may be that of before. This call runs live.", Stale,
                  stacklevel=users_level())  # fmt: skip
