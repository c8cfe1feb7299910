"""Packed sequences: torch's recurrent layers read the sizes of their batches on the host, by no operator.

Which operators they run follows from these sizes, so a recording holds for the same sizes only. They are relied on where they
are the same in each replay (of lengths that nobody writes), and refused where they may be others. On a GPU, what lies on the
host is a constant anyway.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch

from .._torch.autograd import on_thread_of_autograds
from .._torch.dynamic import Args, Kwargs
from .._torch.operators import called_at
from ..capture.dispatch import OperatorWatch
from ..guards.followed_numbers import reader
from ..python.standing import exchanged

__all__ = ["sizes_relied_on"]

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "quantized_lstm", "quantized_gru")
_PADS = "_pad_packed_sequence"


@contextmanager
def sizes_relied_on(watch: OperatorWatch) -> Iterator[None]:
    """During the block, what reads such sizes is refused unless they are the same in each replay."""
    mine = threading.get_ident()

    def relying(name: str, _: str, run: Callable[..., object]) -> Callable[..., object]:
        @wraps(run)
        def rely(*args: Any, **kwargs: Any) -> object:
            sizes, concerned = _sizes(name, args, kwargs), threading.get_ident() == mine or on_thread_of_autograds()
            if sizes is not None and concerned and not watch.repeated:
                frame, said = reader(sys._getframe(1)), f"aten::{name}"
                if not watch.reads_fixed(said, [sizes], frame):
                    watch.refuse_read(watch.told(said, frame))
            return run(*args, **kwargs)

        return rely

    with ExitStack() as stack:
        for name in (*_LAYERS, _PADS):
            stack.enter_context(exchanged(called_at(name), partial(relying, name)))
        yield


def _sizes(name: str, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """The sizes of batches that such a function is given; None if its sequences are not packed."""
    found: Any = kwargs.get("batch_sizes", args[1] if len(args) > 1 else None)
    if "batch_sizes" not in kwargs and name not in (_PADS, "lstm", "quantized_lstm"):
        state = args[2] if len(args) > 2 else kwargs.get("hx")  # of what is not packed, the state comes second, then weights
        found = found if isinstance(state, torch.Tensor) else None
    return found if isinstance(found, torch.Tensor) else None
