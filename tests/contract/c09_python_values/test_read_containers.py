"""C9: a container that the call reads is a value; only one to which it merely adds is not, though both lie in one object."""

import pytest

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp


class Holder:
    """Values that are read, and a log."""

    def __init__(self):
        self.held, self.table, self.log = [2.0, 3.0], {"a": 2.0, "b": 3.0}, []


def first(h):
    return h.held[0]


def last(h):
    return h.held[-1]


def summed(h):
    return sum(h.held)


def looped(h):
    total = 0.0
    for value in h.held:
        total += value
    return total


def unpacked(h):
    a, b = h.held
    return a - b


def named(h):
    held = h.held
    return held[0]


def length(h):
    return float(len(h.held))


def truth(h):
    return 2.0 if h.held else 3.0


def contained(h):
    return 2.0 if 2.0 in h.held else 3.0


def passed(h):
    return max(*h.held)


def sliced(h):
    return sum(h.held[:1])


def counted(h):
    return float(h.held.count(2.0))


def item(h):
    return h.table["a"]


def got(h):
    return h.table.get("a", 5.0)


def items(h):
    return sum(v for _, v in h.table.items())


def added_and_read(h):
    h.held.append(1.0)
    return h.held.pop() + h.held[0]


def set_and_read(h):
    h.table["c"] = h.table["a"]
    return h.table["c"]


READS = [first, last, summed, looped, unpacked, named, length, truth, contained, passed, sliced, counted, item, got, items,
         added_and_read, set_and_read]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_c09_containers_that_are_read(device, read, how):
    """What lies in them, and which they are, changes; the call logs its results in the same object."""
    ours, plain = Holder(), Holder()

    def step_of(h):
        def step(x):
            y = x * read(h)
            h.log.append(y)
            return y

        return step

    recorded, live = pg.record(step_of(ours), keep="always"), step_of(plain)
    for n in range(12):
        if n in (4, 8):
            for h in (ours, plain):
                if how == "replaced":
                    h.held, h.table = [5.0 + n, 7.0], {"a": 5.0 + n, "b": 7.0}
                else:
                    h.held[:], h.table["a"] = [5.0 + n, 9.0, 1.0][: 2 + (read is not unpacked)], 5.0 + n
        assert_same(recorded(ramp(device, 3, start=n)), live(ramp(device, 3, start=n)))
        assert_same([ours.held, ours.table, ours.log], [plain.held, plain.table, plain.log])
