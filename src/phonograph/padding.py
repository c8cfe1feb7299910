"""Many sizes, few recordings: `shapes={"x": {0: [1, 2, 4, 8]}}`.

An argument whose size lies between two of the declared ones is padded with zeros up to the next, a recording of that size is
played, and what comes back is cut. That is right only where a result's rows do not depend on what lies beyond. The user says so
by `shapes=`; what can be tried of it is tried, once for each actual size and recording:

* The first call with a size runs live, with the user's own arguments: that is its answer, and has its effects. Padded arguments
  are never given to the function itself, but to captures, which are dry, and to replays.
* Beside it the padded recording is played, with zeros in the padding, and again with others (NaN, very large, very small
  numbers), and so with other rows. All must agree bit by bit, and with the live result row by row within what another order of
  adding up explains.
* So a replay must do nothing besides giving results: what writes, draws random numbers, or has a gradient is not padded.

The verdict belongs to that recording. Where something that it relies on has changed, another one is played, and is tried anew.
It is found by the signature of the call as it came, in which actual sizes, strides, and what shares memory all count. A call
that is not padded goes through `Recorded`'s corridor with its own size, as if there were no `shapes=`.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from .borrowed import Borrowed, plain
from .devices import lock, owned
from .errors import Mismatch, Refusal, RunsLive, Unpadded
from .keys import NoSignature
from .observe import logger
from .options import Options, switched_off
from .player import Player
from .progress import progress
from .recorded import History, Ours, Recorded, waited
from .recording import Recording
from .reliance import same
from .signature import Call, describe
from .trees import flatten, unflatten
from .verify import equal, generators_in
from .watch import storage_id
from .within import inside

__all__ = ["Padded"]

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3,
          torch.complex128: 1e-9, torch.complex64: 1e-4}  # fmt: skip
"""How far a row of a padded call's result may be from the live one, over the largest value in that row: a matrix product of
another size adds up in another order."""
_CLOSE_TF32 = 2e-3
_BIAS = 5e-4  # as much may all results be off in one direction
_TRIALS = ((0, (0, math.nan, 0.5, -0.5)), (1, (0, -0.5)), (-1, (0, 0.5)))
"""What is played: rows, and with each what in the padding (see `_filled`)."""
_KNOWN = 4096  # kinds of calls that are tried with one recording
_FAILURES = 8  # verdicts against padding in quick succession, after which a declared size is not tried any more

_MASK = "mask what is padded, or leave it out of shapes"


class _Declared(NamedTuple):
    """The sizes of one parameter's dimensions."""

    name: str
    position: int
    dims: tuple[tuple[int, tuple[int, ...]], ...]


class _Pad(NamedTuple):
    """A dimension that has `size` and gets `to`; they may be equal."""

    dim: int
    size: int
    to: int


_Pads: TypeAlias = Mapping[int | str, Sequence[_Pad]]  # by position or name


