import math
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.errors import Refusal
from phonograph.guards.beyond import Beyond
from phonograph.python.bytecode import names_in
from phonograph.reads.place import Read, variable


def reading(space: dict[str, Any]) -> Any:
    return lambda: space["cos"](1.0)


def changed(before: object, now: object) -> tuple[Beyond, dict[str, Any]]:
    """A call that has found this in a variable of a package, and has left that."""
    reach: Any = SimpleNamespace(met=[], spaces=[], cells=[])
    beyond, space = Beyond(reach), {"__name__": "package", "cos": now}
    beyond.reads.before.append(Read(variable(space, "cos", "cos"), (before,)))
    return beyond, space


def test_what_stood_for_a_function_is_no_change_and_is_not_put_back() -> None:
    """It may have been taken back while the call was captured."""
    beyond, space = changed(names_in, math.cos)
    beyond.holders([reading(space).__code__], frozenset())
    beyond.restore()
    assert space["cos"] is math.cos


def test_another_function_is_a_change_that_is_put_back() -> None:
    beyond, space = changed(math.sin, math.cos)
    with pytest.raises(Refusal, match=r"package\.cos"):
        beyond.holders([reading(space).__code__], frozenset())
    beyond.restore()
    assert space["cos"] is math.sin
