"""Host state that a capture may change, saved before it and restored if it fails.

It is: Python attributes and containers, tensors' memory and hooks (`Snapshot`), the packages' state, gradients (`Grads`),
settings and modes of torch, and random generators of Python, NumPy and torch. The device restores its own state, its generator
included.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from .._torch.dynamic import Foreign, Thing
from ..call.signature import modes
from ..call.signature import put_back as put_back_modes
from ..capture.python_events import users_elsewhere
from ..errors import Refusal
from ..guards.beyond import Beyond
from ..guards.reachable import Reach
from ..guards.snapshot import Snapshot
from ..python.putting_back import put_back
from ..slots.gradients import Grads
from ..state.rng import put

__all__ = ["host_draws_noted", "transaction"]


@contextmanager
def transaction(
    reach: Reach, beyond: Beyond, grads: Grads, device: torch.device
) -> Iterator[tuple[Snapshot, Callable[[], None]]]:  # fmt: skip
    """Restore the state that the block changed, if the block fails. Yields the snapshot, and what the block calls at its end,
    which refuses random numbers that were drawn on the host. (Raised where an `ExitStack` ends, an exception would be kept by
    that one's frame, with the whole capture.) The block captures a call on `device`."""
    host, drawn, snapshot, settings = _HostRandom(reach), _Generators(reach, device), Snapshot(reach), modes()
    torch.clear_autocast_cache()

    def end() -> None:
        drawn_on_host = host.used()
        host.restore()
        if drawn_on_host:
            raise _drawn_on_host(reach)
        if device.type != "cpu":
            drawn.refuse("cpu")

    try:
        yield snapshot, end
    except BaseException:
        modes_back = partial(put_back_modes, settings)
        put_back(snapshot.restore, beyond.restore, grads.restore, host.restore, drawn.restore, modes_back)
        raise
    finally:
        torch.clear_autocast_cache()


class _HostRandom:
    """States of Python's and NumPy's random generators before a block. Most draws from Python's generators are refused before
    they happen; this finds the others. NumPy's generators are advanced first, because code that seeds and then draws would
    leave the state of the call before. With `wanted` draws they are not advanced."""

    def __init__(self, reach: Reach, *, wanted: bool = False) -> None:
        self._python = [(r, r.getstate()) for r in (random._inst, *reach.host_rngs) if isinstance(r, random.Random)]
        numpy: object = sys.modules.get("numpy.random")
        legacy = [r for r in reach.host_rngs if hasattr(r, "get_state")] + ([numpy] if numpy is not None else [])
        self._legacy = [(r, r.get_state(legacy=False)) for r in legacy]
        bits: list[Foreign] = [getattr(r, "bit_generator", r) for r in reach.host_rngs]
        self._bits = [(b, b.state) for b in bits if hasattr(b, "random_raw")]
        for r, _ in self._legacy if not wanted else ():
            r.bytes(1)
        for b, _ in self._bits if not wanted else ():
            b.random_raw()
        self._moved = self._numpys()

    def _numpys(self) -> list[torch.Tensor]:
        return [r.get_state(legacy=False) for r, _ in self._legacy] + [b.state for b, _ in self._bits]

    def used(self) -> bool:
        """Whether some have moved on."""
        return bool(self._pythons()) or not all(map(_same_state, self._numpys(), self._moved))

    def _pythons(self) -> list[tuple[random.Random, Thing]]:
        """Those of Python's that have, unless another thread may have drawn from them."""
        alone = threading.active_count() == 1
        return [(r, state) for r, state in self._python if alone and r.getstate() != state]

    def restore(self) -> None:
        """Put back the states that have moved on."""
        for r, state in self._pythons():
            r.setstate(state)
        for r, state in self._legacy:
            r.set_state(state)
        for b, state in self._bits:
            b.state = state


@contextmanager
def host_draws_noted(reach: Reach, note: Callable[[Refusal], object]) -> Iterator[None]:
    """Note if the block has drawn from Python's or NumPy's generators, and let it."""
    host = _HostRandom(reach, wanted=True)
    yield
    if host.used():
        note(_drawn_on_host(reach))


def _drawn_on_host(reach: Reach) -> Refusal:
    return Refusal("draws random numbers on the host (random or numpy.random)",
                   "draw it outside and pass it as an argument, or use torch's generators", _draws_at(reach),
                   final=False)  # fmt: skip


class _Stood(NamedTuple):
    """Where a generator stood. On a GPU, whoever exchanges states gives it that of another (`graphsafe_set_state`): then it
    stood in its own, which both may have moved on."""

    generator: torch.Generator
    own: torch.Generator
    state: torch.Tensor

    @classmethod
    def of(cls, g: torch.Generator) -> _Stood:
        own = g.graphsafe_get_state() if g.device.type == "cuda" else g
        return cls(g, own, own.get_state())

    def moved(self) -> bool:
        return not torch.equal(self.own.get_state(), self.state)

    def put_back(self) -> None:
        if self.own is not self.generator:
            self.generator.graphsafe_set_state(self.own)
        if self.moved():
            put(self.own, self.state)


class _Generators:
    """Where torch's generators stand before a capture: the default ones of all devices, and those in reach. The GPU that
    captures puts its own back by itself."""

    def __init__(self, reach: Reach, device: torch.device) -> None:
        gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        every = dict.fromkeys((torch.default_generator, *gpus, *reach.generators))
        self._stood = [_Stood.of(g) for g in every if device.type == "cpu" or g.device != device]

    def refuse(self, kind: str) -> None:
        """Refuse a call that has moved those of this kind of device, of which the capture knows nothing."""
        if any(one.generator.device.type == kind and one.moved() for one in self._stood) and not users_elsewhere():
            raise Refusal("code of others draws random numbers on the CPU", "draw outside, and pass them as an argument")

    def restore(self) -> None:
        """Put them back, if it was no other thread that has moved them: what that has drawn is not to be drawn again."""
        if not users_elsewhere():
            for one in self._stood:
                one.put_back()


def _draws_at(reach: Reach) -> str:
    """Where the user's code calls a method of NumPy's generators: the line that reads most of their names; "" if several do."""
    kinds = (getattr(sys.modules.get("numpy.random"), kind, object) for kind in ("Generator", "RandomState"))
    names = {"random", *(name for kind in kinds for name in vars(kind) if not name.startswith("_"))}
    found = Counter(line for name in names & reach.mentions.names if (line := reach.mentions.read_at(name)))
    (first, most), (_, next_most) = [*found.most_common(2), ("", 0), ("", 0)][:2]
    return first if most > next_most else ""


def _same_state(a: object, b: Thing) -> bool:
    """Whether two states of a NumPy generator are equal: dictionaries of numbers and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_state(a[k], b[k]) for k in a)
    return bool(a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b)
