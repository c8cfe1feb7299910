"""C12, C13: a fault in any of our functions leaves what eager leaves. More of it: `python -m tests.faults.run`."""

import os
import random

import pytest

from phonograph.python.standing import Standing
from tests.faults import injection
from tests.faults.injection import Functions, Trial, draw, run
from tests.faults.programs import PROGRAMS
from tests.helpers import may_run_live

pytestmark = [may_run_live, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_c12_a_fault_anywhere_leaves_what_eager_leaves(device, program):
    chosen, places = random.Random(f"{os.environ.get('PHONOGRAPH_FUZZ_SEED', '0')}-{program}"), {}
    for _ in range(6):
        trial = draw(chosen, device, places, program)
        assert run(trial, device)[1] == "", trial


@pytest.mark.parametrize("error", ["memory", "interrupt"])
def test_c13_numbers_that_were_being_set_when_something_raised_are_set_again(device, error):
    """Next time, all of them: what was set is not known. (The replay that is broken off is the first with another rate.)"""
    places, _ = run(Trial("Scheduled", "replay", error, 0), device)
    for at in range(3 if error == "memory" else 6, places, 7):
        assert run(Trial("Scheduled", "replay", error, at), device)[1] == "", at


class Changes(Functions):
    """Counts changes of the process, where they are about to be noted."""

    def _trace(self, frame, event, arg):
        if frame.f_code is Standing.__init__.__code__:
            super()._trace(frame, event, arg)


def test_c12_a_change_of_the_process_that_was_about_to_be_noted(device, monkeypatch):
    monkeypatch.setattr(injection, "Functions", Changes)
    changes, _ = run(Trial("Split", "capture", "interrupt", 0), device)
    assert changes > 8
    for at in range(1, changes + 1):
        assert run(Trial("Split", "capture", "interrupt", at), device)[1] == "", at