class _Mould(NamedTuple):
    """What a tensor of the result is in a live call of this very size."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int  # of its storage
    cut: tuple[int, ...]  # dimensions that are larger where it is padded

    @classmethod
    def of(cls, t: torch.Tensor, padded: torch.Tensor) -> _Mould:
        cut = tuple(dim for dim, n in enumerate(t.shape) if padded.size(dim) != n)
        return cls(tuple(t.size()), t.stride(), int(t.storage_offset()), t.untyped_storage().nbytes(), cut)

    def cast(self, t: torch.Tensor) -> torch.Tensor:
        """Such a tensor, in memory of its own, with what is in `t` but for the padding."""
        new = torch.empty_strided(self.size, self.stride, dtype=t.dtype, device=t.device)
        if self.offset or new.untyped_storage().nbytes() != self.nbytes:  # a part of something, as `y[:, -1]` is
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=t.device).untyped_storage()
            new = torch.empty(0, dtype=t.dtype, device=t.device).set_(memory, self.offset, self.size, self.stride)
        for dim in self.cut:
            t = t.narrow(dim, 0, self.size[dim])
        return new.copy_(t)


_Moulds: TypeAlias = tuple[_Mould | None, ...]  # for each leaf of the result; None: it is handed out as it is


class Padded(Recorded[..., Any]):
    """A recorded function whose arguments are padded to a few sizes where that changes nothing."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._declared = _declared(function, options)
        self._verdicts: weakref.WeakKeyDictionary[Player, dict[Any, _Moulds | Unpadded]] = weakref.WeakKeyDictionary()
        self._padded = 0  # calls that were
        super().__init__(function, options)

    @property
    def _kind(self) -> type[Recorded[Any, Any]]:
        return Padded

    # -- a call

    def _answer(self, args: Any, kwargs: Any) -> tuple[bool, Any]:
        with lock:
            pads = self._pads(args, kwargs)
            if not pads:
                return super()._answer(args, kwargs)
            try:
                call = self._described(args, kwargs)
                with Ours("padded the arguments"):
                    padded = describe(*_replaced(pads, args, kwargs, _with_zeros))
                history = self._history((Padded, padded.key))
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
            history.warm += 1
            found = self._tried(pads, call, padded, history, result) if history.warm >= self.options.warmup else None
            if isinstance(found, Unpadded):
                self._say_once(found)
                if known is not None:
                    raise Mismatch(f"a padded replay of {self.name} {found}, and did not when that was tried before; see "
                                   "docs/limits.md")  # fmt: skip
            return True, result

    def _known(self, call: Call, padded: Call, history: History) -> tuple[Player | None, _Moulds | None]:
        """What would play such a call, and how its result is to be cut; None if that has to be tried.

        Raises:
            Refusal: it is not padded.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
            raise _gradients()
        if history.refusal is not None:
            raise history.refusal
        player = self._shelf.find(padded).player
        verdicts = self._verdicts.get(player, {}) if player is not None else {}
        verdict = verdicts.get(None, verdicts.get(call.key))
        if verdict is not None:
            self._shelf.touch(padded.key)
        elif torch.is_grad_enabled() and any(t.requires_grad for _, t in self._reach(call).tensors.values()):
            history.refusal = _gradients()
            raise history.refusal
        if isinstance(verdict, Unpadded):
            raise verdict
        return player, verdict

    def _replayed(self, player: Player, padded: Call, moulds: _Moulds) -> Any:
        self._counters.calls += 1
        self._counters.replayed += 1
        self._padded += 1
        result, copied = player.play(padded)
        self._counters.bytes_copied += copied
        return _cut(result, moulds)

    # -- trying

    def _tried(
        self, pads: _Pads, call: Call, padded: Call, history: History, result: Any
    ) -> _Moulds | Unpadded | None:  # fmt: skip
        """Whether such calls may be padded, of which this one had that result, live; None if that cannot be told yet."""
        try:
            found = self._shelf.find(padded)
            if found.broken is not None:
                self._count_change(found, history)
            player = found.player or self._made(padded, found, history)
        except Refusal as e:
            e.let_go()
            if e.failed:
                self._failed(e)
            if history.refusal is not None:
                history.refusal = why = Unpadded(f"cannot be recorded with padding: {e.reason}", e.remedy, e.where)
                return why
            return None
        verdicts = self._verdicts.setdefault(player, {})
        objection = _objection(player.recording)
        try:
            with Ours("tried a padded call"):
                verdict = objection or self._judged(pads, call, padded, player, result)
        except Refusal as e:
            e.let_go()
            verdict = e if isinstance(e, Unpadded) else Unpadded(e.reason, e.remedy)
        verdicts[None if objection else call.key] = verdict
        if isinstance(verdict, Unpadded) and history.changed(self._counters.replayed) > _FAILURES:
            history.refusal = verdict
        elif len(verdicts) > _KNOWN:
            history.refusal = Unpadded("is called in ever other ways", "pass contiguous tensors, and numbers as tensors")
        return verdict

    def _judged(self, pads: _Pads, call: Call, padded: Call, player: Player, result: Any) -> _Moulds:
        """How results are to be cut.

        Raises:
            Unpadded: what is padded shows in them.
        """
        reach, before = self._reach(call), player.played
        theirs = [t for t in (*call.tensors, *(t for _, t in reach.tensors.values())) if t.layout is torch.strided]
        live = _Leaves(result)
        where, (args, kwargs) = self._said(pads), padded.like
        moulds: _Moulds | None = None
        with _nothing_drawn(generators_in(reach)):
            for rows, fills in _TRIALS:
                first: _Leaves | None = None
                for fill in fills:
                    try:
                        other = describe(*_replaced(pads, args, kwargs, partial(_filled, rows=rows, number=fill)))
                        played = player.play(other)[0]
                    except Exception as e:
                        raise Unpadded(f"raises {type(e).__name__} where {where}", _MASK) from None
                    finally:
                        player.played = max(before, 1)
                    if moulds is None:
                        moulds = _moulds(where, pads, _Leaves(played), live, theirs)
                        _compare(
                            where, _Leaves(_cut(played, moulds)), live, moulds, _tolerance(theirs, player.recording.device)
                        )
                    now = _Leaves(_cut(played, moulds))
                    del played  # the next one has its memory
                    first = first or now
                    if not all(map(equal, now.leaves, first.leaves)):
                        raise Unpadded(f"gives another result where {where} with other values", _MASK)
        assert moulds is not None
        return moulds

    def _said(self, pads: _Pads) -> str:
        of = {at for at, dims in pads.items() if any(pad.size != pad.to for pad in dims)}
        names = [one.name for one in self._declared if one.name in of or one.position in of]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} padded"

    def _say_once(self, refusal: Exception) -> None:
        if not isinstance(refusal, Refusal):
            return
        refusal.let_go()
        if isinstance(refusal, Unpadded) and refusal.reason not in self._reasons:
            self._reasons[refusal.reason] = refusal
            logger.info("%s is not padded: %s", self.name, refusal)
            if self._counters.refuse(refusal.reason):
                said = f"{self.name} is not padded, but recorded with its own sizes: {refusal}"
                warnings.warn(said, RunsLive, stacklevel=4)

    # -- before the calls

    def _pads(self, args: Any, kwargs: Any) -> _Pads:
        """What is padded in a call: nothing, if all sizes are declared, or some one is larger or none at all."""
        pads: dict[int | str, list[_Pad]] = {}
        for at, t, dims in self._given(args, kwargs):
            for dim, sizes in dims:
                size = t.size(dim)
                to = next((s for s in sizes if s >= size), 0)
                if not (size and to):
                    return {}
                pads.setdefault(at, []).append(_Pad(dim, size, to))
        return pads if any(pad.size != pad.to for pad in itertools.chain(*pads.values())) else {}

    def _given(self, args: Any, kwargs: Any) -> Iterator[tuple[int | str, torch.Tensor, list[tuple[int, tuple[int, ...]]]]]:
        """Those of the declared arguments that a call has: where, what, and the sizes of those dimensions that there are."""
        for name, position, dims in self._declared:
            at: int | str = name if name in kwargs else position
            t: Any = kwargs[name] if name in kwargs else args[position] if position < len(args) else None
            if type(t) in _TENSORS and t.layout is torch.strided and not (t.is_quantized or t.is_nested):
                yield at, t, [(dim, sizes) for dim, sizes in dims if dim < t.dim()]

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record every size, the largest first. See `phonograph.prepare`."""
        given = list(self._given(args, kwargs))
        together = list(dict.fromkeys(sizes for *_, dims in given for _, sizes in dims))  # equal sizes are those of one thing
        chosen = list(itertools.product(*(reversed(sizes) for sizes in together))) if together else []
        if not chosen:
            names = ", ".join(one.name for one in self._declared)
            raise ValueError(f"there is no tensor with the dimensions that shapes names: {names}")
        if len(chosen) > self.options.max_recordings:
            raise ValueError(f"{len(chosen)} sizes, and max_recordings={self.options.max_recordings} keeps fewer: raise it")
        if torch.compiler.is_compiling() or inside() or switched_off() or owned() or (not lock.acquire(False) and not waited()):
            return  # they are recorded as they come
        try:
            self._prepare(given, [dict(zip(together, sizes, strict=True)) for sizes in chosen], args, dict(kwargs))
        finally:
            lock.release()

    def _prepare(self, given: Any, chosen: list[dict[Any, int]], args: Any, kwargs: Any) -> None:
        history = None
        try:
            call = self._described(args, kwargs)
            if self.options.warmup:
                self._counters.calls += 1
                self._warm_up(call, args, kwargs)
            with progress(f"recording {self.name}", len(chosen), shown=sys.stderr.isatty()) as advance:
                for to in chosen:
                    pads = {at: [_Pad(dim, t.size(dim), to[sizes]) for dim, sizes in dims] for at, t, dims in given}
                    resized = self._described(*_replaced(pads, args, kwargs, _with_zeros))
                    found = self._shelf.find(resized)
                    if found.player is None:
                        history = self._history(resized.key)
                        self._made(resized, found, history)
                    advance(1)
        except (NoSignature, Refusal) as e:
            refusal = e if isinstance(e, Refusal) else Refusal(str(e))
            refusal.let_go()
            if history is None or not self._needs_a_look(refusal, history):
                self._count(refusal)

    # -- for the observers

    def explain(self) -> str:
        sizes = [f"padded: {one.name}, dimension {dim}, to {', '.join(map(str, sizes))}"
                 for one in self._declared for dim, sizes in one.dims]  # fmt: skip
        return "\n".join([super().explain(), *sizes])

    def reset(self) -> None:
        super().reset()
        self._verdicts.clear()


