"""Judging a capture: whether all that the call has done is what each replay can do again."""

from __future__ import annotations

from dataclasses import dataclass

from .._torch.ddp import averaging
from .._torch.tensors import storage_id
from ..capture.effects import SCHEDULER
from ..errors import Refusal
from ..guards.reachable import Reach
from ..guards.snapshot import Setting, Snapshot
from ..guards.unwatchable import NETWORK, in_trainer
from ..python.bytecode import names_in, set_at
from ..python.origin import is_users
from ..python.places import place
from .capture_terms import Advances, ReadAgain, Request
from .evidence import CodeThatRan, Evidence
from .followed import check_numbers
from .prepared import Prepared
from .process_groups import follow_program

__all__ = ["Verdict", "judge"]

_SETTERS = {"setattr", "__setattr__", "__dict__", "vars", "globals", "exec"}
_THEIRS = "it is code of a package: call that outside of the recorded function, and pass its result"
_PART = "run backward inside the recorded function, or return .detach(): only then such a number is followed"
_RATES = "return the numbers in it, get_last_lr()[0] or list(get_last_lr()): the scheduler keeps the list"
_OUTLIVES = "return the new value, write into a tensor that is there (copy_), or mark the part that changes it @pg.live"


@dataclass(frozen=True)
class Verdict:
    """A capture that can be played."""

    relied: Reach | None
    """The part of what is in reach on which a replay relies; None if that is not known: all of it."""
    settings: tuple[Setting, ...]
    """Plain values that each replay sets."""


def judge(request: Request, prepared: Prepared, evidence: Evidence) -> Verdict:
    """Judge a capture.

    Raises:
        Refusal: the call has had effects that no replay could have.
        Unfollowed, Advances, ReadAgain: on other terms it may be possible.
    """
    watch, release = evidence.captured.watch, prepared.clearance.release
    if watch.communicated:
        follow_program(evidence.captured.program)
        _in_order(request)
    if release is not None and (release.again or watch.parts):
        raise ReadAgain
    check_numbers(request, evidence)
    _no_arrays_written(request.reach, evidence)
    changes = prepared.snapshot.changes()  # `self.seen = []` is none
    settings: list[Setting] = []
    may_see = [part for part in watch.parts if part.may_write_anything()]  # what the call leaves, before it is there
    if changes and request.terms.following is not None and request.whole and not may_see:
        settings = _settings(request, prepared.snapshot)
        changes = prepared.snapshot.changes() if settings else changes
    relied = None if changes else _relied(request, evidence)
    left = evidence.behaviour.left
    changes += left.paths if relied is None else []
    carried = request.terms.carried
    seen = [p.path for p in left.puts if carried.has(p.of, p.name) or p in left.items] if may_see else []
    if seen:
        said = f"sets {seen[0]}, which what runs live meanwhile may read"
        refusal = Refusal(said, "set it outside, or pass it", final=False)
        refusal.cutting = True
        raise refusal
    if changes:
        steps = [name for name in changes if name.endswith(".last_epoch")]
        remedy = SCHEDULER.remedy if steps else _remedy(changes[0], request, prepared)
        changes = steps or (changes[:1] if remedy is NETWORK else changes)
        where = _where_set(changes[0], request.reach, evidence.behaviour.code)
        if remedy is _OUTLIVES and not where and not _is_named(changes[0], evidence.behaviour.code):
            remedy = _THEIRS
        others = f" (and {', '.join(changes[1:3])})" if changes[1:] else ""
        raise Refusal(f"changes {changes[0]}{others}, which outlives the call", remedy, where, final=False)
    return Verdict(relied, tuple(settings))


def _remedy(change: str, request: Request, prepared: Prepared) -> str:
    """What to do about what is changed first."""
    if in_trainer(request.reach.modules):
        return NETWORK
    if change.endswith("._last_lr"):
        return _RATES
    if request.tracing is not None and any(one.number for one in prepared.snapshot.settings()):
        return _PART
    following = request.terms.following
    why = following.why.get(change, "") if following is not None else ""
    return f"{_OUTLIVES}; it is not followed, because it {why}" if why else _OUTLIVES


def _in_order(request: Request) -> None:
    """What communicates in a backward does so between the averages of a wrapper around it; recorded, before all of them. A rank
    that runs live would meet another's with its own."""
    refusal = Refusal("lies in DistributedDataParallel, and communicates with other ranks as well: in a recorded backward that "
                      "would come before all averages", "record the whole step")  # fmt: skip
    if request.tracing is not None and averaging() is not None:
        raise refusal
    if request.backward is not None and request.backward.forward.averaged:
        request.backward.forward.stop(refusal)


def _no_arrays_written(reach: Reach, evidence: Evidence) -> None:
    for t in evidence.captured.watch.written.values():
        if any(t.data_ptr() < at + nbytes and at < t.data_ptr() + t.nbytes for at, nbytes in reach.array_places):
            raise Refusal("writes a tensor that shares memory with an array it can read", "read it as a tensor")


def _settings(request: Request, snapshot: Snapshot) -> list[Setting]:
    """The plain values that the call has set, if that is all that it has changed. What was there is put back.

    Raises:
        Advances: among them are numbers that could be followed.
    """
    terms, settings = request.terms, snapshot.settings()
    numbers = [(one.spot.at, one.path) for one in settings if one.number]
    if terms.following.advances(numbers, terms.concessions.baked):  # type: ignore[union-attr]
        raise Advances
    stands = terms.carried.holders()  # others will stand there
    if numbers or any(one.spot.at[0] in stands for one in settings):
        return []
    for one in settings:
        one.spot.put(one.old)
    return settings


def _relied(request: Request, evidence: Evidence) -> Reach | None:
    """The part of what is in reach on which a replay relies; None if it is not known, or lacks something that an operator has
    read."""
    reach, behaviour, touched = request.reach, evidence.behaviour, evidence.captured.watch.touched
    known = behaviour.code.known
    part = reach.of_what_ran(known, behaviour.left, request.terms.carried) if known is not None else None
    if part is None:
        return None
    in_part = {storage_id(t) for _, t in part.tensors.values()}
    return part if {storage_id(t) for _, t in reach.tensors.values()} & touched <= in_part else None


def _is_named(path: str, ran: CodeThatRan) -> bool:
    """Whether code of the user's that ran names the attribute or the variable of this path, or may set it by no name."""
    names = _SETTERS | {path.rpartition(".")[2].partition("[")[0]}
    return any(not names.isdisjoint(names_in(code)) for code, _ in ran.functions if is_users(code.co_filename))


def _where_set(path: str, reach: Reach, ran: CodeThatRan) -> str:
    """Where the user's code that ran sets what has this path, or a tensor's memory, if there is one such line only."""
    names = [path.rpartition(".")[2], *(["data"] if path in {name for name, _ in reach.tensors.values()} else [])]
    codes = [code for code, _ in ran.functions if is_users(code.co_filename)]
    found = {place(code.co_filename, line) for name in names for code in codes for line in set_at(code, name)}
    return found.pop() if len(found) == 1 else ""
