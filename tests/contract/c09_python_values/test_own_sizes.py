"""C9: containers of the user's classes, which do not tell how many items they have, or raise where they are asked."""

import pytest

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import ramp, reasons


def _sizeless(kind):
    def untold(self):
        raise NotImplementedError

    return type("Sizeless", (kind,), {"__len__": untold, "__contains__": untold})


@pytest.mark.parametrize("kind", [tuple, frozenset, list, set])
def test_c09_a_container_whose_class_has_no_length(device, kind):
    class Layer:
        def __init__(self):
            self.of, self.scale = _sizeless(kind)((2, 3)), 2.0

        def __call__(self, x):
            return x * self.scale * next(kind.__iter__(self.of))

    layer = Layer()
    f = pg.record(lambda x: layer(x), keep="always")
    for n in range(1, 12):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 4.0)
    assert pg.stats(f).replayed >= 9, reasons(f)
    assert "phonograph itself failed" not in reasons(f)
    layer.of = _sizeless(kind)((5,))
    assert_same(f(ramp(device, 3)), ramp(device, 3) * 10.0)