_TENSORS = (torch.Tensor, torch.nn.Parameter, Borrowed)


class _Leaves:
    """A result, taken apart."""

    def __init__(self, result: Any) -> None:
        self.leaves: list[Any] = []
        self.shape = flatten(result, self.leaves)
        first: dict[int, int] = {}
        self.same = [first.setdefault(id(x), i) if isinstance(x, torch.Tensor) else i for i, x in enumerate(self.leaves)]


def _declared(function: Callable[..., Any], options: Options) -> list[_Declared]:
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
            known = ", ".join(dict.fromkeys([*places, *by_name])) or "none"
            raise ValueError(f"shapes names {name!r}, which is no parameter; there are: {known}")
    return [_Declared(name, places.index(name) if name in places else sys.maxsize, dims) for name, dims in options.shapes]


def _gradients() -> Unpadded:
    return Unpadded("works with gradients, which padding would change", "call it under torch.no_grad()")


# -- what is padded


def _replaced(pads: _Pads, args: Any, kwargs: Any, make: Callable[[torch.Tensor, Sequence[_Pad]], torch.Tensor]) -> Any:
    """The arguments with others for those that are padded, and one for one that is given twice."""
    new_args, new_kwargs = list(args), dict(kwargs)
    made: dict[Any, torch.Tensor] = {}
    for at, dims in pads.items():
        place: Any = new_kwargs if isinstance(at, str) else new_args
        key = id(place[at]), tuple(dims)
        if key not in made:
            t = plain(place[at])
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                made[key] = make(t, dims)
        place[at] = made[key]
    return tuple(new_args), new_kwargs


