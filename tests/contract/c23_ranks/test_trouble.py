"""C23: trouble on one rank while the other replays. Whatever happens to one of two ranks in a call, both have what they have in
eager, and none waits longer than the process group allows. More of it: `python -m tests.ranks_faults_run`."""

import os

import pytest

from tests.ranks_faults_run import search

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_c23_trouble_on_one_rank_is_what_it_is_in_eager():
    found = search(os.environ.get("PHONOGRAPH_FUZZ_SEED", "29"), first=0, trials=8, seconds=120)
    assert found["failures"] == []
    assert (found["trials"], found["hangs"]) == (8, 0)
    assert found["replayed"] > 16 * 4
