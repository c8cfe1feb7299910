"""Whether the ranks are alike in what decides how a captured collective is done: releases, and NCCL's settings for graphs.

When a process captures a collective for the first time, it says what it has in the process group's store, and gives the others
a second to do the same. Those who were not there by then are looked for again at later captures, without waiting, until all
have spoken. So there is nothing to ask in a replay. A rank that never records (`PHONOGRAPH=off`, a refusal) says nothing, and
need not: its live collectives are what they are in eager, see "Ranks that differ" in `docs/several-gpus.md`.

Each counts itself under what it has. So as long as all are alike a rank makes a few calls, however many ranks there are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from time import monotonic, sleep

import torch.distributed

from . import nccl
from .store import Store, ask

__all__ = ["forget", "own", "unlike"]

_ALL, _ALIKE, _SAID = "phonograph/alike/all", "phonograph/alike/as {}", "phonograph/alike/{}"
_PATIENCE, _PAUSE = 1.0, 0.01  # seconds
_SETTINGS = (nccl.REGISTERS, "NCCL_GRAPH_MIXING_SUPPORT")

_spoken: list[str] = []  # what this process has said
_found: list[str] = []  # what has come of it, when all had spoken


def own(nccl_release: tuple[int, ...]) -> dict[str, str]:
    """What this process has."""
    from ..version import __version__

    releases = {"phonograph": __version__, "torch": torch.__version__, "NCCL": ".".join(map(str, nccl_release))}
    return releases | {name: os.environ.get(name, "not set") for name in _SETTINGS}


def unlike(mine: Mapping[str, str]) -> str:
    """Who has something else than this rank, and what; "" if nobody who has spoken."""
    if not _found:
        return ask(lambda store, rank: _compared(store, rank, mine)) or ""
    return _found[0]


def forget() -> None:
    """The process group ends. In another one, ranks may be others."""
    _spoken.clear()
    _found.clear()


def _compared(store: Store, rank: int, mine: Mapping[str, str]) -> str:
    world, until, pause = torch.distributed.get_world_size(), monotonic(), _PAUSE
    if not _spoken:
        _spoken.append(json.dumps(mine, sort_keys=True))
        store.set(_SAID.format(rank), _spoken[0])
        store.add(_alike(), 1)
        store.add(_ALL, 1)
        until += _PATIENCE
    while (there := store.add(_ALL, 0)) < world and monotonic() < until:
        sleep(pause)
        pause = min(2 * pause, _PATIENCE / 4)
    said = "" if store.add(_alike(), 0) >= there else _difference(store, mine, world)
    if there >= world:
        _found.append(said)
    return said


def _alike() -> str:
    return _ALIKE.format(hashlib.sha256(_spoken[0].encode()).hexdigest()[:16])


def _difference(store: Store, mine: Mapping[str, str], world: int) -> str:
    for other in range(world):
        key = _SAID.format(other)
        theirs = json.loads(store.get(key)) if store.check([key]) else mine
        for name, value in mine.items():
            if theirs.get(name) != value:
                return f"rank {other} has {name} {theirs.get(name)}, this one {value}"
    return ""