def _with_zeros(t: torch.Tensor, pads: Sequence[_Pad]) -> torch.Tensor:
    """The tensor in its new size, with the same order of dimensions in memory, and zeros beyond its own numbers."""
    size, order = list(t.shape), sorted(range(t.dim()), key=t.stride, reverse=True)
    for pad in pads:
        size[pad.dim] = pad.to
    new = torch.empty_permuted(size, order, dtype=t.dtype, device=t.device).zero_()
    _own(new, pads).copy_(_own(t, pads))
    return new


def _filled(t: torch.Tensor, pads: Sequence[_Pad], rows: int, number: float) -> torch.Tensor:
    """A padded tensor as it may be in other calls.

    Its rows: as they are (0), or floating-point numbers with their signs turned, and integers all as large (1) or as small (-1)
    as some row has them. Its padding: zeros, or this part of the largest number, or integers that some row has, because they
    may be indices.
    """
    new, own = t.clone(), _own(t, pads)
    dims = [pad.dim for pad in pads]
    if t.is_floating_point() or t.is_complex():
        other, filling = -own, t.new_full((), number * torch.finfo(t.dtype).max)
    else:
        high, low = own.amax(dims, keepdim=True), own.amin(dims, keepdim=True)
        other = high if rows > 0 else low
        first, second = (low, high) if number < 0 else (high, low)
        filling = torch.where(first != 0, first, second)
    for dim, size, to in pads if number != 0 else ():
        new.narrow(dim, size, to - size).copy_(filling)
    if rows:
        _own(new, pads).copy_(other)
    return new


