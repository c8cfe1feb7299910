"""How processes end that have recordings which communicate. Run as one of two processes: `python -m tests.ends RANK BACKEND
FOLDER WAY...`. It imports what takes long, and forks a process for each way to end (`destroys:1 destroys:2` are the same way
twice). Writes `FOLDER/RANK.json`: how each has ended (a signal is a negative number), what it printed, and how long it took.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import CALLS, _device, _numbers

BEGINNING, TIMEOUT, PATIENCE = 60, 4, 40  # seconds: of the process group at first, then, and until a process is killed


class _Never:
    """A mark that no device reaches: stands for a replay that waits for ever."""

    def put(self) -> None:
        pass

    def reached(self) -> bool:
        return False


def step(x, inside=None):
    y = x * 2
    dist.all_reduce(y)
    if inside is not None:
        inside()
    return y + 1


def _trained() -> Any:
    """A recorded function that communicates, called a few times."""
    import phonograph as pg

    recorded = pg.record(step)
    for n in range(CALLS):
        recorded(_numbers(n, 4))
    if dist.get_backend() == "nccl":
        assert pg.stats(recorded).replayed == CALLS - 1, pg.explain(recorded)
        torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has another name from torch 2.14 on
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
    return recorded


def destroys(rank: int) -> None:
    recorded = _trained()
    dist.destroy_process_group()
    del recorded


def leaves(rank: int) -> None:
    globals()["kept"] = _trained()


def exits_in_a_step(rank: int) -> None:
    _trained()(_numbers(0, 4), lambda: sys.exit(3))


def raises_in_a_step(rank: int) -> None:
    """On both ranks, where they are recorded: the second call with this signature."""
    calls: list[int] = []

    def inside() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("of the function's own")

    recorded = _trained()
    for n in range(2):
        recorded(_numbers(n, 4), inside)


def raises_on_one_rank(rank: int) -> None:
    """Rank 0 goes on, and waits for the other."""
    recorded = _trained()
    if rank:
        raise ArithmeticError("of this rank's own")
    recorded(_numbers(0, 4))
    _wait()


def dies_on_one_rank(rank: int) -> None:
    from phonograph import watchdog

    recorded = _trained()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_backend() == "nccl":
        recorded(_numbers(0, 4))
        _wait()
        return
    program = _Never()
    what = watchdog.Watched(_device(), {"all_reduce at train.py:3": 1}, [dist.group.WORLD.group_name], "step", made=2)
    watchdog.watch(program, what)
    watchdog.launches("cpu", _Never).note(what)
    time.sleep(PATIENCE)


def is_interrupted(rank: int) -> None:
    """Somewhere in its steps, one rank a little earlier."""
    recorded = _trained()

    def interrupt() -> None:
        time.sleep(0.2 + 0.2 * rank)
        while True:  # Python loses one that comes while a finalizer runs
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(3)

    threading.Thread(target=interrupt, daemon=True).start()
    while True:
        recorded(_numbers(0, 4))


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


WAYS = {way.__name__: way for way in (destroys, leaves, exits_in_a_step, raises_in_a_step, raises_on_one_rank, dies_on_one_rank,
                                      is_interrupted)}  # fmt: skip


def _end(way: str, rank: int, backend: str, folder: Path) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it goes with the process that has forked it
    with (folder / f"{way}.{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/{way}.store", rank=rank, world_size=2,
                            timeout=timedelta(seconds=BEGINNING))  # fmt: skip
    WAYS[way.partition(":")[0]](rank)


def _meet(folder: Path, way: str, rank: int) -> None:
    """Wait until the other rank is as far."""
    (folder / f"{way}.{rank}.here").touch()
    until = time.monotonic() + PATIENCE
    while not (folder / f"{way}.{1 - rank}.here").exists() and time.monotonic() < until:
        time.sleep(0.02)


def _awaited(child: int) -> tuple[Any, float]:
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "did not end", PATIENCE


def main(rank: int, backend: str, folder: Path, ways: list[str]) -> None:
    torch.set_num_threads(1)
    for module in ("torch._dynamo", "phonograph"):
        importlib.import_module(module)
    (folder / f"{rank}.ready").touch()
    found: dict[str, Any] = {}
    for way in ways:
        _meet(folder, way, rank)
        child = os.fork()
        if not child:
            _end(way, rank, backend, folder)
            return
        status, seconds = _awaited(child)
        found[way] = {"status": status, "seconds": seconds, "log": (folder / f"{way}.{rank}.log").read_text()[-6000:]}
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*WAYS])
