"""How processes end that have recordings which communicate. Run as one of two processes: `python -m tests.ends RANK BACKEND
FOLDER WAY...`. It imports what takes long, and forks a process for each way to end (`destroys:1 destroys:2` are the same way
twice). Writes `FOLDER/RANK.json`: how each has ended (a signal is a negative number), what it printed, how long it took, and
how long that was after its last step.

`start` starts pairs of such processes, several at once, and waits for them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import CALLS, _device, _numbers

BEGINNING, TIMEOUT = 60, 4  # seconds: of the process group at first, and then
PATIENCE = float(os.environ.get("ENDS_PATIENCE", "60"))  # seconds until a process is killed

Told = dict[str, Any]


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
    _last_step()
    return recorded


def _last_step() -> None:
    print("last step at", time.monotonic(), flush=True)


def destroys(rank: int) -> None:
    recorded = _trained()
    dist.destroy_process_group()
    del recorded


def leaves(rank: int) -> None:
    globals()["kept"] = _trained()


def in_a_cycle(rank: int) -> None:
    """Garbage that is not collected, when its group is destroyed."""
    gc.disable()
    circle: list[Any] = [_trained()]
    circle.append(circle)
    del circle
    dist.destroy_process_group()


def begins_anew(rank: int) -> None:
    """With another group, in the same process; then it ends with the recordings of that."""
    import phonograph as pg

    backend, recorded = dist.get_backend(), _trained()
    before = pg.stats(recorded)
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{_folder[0]}.anew", rank=rank, world_size=2,
                            timeout=timedelta(seconds=BEGINNING))  # fmt: skip
    for n in range(CALLS):
        x = _numbers(n, 4)
        assert recorded(x).equal(step(x))
    after = pg.stats(recorded)
    counts = (after.live - before.live, after.recorded - before.recorded, after.replayed - before.replayed)
    assert counts == (1, 1, CALLS - 1), pg.explain(recorded)
    _last_step()
    dist.destroy_process_group()


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
    from phonograph.distributed import watchdog

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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whom a shell has started in the background ignores it
    recorded = _trained()

    def interrupt() -> None:
        time.sleep(0.2 + 0.2 * rank)
        _last_step()
        while True:  # Python loses one that comes while a finalizer runs
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(3)

    threading.Thread(target=interrupt, daemon=True).start()
    while True:
        recorded(_numbers(0, 4))


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


_ABORTED = -signal.SIGABRT
# Where the other rank was interrupted before, gloo raises; and who waits for it in NCCL, in C++, cannot be interrupted.
_INTERRUPTED = (-signal.SIGINT, 1, _ABORTED)

WAYS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    way.__name__: (way, mine, other)
    for way, mine, other in (
        (destroys, (0,), (0,)),
        (leaves, (0,), (0,)),
        (in_a_cycle, (0,), (0,)),
        (begins_anew, (0,), (0,)),
        (exits_in_a_step, (3,), (3,)),
        (raises_in_a_step, (1,), (1,)),
        (raises_on_one_rank, (1, _ABORTED), (1,)),
        (dies_on_one_rank, (_ABORTED,), (-signal.SIGKILL,)),
        (is_interrupted, _INTERRUPTED, _INTERRUPTED),
    )
}
"""What a process does, and with which status rank 0, and rank 1, may end."""

_NOISE = re.compile(r"CUDA error|NCCL (?:error|WARN)|NCCLUtils|terminate called|phonograph: |Fatal Python error")


def as_text(told: Sequence[Told]) -> str:
    """How both ranks have ended, and what they said last."""
    return "\n".join(
        f"rank {rank} has ended with {one.get('status')}:\n{one.get('log', '')[-2500:]}" for rank, one in enumerate(told)
    )


def is_as_it_should_be(way: str, told: Sequence[Told]) -> bool:
    """Whether both ranks have ended with the statuses that eager has. Who has ended by itself has left no message of CUDA's,
    NCCL's or the watchdog's."""
    expected = WAYS[way.partition(":")[0]][1:]
    return all(
        one.get("status") in statuses and (one["status"] == _ABORTED or not _NOISE.search(one["log"]))
        for one, statuses in zip(told, expected, strict=True)
    )


_folder: list[str] = []


def _end(way: str, rank: int, backend: str, folder: Path) -> None:
    _folder[:] = [f"{folder}/{way}"]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it goes with the process that has forked it
    with (folder / f"{way}.{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/{way}.store", rank=rank, world_size=2,
                            timeout=timedelta(seconds=BEGINNING))  # fmt: skip
    WAYS[way.partition(":")[0]][0](rank)


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
    os.kill(child, signal.SIGUSR1)  # it tells where it is
    time.sleep(0.5)
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
        ended, log = time.monotonic(), (folder / f"{way}.{rank}.log").read_text()
        last = re.findall(r"last step at ([\d.]+)", log)
        after = ended - float(last[-1]) if last else None
        found[way] = {"status": status, "seconds": seconds, "after": after, "log": log[-6000:]}
        (folder / f"{rank}.part").write_text(json.dumps(found))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")  # whole for who reads it meanwhile


def start(
    backend: str, ways: Sequence[str], at_once: int = 1, **environment: str
) -> Iterator[tuple[str, tuple[Told, Told]]]:  # fmt: skip
    """What both ranks have told of each way, as soon as a pair of processes has been through it."""
    environment = {"NCCL_MAX_NCHANNELS": "1", **environment}  # several pairs at once begin, and need no speed
    parts = [part for n in range(at_once) if (part := ways[n::at_once])]
    with tempfile.TemporaryDirectory(prefix="phonograph-ends-") as name, ThreadPoolExecutor(len(parts)) as pool:
        folders = [Path(name, str(n)) for n in range(len(parts))]
        pairs = [
            pool.submit(ranks.start, backend, folder, part, "tests.ends", (PATIENCE + 5) * len(part), **environment)
            for folder, part in zip(folders, parts, strict=True)
        ]
        left = {way: folder for folder, part in zip(folders, parts, strict=True) for way in part}
        while left:
            over = all(pair.done() for pair in pairs)
            for way, (mine, other) in _told(left).items():
                del left[way]
                yield way, (mine, other)
            if over:
                break
            time.sleep(0.2)
        for part, pair in zip(parts, pairs, strict=True):
            mine, other = pair.result()
            missing = {"status": "did not begin", "log": f"{mine['log']}\n{other['log']}"}
            yield from ((way, (mine.get(way, missing), other.get(way, missing))) for way in part if way in left)


def _told(ways: dict[str, Path]) -> dict[str, tuple[Told, Told]]:
    """Of those ways, each with its folder, those that both ranks have been through."""
    files = {folder: [folder / f"{rank}.json" for rank in range(2)] for folder in ways.values()}
    both = {folder: [json.loads(f.read_text()) if f.exists() else {} for f in pair] for folder, pair in files.items()}
    return {
        way: (both[folder][0][way], both[folder][1][way])
        for way, folder in ways.items()
        if way in both[folder][0] and way in both[folder][1]
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*WAYS])
