"""Which values may stand for each other; what is put back."""

import pytest

from phonograph.guards.reachable import Reach
from phonograph.guards.sameness import equal
from phonograph.guards.snapshot import Snapshot
from phonograph.python.holders import kept


def test_values_of_two_kinds_are_not_equal():
    assert not equal((1, 2), 1.0)
    assert not equal((1, 2), (1, 2, 3))
    assert not equal((1, 2), [1, 2])
    assert not equal(1, 1.0)


def test_what_can_change_by_itself_stands_for_nothing_else():
    assert not equal([1], [1])
    assert not equal(([1],), ([1],))
    assert equal((1, "a"), (1, "a"))


def test_places_found_later_that_cannot_be_read():
    """All else is put back."""
    state = {"n": 1}
    snapshot = Snapshot(Reach([("state", state)]))
    state["n"] = 2
    with pytest.raises(ZeroDivisionError):
        snapshot.also([kept("one", lambda: (1,)), kept("other", lambda: (1 / 0,))])
    snapshot.restore()
    assert state == {"n": 1}
