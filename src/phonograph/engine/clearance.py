"""Where in the pool a capture works: the slots of its arguments, and the addresses of which it keeps clear."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..autograd.release import Release
from ..call.signature import Call
from ..capture.digest import NotNow
from ..capture.recording import memory_of
from ..devices.base import Device
from ..memory.pool import unowned
from ..memory.spans import Spans
from .capture_terms import Placement, Request

__all__ = ["Clearance", "Slots", "fed"]

_TAKING_TURNS = 2  # recordings of one signature that differ only in memory; a further one hands out copies


@dataclass(frozen=True)
class Slots:
    """The tensors with which a call is captured, one an argument."""

    arguments: list[torch.Tensor]
    fixed: list[bool]
    """Arguments that stay where they are, and are used as slots themselves."""
    shared: list[torch.Tensor | None]
    """Slots that are another recording's as well."""

    @classmethod
    def of(cls, request: Request) -> Slots:
        arguments, fixed = _arguments(request.call, request.device, in_place=request.whole)
        return cls(arguments, fixed, _shared(request.terms.placement, request.device, fixed))


def fed(call: Call, device: Device) -> list[torch.Tensor]:
    """The arguments that each replay will copy to a place of its own."""
    return [t for t, fixed in zip(call.tensors, _arguments(call, device, in_place=True)[1], strict=True) if not fixed]


def _arguments(call: Call, device: Device, in_place: bool) -> tuple[list[torch.Tensor], list[bool]]:
    """What the call's tensors are captured with, and which of them stay where they are: parameters, which are state and no
    input, and outputs of earlier recordings, which are read `in_place`. But where forwards wait for their backwards at the same
    time, arguments come from other recordings each time, and one recording that takes copies serves them all."""
    arguments, fixed = [], []
    for t in call.tensors:
        parameter, borrowed = isinstance(t, torch.nn.Parameter), in_place and device.pool.lease_of(t) is not None
        arguments.append(unowned(t) if borrowed and not parameter else t)
        fixed.append(borrowed or parameter)
    return arguments, fixed


def _shared(placement: Placement, device: Device, fixed: list[bool]) -> list[torch.Tensor | None]:
    """Slots that are another recording's as well: a slot is read in the very replay for which it was filled, so that forwards
    that wait for their backwards at the same time need only one. (What is kept of an argument is the argument.)"""
    if placement.within is not None:
        if fixed != [slot.borrowed for slot in placement.within.slots]:
            raise NotNow
        return [None if slot.borrowed else slot.tensor for slot in placement.within.slots]
    sibling = placement.sibling
    if sibling is None or not placement.turns or placement.apart or sibling.spoiled:
        return [None] * len(fixed)
    leased = device.pool.leased()
    return [
        slot.tensor if not (f or slot.borrowed or leased.meets(*memory_of(slot.tensor))) else None
        for slot, f in zip(sibling.slots, fixed, strict=True)
    ]


@dataclass(frozen=True)
class Clearance:
    """The memory of which a new recording keeps clear.

    Sharing memory saves it, at the price that a held output of one recording may be in another's way. While there is room,
    recordings are kept apart altogether. When it is scarce only what is held counts as taken; and where that led to a recording
    being in its own way, the new one keeps clear of every output and never holds one itself. One that is made because another
    has left a tensor in the memory of its predecessor, or hands one out there, keeps `apart` from all: so functions that take
    turns are in nobody's way after one more recording each. A backward may have `room` where its forward works; nothing else
    is there when it runs.

    Forwards that wait for their backwards at the same time take `turns`, in an order that is not known yet: each keeps clear of
    all others. Their backwards share what none of them hands out, and hand out copies, because gradients are held for long.
    """

    protected: Spans
    """Addresses that are taken."""
    copies: bool
    """All results are copied out by each replay."""
    release: Release | None
    """Gives saved tensors back to a backward that has read them."""

    @classmethod
    def of(cls, request: Request) -> Clearance:
        pool, placement, backward = request.device.pool, request.terms.placement, request.backward
        taken, turns = pool.footprints(), placement.turns or pool.takes_turns
        one_of_many = turns and backward is not None
        release = None
        if backward is not None and not (placement.apart or placement.blocked):
            room = backward.forward.room
            if room is not None and not turns:
                taken -= room
            if backward.last and (room is not None or turns) and not request.terms.concessions.retain:
                release = Release(backward.saved.releasable)
        everything = taken | pool.protected()
        if placement.within is not None:
            return cls(everything - placement.within.footprint, False, None)
        roomy = pool.footprints().nbytes <= request.device.roomy
        if placement.apart or (roomy and placement.blocked < _TAKING_TURNS):
            return cls(everything, one_of_many, release)
        if request.tracing is not None and (placement.blocked or turns):
            return cls(everything, True, release)
        if one_of_many:
            return cls(pool.leased(), True, release)
        return cls(pool.leased(), True, None) if placement.blocked else cls(pool.protected(), False, release)
