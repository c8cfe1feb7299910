"""Every example runs as a user would run it, and checks itself against the live run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import phonograph

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = {"transformers_trainer": "transformers", "lightning_trainer": "lightning", "accelerate_loop": "accelerate",
         "lightning_ranks": "lightning", "accelerate_ranks": "accelerate"}  # fmt: skip
"""Examples that need another package."""
ON_RANKS = {"several_gpus": ["ddp"], "lightning_ranks": ["fabric"], "accelerate_ranks": []}
"""Those that torchrun starts, and with which arguments."""


def environment() -> dict[str, str]:
    """What a fresh interpreter needs to find the same phonograph as this one."""
    source = str(Path(phonograph.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    # One thread: the tensors are small, and threads that wait for each other on a busy machine take for ever.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(script: Path) -> subprocess.CompletedProcess[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched = ranks if script.stem in ON_RANKS else []
    command = [sys.executable, *launched, str(script), *ON_RANKS.get(script.stem, [])]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment())


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_example_runs_and_agrees_with_live(script: Path) -> None:
    needed = LOOPS.get(script.stem, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] in ("bitwise equal", "the same tokens")
    assert "Traceback" not in done.stderr
    for complaint in ("Warning", "RunsLive"):
        assert complaint not in done.stderr, "an example must record without complaint"


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("*.py"))) >= 3
