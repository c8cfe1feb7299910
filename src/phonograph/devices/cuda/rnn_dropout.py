"""What cuDNN draws from for the dropout between the layers of its recurrent networks.

torch keeps a buffer of states for each device. Each use reads it and moves it on, in memory: so a captured use does the same
in each replay, and replays and live calls may follow each other in any order. What a replay would miss is that torch begins the
buffer anew, with a seed that it draws, at the first use after somebody has seeded the default generator. Nothing in Python
tells of that but what torch does next. So it is asked before each replay: a network of one layer, which draws nothing, is run
up to where torch would draw a seed, or hand the buffer to cuDNN. That takes about 60 us (H200) and launches nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FrameType

import torch

from ..._torch.dynamic import Args, Kwargs
from ..._torch.modes import TorchDispatchMode
from ..._torch.operators import OpOverload
from ...capture.recording import BEGINS_ANEW
from ...python.origin import is_ours
from ...state.rng import reset

__all__ = ["BUFFER", "Dropout", "begins_anew", "buffer_of", "draws", "forgotten"]

BUFFER = "what dropout of cuDNN's draws from"

_FORWARD, _BACKWARD = "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"
_BUFFERS = {_FORWARD: 15, _BACKWARD: 19}  # the places of the buffer among the arguments
_NETWORKS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def buffer_of(name: str, args: Args) -> torch.Tensor | None:
    """The buffer that an operator is given, if it is one of cuDNN's recurrent networks, and torch has made it by now."""
    place = _BUFFERS.get(name)
    return args[place] if place is not None and isinstance(args[place], torch.Tensor) else None


def draws(name: str, args: Sequence[object]) -> bool:
    """Whether this network draws from it: with a probability, in training."""
    return name == _FORWARD and bool(args[11] and args[12])


def begins_anew(name: str, args: Args, frame: FrameType | None) -> bool:
    """Whether an operator draws the seed for a new buffer. The code of `frame` has called what runs it."""
    if name != "aten::random_" or args[0].dim() or args[0].dtype is not torch.int64 or not args[0].is_cuda:
        return False
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    names = frozenset(frame.f_code.co_names) if frame is not None else frozenset[str]()
    return not _NETWORKS.isdisjoint(names) and "random_" not in names


class Dropout:
    """The buffer that a graph has captured. Where torch has begun another one since, that is copied to it before a launch, and
    back afterwards."""

    def __init__(self, captured: torch.Tensor, *, copied: bool) -> None:
        """With `copied` unset, another one cannot take its place."""
        self._own = self._now = captured
        self._copied = copied

    def amiss(self) -> str | None:
        """Why the graph cannot be launched now."""
        now = _asked(self._own.device.index)
        if now is None:
            return BEGINS_ANEW
        self._now = self._own if now.data_ptr() == self._own.data_ptr() else now
        return BUFFER if self._now is not self._own and not self._copied else None

    def fetch(self) -> None:
        if self._now is not self._own:
            self._own.copy_(self._now)

    def give_back(self) -> None:
        if self._now is not self._own:
            self._now.copy_(self._own)


def _asked(device: int) -> torch.Tensor | None:
    """The buffer that torch would hand to cuDNN now; None if it would begin a new one."""
    found = forgotten(device)
    if found is None:
        reset(torch.cuda.default_generators[device])
    return found


def forgotten(device: int) -> torch.Tensor | None:
    """The same, after which torch does not begin a new one: it takes the generator for one that was not seeded since."""
    asking, given = _question(device)
    asking.buffer = None
    try:
        with torch.no_grad(), asking:
            if torch.is_autocast_enabled("cuda"):
                with torch.autocast("cuda", enabled=False):
                    torch.lstm(*given)
            else:
                torch.lstm(*given)
    except _Begins:
        return None
    return asking.buffer


@functools.cache
def _question(device: int) -> tuple[_Asking, Args]:
    with torch.inference_mode(False):
        made = [torch.zeros(size, dtype=torch.float32, device=f"cuda:{device}") for size in ((1, 1, 1), (4, 1), (4, 1), 4, 4)]
    x, *weights = made
    asking = _Asking()  # type: ignore[no-untyped-call]
    return asking, (x, (x, x), weights, True, 1, 0.5, True, False, False)


class _Begins(Exception):
    """A seed would be drawn."""


class _Asking(TorchDispatchMode):
    """Lets a network run up to where it would do something."""

    buffer: torch.Tensor | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        if func is _RANDOM:
            raise _Begins
        if func is _NETWORK:
            self.buffer = args[_BUFFERS[_FORWARD]]
            return (args[0],) * 5
        return func(*args, **(kwargs or {}))


_RANDOM, _NETWORK = torch.ops.aten.random_.default, torch.ops.aten._cudnn_rnn.default