def _own(t: torch.Tensor, pads: Sequence[_Pad]) -> torch.Tensor:
    """That part of a padded tensor which is not padding."""
    for dim, size, to in pads:
        t = t.narrow(dim, 0, min(size, to))
    return t


# -- what comes back


def _cut(result: Any, moulds: _Moulds) -> Any:
    """A padded result in the size that it would have had."""
    leaves: list[Any] = []
    shape = flatten(result, leaves)
    made: dict[int, torch.Tensor] = {}
    given = list(leaves)  # so that identities stay theirs
    for i, (mould, t) in enumerate(zip(moulds, given, strict=True)):
        if mould is not None:
            if id(t) not in made:
                made[id(t)] = mould.cast(plain(t))
            leaves[i] = made[id(t)]
    return unflatten(shape, iter(leaves), result)


def _objection(recording: Recording) -> Unpadded | None:
    """Why a recording is not played with padded arguments, whatever their values."""
    if recording.effects:
        return Unpadded(recording.effects, "do that outside, where it is to be padded")
    if recording.live_parts:
        return Unpadded("has operators that run live")
    if recording.backward is not None or any(o.attached or o.consumed for o in recording.outputs):
        return _gradients()
    leases = [id(o.lease) for o in recording.outputs if o.kind == "lease"]
    views = any(o.lazy is not None or o.kind in ("argument", "argument view", "outside view") for o in recording.outputs)
    if views or len(set(leases)) < len(leases):
        return Unpadded("returns an argument, or a view of one or of another result", "return a clone of it")
    return None


def _moulds(where: str, pads: _Pads, padded: _Leaves, live: _Leaves, theirs: Sequence[torch.Tensor]) -> _Moulds:
    """What the tensors of a padded result have to become.

    Raises:
        Unpadded: they cannot.
    """
    if (padded.shape, padded.same) != (live.shape, live.same):
        raise Unpadded(f"gives a result of another structure where {where}", _MASK)
    known = {(p.size, p.to) for p in itertools.chain(*pads.values())}
    moulds: list[_Mould | None] = []
    used = {storage_id(t) for t in theirs}
    for i, (t, wanted) in enumerate(zip(padded.leaves, live.leaves, strict=True)):
        if t is wanted or not isinstance(t, torch.Tensor) or not isinstance(wanted, torch.Tensor):
            if not same(t, wanted):
                raise Unpadded(f"gives another result {i} where {where}", _MASK)
            moulds.append(None)
            continue
        t = plain(t)
        if live.same[i] == i and not _stands_alone(wanted, used):
            raise Unpadded(f"gives a result {i} that shares memory, or is no plain tensor", "return a clone of it")
        if (t.dtype, t.device, t.dim()) != (wanted.dtype, wanted.device, wanted.dim()):
            raise Unpadded(f"gives another result {i} where {where}", _MASK)
        if any(now != then and (now, then) not in known for now, then in zip(wanted.shape, t.shape, strict=True)):
            raise Unpadded(f"gives a result {i} of which it is not known what to cut where {where}", _MASK)
        moulds.append(_Mould.of(wanted, t))
    return tuple(moulds)


