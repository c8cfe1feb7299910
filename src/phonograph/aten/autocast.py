"""Autocast, as a setting of the process and within operators.

Most of torch's own operators have their arguments cast before they run; what they do then is none of its business. Some are
called as they are, and what their code calls is cast: so are those that somebody else has made. But where a mode looks on that
is told of each operator, as in a capture, torch has autocast off below: there, it has to be put on again for such code.

In inference mode, torch shows a mode operators whole that it takes apart otherwise. Each is what was called: if it has its
arguments cast, it does so again, which changes nothing, and turns autocast off by itself. Elsewhere an operator may be a part
of one that has turned it off, and nobody tells: only those are called under autocast that are a part of no such operator.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import is_inference_mode_enabled

from .._torch.autograd import backward_id
from .._torch.dynamic import Args, Kwargs, Private, Reading
from .._torch.modes import autocast_is_on, following_views
from ..python.standing import exchanged
from .operators import CASTS, Meaning

__all__ = ["USED_WHEN_ON", "Casts", "autocast", "set_autocast"]

_KINDS = ("cpu", "cuda")
# On a GPU, autocast is off within `bilinear`, of which it is a part, and on again where the backward of that calls it.
_CASTS_ON_CPU = frozenset({"aten::_trilinear"})
_PART_OF_CAST = frozenset({"aten::linalg_pinv"})  # of `pinverse`, as well
_USUAL = torch.bfloat16, torch.float16, True
USED_WHEN_ON: tuple[Callable[[], object], ...] = (
    *(functools.partial(torch.get_autocast_dtype, kind) for kind in _KINDS), torch.is_autocast_cache_enabled
)  # fmt: skip
"""What code in the function that turns it on goes by: to be asked where it is off as well."""


def autocast() -> tuple[object, ...]:
    """Where it is on, with which types, and whether a weight that is used twice is cast once, so that its gradients are added
    up in that type. Empty where it is off, and these are as usual."""
    of_cpu, of_cuda, cached = used = tuple([get() for get in USED_WHEN_ON])
    if used == _USUAL and not autocast_is_on():
        return ()
    return tuple(zip(map(torch.is_autocast_enabled, _KINDS), (of_cpu, of_cuda), strict=True)), cached


def set_autocast(to: Reading) -> None:
    """Make it what `autocast` gave."""
    kinds, cached = to or (((False, _USUAL[0]), (False, _USUAL[1])), _USUAL[2])
    torch.set_autocast_cache_enabled(cached)
    for kind, (on, dtype) in zip(_KINDS, kinds, strict=True):
        torch.set_autocast_enabled(kind, on)
        if dtype is not None:
            torch.set_autocast_dtype(kind, dtype)


class Casts:
    """What autocast is within the operators of a call, while it is `following` that. From below, torch does not tell; so its
    contexts do, where they begin and end."""

    def __init__(self) -> None:
        self._outside: Reading = autocast()
        self._thread = threading.get_ident()
        self._regions: dict[int, list[Reading]] = {self._thread: []}  # by threads: autograd has its own
        self.ended = 0
        """How many contexts have ended that were in no other. With one of these goes what autocast has cast."""

    def keep(self) -> bool:
        """Whether a weight that is cast now is cast once for as long as autocast is on."""
        kinds, cached = self._here() or ((), False)
        return bool(cached) and any(enabled for enabled, _ in kinds)

    def within(self, m: Meaning) -> tuple[object, ...]:
        """As `autocast` says it, where this operator is called, if what it calls is cast. But no cast is kept: a replay would
        have that of what a weight was before."""
        if not (m.others or m.name in CASTS or (m.calls and is_inference_mode_enabled())):
            return ()
        found = self._here()
        if not found:
            return ()
        (of_cpu, of_cuda), _ = found
        if m.name in _CASTS_ON_CPU and backward_id() < 0:
            of_cuda = False, of_cuda[1]
        return (of_cpu, of_cuda), False

    def unclear(self, m: Meaning) -> bool:
        """Whether nobody tells if what this operator calls is cast."""
        if m.name not in _PART_OF_CAST or is_inference_mode_enabled():
            return False
        kinds, _ = self._here() or ((), False)
        return any(enabled for enabled, _ in kinds)

    def _here(self) -> Reading:
        regions = self._regions.get(threading.get_ident()) or self._regions[self._thread]
        return regions[-1] if regions else self._outside

    @contextmanager
    def following(self) -> Iterator[None]:
        """The call runs inside the block."""

        def heard(name: str, own: Callable[..., object]) -> Callable[..., object]:
            @functools.wraps(own)
            def begins(region: object) -> object:
                result = own(region)
                self._regions.setdefault(threading.get_ident(), []).append(autocast())
                return result

            @functools.wraps(own)
            def ends(region: object, *exception: object) -> object:
                regions = self._regions.get(threading.get_ident())
                if regions:
                    regions.pop()
                    self.ended += not regions
                return own(region, *exception)

            return begins if name == "__enter__" else ends

        with exchanged([(torch.amp.autocast_mode.autocast, name) for name in ("__enter__", "__exit__")], heard):
            yield

    @classmethod
    def called(cls, m: Meaning, then: tuple[object, ...], func: Callable[..., Private], args: Args, kwargs: Kwargs) -> Private:
        """What an operator gives that is called so."""
        if not then and not _goes_another_way(m):  # as most are
            return func(*args, **kwargs)
        with cls.as_called(m, then):
            return func(*args, **kwargs)

    @classmethod
    @contextmanager
    def as_called(cls, m: Meaning, then: tuple[object, ...]) -> Iterator[None]:
        """Inside the block what this operator calls goes its way as where no mode looks on, with autocast as it was `then`."""
        with following_views() if _goes_another_way(m) else nullcontext(), cls.restored(then) if then else nullcontext():
            yield

    @staticmethod
    @contextmanager
    def restored(then: tuple[object, ...]) -> Iterator[None]:
        """Inside the block it is as it was then."""
        now = autocast()
        if now == then:
            yield
            return
        set_autocast(then)
        try:
            yield
        finally:
            set_autocast(now)


def _goes_another_way(m: Meaning) -> bool:
    """Whether what an operator calls does not do all that it does where no mode looks on: views are not followed, and versions
    do not move on."""
    return m.one_by_one or (m.calls and is_inference_mode_enabled())
