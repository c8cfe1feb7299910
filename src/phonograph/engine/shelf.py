"""Recordings of one function by signature, in bounded number. The least recently played goes first, unless it is in use.

A signature may have several recordings. They differ in what they rely on (train and eval, two sets of weights), in the
memory that they overwrite (two that take turns serve a loop that keeps its last output), or in whether results are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..call.signature import Call, Key
from ..memory.spans import Spans
from ..slots.gradients import GRAD
from .known_calls import KnownCalls
from .player import Player

__all__ = ["Found", "Key", "Shelf"]


class Found:
    """Result of a look-up: a player, or the reason why there is none."""

    __slots__ = ("blocked", "broken", "player", "waiting")

    def __init__(self, player: Player | None, waiting: list[Player], broken: str | None) -> None:
        self.player = player
        self.waiting = waiting  # those that would fit but for held outputs in their way
        self.blocked = len(waiting)
        self.broken = broken  # what no longer holds, of a recording of this signature


class Shelf:
    """At most `limit` players, whose footprints together have at most `most` bytes. One player is kept in any case. `known`
    leads from calls to players without a description."""

    def __init__(self, limit: int, most: int | None = None) -> None:
        self.limit = limit
        self.most = most
        self.known = KnownCalls()
        self.gone: Callable[[Player], None] = lambda player: None
        """Is told of recordings that have to go."""
        self._by_key: dict[Key, list[Player]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Player]:
        return (p for players in self._by_key.values() for p in players)

    def find(self, call: Call) -> Found:
        """A recording of this call's signature that may be played now."""
        players = self._by_key.get(call.key, ())
        waiting, broken = list[Player](), None
        for player in players:
            player.take(call)
            now = player.broken()
            if now is not None:
                broken = now if broken != GRAD else broken  # gradients are asked for last: all else is as that one has it
            elif player.blocked(call):
                waiting.append(player)
            else:
                return Found(player, waiting, None)
        return Found(None, waiting, None if waiting else broken)

    def of(self, key: Key) -> list[Player]:
        """The recordings of a signature."""
        return self._by_key.get(key, [])

    def keys(self) -> list[Key]:
        """The signatures that have recordings."""
        return list(self._by_key)

    def has_room(self, since: int | None) -> bool:
        """Whether another signature has a place: a free one, or that of a recording which was not played since then (a number
        as in `Player.used`). Where more of them take turns than have a place, the oldest is the one that is needed next."""
        if len(self) < self.limit:
            return True
        return since is not None and min(map(self._last_use, self._by_key)) < since

    def _last_use(self, key: Key) -> int:
        return max(player.used for player in self._by_key[key])

    # -- what comes

    def add(self, key: Key, player: Player) -> None:
        """Put a recording on the shelf. Those go for which there is no room any more."""
        self.known.forget(key)
        players = self._by_key.setdefault(key, [])
        # One that copies its results may always be played, but those that need not copy come first. Of several that wait for
        # their backwards at the same time, each keeps clear of the older ones: in that order they are in nobody's way.
        last = player.recording.copied or player.recording.backward is not None
        players.insert(len(players) if last else 0, player)
        gone: list[Player] = []
        while len(self) > self.limit or (self.most is not None and len(self) > 1 and self._nbytes() > self.most):
            oldest = min(self._by_key, key=self._last_use)
            gone.append(min((p for p in self._by_key[oldest] if p is not player), key=lambda p: p.used))
            self._by_key[oldest].remove(gone[-1])
            if not self._by_key[oldest]:
                del self._by_key[oldest]
        self.close(gone)

    def _nbytes(self) -> int:
        return Spans(piece for player in self for piece in player.recording.footprint).nbytes

    def put_back(self, key: Key, players: list[Player]) -> None:
        """Put those back that were taken, in their order."""
        if players:
            self.known.forget(key)
            self._by_key.setdefault(key, []).extend(players)

    # -- what goes

    def take(self, key: Key) -> list[Player]:
        """Take all recordings of a signature off the shelf."""
        self.known.forget(key)
        return self._discard(key, lambda _: True)

    def drop(self, key: Key, unwanted: Callable[[Player], object]) -> int:
        """Close those recordings of a signature; how many there were."""
        gone = self._discard(key, unwanted)
        self.close(gone)
        return len(gone)

    def drop_all(self, unwanted: Callable[[Key], bool]) -> None:
        """Close all recordings of such signatures."""
        self.close([player for key in filter(unwanted, list(self._by_key)) for player in self._by_key.pop(key)])

    def clear(self) -> None:
        """Close all recordings."""
        gone = list(self)
        self._by_key.clear()
        self.known.clear()
        for player in gone:
            player.close()

    def _discard(self, key: Key, unwanted: Callable[[Player], object]) -> list[Player]:
        players = self._by_key.get(key, [])
        gone = [p for p in players if unwanted(p)]
        players[:] = [p for p in players if p not in gone]
        if gone and not players:
            del self._by_key[key]
        return gone

    def close(self, players: list[Player]) -> None:
        """Free what these take, which are not on the shelf any more."""
        for player in players:
            self.known.forget(player.recording.key)
            self.gone(player)
            player.close()
