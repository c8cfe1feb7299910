"""Making a recording: a transaction.

    look   what can the function reach?                         reach.py
    guard  note everything that a capture may disturb            Transaction
    dry    capture the call on the device                        devices/
    judge  did Python code have effects? is every output one that a replay can hand out?
    settle plan outputs, take part in the pool

If anything fails, the transaction puts back what it noted: Python attributes and containers, `.grad`, random states,
optimizers' settings. The caller then runs the function live, which is the only run with effects; the exception of a
failed capture never reaches the user, because if the function itself is at fault the live run raises the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import outputs
from .errors import Refusal
from .optimizers import recordable
from .pool import Lease, Pool, unowned
from .reach import Reach
from .recording import Recording, Slot
from .reliance import Grads, Reliances, Snapshot
from .signature import Call
from .spans import Spans
from .trees import flatten, unflatten
from .watch import storage_id, watching_python

__all__ = ["record", "recording_now"]

_TAKING_TURNS = 2  # recordings of one signature that differ only in memory; a further one hands out copies
_ROOMY = 256 << 20  # bytes: up to here, recordings in each other's way get memory of their own

_recording: list[str] = []


def recording_now() -> str | None:
    """The name of the function that is being recorded at this moment, if any."""
    return _recording[-1] if _recording else None


def record(
    name: str, function: Callable[..., Any], call: Call, reach: Reach, device: Any, *, blocked: int = 0, borrow: bool = False
) -> Recording:
    """Capture this call and return its recording, not yet played.

    `blocked` recordings of the same signature could not be played, because outputs are held in their memory. Then this
    one keeps clear of every other recording in the pool, so that two can take turns; or, where that would cost too much
    memory or two were not enough, it hands out copies of its outputs and is in nobody's way again.

    Raises:
        Refusal: it cannot be recorded; everything is as before.
    """
    if reach.iterators:
        raise Refusal(f"uses an iterator ({reach.iterators[0]})", "take the next item outside and pass it as an argument")
    grads = Grads([t for _, t in reach.tensors.values()])
    protected, copies_out = _clearance(device.pool, blocked)
    with _transaction(reach, grads) as snapshot:
        borrowed = [device.pool.lease_of(t) is not None for t in call.tensors]
        arguments = [unowned(t) if b else t for t, b in zip(call.tensors, borrowed, strict=True)]
        parameters = {i for i, t in enumerate(call.tensors) if isinstance(t, torch.nn.Parameter)}
        arguments = [call.tensors[i] if i in parameters else t for i, t in enumerate(arguments)]
        fixed = [b or i in parameters for i, b in enumerate(borrowed)]
        captured = _capture(name, function, call, reach, device, grads, arguments, fixed, protected)
        changes = snapshot.changes()
        if changes:
            raise Refusal(f"changes {', '.join(changes[:3])}, which outlives the call",
                          "return the new value, or mark the part that changes it @pg.live", final=False)  # fmt: skip
        grads.settle(lambda g: storage_id(g) in captured.watch.touched)
        leases: dict[int, Lease] = {}
        plan = outputs.plan(captured, call, reach, grads, leases, device)
    written = captured.watch.written
    slots = tuple(
        Slot(final, borrowed=b, written=storage_id(used) in written)
        for used, final, b in zip(captured.used, captured.slots, fixed, strict=True)
    )
    _no_overlap(call, slots)
    leaves: list[Any] = []
    return Recording(
        name=name,
        key=call.key,
        device=device.torch_device,
        program=captured.program,
        slots=slots,
        shape=flatten(captured.result, leaves),
        outputs=plan,
        leases=() if borrow else tuple(leases.values()),
        footprint=captured.program.footprint,
        reliances=Reliances(reach, grads),
        written_outside=tuple(t for key, t in written.items() if key in captured.watch.outside and not t.is_inference()),
        like=outputs.skeleton(captured.result),
        copies_out=copies_out,
    )


def _clearance(pool: Pool, blocked: int) -> tuple[Spans, bool]:
    """Which addresses the new recording keeps clear of, and whether it hands out copies."""
    if not blocked:
        return pool.protected(), False
    if blocked < _TAKING_TURNS and pool.footprints().nbytes <= _ROOMY:
        return pool.footprints() | pool.protected(), False
    return pool.leased(), True


def _capture(
    name: str, function: Callable[..., Any], call: Call, reach: Reach, device: Any, grads: Grads,
    arguments: list[torch.Tensor], fixed: list[bool], protected: Spans,
) -> Any:  # fmt: skip
    outer = {id(x) for x in reach._keep}

    def run(slots: list[torch.Tensor]) -> Any:
        leaves = list(call.leaves)
        for place, slot in zip(call.places, slots, strict=True):
            leaves[place] = slot
        args, kwargs = unflatten(call.shape, iter(leaves), call.like)
        with watching_python(outer, device.frames_refused()) as refused:
            result = function(*args, **kwargs)
        if refused:
            raise refused[0]
        return result

    def leaving(result: Any) -> list[torch.Tensor]:
        leaves: list[Any] = []
        flatten(result, leaves)
        staying = {storage_id(g) for g in grads.read() if g is not None}
        return [x for x in leaves if isinstance(x, torch.Tensor) and _ordinary(x) and storage_id(x) not in staying]

    _recording.append(name)
    try:
        return device.capture(arguments, fixed, reach, run, leaving, protected)
    except Refusal:
        raise
    except Exception as e:
        first = str(e).strip().split("\n", 1)[0]
        raise Refusal(f"capture failed: {type(e).__name__}: {first}", where=_line_of(e), final=False) from e
    finally:
        _recording.pop()


def _ordinary(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter)


def _line_of(e: BaseException) -> str:
    from .where import is_users

    line, at = "", e.__traceback__
    while at is not None:
        if is_users(at.tb_frame.f_code.co_filename):
            line = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
        at = at.tb_next
    return line


def _no_overlap(call: Call, slots: tuple[Slot, ...]) -> None:
    """Separate slots cannot stand for arguments that share memory, if one of them is written."""
    ids = [storage_id(t) for t in call.tensors]
    for i, slot in enumerate(slots):
        if slot.written and ids.count(ids[i]) > 1:
            raise Refusal("writes an argument that shares memory with another argument", "pass separate tensors")


@contextmanager
def _transaction(reach: Reach, grads: Grads) -> Iterator[Snapshot]:
    host = _HostRandom(reach)
    torch.clear_autocast_cache()
    try:
        with recordable(reach.optimizers):
            snapshot = Snapshot(reach.holders)
            try:
                yield snapshot
            except BaseException:
                snapshot.restore()
                raise
        host.restore(changed="draws random numbers on the host (random or numpy.random)")
    except BaseException:
        grads.restore()
        host.restore()
        raise
    finally:
        torch.clear_autocast_cache()


class _HostRandom:
    """The states of Python's and NumPy's random generators, and of CPU generators, before a capture."""

    def __init__(self, reach: Reach) -> None:
        self._torch = torch.get_rng_state()
        self._python = [(r, r.getstate()) for r in (random._inst, *reach.host_rngs) if isinstance(r, random.Random)]  # type: ignore[attr-defined]
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random if numpy is not None and hasattr(numpy, "random") else None
        self._global = self._numpy.get_state() if self._numpy is not None else None
        self._generators = [(g.bit_generator, g.bit_generator.state) for g in reach.host_rngs if hasattr(g, "bit_generator")]

    def restore(self, changed: str | None = None) -> None:
        """Put the states back; with `changed`, raise that as a refusal if any had moved on."""
        moved = any(r.getstate() != s for r, s in self._python)
        moved = moved or any(str(b.state) != str(s) for b, s in self._generators)
        if self._numpy is not None:
            now = self._numpy.get_state()
            moved = moved or now[2] != self._global[2] or bool((now[1] != self._global[1]).any())  # type: ignore[index]
            self._numpy.set_state(self._global)
        for r, state in self._python:
            r.setstate(state)
        for bits, state in self._generators:
            bits.state = state
        torch.set_rng_state(self._torch)
        if moved and changed:
            raise Refusal(changed, "draw them outside and pass them as arguments, or use torch's generators")
