"""Gradients that a call finds in another place each time, as a GAN's discriminator does: the generator's backward adds to what
its last step has left, `zero_grad()` drops that, and its next backward makes new ones.

A graph reads fixed addresses. So each such gradient has a slot, as an argument has: a replay copies into it what stands in
`p.grad`, and back what the call has written into a gradient that it leaves there.

What a slot stands for must be found in no other way, or the call might write it there and read it elsewhere. So nobody else may
have such a gradient when a replay begins: but the recording that has made it, which knows whether somebody has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from .._torch.dynamic import Thing
from .._torch.tensors import copy_all, has_memory, storage_id
from ..errors import Refusal
from ..guards.attribute_epochs import gradient, nobody_has
from ..guards.tensor_states import alike, hook_values
from ..python.identity import identity
from ..values.tensor_subclasses import storages

__all__ = ["FedGradients", "Maker", "hands_on", "made_by"]


class Maker(Protocol):
    """Of gradients: a recording, which has them as well."""

    def alone(self) -> bool: ...


_makers: weakref.WeakValueDictionary[int, Maker] = weakref.WeakValueDictionary()


def made_by(maker: Maker, created: Sequence[torch.Tensor]) -> None:
    """These were, and it has them for as long as it is there."""
    _makers.update({identity(g): maker for g in created})


def hands_on() -> Refusal:
    """A gradient that was found would be there by another name, or with more than its values."""
    return Refusal("hands on a gradient that an earlier call has left", "clone it")


class FedGradients:
    """Those of some parameters, for one recording."""

    def __init__(self, parameters: Sequence[torch.Tensor], within: FedGradients | None = None) -> None:
        """Of those parameters that have such a gradient now; with the same slots as `within` another."""
        there: dict[int, torch.Tensor] = {} if within is None else within._slots
        may = [p for p in parameters if _may_be_fed(p)]
        makers, others = _makers_of(may)
        apart = {identity(p) for p in others if not _are_nobodys([*map(gradient, [p])])}
        apart |= {key for maker, keys in makers if not maker.alone() for key in keys}
        self._owners = [p for p in may if identity(p) not in apart]
        self._slots: dict[int, torch.Tensor] = {identity(p): there.get(identity(p), _slot(gradient(p))) for p in self._owners}
        self.storages = {*map(storage_id, self._slots.values())}
        # Those whose gradients the call reads, and those in whose gradients it leaves something.
        self._read, self._left = list[torch.Tensor](), list[torch.Tensor]()
        self._read_slots, self._left_slots = list[torch.Tensor](), list[torch.Tensor]()
        self._are_such: Callable[[list[torch.Tensor]], bool] = bool

    def slot(self, p: torch.Tensor) -> torch.Tensor | None:
        return self._slots.get(identity(p))

    def stand(self) -> None:
        """Let the slots stand where the gradients do, with the same in them."""
        with torch.no_grad():
            for p in self._owners:
                slot, found = self._slots[identity(p)], gradient(p)
                if found is not None and slot is not found:
                    slot.copy_(found)
                    p.grad = slot

    def check(self, left: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """The call has `left` these gradients.

        Raises:
            Refusal: a slot is found elsewhere than in its place, or with what a gradient has not that is copied.
        """
        for p, g in left:
            if g is not None and g is not self.slot(p) and not self.storages.isdisjoint(storages(g)):
                raise hands_on()
        for slot in self._slots.values():
            if storage_id(slot) not in self.storages or slot.__dict__ or hook_values(slot):
                raise hands_on()

    def settle(self, p: torch.Tensor, leaves: bool) -> None:
        """The call reads the gradient of this parameter, and perhaps `leaves` it there with something else in it."""
        slot = self._slots[identity(p)]
        self._read.append(p)
        self._read_slots.append(slot)
        if leaves:
            self._left.append(p)
            self._left_slots.append(slot)

    def seal(self) -> bool:
        """The call has been captured: what a replay has to find is like the slots. Returns whether it reads any."""
        self._are_such = alike(self._read_slots)
        return bool(self._read)

    @property
    def writes(self) -> bool:
        return bool(self._left)

    def fit(self) -> bool:
        """Whether the gradients are such as the call has to find, and nobody else has one."""
        found = [*map(gradient, self._read)]
        if any(g is None for g in found) or not self._are_such(found):
            return False
        del found
        makers, others = _makers_of(self._read)
        return all(maker.alone() for maker, _ in makers) and _are_nobodys([*map(gradient, others)])

    def feed(self, found: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Before a replay, with the gradients that it has found."""
        with torch.no_grad():
            copy_all(self._read_slots, [*map(found, self._read)])

    def take(self) -> None:
        """After a replay."""
        if self._left:
            with torch.no_grad():
                copy_all([*map(gradient, self._left)], self._left_slots)


def _may_be_fed(p: torch.Tensor) -> bool:
    """Whether its gradient, if there is one, is plain memory, all of it."""
    g = gradient(p)
    if type(g) is not torch.Tensor or not has_memory(g) or g.untyped_storage().nbytes() != g.nbytes:
        return False
    odd = g.is_conj() or g.is_neg() or g.is_inference() or g.requires_grad
    return not odd and not g.__dict__ and not hook_values(g)


def _are_nobodys(found: Sequence[torch.Tensor]) -> bool:
    """Whether nobody else has one of these gradients, just read, or memory of one. (What lies where another library has put it,
    others may lie on that do not refer to this storage.)"""
    return nobody_has(found) and all(map(torch.UntypedStorage.resizable, map(torch.Tensor.untyped_storage, found)))


def _slot(g: Thing) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device=g.device)


def _makers_of(parameters: Sequence[torch.Tensor]) -> tuple[list[tuple[Maker, list[int]]], list[torch.Tensor]]:
    """Who has made their gradients, each once, with the identities of the parameters; and those whose gradients nobody is known
    to have made."""
    makers, others = dict[int, tuple[Maker, list[int]]](), list[torch.Tensor]()
    for p in parameters:
        maker = _makers.get(identity(gradient(p)))
        if maker is None:
            others.append(p)
        else:
            makers.setdefault(identity(maker), (maker, []))[1].append(identity(p))
    return [*makers.values()], others
