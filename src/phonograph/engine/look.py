"""One live call under observation: everything in it that a capture would refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..aten.products import products_as_without_mode
from ..call.signature import Call
from ..capture.looking import LookingListener, LookingWatch, Seen
from ..capture.python_events import watching_python
from ..devices.class_indices import one_hot_checked
from ..devices.host_reads import AS_MEMORY, ITEM, LISTED, NUMBERS, READS, host_reads_refused, of_the_host, reads_value
from ..errors import Refusal
from ..guards.reachable import Reach
from ..python.identity import identity
from ..state.reentrancy import Nested
from ..values.keys import NoSignature
from .contained import Contained
from .describer import Describer
from .transaction import host_draws_noted

__all__ = ["Look", "look_at"]


@dataclass
class Look:
    """What was seen of a call."""

    seen: Sequence[Seen] = ()
    operators: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def pieces(self) -> list[int]:
        """How many operators there are between the things that were seen."""
        cuts = sorted({0, self.operators, *(one.after for one in self.seen)})
        return [b - a for a, b in pairwise(cuts) if b > a]


_ON_CPU = ((*READS, *NUMBERS, ITEM), reads_value)
_ON_GPU = ((*LISTED, *AS_MEMORY, ITEM, *NUMBERS), of_the_host)
_UNKNOWN = Call((), None, [], [], ())


def look_at(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], describer: Describer
) -> tuple[Any, Look]:
    """The result of a live call, and what was seen of it. Whatever the function raises it raises."""
    try:
        with Contained("looked at what the function can reach"):
            call = describer.describe((*args,), {**kwargs})
            reach = describer.reach(call)
            device = describer.device_of(call, reach, None)
    except (Refusal, NoSignature):  # which each call is told of
        given = [("an argument", x) for x in (*args, *kwargs.values())]
        call, reach, device = _UNKNOWN, Reach([("the function", function), *given]), _device_in(args, kwargs)
    watch = LookingWatch(device, reach, call)
    watch.outermost = sys._getframe().f_code

    def drawn(refusal: Refusal) -> None:
        if not any(one.refusal.reason.startswith("draws random numbers on the host") for one in watch.seen.values()):
            watch.seen[refusal.reason] = Seen(refusal, None, watch.operators)  # which knows its place

    outer = {identity(x) for x in reach.met}
    reads = _ON_CPU if device.type == "cpu" else _ON_GPU
    try:
        with (
            Nested(waits=True),
            watch,
            products_as_without_mode(),
            host_reads_refused(watch, *reads),
            one_hot_checked(watch),
            watching_python(outer, watch.frames(), reach.caching, _nothing, watch, LookingListener),
            host_draws_noted(reach, drawn),
        ):
            result = function(*args, **kwargs)
    finally:
        seen = sorted(watch.seen.values(), key=lambda one: one.after)
    return result, Look(seen, watch.operators, device)


def _nothing(_: Any) -> None:
    """Code that was not looked at before is no matter: nothing is concluded from what was."""


def _device_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return next((t.device for t in tensors), torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
