"""The figures of the documentation are what `python -m tests.docs.figures` draws."""

from __future__ import annotations

import pytest

from tests.docs.figures import BESIDE, DOCS, FIGURES, HOT, TRUST, filled, house, imports
from tests.unit.test_layers import LAYERS, SOURCE


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == FIGURES[name](), "run python -m tests.docs.figures"
    assert f"]({name})" in (DOCS / "how-it-works.md").read_text(encoding="utf-8")


def test_the_figures_of_the_tests_are_those_of_the_results() -> None:
    page = (DOCS / "trust.md").read_text(encoding="utf-8")
    assert all(page.count(f"<!-- {name} -->") == 1 for name in TRUST)
    assert page == filled(page), "run python -m tests.docs.figures"


def test_no_arrow_goes_up_and_there_are_few_floors() -> None:
    assert [pair for pair in imports() if LAYERS.index(pair[1]) > LAYERS.index(pair[0])] == []
    assert len(LAYERS) <= 19
    assert " 0 imports from above" in house()


def test_a_calls_way_leads_through_files_that_there_are() -> None:
    assert [where for _, _, where in (*HOT, *BESIDE.values()) if not (SOURCE / where).exists()] == []