def _stands_alone(t: torch.Tensor, used: set[int]) -> bool:
    """Whether this live result is a plain tensor with memory of its own, in which no two elements share a place. Notes that
    memory as used."""
    if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_conj() or t.is_neg() or t.requires_grad:
        return False
    key, end = storage_id(t), 0
    free = key not in used or not t.untyped_storage().nbytes()
    used.add(key)
    for step, n in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        free = free and step > end
        end += step * (n - 1)
    return free and t.is_inference() == torch.is_inference_mode_enabled()


def _compare(where: str, now: _Leaves, live: _Leaves, moulds: _Moulds, tolerance: float) -> None:
    for i, (t, wanted, mould) in enumerate(zip(now.leaves, live.leaves, moulds, strict=True)):
        if mould is not None and not _close(t, wanted, [d for d in range(t.dim()) if d not in mould.cut], tolerance):
            raise Unpadded(f"gives another result {i} where {where}", _MASK)


def _close(x: torch.Tensor, y: torch.Tensor, within: list[int], tolerance: float) -> bool:
    """Whether `x` is what another order of adding up may make of `y`, for each of its rows by itself, which extend along the
    dimensions `within`; and all in all: a division by the size is a little less everywhere, and rounding is not."""
    if not (x.is_floating_point() or x.is_complex()) or not x.numel():
        return torch.equal(x, y)
    kind = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(kind), y.to(kind)
    finite = y.isfinite()
    if not torch.equal(_other_than(finite, x), _other_than(finite, y)):
        return False
    x, y = torch.where(finite, x, 0), torch.where(finite, y, 0)
    off, most = (x - y).abs(), y.abs()
    if within:
        off, most = off.amax(within, keepdim=True), most.amax(within, keepdim=True)
    if not bool((off <= tolerance * most).all()):
        return False
    x, y = x / most.clamp(min=1e-300), y / most.clamp(min=1e-300)
    scale = (x * y.conj()).sum() / (y * y.conj()).sum()
    bias = max(tolerance / math.sqrt(x.numel()), min(tolerance, _BIAS))
    return not bool(most.any()) or bool((scale - 1).abs() <= bias)


def _other_than(finite: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Which infinity stands where (1, -1), and where there is none of them, but no number (2)."""
    if x.is_complex():
        return torch.stack([_other_than(finite, x.real), _other_than(finite, x.imag)])
    kinds = x.isposinf() * 1 - x.isneginf() * 1 + x.isnan() * 2
    return torch.where(finite, 0, kinds)


def _tolerance(tensors: Sequence[torch.Tensor], device: torch.device) -> float:
    """How close results have to be that are made of these, by the coarsest numbers that they may have gone through."""
    kinds = {t.dtype for t in tensors}
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    coarsest = max((_CLOSE[kind] for kind in kinds if kind in _CLOSE), default=_CLOSE[torch.float32])
    try:
        tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # old and new ways to set it were mixed
        tf32 = True
    return max(coarsest, _CLOSE_TF32 if tf32 else 0)


@contextmanager
def _nothing_drawn(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Random generators are afterwards as before.

    Raises:
        Unpadded: they were moved on.
    """
    states = [(g, g.get_state()) for g in generators]
    moved = []
    try:
        yield
    finally:
        moved = [(g, state) for g, state in states if not torch.equal(g.get_state(), state)]
        for g, state in moved:
            g.set_state(state)
    if moved:
        raise Unpadded("draws random numbers", "draw them outside, and pass them as arguments")
