"""What it takes to compare a recording with the code that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..autograd.saved_hooks import Tracing
from ..capture.digest import Digest
from ..capture.recording import Recording
from ..devices.base import Device
from ..guards.followed_numbers import Following
from ..guards.hyperparameters import Dials
from .capture_terms import Placement, Terms

__all__ = ["Retrace"]

_ARGUMENTS = -1  # where the spots of numbers among the arguments lie


@dataclass(frozen=True)
class Retrace:
    """Of one recording."""

    digest: Digest
    """Of the operators that the call called."""
    terms: Terms
    """On which it was captured in the end."""
    traced: bool
    """Autograd was followed."""
    spots: frozenset[tuple[int, object]]
    """The places of the numbers that it follows."""

    @classmethod
    def of(cls, digest: Digest | None, terms: Terms, dials: Dials) -> Retrace | None:
        """None without a digest."""
        if digest is None:
            return None
        kept = replace(terms, placement=Placement(borrow=terms.placement.borrow), tracing=None, following=None, digest=None)
        spots = frozenset(spot.at for spot in dials.spots if spot.at[0] != _ARGUMENTS)
        return cls(digest, kept, terms.tracing is not None, spots)

    def again(self, comparison: Callable[[], Digest], within: Recording, device: Device) -> Terms:
        """The same terms, for a capture that is only compared, in the memory of this recording."""
        placement = replace(self.terms.placement, within=within)
        tracing = Tracing(device.torch_device) if self.traced else None
        return replace(
            self.terms, placement=placement, tracing=tracing, following=Following.only(self.spots), digest=comparison,
            true_edges=False,
        )  # fmt: skip
