"""Forty-three programs of the first day: how many are recorded as they are, and how many after one round with the check."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from typing import Any

import pytest
import torch

import phonograph as pg
from phonograph.engine.check import Checking
from phonograph.engine.findings import Findings
from phonograph.testing import assert_same
from tests.examples.first_day import PROGRAMS, Program

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages say

STEPS = 12
SETTLED = 4  # replays after which a program counts as recorded
INTERNAL = re.compile(r"aten::|phonograph\.|__\w+__(?!\.py)|Traceback|<locals>")


def played(program: Program, *, mended: bool, record: bool, **options: Any) -> tuple[list[Any], pg.Stats | None]:
    """What its steps give, and what was recorded."""
    torch.manual_seed(0)
    made = program.make(mended)
    target = pg.record(made.target, keep="always", **{**made.options, **options}) if record else made.target
    with contextlib.redirect_stdout(io.StringIO()):
        results = [made.step(target, i) for i in range(STEPS)]
    return results, pg.stats(target) if record else None


def is_recorded(program: Program, *, mended: bool, **options: Any) -> bool:
    """Whether it is recorded, with the results that it has without."""
    live, _ = played(program, mended=mended, record=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results, stats = played(program, mended=mended, record=True, **options)
    assert_same(results, live)
    assert [str(w.message) for w in told if w.category is pg.RunsLive and INTERNAL.search(said(str(w.message)))] == []
    assert stats is not None
    return stats.replayed >= SETTLED


def said(message: str) -> str:
    """A warning without the name of the function that runs live."""
    return message.partition(" runs live: ")[2]


def checked(program: Program) -> Findings:
    """What the check says of it, as `phonograph check` does: in its own calls."""
    torch.manual_seed(0)
    made = program.make(False)
    checking = Checking(made.target)
    with contextlib.redirect_stdout(io.StringIO()):
        for i in range(STEPS):
            if not checking.done:
                made.step(checking, i)
    return checking.findings()


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_the_first_day(name: str) -> None:
    """It is recorded as it is, or without cuts after doing all that one check says."""
    program = PROGRAMS[name]
    for package in program.needs:
        pytest.importorskip(package)
    assert is_recorded(program, mended=False) is program.unchanged
    if program.cut:
        assert not is_recorded(program, mended=False, fallback="live")
    if program.told:
        found = checked(program)
        assert {obstacle.code for obstacle in found.obstacles} == program.told
        assert [line for o in found.obstacles for line in o.lines() if INTERNAL.search(line)] == []
        assert is_recorded(program, mended=True)


def test_counts_of_the_first_day() -> None:
    """Without cuts; as they are; and all, after one round."""
    programs = PROGRAMS.values()
    assert sum(program.unchanged and not program.cut for program in programs) == 30
    assert sum(program.unchanged for program in programs) == 39
    assert len(programs) == 43
