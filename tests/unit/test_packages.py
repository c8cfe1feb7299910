"""What code may read of modules of others': found once, however many ways lead there."""

import types

import pytest

from phonograph.guards import packages


def test_modules_that_name_each_other_are_each_looked_at_once():
    count, asked = 12, []
    found = {f"m{i}": types.ModuleType(f"m{i}") for i in range(count)}  # as those of a large package
    for module in found.values():
        vars(module).update(found, __file__=pytest.__file__, RATE=1.0, run=lambda: None)

    def following(name):
        asked.append(name)
        return {"RATE", "run", *found}, set()

    values = list(packages.values_in(found.items(), following))
    assert {v.path for v in values if v.name == "RATE"} == {f"m{i}.RATE" for i in range(count)}
    functions = list(packages.functions_in(found.items(), following))
    assert sorted(v.path for v in functions) == sorted(f"m{i}.run" for i in range(count))
    assert len(asked) <= 2 * count * (count + 3)  # where one module has another, and for the values in each
