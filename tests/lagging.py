"""Streams that lag behind: work that is not ordered comes too late, and shows as a wrong value.

    PYTHONPATH=src python -m pytest -p phonograph.pytest_plugin -p tests.lagging -k cuda tests

What runs on two streams without waiting for each other mostly goes well, because the GPU is faster than Python. Here every
stream that phonograph works on is kept busy for a while around warm-ups, captures and replays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phonograph.devices.cuda import driver
from phonograph.devices.cuda.capture_stream import CaptureStream

CYCLES = 300_000  # about 0.2 ms

_on, _enter = CaptureStream.on, CaptureStream.enter
_turn = 0


def lag(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        if not driver.is_capturing(stream.cuda_stream):
            torch.cuda._sleep(CYCLES)


@contextmanager
def on(self: CaptureStream) -> Iterator[None]:
    with _on(self):
        lag(self.stream)
        yield
        lag(self.stream)


def enter(self: CaptureStream) -> None:
    """Every other time the stream that the replay runs on is late, else all others are."""
    global _turn
    _turn += 1
    _enter(self)
    current = torch.cuda.current_stream(self.torch_device)
    for stream in {current, self.stream, *self.joined}:
        if (stream == current) == bool(_turn % 2):
            lag(stream)


CaptureStream.on = on  # type: ignore[method-assign]
CaptureStream.enter = enter  # type: ignore[method-assign]
