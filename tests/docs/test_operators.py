"""`docs/operators.md` is what the committed results of `benchmarks/operators.py` say, and none of them is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def operators_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import operators_page

    yield operators_page
    del sys.modules["operators_page"]


def test_the_page_is_what_the_results_say(operators_page) -> None:
    """`python benchmarks/operators.py --page > docs/operators.md` writes it."""
    written = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert written == operators_page.page(RESULTS), "run python benchmarks/operators.py --page > docs/operators.md"


def test_a_cell_says_what_is_not_recorded_in_which_ways(operators_page) -> None:
    assert operators_page.cell({"forward": {"recorded": 4}, "pair": {"recorded": 3, "none": 1}}) == "recorded"
    assert operators_page.cell({"forward": {"none": 4}}) == ""
    row = {"forward": {"recorded": 4}, "out": {"PG202": 2, "recorded": 2}, "vmap": {"PG202": 3}, "pair": {"itself": 1}}
    assert operators_page.cell(row) == "[PG202](reasons.md#pg202): out (2 of 4), vmap; differs from itself: pair"


BOUND_BEFORE = {"cpu": set(), "cuda": {("op:matmul", way) for way in ("forward", "forward mode", "out")}}
"""Of `docs/details.md`, "Numbers": the database has `torch.matmul` from before it is exchanged."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_wrong(device: str) -> None:
    path = RESULTS / f"operators_{device}.json"
    if not path.exists():
        pytest.skip("not run yet")
    found = json.loads(path.read_text(encoding="utf-8"))["members"]
    wrong = {
        (member, way)
        for member, ways in found.items()
        for way, row in ways.items()
        if {"differs", "raises", "crashes"} & {*row}
    }
    assert wrong == BOUND_BEFORE[device]
