"""C9, C11: a refusal ends with its cause. A flag that is switched off, a hook that is removed, a model that is evaluated: then
such calls are recorded. And an equal list, dictionary or set in place of another is no change."""

import phonograph as pg
from tests.helpers import counts

NOTICED = 16  # calls within which the end of a refusal is noticed, where not many values are in reach


def assert_ends(both, *args, within=NOTICED):
    """Assert that calls are replays after at most so many."""
    for _ in range(within):
        both(*args)
    before = counts(both)
    for _ in range(4):
        both(*args)
    live, recorded, replayed = counts(both)
    assert (live, recorded, replayed) == (before[0], before[1], before[2] + 4), pg.explain(both.recorded)
