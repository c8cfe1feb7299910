"""A pipeline's schedule, as a list of numbers: ``[1, 1, 2, 2, -2, -2, -1, -1]``.

``+c`` is a forward of model chunk c (counted from 1), ``-c`` the backward of the oldest forward of that chunk that still waits
for one. All chunks see the same micro-batches. This is the format of Transformer Engine's and Megatron's `_order`.

What it is good for here: how many forwards of a chunk wait for their backwards at the same time, at most. That is how many
recordings a layer of the chunk needs, however many micro-batches there are: the pool's one rule hands the recording of a
forward whose backward has run to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """A checked order. `layers` are the numbers of layers of each chunk; callables are numbered chunk by chunk."""

    layers: tuple[int, ...]
    microbatches: int
    in_flight: tuple[int, ...]
    """For each chunk: the most forwards that wait for their backwards at the same time."""
    takes_turns: bool
    """Whether there are several at any time, of all chunks together; or gradients, while other forwards run."""

    @classmethod
    def of(cls, order: Sequence[int], layers: int | Sequence[int] | None, callables: int) -> Schedule:
        """Check an order for so many callables.

        Raises:
            TypeError: an entry is no int. (Fractions, which ask for delayed weight gradients, are not known here.)
            ValueError: it is no schedule, or does not fit the number of callables.
        """
        if not all(type(c) is int for c in order):
            raise TypeError(f"_order must be a list of ints, chunk numbers from 1 and their negatives, not {order!r}")
        chunks = max(map(abs, order), default=0)
        counts = Counter(order)
        microbatches = counts[1]
        expected = {sign * c: microbatches for c in range(1, chunks + 1) for sign in (1, -1)}
        if not order or counts != expected:
            raise ValueError("_order must have the same number of forwards c and of backwards -c for each chunk c = 1, 2, …; "
                             f"it has {dict(counts)}")  # fmt: skip
        together = max(accumulate(1 if c > 0 else -1 for c in order))
        return cls(_layers(layers, chunks, callables), microbatches, tuple(_in_flight(order, chunks)),
                   together > 1 or microbatches > 1)  # fmt: skip

    def samples(self) -> Iterator[int]:
        """For each sample, the number of its callable: chunk by chunk, in these by micro-batch, in these by layer."""
        first = 0
        for layers in self.layers:
            for _ in range(self.microbatches):
                yield from range(first, first + layers)
            first += layers

    def needed(self) -> list[int]:
        """For each callable, how many of its forwards are in flight at most."""
        return [flying for flying, layers in zip(self.in_flight, self.layers, strict=True) for _ in range(layers)]


def _layers(layers: int | Sequence[int] | None, chunks: int, callables: int) -> tuple[int, ...]:
    if layers is None:
        if callables % chunks:
            raise ValueError(f"{callables} callables are not a whole number for each of the {chunks} chunks of _order: "
                             "give _num_layers_per_chunk")  # fmt: skip
        layers = callables // chunks
    each = (layers,) * chunks if isinstance(layers, int) else tuple(layers)
    if not all(type(n) is int for n in each):
        raise TypeError(f"_num_layers_per_chunk must be an int or a list of ints, not {layers!r}")
    if len(each) != chunks or min(each) < 1 or sum(each) != callables:
        raise ValueError(f"_num_layers_per_chunk is {list(each)}, for {callables} callables in the {chunks} chunks of _order")
    return each


def _in_flight(order: Sequence[int], chunks: int) -> Iterator[int]:
    for chunk in range(1, chunks + 1):
        flying = most = 0
        for step in order:
            flying += (step == chunk) - (step == -chunk)
            most = max(most, flying)
            if flying < 0:
                raise ValueError(f"_order has a backward of chunk {chunk} before its forward")
        yield most
