"""Which of many places have changed, asked of the dictionaries that they lie in.

A dictionary says by its version whether anything in it may have changed (`python.dict_versions`), and one look tells of all of
them. Places that lie in none, or in one that does not tell in this release of Python, are read each time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from .._torch.dynamic import Table
from ..python.dict_versions import Versions, tell
from ..python.identity import identity
from .place import Read

__all__ = ["Told"]


class Told:
    """Reads of places, of which it says what has `moved`."""

    def __init__(self, reads: Iterable[Read]) -> None:
        self.silent = list[Read]()
        """Those that have to be read."""
        tables = dict[int, Table]()
        lying: defaultdict[int, list[Read]] = defaultdict(list)
        own = dict[int, Callable[[], Table]]()
        for read in reads:
            place = read.place
            inside = [*place.inside()] if place.inside is not None else []
            mine = place.own() if place.own is not None else None
            if not tell([*inside, *([] if mine is None else [mine])]) or not (inside or mine):
                self.silent.append(read)
                continue
            if place.own is not None:
                own[identity(mine)] = place.own
            for table in [*inside, *([] if mine is None else [mine])]:
                tables[identity(table)] = table
                lying[identity(table)].append(read)
        fixed = [i for i in tables if i not in own]
        self._reads = [lying[i] for i in (*fixed, *own)]
        self._versions = Versions([tables[i] for i in fixed], [*own.values()])

    def __len__(self) -> int:
        return len(self._reads) + len(self.silent)

    def moved(self) -> list[Read]:
        """The reads whose places hold something else by now."""
        found = [read for read in self.silent if read.changed]
        moved = self._versions.moved()
        for read in {identity(read): read for i in moved for read in self._reads[i]}.values():
            if read.changed:
                found.append(read)
        if moved and not found:
            self._versions.keep()
        return found
