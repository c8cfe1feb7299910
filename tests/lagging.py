"""Streams that lag behind: work that is not ordered comes too late, and shows as a wrong value.

    PYTHONPATH=src python -m pytest -p phonograph.pytest_plugin -p tests.lagging -k cuda tests

What runs on two streams without waiting for each other mostly goes well, because the GPU is faster than Python. Here every
stream that phonograph works on is kept busy for a while around warm-ups, captures and replays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phonograph.devices.cuda import driver
from phonograph.devices.cuda.device import CudaDevice

CYCLES = 300_000  # about 0.2 ms

_on_stream, _enter = CudaDevice._on_stream, CudaDevice.enter
_turn = 0


def lag(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        if not driver.is_capturing(stream.cuda_stream):
            torch.cuda._sleep(CYCLES)


@contextmanager
def on_stream(self: CudaDevice) -> Iterator[None]:
    with _on_stream(self):
        lag(self._stream)
        yield
        lag(self._stream)


def enter(self: CudaDevice) -> None:
    """Every other time the stream that the replay runs on is late, else all others are."""
    global _turn
    _turn += 1
    _enter(self)
    current = torch.cuda.current_stream(self.torch_device)
    for stream in {current, self._stream, *self._joined}:
        if (stream == current) == bool(_turn % 2):
            lag(stream)


CudaDevice._on_stream = on_stream  # type: ignore[method-assign]
CudaDevice.enter = enter  # type: ignore[method-assign]
