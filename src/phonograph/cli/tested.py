"""Which releases of torch the tests were run with. It is told, and nothing is decided by it: what a torch can do is probed."""

from __future__ import annotations

import re

RELEASES = ("2.11.0", "2.13.0", "2.14.1")
"""Of torch, the oldest first, with which the tests have been run. The first is the floor that pyproject.toml sets; the one
that constraints.txt pins is among them."""


def compared(version: str) -> tuple[bool, str]:
    """Whether phonograph can be used with this release of torch, and what the tests say of it."""
    release, number = version.partition("+")[0], _number(version)
    tests = f"the tests were run with {', '.join(RELEASES[:-1])} and {RELEASES[-1]}"
    if release in RELEASES:
        return True, f"{tests}: this is one of them"
    if number and number[:2] < _number(RELEASES[0])[:2]:
        return False, f"phonograph needs torch {RELEASES[0]} or newer; {tests}"
    if number > _number(RELEASES[-1]):
        return True, f"{tests}: this is newer"
    return True, f"{tests}: this is none of them"


def _number(version: str) -> tuple[int, ...]:
    digits = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, digits[0].split("."))) if digits else ()
