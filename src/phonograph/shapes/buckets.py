"""Many sizes, few recordings: `shapes={"x": {0: [1, 2, 4, 8]}}`.

An argument of a size between two declared ones is padded with zeros to the next, a recording of that size is played, and its
results are cut. That is right only if no row of a result depends on the padding. With `shapes=` the user says so, and a trial
compares (`trial.py`), once for each actual size and recording. The first call of a size runs live with the user's own
arguments: its result and effects are the call's. The function itself never gets padded arguments; captures, which are dry, and
replays do.

The verdict of a trial belongs to the recording. If something that it relies on changes, another recording is played, with a
trial of its own. A recording is found by the signature of the call as it came: actual sizes, strides and shared memory count. A
call that is not padded goes through `Recorded` with its own size, as without `shapes=`.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.tensors import has_memory
from ..call.signature import Call, describe
from ..devices import lock, owned
from ..engine.contained import Contained
from ..engine.history import History
from ..engine.locking import acquired
from ..engine.player import Player
from ..engine.policy import Case
from ..engine.recorded import Recorded
from ..errors import Mismatch, Refusal, Unpadded
from ..guards.carried_state import Carried
from ..memory.loans import Borrowed
from ..options import Options, switched_off, unknown_parameter
from ..state.reentrancy import inside
from ..values.keys import NoSignature
from .progress import progress
from .trial import Moulds, Pad, Pads, cut, gradients, judged, objection, replaced, with_zeros

__all__ = ["Padded"]

_KNOWN = 4096  # kinds of calls that are tried with one recording
_FAILURES = 8  # verdicts against padding in quick succession, after which a declared size is not tried any more
_UNTOLD = 8  # calls that did not show whether a declared size may be padded, after which likewise


class _Declared(NamedTuple):
    """The sizes of one parameter's dimensions."""

    name: str
    position: int
    dims: tuple[tuple[int, tuple[int, ...]], ...]


