"""Which values may stand for each other."""

from phonograph.reliance import _equal


def test_values_of_two_kinds_are_not_equal():
    assert not _equal((1, 2), 1.0)
    assert not _equal((1, 2), (1, 2, 3))
    assert not _equal((1, 2), [1, 2])
    assert not _equal(1, 1.0)


def test_what_can_change_by_itself_stands_for_nothing_else():
    assert not _equal([1], [1])
    assert not _equal(([1],), ([1],))
    assert _equal((1, "a"), (1, "a"))
