"""The stream on which everything is captured, and the order between it and the streams of callers.

A capture needs a stream of its own. It is always the same one, because the allocator never reuses a block of one stream on
another. Replays go to the caller's stream instead: where results were given out on several, a replay waits for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..._torch.autograd import backward_id
from ..._torch.cuda import OnStream, current_device, raw_stream, wait_for
from ...values.device_names import named
from . import driver

__all__ = ["CaptureStream"]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the context current where the thread has not used CUDA yet
        return torch.cuda.ExternalStream(driver.new_stream(), device)


class CaptureStream:
    """The capture stream of one GPU, and the streams that it has met."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.index: int = torch_device.index
        self.stream = _new_stream(torch_device)
        self._last = -1  # the stream of the last replay
        self._last_stream = self.stream
        self.served: list[torch.cuda.Stream] = []  # those that results were given to, the user's mostly
        self.joined: list[torch.cuda.Stream] = []  # the user's, where nodes of autograd were made
        self.reads: list[torch.Tensor] = []  # what the backward of a warm-up call reads of others' memory
        self._streams = {self.stream.cuda_stream: self.stream}
        self._event = torch.cuda.Event()
        self._beside = _new_stream(torch_device)

    def is_current(self, streams: Sequence[torch.Stream]) -> bool:
        """Whether the current stream is one of these."""
        current = torch.cuda.current_stream(self.torch_device).stream_id
        return any(named(s.device) == self.torch_device and s.stream_id == current for s in streams)

    @property
    def is_here(self) -> bool:
        """Whether the capture stream is the current one."""
        return raw_stream(self.index) == self.stream.cuda_stream

    @contextmanager
    def on(self) -> Iterator[None]:
        """Work goes to the capture stream inside the block, after all that callers have given to theirs, and before what they
        give next."""
        with torch.cuda.device(self.index):
            outer = self._serve()
            for stream in (*self.served, *self.joined):
                self.stream.wait_stream(stream)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                outer.wait_stream(self.stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work goes to another stream inside the block, where it runs at once, also during a capture: after all that callers
        have given to theirs before."""
        with driver.unsafe_calls():
            for stream in (*self.served, *self.joined):
                if not driver.is_capturing(stream.cuda_stream):
                    wait_for(self._beside, stream)
            with torch.cuda.stream(self._beside):
                yield

    @property
    def apart(self) -> torch.cuda.Stream:
        """That stream."""
        return self._beside

    def in_turn(self) -> AbstractContextManager[object]:
        """The same for a capture of nothing. (One of somebody else's that is going on here must not hear of it.)"""
        return torch.cuda.stream(self.stream) if torch.cuda.is_current_stream_capturing() else self.on()

    def _serve(self) -> torch.cuda.Stream:
        """The current stream, on which something is going to be given out."""
        stream = raw_stream(self.index)
        if stream != self._last:
            self._last, self._last_stream = stream, self._current(stream)
            if self._last_stream not in self.served:
                self.served.append(self._last_stream)
        return self._last_stream

    def enter(self) -> None:
        joined = bool(self.joined or self.reads) and backward_id() >= 0
        if raw_stream(self.index) != self._last or len(self.served) > 1 or joined:
            self._wait_for_readers(joined)

    def _wait_for_readers(self, joined: bool) -> None:
        current = self._serve()
        others = list[torch.cuda.Stream]()
        if len(self.served) > 1:
            # A result is dropped as soon as what reads it is launched, and its memory may be what is written now.
            others += self.served
        if joined:
            # Likewise a gradient, on another stream of the backward; autograd waits for all of them only where it ends.
            others += (*self.joined, self.stream) if self.reads else self.joined
        for other in others:
            if other is not current:
                self._wait(current, other)

    def joining(self, lasting: bool, many: bool) -> AbstractContextManager[None]:
        """Where a capture's own nodes add up gradients, they do so on its stream. Where those are many, the backward is played
        there as well, or autograd would wait for the other stream at each."""
        users = self._current(raw_stream(self.index))
        for stream in (users, self.stream) if lasting else (users,):
            if stream not in self.joined:
                self.joined.append(stream)
        if not many:
            return nullcontext()
        return OnStream(self.stream) if current_device() == self.index else torch.cuda.stream(self.stream)

    def _current(self, stream: int) -> torch.cuda.Stream:
        """The current stream, which is `stream`."""
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = torch.cuda.current_stream(self.torch_device)
        return found

    def _wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """As `stream.wait_stream(other)`, which makes a new event each time."""
        self._event.record(other)
        self._event.wait(stream)
