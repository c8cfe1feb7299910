"""Corners that ordinary programs turn: each of these was once wrong, lost or slow. By clause, as the other files."""

import pytest


@pytest.fixture(autouse=True)
def globals_as_before(request):
    before = dict(vars(request.module))
    yield
    vars(request.module).clear()
    vars(request.module).update(before)


class WithSlot:
    __slots__ = ("n",)
