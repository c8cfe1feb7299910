"""The store that ranks share, by which they find each other when process groups are made. It is asked where ranks must know of
each other and nothing waits for it: when recordings are made, and where a replay takes too long. Never for a replay that goes
well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, TypeVar

from .._torch import process_groups as torch_process_groups

__all__ = ["Store", "ask"]

_PATIENCE = 2.0  # seconds

T = TypeVar("T")


class Store(Protocol):
    """A `torch.distributed.Store`, as it is asked here. (There is none in a torch without `distributed`.)"""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


def ask(call: Callable[[Store, int], T]) -> T | None:
    """What a call gives to which the store and the own rank are given; None where that cannot be had in time. (It is made on a
    thread of its own, whose calls are no part of a call that is recorded.)"""
    found: list[T] = []

    def work() -> None:
        with suppress(Exception):  # the rank that has the store may be the one that is missing
            found.append(call(torch_process_groups.default_store(), torch_process_groups.own_rank()))

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return found[0] if found else None