class Padded(Recorded[..., object]):
    """A recorded function whose arguments are padded to a few sizes where that changes nothing."""

    _measures = False  # what is played is not the call that would run live
    _watches_sizes = False  # what cannot be padded after all leaves a recording that nobody plays

    def __init__(self, function: Callable[..., object], options: Options) -> None:
        self._declared = _declared(function, options)
        self._verdicts: weakref.WeakKeyDictionary[Player, dict[object, Moulds | Unpadded]] = weakref.WeakKeyDictionary()
        self._padded = 0  # calls that were
        super().__init__(function, options)
        self._describer.carried = Carried(learns=False)  # what is carried would have to be padded as well

    @property
    def _kind(self) -> Callable[[Thing, Options], Recorded[..., object]]:
        return Padded

    # -- a call

    def _answer(self, args: Args, kwargs: Kwargs) -> tuple[bool, object]:
        with lock:
            pads = self._pads(args, kwargs)
            if not pads:
                return super()._answer(args, kwargs)
            try:
                call = self._described(args, kwargs)
                with Contained("padded the arguments"):
                    padded = describe(*replaced(pads, args, kwargs, with_zeros))
                history = self._backoff.history((Padded, padded.key))
                player, known = self._known(call, padded, history)
                due = self.options.verify and (self._padded + 1) % self.options.verify == 0
                if player is not None and known is not None and not due:
                    return True, self._replayed(player, padded, known)
            except (NoSignature, Refusal) as e:  # with its own size it is recorded, or refused for the same reason
                self._say_once(e)
                return super()._answer(args, kwargs)
            self._counters.calls += 1
            self._padded += 1
            result = self._warm_up(call, args, kwargs)
            history.arrivals.warm_ups += 1
            found = (
                self._tried(pads, call, padded, history, result) if history.arrivals.warm_ups >= self.options.warmup else None
            )
            if isinstance(found, Unpadded):
                self._say_once(found)
                if known is not None:
                    raise Mismatch(f"a padded replay of {self.name} {found}, and did not when that was tried before; see "
                                   "docs/details.md")  # fmt: skip
            return True, result

    def _known(self, call: Call, padded: Call, history: History) -> tuple[Player | None, Moulds | None]:
        """What would play such a call, and how its result is to be cut; None if that has to be tried.

        Raises:
            Refusal: it is not padded.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
            raise gradients()
        refusal = self._backoff.still(history, given=[call.leaves[at] for at in call.numbers])
        if refusal is not None:
            raise refusal
        player = self._shelf.find(padded).player
        verdicts = self._verdicts.get(player, {}) if player is not None else {}
        verdict = verdicts.get(None, verdicts.get(call.key))
        if player is not None and verdict is not None:
            player.touch()
        elif torch.is_grad_enabled() and any(t.requires_grad for _, t in self._describer.reach(call).all_tensors):
            self._backoff.refuse(history, refusal := gradients(), None)
            raise refusal
        if isinstance(verdict, Unpadded):
            raise verdict
        return player, verdict

    def _replayed(self, player: Player, padded: Call, moulds: Moulds) -> object:
        self._counters.calls += 1
        self._counters.replayed += 1
        self._padded += 1
        result, copied = player.play(padded)
        self._counters.bytes_copied += copied
        return cut(result, moulds)

    # -- trying

    def _tried(self, pads: Pads, call: Call, padded: Call, history: History, result: object) -> Moulds | Unpadded | None:
        """Whether such calls may be padded, of which this one had that result, live; None if that cannot be told yet."""
        try:
            found = self._shelf.find(padded)
            case = Case(padded, history, self._policy.broken(history, found.broken, found.blocked), found.blocked)
            if case.broken is not None and (refusal := self._backoff.changed(case.broken, history, padded)) is not None:
                raise refusal
            player = found.player or self._recorded(case)
        except Refusal as e:
            e.drop_references()
            if e.failed:
                self._backoff.live_run_succeeded(e)
            if history.refused.refusal is not None:
                why = Unpadded(f"cannot be recorded with padding: {e.reason}", e.remedy, e.where)
                history.refused.say(why)
                return why
            return None
        verdicts = self._verdicts.setdefault(player, {})
        never = objection(player.recording)
        try:
            with Contained("tried a padded call"):
                verdict = never or judged(self._said(pads), pads, call, padded, player, self._describer.reach(call), result)
            if verdict is None:
                history.untold += 1
                if history.untold < _UNTOLD:
                    return None
                verdict = Unpadded(f"gives, or is given, nothing but zeros where {self._said(pads)}, which shows nothing",
                                   "call it first with other numbers")  # fmt: skip
        except Refusal as e:
            e.drop_references()
            verdict = e if isinstance(e, Unpadded) else Unpadded(e.reason, e.remedy)
        verdicts[None if never else call.key] = verdict
        if isinstance(verdict, Unpadded) and self._backoff.count_change(history) > _FAILURES:
            history.refuse(verdict)
        elif len(verdicts) > _KNOWN:
            history.refuse(Unpadded("is called in ever other ways", "pass contiguous tensors, and numbers as tensors"))
        return verdict

    def _recorded(self, case: Case) -> Player:
        """A recording of a padded call, which has not come by the corridor."""
        refusal = self._policy.no_room(case)
        if refusal is not None:
            raise refusal
        with ExitStack() as unplayed:
            return self._made(case, unplayed)

    def _said(self, pads: Pads) -> str:
        of = {at for at, dims in pads.items() if any(pad.size != pad.to for pad in dims)}
        names = [one.name for one in self._declared if one.name in of or one.position in of]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} padded"

    def _say_once(self, refusal: Exception) -> None:
        if not isinstance(refusal, Refusal):
            return
        refusal.drop_references()
        if isinstance(refusal, Unpadded):
            self._report.not_padded(refusal)

    # -- before the calls

    def _pads(self, args: Args, kwargs: Kwargs) -> Pads:
        """What is padded in a call: nothing, if all sizes are declared, or some one is larger or none at all."""
        pads: dict[int | str, list[Pad]] = {}
        for at, t, dims in self._given(args, kwargs):
            for dim, sizes in dims:
                size = t.size(dim)
                to = next((s for s in sizes if s >= size), 0)
                if not (size and to):
                    return {}
                pads.setdefault(at, []).append(Pad(dim, size, to))
        return pads if any(pad.size != pad.to for pad in itertools.chain(*pads.values())) else {}

    def _given(
        self, args: Args, kwargs: Mapping[str, object]
    ) -> Iterator[tuple[int | str, torch.Tensor, list[tuple[int, tuple[int, ...]]]]]:
        """Those of the declared arguments that a call has: where, what, and the sizes of those dimensions that there are."""
        for name, position, dims in self._declared:
            at: int | str = name if name in kwargs else position
            t: Thing = kwargs[name] if name in kwargs else args[position] if position < len(args) else None
            if type(t) in _TENSORS and has_memory(t):
                yield at, t, [(dim, sizes) for dim, sizes in dims if dim < t.dim()]

    def prepare(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Record every size, the largest first. See `phonograph.prepare`."""
        given = list(self._given(args, kwargs))
        together = list(dict.fromkeys(sizes for *_, dims in given for _, sizes in dims))  # equal sizes are those of one thing
        chosen = list(itertools.product(*(reversed(sizes) for sizes in together))) if together else []
        if not chosen:
            names = ", ".join(one.name for one in self._declared)
            raise ValueError(f"there is no tensor with the dimensions that shapes names: {names}")
        if len(chosen) > self.options.max_recordings:
            raise ValueError(f"{len(chosen)} sizes, and max_recordings={self.options.max_recordings} keeps fewer: raise it")
        if torch.compiler.is_compiling() or inside() or switched_off() or owned():
            return  # they are recorded as they come
        if not lock.acquire(False) and not acquired():
            return
        try:
            self._prepare(given, [dict(zip(together, sizes, strict=True)) for sizes in chosen], args, dict(kwargs))
        finally:
            lock.release()

    def _prepare(
        self,
        given: Sequence[tuple[int | str, torch.Tensor, list[tuple[int, tuple[int, ...]]]]],
        chosen: list[dict[object, int]],
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        history = None
        try:
            call = self._described(args, kwargs)
            if self.options.warmup:
                self._counters.calls += 1
                self._warm_up(call, args, kwargs)
            with progress(f"recording {self.name}", len(chosen), shown=sys.stderr.isatty()) as advance:
                for to in chosen:
                    pads = {at: [Pad(dim, t.size(dim), to[sizes]) for dim, sizes in dims] for at, t, dims in given}
                    resized = self._described(*replaced(pads, args, kwargs, with_zeros))
                    found = self._shelf.find(resized)
                    if found.player is None:
                        history = self._backoff.history(resized.key)
                        self._recorded(Case(resized, history, found.broken, found.blocked))
                    advance(1)
        except (NoSignature, Refusal) as e:
            refusal = e if isinstance(e, Refusal) else Refusal(str(e), e.remedy)
            refusal.drop_references()
            if history is None or not self._maker.learns(refusal, history, resized):
                self._report.refuse(refusal)

    # -- for the observers

    def explain(self) -> str:
        sizes = [f"padded: {one.name}, dimension {dim}, to {', '.join(map(str, sizes))}"
                 for one in self._declared for dim, sizes in one.dims]  # fmt: skip
        return "\n".join([super().explain(), *sizes])

    def _reset(self) -> None:
        super()._reset()
        self._verdicts.clear()


_TENSORS = (torch.Tensor, torch.nn.Parameter, Borrowed)


def _declared(function: Callable[..., object], options: Options) -> list[_Declared]:
    """The sizes that the user declared, with the places of the function's parameters.

    Raises:
        ValueError: there is no such parameter.
    """
    own = getattr(function, "__self__", None)
    if isinstance(own, torch.nn.Module) and getattr(function, "__func__", None) is not type(own).forward:
        function = own.forward  # what a module's call takes
    parameters = list(inspect.signature(function).parameters.values())
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, _ in options.shapes:
        if name not in places and name not in by_name and not others:
            raise unknown_parameter("shapes", name, [*places, *by_name])
    return [_Declared(name, places.index(name) if name in places else sys.maxsize, dims) for name, dims in options.shapes]
