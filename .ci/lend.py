"""Give an environment what an installed package needs, and nothing else: hard links to the files that pip has installed here.

    python .ci/lend.py PACKAGE SITE_PACKAGES

torch alone is several GB: it need not be unpacked twice to see that a wheel works beside what it asks for.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def needed(package: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """The names of what a package with these extras asks for, of what those ask for, and so on."""
    for text in distribution(package).requires or ():
        wanted = Requirement(text)
        one = (wanted.name, frozenset(wanted.extras))
        applies = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras | {""})
        if applies and one not in seen:
            seen.add(one)
            yield wanted.name
            yield from needed(*one, seen)


def lend(package: str, site: Path) -> None:
    """Link a package's files; its commands, which lie elsewhere and name this environment, are left out."""
    for file in distribution(package).files or ():
        if ".." in file.parts or not file.locate().exists():
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.locate(), target)
        except OSError:  # on another disk
            shutil.copy2(file.locate(), target)


if __name__ == "__main__":
    root, site = sys.argv[1], Path(sys.argv[2])
    for name in sorted(set(needed(root, frozenset(), set()))):
        lend(name, site)
