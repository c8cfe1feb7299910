"""The two commands: what they print, and what their exit status says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phonograph import __version__
from phonograph.cli import doctor, main, tested
from tests import forked


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(arguments)
    return status, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status, out = run(capsys, *arguments, "--json")
    assert out.count("\n") == 1, "one JSON object and nothing else"
    return status, json.loads(out)


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"phonograph {__version__}\n")


def with_torch(folder: Path, release: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command where torch is missing, or of another release."""
    start = "import sys; from phonograph.cli import main; sys.exit(main(sys.argv[1:]))"
    if release is None:
        start = f"import sys; sys.modules['torch'] = None; {start}"
        metadata = "import importlib.metadata as m; from unittest.mock import patch"
        missing = "patch('phonograph.cli.without_torch._torch', lambda: None).start()"
        start = start.replace("from phonograph", f"{metadata}; {missing}; from phonograph")
    else:
        (folder / "torch").mkdir(exist_ok=True)
        (folder / "torch" / "__init__.py").write_text(f"__version__ = {release!r}\n")
        (folder / f"torch-{release}.dist-info").mkdir(exist_ok=True)
        (folder / f"torch-{release}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {release}\n")
    env = {**forked.environment(), "PYTHONPATH": f"{folder}{os.pathsep}{forked.environment()['PYTHONPATH']}"}
    return subprocess.run([sys.executable, "-c", start, *arguments], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("release", "said"),
    [(None, "torch is not installed: pip install"), ("2.1.0", f"needs torch {tested.RELEASES[0]} or newer")],
)
def test_a_machine_without_the_torch_that_it_needs(tmp_path: Path, release: str | None, said: str) -> None:
    """The version is told all the same; doctor finds what is wrong; other commands say it in a line."""
    lines = ("--version", "doctor", "doctor --json", "check x.py")
    version, told, found, other = (with_torch(tmp_path, release, *line.split()) for line in lines)
    assert (version.returncode, version.stdout) == (0, f"phonograph {__version__}\n")
    assert (told.returncode, found.returncode, other.returncode) == (1, 1, 2)
    assert "does NOT work" in told.stdout
    (row,) = [row for row in json.loads(found.stdout)["findings"] if row["status"] == "problem"]
    assert (row["what"], row["value"]) == ("torch", release or "missing")
    assert said in row["meaning"]
    assert other.stderr.startswith("phonograph: ")
    assert said in other.stderr
    assert other.stderr.count("\n") == 1


def test_without_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys)
    assert status == 0
    assert "usage: phonograph" in out
    assert "doctor" in out


@pytest.mark.parametrize(
    ("arguments", "usage", "said"),
    [
        ("dcotor", "usage: phonograph [", "Did you mean 'doctor'?"),
        ("--versoin", "usage: phonograph [", "Did you mean '--version'?"),
        ("doctor --jsn", "usage: phonograph doctor", "Did you mean '--json'?"),
    ],
)
def test_a_wrong_line_is_told(capsys: pytest.CaptureFixture[str], arguments: str, usage: str, said: str) -> None:
    """By the command's own usage, with what is like the unknown word, and no name of ours."""
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(usage)
    assert said in error


def test_doctor_records_on_every_device_here(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys, "doctor")
    trials = {row["what"]: row for row in report["findings"] if row["what"].startswith("recording on")}
    assert status == 0
    assert report["works"]
    assert len(trials) == 1 + torch.cuda.device_count()
    assert {row["status"] for row in trials.values()} == {"ok"}


def test_doctor_exits_1_where_recording_is_switched_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHONOGRAPH", "off")
    status, report = run_json(capsys, "doctor")
    assert status == 1
    assert not report["works"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_doctor_reads_the_allocator_settings(name: str) -> None:
    settings = {name: "expandable_segments:True, backend:cudaMallocAsync"}
    assert doctor.allocator_settings(settings) == {"expandable_segments": "True", "backend": "cudaMallocAsync"}
    assert doctor.allocator_settings({}) == {}


def test_doctor_says_with_which_releases_of_torch_the_tests_were_run(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys, "doctor")
    (row,) = [row for row in report["findings"] if row["what"] == "torch"]
    assert status == 0
    assert report["torch_tested"] == list(tested.RELEASES)
    assert row["value"] == torch.__version__
    assert row["status"] == "ok"
    assert all(release in row["meaning"] for release in tested.RELEASES)
    assert all(release in run(capsys, "doctor")[1] for release in tested.RELEASES)  # the table


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        (f"{tested.RELEASES[0]}+cu130", "ok", "this is one of them"),
        (tested.RELEASES[-1], "ok", "this is one of them"),
        ("2.12.1", "ok", "this is none of them"),
        (f"{tested.RELEASES[-1]}a0+git1234", "ok", "this is none of them"),
        ("99.0.0.dev20990101+cpu", "ok", "this is newer"),
        ("2.9.1", "problem", f"phonograph needs torch {tested.RELEASES[0]} or newer"),
        ("unknown", "ok", "this is none of them"),
    ],
)
def test_doctor_tells_whether_a_release_of_torch_is_one_that_was_tested(version: str, status: str, said: str) -> None:
    found = doctor.torch_release(version)
    assert (found.value, found.status) == (version, status)
    assert said in found.meaning


def test_what_was_tested_decides_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "RELEASES", ("98.0.0", "99.0.0"))
    status, report = run_json(capsys, "doctor")
    assert status == 0
    assert report["works"]
    assert [row["status"] for row in report["findings"] if row["what"] == "torch"] == ["problem"]


def test_the_releases_that_were_tested_are_those_that_the_project_asks_for() -> None:
    root = Path(__file__).parents[2]
    floor = re.search(r'"torch>=([\d.]+)"', (root / "pyproject.toml").read_text(encoding="utf-8"))
    pinned = re.search(r"^torch==(\S+)$", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert floor
    assert pinned
    assert tested.RELEASES[0].startswith(f"{floor[1]}.")
    assert pinned[1] in tested.RELEASES


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = forked.run(forked.Module("phonograph"), "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["works"]


def test_report_runs_a_script_and_writes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its functions are gone by then, and its arguments are its own."""
    script, page = tmp_path / "script.py", tmp_path / "page.html"
    script.write_text(
        "import sys, torch, phonograph as pg\n"
        "def main():\n"
        "    step = pg.record(lambda x: x * 2, name='of a script', keep='always')\n"
        "    for _ in range(4): step(torch.ones(3))\n"
        "main(); print(sys.argv[1:], __name__)\n",
        encoding="utf-8",
    )
    status, out = run(capsys, "report", "-o", str(page), str(script), "--steps", "3")
    assert status == 0
    assert out == "['--steps', '3'] __main__\n"
    assert "of a script" in page.read_text(encoding="utf-8")
    assert main(["report", str(tmp_path / "none.py")]) == 2


def test_report_names_a_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')")
    assert main(["report", "-o", str(tmp_path / "nowhere" / "page.html"), str(script)]) == 2
    assert "there is no folder" in capsys.readouterr().err
