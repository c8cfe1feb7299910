"""What is held where a recording of a forward works, and how that gets out of its way.

A recording that is made while memory is scarce may lie where older ones work. Mostly nobody holds what it hands out when they
are played. But gradients that are added up over several micro-batches stay while the next forward runs, and so does what a loop
keeps of its last evaluation. To record the forward once more, clear of that, does not help for long: its own backward lies
where the new one works, and so on at each step. So it is the younger that has to go: it is made once more, apart from all
others, and the older stays. Gradients that are held by then can be moved; a call that finds anything else in its way runs live.

(Not where several forwards of the same are in flight, as in a pipeline: its first step needs one recording for each anyway.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .._torch.tensors import use_count
from ..capture.recording import MEMORY
from ..memory.pool import copy_of
from ..python.identity import identity

if TYPE_CHECKING:
    from ..memory.pool import Lease, Pool
    from .player import Player

__all__ = ["cleared", "obstructing"]


def cleared(players: Sequence[Player]) -> bool:
    """Get what is held of others' out of the way of these. Whether they can be kept as they are: all of it comes from younger
    recordings, which are spoiled by this, or was moved, as gradients can be."""
    pool: Pool = players[0].pool
    owners = {lease.cdata: recording for recording in pool.recordings for lease in recording.leases}
    age = {identity(recording): i for i, recording in enumerate(pool.recordings)}
    grads = _gradients(pool)
    found = [(lease, owners.get(lease.cdata), player.recording) for player in players for lease in obstructing(player)]
    for lease, _, _ in found:
        _move(lease, grads)
    younger = {
        identity(owner): owner for _, owner, of in found if owner is not None and age[identity(owner)] > age[identity(of)]
    }
    fresh = {key: owner for key, owner in younger.items() if not owner.spoiled}
    for owner in fresh.values():
        owner.spoiled.append(MEMORY)
    return bool(found) and all(not lease.alive or identity(owner) in fresh for lease, owner, _ in found)


def obstructing(player: Player) -> list[Lease]:
    """What is held of others' where this one works."""
    recording = player.recording
    own = {lease.cdata for lease in recording.leases}
    met = [x for x in player.pool.leases if x.cdata not in own and recording.footprint.meets(x.address, x.nbytes)]
    return [lease for lease in met if lease.alive]


def _gradients(pool: Pool) -> dict[int, torch.Tensor]:
    """Those of all parameters of which a recorded backward has given gradients, by their storages."""
    backwards = [r.backward for r in pool.recordings if r.backward is not None]
    parameters = [p for backward in backwards for p in (*backward.graph.parameters, *backward.graph.reentrant)]
    grads = [p.grad for p in parameters if p.is_leaf and p.grad is not None]
    plain = [g for g in grads if type(g) is torch.Tensor and g.layout is torch.strided and not g.requires_grad]
    return {g.untyped_storage()._cdata: g for g in plain if not (g.is_conj() or g.is_neg())}


def _move(lease: Lease, grads: dict[int, torch.Tensor]) -> None:
    """Give a gradient memory of its own, if it is all that is held of this."""
    grad = grads.get(lease.cdata)
    if grad is not None and use_count(lease.cdata) == lease.own + 1:
        with torch.inference_mode(False), torch.no_grad():
            grad.data = copy_of(grad)
