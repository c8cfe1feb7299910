"""What padding makes of a call, and whether it shows: arguments with their padding, results without, and the trial.

A trial is for one recording and one kind of call. The recording is played, with zeros in the padding, and again with others
(NaN, very large, very small numbers), and so with other rows. All must agree bit by bit, and with the result of a live call row
by row within what another order of adding up explains. A replay must therefore do nothing besides giving results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from .._torch.dynamic import Args, Kwargs, Leaves
from .._torch.tensors import has_memory, storage_id
from ..call.signature import Call, describe
from ..capture.recording import Recording
from ..engine.output_kinds import Argument, Fresh, Leased, Viewed
from ..engine.player import Player
from ..engine.verify import equal, generators_in
from ..errors import Unpadded
from ..guards.reachable import Reach
from ..guards.sameness import same
from ..memory.loans import plain
from ..python.identity import identity
from ..state.rng import put
from ..values.pytree import flatten, unflatten

__all__ = ["Moulds", "Pad", "Pads", "cut", "gradients", "judged", "objection", "replaced", "with_zeros"]

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3,
          torch.complex128: 1e-9, torch.complex64: 1e-4}  # fmt: skip
"""How far a row of a padded call's result may be from the live one, over the largest value in that row: a matrix product of
another size adds up in another order."""
_CLOSE_TF32 = 2e-3
_BIAS = 5e-4  # as much may all results be off in one direction
_TRIALS = ((0, (0, math.nan, 0.5, -0.5)), (1, (0, -0.5)), (-1, (0, 0.5)))
"""What is played: rows, and with each what in the padding (see `_filled`)."""

_MASK = "mask what is padded, or leave it out of shapes"


class Pad(NamedTuple):
    """A dimension that has `size` and gets `to`; they may be equal."""

    dim: int
    size: int
    to: int


Pads: TypeAlias = Mapping[int | str, Sequence[Pad]]  # by position or name


class Mould(NamedTuple):
    """What a tensor of the result is in a live call of this very size."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int  # of its storage
    cut: tuple[int, ...]  # dimensions that are larger where it is padded

    @classmethod
    def of(cls, t: torch.Tensor, padded: torch.Tensor) -> Mould:
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


Moulds: TypeAlias = tuple[Mould | None, ...]  # for each leaf of the result; None: it is handed out as it is


class _Leaves:
    """A result, taken apart."""

    def __init__(self, result: object) -> None:
        self.leaves: Leaves = []
        self.shape = flatten(result, self.leaves)
        first: dict[int, int] = {}
        self.same = [first.setdefault(identity(x), i) if isinstance(x, torch.Tensor) else i for i, x in enumerate(self.leaves)]


# -- the trial


def judged(where: str, pads: Pads, call: Call, padded: Call, player: Player, reach: Reach, result: object) -> Moulds | None:
    """How results are to be cut of what this player plays. Such a call had that `result`, live; `where` says what is padded.
    None: that result cannot be told from another.

    Raises:
        Unpadded: what is padded shows in them.
    """
    before = player.played
    theirs = [t for t in (*call.tensors, *(t for _, t in reach.tensors.values())) if has_memory(t)]
    live = _Leaves(result)
    args, kwargs = padded.like
    moulds: Moulds | None = None
    if not all(map(_can_show, _padded(pads, args, kwargs))):
        return None
    own = player.recording.program.own_generators
    with _nothing_drawn([*generators_in(reach), *own] if player.recording.table.draws.some else ()):
        for rows, fills in _TRIALS:
            first: _Leaves | None = None
            for fill in fills:
                try:
                    other = describe(*replaced(pads, args, kwargs, partial(_filled, rows=rows, number=fill)))
                    played = player.play(other)[0]
                except Exception as e:
                    raise Unpadded(f"raises {type(e).__name__} where {where}", _MASK) from None
                finally:
                    player.played = max(before, 1)
                if moulds is None:
                    moulds = _moulds(where, pads, _Leaves(played), live, theirs)
                    if any(map(_tells_nothing, live.leaves)):
                        return None
                    _compare(where, _Leaves(cut(played, moulds)), live, moulds, _tolerance(theirs, player.recording.device))
                now = _Leaves(cut(played, moulds))
                del played  # the next one has its memory
                first = first or now
                if not all(map(equal, now.leaves, first.leaves)):
                    raise Unpadded(f"gives another result where {where} with other values", _MASK)
    assert moulds is not None
    return moulds


