"""A recording's table: what there is nothing to do for costs a replay nothing, and what is left twice is left once."""

import torch

import phonograph as pg


def table(function, *calls):
    """Of the recording that these calls make."""
    recorded = pg.record(function, keep="always")
    for x in calls:
        recorded(x)
    (player,) = recorded._shelf
    return player.recording.table


class Counted:
    def __init__(self):
        self.n, self.last = 0, None

    def step(self, x):
        self.n += 1
        self.last = x + 1
        return x * 2


def test_a_recording_that_only_gives_results_has_nothing_to_fill_or_to_leave():
    made = table(torch.sin, *[torch.randn(3)] * 3)
    assert (made.fill, made.leave) == (None, None)
    assert made.fits() is None
    assert next(made.explain()) == "slots: float32[3]"


def test_what_does_not_fit_is_named():
    made = table(torch.sin, *[torch.randn(3)] * 3)
    made.memories.lost.append("a process group")
    assert made.fits() == "a process group"
    assert not made.ready((torch.randn(3),))


def test_what_was_counted_is_not_counted_again():
    counted, x = Counted(), torch.randn(3)
    made = table(counted.step, x, x, x)
    n = counted.n
    made.publish((x,), None)
    assert counted.n == n
    made.fill((x,), None)
    for _ in range(2):
        made.leave((x,), None)
    assert counted.n == n + 1


def test_what_an_exception_has_broken_off_is_published_once():
    """Also where a later step fails the first time: each is run again, until it has succeeded."""
    counted, x, failing = Counted(), torch.randn(3), [MemoryError("injected")]
    made = table(counted.step, x, x, x)
    n = counted.n

    def fails_once():
        if failing:
            raise failing.pop()

    made._counts.append(fails_once)
    made.fill((x,), None)
    made.publish((x,), None)
    assert (counted.n, failing) == (n + 1, [])


def test_a_written_argument_is_all_that_is_left():
    def writes(x):
        x.add_(1)

    x = torch.zeros(3)
    made = table(writes, x, x, x)
    assert made.inputs.writes
    assert made.fill is None
    assert x.tolist() == [3.0] * 3
    assert "slots: float32[3] written" in [*made.explain()]
