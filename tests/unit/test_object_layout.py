"""How objects are taken apart."""

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from phonograph.values import object_layout


class Struct:
    """As an extension's: its objects are made in C, though the class shows no `__new__` of its own."""

    def __new__(cls, *values):
        if not values:
            raise TypeError("object.__new__(Struct) is not safe, use Struct.__new__()")
        return object.__new__(cls)

    def __init__(self, scale):
        self.scale = scale


def test_what_an_extension_makes_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does looking at it fail: a call that is given such an object (of msgspec, say) runs live, and says why."""
    monkeypatch.setattr(object_layout, "_MAKES", (*object_layout._MAKES, Struct.__new__))
    assert object_layout.layout_of(Struct) is None
    recorded, x, struct = pg.record(lambda x, struct: x * struct.scale), torch.ones(3), Struct(2.0)
    with pytest.warns(pg.RunsLive, match="takes an object of class .*Struct as `struct`"):
        assert_same(recorded(x, struct), x * 2)
    struct.scale = 3.0
    assert_same(recorded(x, struct), x * 3)