def _padded(pads: Pads, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    return [plain(kwargs[at] if isinstance(at, str) else args[at]) for at in pads]


def _can_show(t: torch.Tensor) -> bool:
    """Whether other rows and another padding can be made of an argument: of zeros, which may be indices, there can not."""
    return t.dtype is torch.bool or bool(t.any())


def _tells_nothing(leaf: object) -> bool:
    """Whether this is a tensor of zeros, which a wrong factor leaves alone, or has what is no number, and hides others."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return False
    return not bool(leaf.isfinite().all()) or not bool(leaf.any())


def gradients() -> Unpadded:
    return Unpadded("works with gradients, which padding would change", "call it under torch.no_grad()")


# -- what is padded


def replaced(
    pads: Pads, args: Args, kwargs: Kwargs, make: Callable[[torch.Tensor, Sequence[Pad]], torch.Tensor]
) -> tuple[Args, Kwargs]:
    """The arguments with others for those that are padded, and one for one that is given twice."""
    new_args, new_kwargs = list(args), dict(kwargs)
    made: dict[object, torch.Tensor] = {}
    for at, dims in pads.items():
        place: Any = new_kwargs if isinstance(at, str) else new_args
        key = identity(place[at]), tuple(dims)
        if key not in made:
            t = plain(place[at])
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                made[key] = make(t, dims)
        place[at] = made[key]
    return tuple(new_args), new_kwargs


def with_zeros(t: torch.Tensor, pads: Sequence[Pad]) -> torch.Tensor:
    """The tensor in its new size, with the same order of dimensions in memory, and zeros beyond its own numbers."""
    size, order = list(t.shape), sorted(range(t.dim()), key=t.stride, reverse=True)
    for pad in pads:
        size[pad.dim] = pad.to
    new = torch.empty_permuted(size, order, dtype=t.dtype, device=t.device).zero_()
    _own(new, pads).copy_(_own(t, pads))
    return new


def _filled(t: torch.Tensor, pads: Sequence[Pad], rows: int, number: float) -> torch.Tensor:
    """A padded tensor as it may be in other calls.

    Its rows: as they are (0), or floating-point numbers with their signs turned, integers all as large (1) or as small (-1) as
    some row has them, and truth values all true or false. Its padding: zeros, or this part of the largest number, or integers
    that some row has, because they may be indices.
    """
    new, own = t.clone(), _own(t, pads)
    dims = [pad.dim for pad in pads]
    if t.is_floating_point() or t.is_complex():
        other, filling = -own, t.new_full((), number * torch.finfo(t.dtype).max)
    else:
        high, low = own.amax(dims, keepdim=True), own.amin(dims, keepdim=True)
        if t.dtype is torch.bool:
            high, low = torch.ones_like(high), torch.zeros_like(low)
        other = high if rows > 0 else low
        first, second = (low, high) if number < 0 else (high, low)
        filling = torch.where(first != 0, first, second)
    for dim, size, to in pads if number != 0 else ():
        new.narrow(dim, size, to - size).copy_(filling)
    if rows:
        _own(new, pads).copy_(other)
    return new


def _own(t: torch.Tensor, pads: Sequence[Pad]) -> torch.Tensor:
    """That part of a padded tensor which is not padding."""
    for dim, size, to in pads:
        t = t.narrow(dim, 0, min(size, to))
    return t


# -- what comes back


def cut(result: object, moulds: Moulds) -> object:
    """A padded result in the size that it would have had."""
    leaves: Leaves = []
    shape = flatten(result, leaves)
    made: dict[int, torch.Tensor] = {}
    given = list(leaves)  # so that identities stay theirs
    for i, (mould, t) in enumerate(zip(moulds, given, strict=True)):
        if mould is not None:
            if identity(t) not in made:
                made[identity(t)] = mould.cast(plain(t))
            leaves[i] = made[identity(t)]
    return unflatten(shape, iter(leaves))


def objection(recording: Recording) -> Unpadded | None:
    """Why a recording is not played with padded arguments, whatever their values."""
    if recording.effects:
        return Unpadded(recording.effects, "do that outside, where it is to be padded")
    if recording.live_parts:
        return Unpadded("has operators that run live", "do what they do outside")
    if recording.backward is not None or any(o.attached or (isinstance(o, Fresh) and o.consumed) for o in recording.outputs):
        return gradients()
    leases = [identity(o.lease) for o in recording.outputs if isinstance(o, Leased)]
    views = any(isinstance(o, (Argument, Viewed)) or (isinstance(o, Fresh) and o.lazy is not None) for o in recording.outputs)
    if views or len(set(leases)) < len(leases):
        return Unpadded("returns an argument, or a view of one or of another result", "return a clone of it")
    return None


def _moulds(where: str, pads: Pads, padded: _Leaves, live: _Leaves, theirs: Sequence[torch.Tensor]) -> Moulds:
    """What the tensors of a padded result have to become.

    Raises:
        Unpadded: they cannot.
    """
    if (padded.shape, padded.same) != (live.shape, live.same):
        raise Unpadded(f"gives a result of another structure where {where}", _MASK)
    known = {(p.size, p.to) for p in itertools.chain(*pads.values())}
    moulds: list[Mould | None] = []
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
        moulds.append(Mould.of(wanted, t))
    return tuple(moulds)


def _stands_alone(t: torch.Tensor, used: set[int]) -> bool:
    """Whether this live result is a plain tensor with memory of its own, in which no two elements share a place. Notes that
    memory as used."""
    if type(t) is not torch.Tensor or not has_memory(t) or t.is_conj() or t.is_neg() or t.requires_grad:
        return False
    key, end = storage_id(t), 0
    free = key not in used or not t.untyped_storage().nbytes()
    used.add(key)
    for step, n in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        free = free and step > end
        end += step * (n - 1)
    return free and t.is_inference() == torch.is_inference_mode_enabled()


def _compare(where: str, now: _Leaves, live: _Leaves, moulds: Moulds, tolerance: float) -> None:
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
            put(g, state)
    if moved:
        raise Unpadded("draws random numbers", "draw them outside, and pass them as arguments")
