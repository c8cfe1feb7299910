"""The demo (`make demo`): what it prints, and what its exit status says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phonograph.cli import console

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
import demo
import gpt
from race import Outcome, race


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = demo.main(arguments)
    return status, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status, out = run(capsys, *arguments, "--json")
    assert out.count("\n") == 1, "one JSON object and nothing else"
    return status, json.loads(out)


def test_demo_trains_both_ways_and_finds_them_bitwise_equal(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys, "--device", "cpu", "--steps", "200")
    (digits,) = report["training"]
    assert status == 0
    assert report["equal"]
    assert digits["losses_equal"]
    assert digits["weights_equal"]
    assert digits["last_loss"] < digits["first_loss"] / 4
    assert digits["test_accuracy"] > 0.8
    assert digits["ratio"] > 0


def test_demo_replays_and_a_new_learning_rate_records_nothing_new(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = run_json(capsys, "--device", "cpu", "--steps", "200")
    (digits,) = report["training"]
    assert digits["recordings"] == 1
    assert digits["replays"] > 190
    assert digits["refusals"] == {}


def test_demo_says_so_and_exits_1_when_the_runs_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outcome, "losses_equal", property(lambda outcome: False))
    status, out = run(capsys, "--device", "cpu", "--steps", "30")
    assert status == 1
    assert "LIVE AND RECORDED DIFFER" in out


def test_race_finds_a_single_wrong_bit() -> None:
    text = torch.arange(1000) % 256
    jobs = [gpt.make_job(text, 1, seed=0), gpt.make_job(text, 1, seed=0)]
    outcome = race(lambda: jobs.pop(), 1, torch.device("cpu"), block=1, advance=lambda steps: None)
    assert outcome.losses_equal
    assert outcome.weights_equal
    weight = outcome.recorded.job.weights()[0]
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
    assert not outcome.weights_equal


def test_demo_ends_in_time_and_compares_what_it_has_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_SECONDS", 0.0)
    status, report = run_json(capsys, "--device", "cpu")
    (digits,) = report["training"]
    assert status == 0
    assert digits["steps"] == 25
    assert digits["last_loss"] > 0


@pytest.mark.parametrize("rich", [True, False])
def test_tables_need_no_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    monkeypatch.setattr(console, "HAVE_RICH", rich and console.HAVE_RICH)
    status, out = run(capsys, "--device", "cpu", "--steps", "60")
    assert status == 0
    assert "live and recorded agree, bit for bit" in out
    assert "steps/s" in out


@pytest.mark.parametrize("device", ["cuda:77", "nonsense"])
def test_a_device_that_is_not_there_is_told_and_exits_2(capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert demo.main(["--device", device]) == 2
    assert device in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["abc", "0"])
def test_a_wrong_number_of_steps_is_told(capsys: pytest.CaptureFixture[str], steps: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--steps", steps])
    assert f"must be a whole number, at least 1, not '{steps}'" in capsys.readouterr().err
