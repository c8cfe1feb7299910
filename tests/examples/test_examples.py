"""Every example runs as a user would run it, and checks itself against the live run."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
import torch

from tests import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = {"transformers_trainer": "transformers", "lightning_trainer": "lightning", "accelerate_loop": "accelerate",
         "lightning_ranks": "lightning", "accelerate_ranks": "accelerate"}  # fmt: skip
"""Examples that need another package."""
ON_RANKS = {"several_gpus": ["ddp"], "lightning_ranks": ["fabric"], "accelerate_ranks": [], "torchtitan_llama": []}
"""Those that torchrun would start, and with which arguments."""


def on_ranks(script: Path, folder: Path) -> forked.Ended:
    """Two processes of a script, each told its rank as torchrun tells it, and what both have printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, err = folder / "stdout", folder / "stderr"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}  # fmt: skip
    started = [
        forked.start(script, *ON_RANKS[script.stem], stdout=out, stderr=err, env={**shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    try:
        status = max(abs(process.wait(200)) for process in started)
    finally:
        for process in started:
            process.kill()
    return forked.Ended(status, out.read_text(), err.read_text())


NEEDS_GPUS = {"torchtitan_llama": ("torchtitan", "torchdata", "datasets", "spmd_types")}
"""Those that need two GPUs, and packages."""


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_example_runs_and_agrees_with_live(script: Path, tmp_path: Path) -> None:
    for package in NEEDS_GPUS.get(script.stem, ()):
        if importlib.util.find_spec(package) is None or torch.cuda.device_count() < 2:
            pytest.skip(f"needs two GPUs and {package}")
    needed = LOOPS.get(script.stem, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    done = on_ranks(script, tmp_path) if script.stem in ON_RANKS else forked.run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] in ("bitwise equal", "the same tokens")
    assert "Traceback" not in done.stderr
    for complaint in ("Warning", "RunsLive"):
        assert complaint not in done.stderr, "an example must record without complaint"


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("*.py"))) >= 3
