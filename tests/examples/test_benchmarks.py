"""Benchmarks still run, what is ours in them is played, and none of their rows is an error."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests import forked

FOLDER = Path(__file__).parents[2] / "benchmarks"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCRIPTS = {
    "tiny_kernels": (), "digits_cpu": (), "ppo_update": (), "pairs": ("--only", "PPO"), "plain_adam": ("--only", "PPO"),
    "loss_curves": (), "llama_decode": (), "control_flow_uses": ("--only", "toy", "ppo", "scaler"),
    "host_time": ("--only", "13 parameters", "8 tiny kernels", "a written argument"),
    "true_edges": ("--only", "PPO", "SAC", "world model"),
}  # fmt: skip
"""The quickest, and their arguments."""
NEEDS = {"llama_decode": "transformers"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs_and_ours_is_played(script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS.get(script, "torch")) is None:
        pytest.skip(f"needs {NEEDS[script]}")
    device = () if script == "digits_cpu" else ("--device", DEVICE)
    arguments = ("--quick", "--out", str(tmp_path), *device, *SCRIPTS[script])
    done = forked.run(FOLDER / f"{script}.py", *arguments, warned="always")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if "RunsLive" in line]
    assert not told, told
    (written,) = tmp_path.glob("*.json")
    rows = json.loads(written.read_text())["rows"]
    failed = [row for row in rows if row["error"]]
    assert not failed, failed


def test_where_decodes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    compare = importlib.import_module("decode_bits").compare
    one = {name: torch.ones(4, 3, dtype=torch.bfloat16) for name in ("layer 0", "layer 1", "logits")}
    two = {name: log.clone() for name, log in one.items()}
    assert compare(one, two) == {"equal": True}
    two["layer 1"][2, 1] = two["logits"][2, 1] = 1.5
    two["layer 0"][3, 0] = 2.0
    assert compare(one, two) == {
        "equal": False, "first token": 2, "first part": "layer 1", "of logits": 0.5, "other tokens chosen": 1
    }  # fmt: skip


@pytest.mark.slow
def test_c23_four_ranks_play_what_is_sharded_in_two_dimensions(tmp_path: Path) -> None:
    names = ("hsdp", "fsdp2 + tp")
    arguments = ("--device", "cpu", "--quick", "--nproc", "4", "--out", str(tmp_path), "--only", *names)
    done = forked.run(FOLDER / "ranks.py", *arguments)
    figures = json.loads((tmp_path / "ranks_4.json").read_text())["figures"]
    assert figures["missed"] == figures["left out"] == [], done.stdout + done.stderr
    assert [figures["cases"][name]["replayed"] for name in names] == [19, 19]
