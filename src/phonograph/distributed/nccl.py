"""Settings and releases of NCCL under which collectives may be captured.

NCCL *registers* the memory of a captured collective, as if each piece were one allocation of the driver's. That is not so where
segments expand. And it may then choose another algorithm than for a live collective: ranks that do the same collective in
different ways would wait for each other for ever (with NVLink SHARP, or a tuner plugin; NCCL 2.28 to 2.30, `coll_reg.cc` and
`getAlgoInfo`). Without it, a captured collective is the very kernel that a live one is. NCCL looks at the setting when a
collective is captured for the first time in the process (as `NCCL_DEBUG=INFO` shows). So it is set to 0 before that, where
nobody has set it.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch.distributed

from .store import Store, ask

__all__ = ["ACROSS_HOSTS", "REGISTERS", "Obstacle", "obstacles", "register_nothing", "several_hosts"]

_KEY = "phonograph/hosts/{}"

REGISTERS = "NCCL_GRAPH_REGISTER"
ACROSS_HOSTS = (2, 30, 7)
"""From this release on, replays of several hosts are known not to wait for ever (vllm issue 52504: 2.28.9 did, over RoCE;
NVIDIA's notes on cuEST: 2.29.7 to 2.30.4 did, over InfiniBand)."""


class Obstacle(NamedTuple):
    """Why what communicates runs live here, and what to do."""

    name: str
    value: str
    why: str
    remedy: str


def obstacles(
    environment: Mapping[str, str], version: tuple[int, ...], expandable: bool = False, several_hosts: bool = False
) -> Iterator[Obstacle]:
    """All there are, where recordings would communicate by this release of NCCL."""
    if _is_set(environment.get("NCCL_GRAPH_MIXING_SUPPORT"), "0"):
        yield Obstacle("NCCL_GRAPH_MIXING_SUPPORT", "0", "by which no communicator may be used in graphs and out of them",
                       "unset it before the process group is made")  # fmt: skip
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if environment.get(name, "0").lower() in ("1", "y", "yes", "t", "true"):
            yield Obstacle(name, environment[name], "by which the host waits for each collective, which a replay cannot",
                           "unset it before the process group is made")  # fmt: skip
    if expandable and not _is_set(environment.get(REGISTERS), "0"):
        yield Obstacle(REGISTERS, environment.get(REGISTERS, "not set"),
                       "by which NCCL takes memory of expandable segments for one allocation each in a graph",
                       f"set {REGISTERS}=0 in the environment, before the process group is made")  # fmt: skip
    if several_hosts and version < ACROSS_HOSTS:
        known, needed = ".".join(map(str, version)), ".".join(map(str, ACROSS_HOSTS))
        yield Obstacle("NCCL", known, "whose replays across hosts can wait for each other for ever",
                       f"install NCCL {needed} or newer (pip install nvidia-nccl-cu13, or -cu12)")  # fmt: skip


def _is_set(value: str | None, to: str) -> bool:
    return value is not None and value.strip() == to


def register_nothing(environment: MutableMapping[str, str]) -> None:
    """Tell NCCL not to register the memory of captured collectives, unless somebody has decided that, or it has looked."""
    looked = _is_set(environment.get("NCCL_LOCAL_REGISTER"), "0")  # when the communicator was made
    if REGISTERS not in environment and not looked and not _decided():
        environment[REGISTERS] = "0"


def _decided() -> bool:
    """Whether NCCL's own files (`/etc/nccl.conf`) set it: they change the environment of C, which Python does not see."""
    with suppress(OSError, AttributeError):
        get = ctypes.CDLL(None).getenv
        get.argtypes, get.restype = [ctypes.c_char_p], ctypes.c_char_p
        return get(REGISTERS.encode()) is not None
    return False


def several_hosts() -> bool:
    """Whether the ranks are known to be on several hosts. Each asks the others once, by the store, where what has started them
    does not say."""
    if not torch.distributed.is_initialized():
        return False
    world, local = torch.distributed.get_world_size(), os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) < world if local.isdecimal() else _hosts_of(world) > 1


@cache
def _hosts_of(world: int) -> int:
    """How many hosts there are, as far as the ranks say within a second; 0 if not all do."""

    def exchange(store: Store, rank: int) -> int:
        store.set(_KEY.format(rank), _host())
        keys = [_KEY.format(other) for other in range(world)]
        store.wait(keys, timedelta(seconds=1))
        return len({store.get(key) for key in keys})

    return ask(exchange) or 0


def _host() -> str:
    """What NCCL knows a host by."""
    if own := os.environ.get("NCCL_HOSTID"):
        return own
    boot = Path("/proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{socket.gethostname()} {boot.read_text().strip()}"
    return socket.gethostname()
