"""The real programs still run, equal to plain by their bits, and what can be recorded is played but for the first calls."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from tests import forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAYED = {"c51": 1, "gpt_fast": 1, "pinn": 1}
"""Quick ones, whose calls are all alike, and how many of these run live."""


def names() -> list[str]:
    return sorted(path.stem for path in (BENCHMARKS / "real").glob("*.py"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What each has found that `real_programs.py` would start in a process of its own."""
    folder, found = tmp_path_factory.mktemp("real"), {}
    for name in PLAYED:
        row = folder / f"{name}.json"
        arguments = ("--device", DEVICE, "--quick", "--no-times", "--keep", "always", "--folder", str(folder))
        done = forked.run(BENCHMARKS / "real_programs.py", *arguments, "--program", name, "--row", str(row))
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = json.loads(row.read_text())
    return found


@pytest.mark.parametrize("name", PLAYED)
def test_program_is_equal_to_plain_and_played(name: str, rows: dict[str, dict]) -> None:
    row = rows[name]
    assert not row["errors"]
    assert not row["reasons"]
    assert row["equal"] == {"phonograph": True}
    assert row["calls"] - row["replayed"] == PLAYED[name]
    assert row["recorded"] <= 2


WITH_A_RIVAL = """
import sys
sys.path.insert(0, {benchmarks!r})
import real_programs

def never_ready(function):
    while True:
        try:
            real_programs.time.sleep(60)
        except BaseException:
            pass

def fails_later(function):
    calls = iter(range(6))
    return lambda *args: (next(calls), function(*args))[1]

def variants_of(program, arguments):
    rival = never_ready if program.__name__ == "real.pinn" else fails_later
    return before(program, arguments) | {{program.RIVAL[0]: real_programs.Variant(rival, {{}})}}

before, real_programs.variants_of = real_programs.variants_of, variants_of
real_programs.__file__, real_programs.PATIENCE = __file__, 2
real_programs.importlib.import_module("real.pinn").STEPS = 4
real_programs.importlib.import_module("real.c51").STEPS = 4
real_programs.importlib.import_module("real.pinn").ROUND = 2
real_programs.importlib.import_module("real.c51").ROUND = 2
raise SystemExit(real_programs.main())
"""


def test_a_rival_that_is_never_ready_or_fails_costs_nothing_but_its_own_place(tmp_path: Path) -> None:
    script = tmp_path / "with_a_rival.py"
    script.write_text(WITH_A_RIVAL.format(benchmarks=str(BENCHMARKS)))
    arguments = ("--device", "cpu", "--quick", "--jobs", "2", "--limit", "60", "--out", str(tmp_path), "--only", "pinn", "c51")
    done = forked.run(script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "real.json").read_text())["rows"]
    assert [(row["program"], [*row["speed"]], [*row["errors"]], row.get("error")) for row in rows] == [
        ("c51", ["phonograph"], ["CudaGraphModule"], None), ("pinn", ["phonograph"], ["CudaGraphModule"], None)
    ]  # fmt: skip
    said = {row["program"]: row["errors"]["CudaGraphModule"] for row in rows}
    assert "StopIteration" in said["c51"]
    assert "not ready after 2 s" in said["pinn"]


def test_every_program_is_listed_and_has_a_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    real = importlib.import_module("real")
    assert set(names()) - {"__init__", "rivals", "worlds", "gpt"} == set(real.PROGRAMS)
    for name in real.PROGRAMS:
        program = importlib.import_module(f"real.{name}")
        rival, wrap, options = program.RIVAL
        assert isinstance(rival, str)
        assert callable(wrap)
        assert isinstance(options, dict)
        assert program.STEPS >= program.ROUND // 2


def test_measured_tables_are_those_of_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python benchmarks/tables.py` writes them, `python benchmarks/plot.py` the plot."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script, plot = importlib.import_module("tables"), importlib.import_module("plot")
    for page in script.PAGES:
        written = page.read_text(encoding="utf-8")
        assert script.filled(written) == written, "run python benchmarks/tables.py"
    marked = "".join(page.read_text(encoding="utf-8") for page in script.PAGES)
    assert [name for name, _ in script.tables() if f"<!-- {name} -->" not in marked] == []
    assert plot.TARGET.read_text(encoding="utf-8") == plot.plot(), "run python benchmarks/plot.py"


def test_a_table_says_what_differs_and_what_runs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("tables")
    names = list(importlib.import_module("real").PROGRAMS)
    whole = {"rival": "CudaGraphModule", "equal": {"phonograph": True}}
    rows: list[dict] = [{"program": name, "speed": {"phonograph": 2.0}, **whole} for name in names]
    rows[0] |= {"speed": {"phonograph": 3.0, "CudaGraphModule": 2.5}, "played": 0.9}
    rows[1]["equal"] = {"phonograph": False}
    made = script.real({"rows": rows})
    assert "| 3.00 | CudaGraphModule 2.50 |" in made
    assert "| differs | CudaGraphModule fails |" in made
    assert made.count("(2.00)") == len(names) - 2  # mostly live
