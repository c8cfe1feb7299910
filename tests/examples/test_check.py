"""`phonograph check` on scripts: what it finds in them, what it says, and its exit status."""

from __future__ import annotations

import json
import linecache
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from phonograph.cli import main
from phonograph.cli.candidates import Candidate
from phonograph.engine.findings import Findings

HABITS = Path(__file__).with_name("ten_habits.py")
LOOP = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
{steps}
for i in range({n}):
    x = torch.full((3, 4), float(i))
    {call}
print("the end")
"""
STEP = """
def train_step(x):
    loss = net(x).pow(2).mean(){logs}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
BY_HAND = "optimizer.zero_grad(); net(x).pow(2).mean().backward(); optimizer.step()"


@pytest.fixture(autouse=True)
def all_may_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a replay of something tiny is faster would hang on the machine."""
    monkeypatch.setattr(Candidate, "worth", property(lambda one: True))


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a script."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text)
        linecache.checkcache()
        return str(path)

    return write


def loop(steps: str = "", call: str = "train_step(x)", n: int = 40) -> str:
    return LOOP.format(steps=steps, call=call, n=n)


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(["check", "--json", *arguments])
    out = capsys.readouterr().out
    assert out.count("\n") == 1, "one JSON object and nothing else"
    return status, json.loads(out)


def test_ten_habits_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them are told, each with its line, its fix and a link."""
    status, report = check(capsys, str(HABITS), "--", "--lr", "0.002")
    (found,) = report["found"]
    assert (status, report["status"], found["name"]) == (1, 1, "train_step")
    source = HABITS.read_text().splitlines()
    habits = {n: source.index(next(line for line in source if f"# {n}: " in line)) + 1 for n in range(1, 11)}
    told = {obstacle["line"]: obstacle for obstacle in found["obstacles"]}
    by_argument = {obstacle["argument"]: obstacle for obstacle in found["obstacles"]}
    assert {n for n, line in habits.items() if line not in told} == {6}
    assert by_argument["step"]["code"] == "PG1401"  # of which 6 makes a tensor
    assert all(obstacle["code"] and obstacle["remedy"] for obstacle in found["obstacles"])
    assert {obstacle["link"] for obstacle in found["obstacles"]} <= links()
    assert found["share"] > 0.5
    assert found["operators"] == sum(found["pieces"]) > 100


def links() -> set[str]:
    """The places of the page to which a link may lead."""
    page = (HABITS.parents[2] / "docs" / "reasons.md").read_text(encoding="utf-8")
    return {f"docs/reasons.md#{part.partition(chr(34))[0]}" for part in page.split('<a id="')[1:]}


def test_the_place_is_marked(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    path = script(loop(STEP.format(logs="\n    print(loss.item())")))
    assert main(["check", path]) == 1
    out = capsys.readouterr().out
    assert textwrap.indent("print(loss.item())\n      ^^^^^^^^^^^", " " * 8) in out or sys.version_info < (3, 11)
    assert "train_step = pg.record(train_step)" in out
    assert "the end" not in out, "it was stopped"


def test_a_step_that_is_recorded(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    """With what it measured, and exit status 0."""
    status, report = check(capsys, script(loop(STEP.format(logs=""))))
    (found,) = report["found"]
    assert (status, found["records"], found["obstacles"]) == (0, True, [])
    assert found["patch"].startswith("train_step = pg.record(train_step)")
    assert found["replay_ms"] > 0
    assert found["live_ms"] > 0


def test_a_loop_without_a_step(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    """The module and the optimizer are found."""
    status, report = check(capsys, script(loop(call=BY_HAND)))
    assert status == 0
    assert {found["patch"] for found in report["found"]} == {
        "net = pg.record(net)", "optimizer.step = pg.record(optimizer.step)",
    }  # fmt: skip


def test_the_script_does_what_it_does(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    """Each step gives what it gives without the check, until it is stopped."""
    seeded = loop(STEP.format(logs=""), "print(train_step(x).item().hex())").replace("net =", "torch.manual_seed(0)\nnet =")
    path = script(seeded)
    main(["check", "--json", path])
    checked = capsys.readouterr().err.split()
    runpy.run_path(path)
    plain = capsys.readouterr().out.split()
    assert 8 < len(checked) < 40
    assert checked == plain[: len(checked)]


@pytest.mark.parametrize("where", ["closure", "method"])
def test_functions_wherever_they_are(capsys: pytest.CaptureFixture[str], script: Any, where: str) -> None:
    """A function within another, and a method."""
    step = STEP.format(logs="\n    loss.item()").replace("def train_step(x):\n", "def train_step(x):\n    total = scale\n")
    if where == "closure":
        body = "def main():\n    scale = 2\n" + textwrap.indent(step, "    ") + "    return train_step\nstep = main()\n"
    else:
        body = "class Trainer:\n" + textwrap.indent(step.replace("(x):", "(self, x):").replace("scale", "self"), "    ")
        body += "step = Trainer().train_step\n"
    status, report = check(capsys, script(loop(body, "step(x)")), "--fn", "train_step")
    (found,) = report["found"]
    assert status == 1
    assert [obstacle["code"] for obstacle in found["obstacles"]] == ["PG101"]
    assert found["patch"].startswith("@pg.record    # above")


@pytest.mark.parametrize("named", [False, True])
def test_a_function_in_decorators_of_a_library(capsys: pytest.CaptureFixture[str], script: Any, named: bool) -> None:
    step = "@torch.inference_mode()\n@torch.autocast('cpu')\ndef predict(x):\n    return net(x).sum().item()\n"
    status, report = check(capsys, script(loop(step, "predict(x)")), *(["--fn", "predict"] if named else []))
    (found,) = report["found"]
    assert status == 1
    assert [obstacle["code"] for obstacle in found["obstacles"]] == ["PG101"]
    assert found["patch"].startswith("predict = pg.record(predict)")


@pytest.mark.parametrize("above", ["", "@torch.no_grad()\n"])
@pytest.mark.parametrize("named", [False, True])
def test_what_is_recorded_already(capsys: pytest.CaptureFixture[str], script: Any, above: str, named: bool) -> None:
    """It is the first to be looked at, under its own name, though it warns; the exit status says that it runs live."""
    step = f"import phonograph as pg\n{above}@pg.record\ndef predict(x):\n    return net(x).sum().item()\n"
    path = script(loop(step, "predict(x)"))
    status, report = check(capsys, path, *(["--fn", "predict"] if named else []))
    (found,) = report["found"]
    assert (status, found["name"], found["recorded"], found["patch"]) == (1, "predict", True, "")
    assert [obstacle["code"] for obstacle in found["obstacles"]] == ["PG101"]
    assert main(["check", path]) == 1
    assert "recorded already" in capsys.readouterr().out


def test_a_recorded_function_by_its_own_options(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    """What cuts is recorded, as it is in the script; what would raise does not."""
    step = "import phonograph as pg\n@pg.record(fallback='{}')\ndef predict(x):\n    y = net(x).sum()\n    return y, y.item()\n"
    status, report = check(capsys, script(loop(step.format("split"), "predict(x)")))
    assert (status, report["found"][0]["records"], report["found"][0]["obstacles"]) == (0, True, [])
    status, report = check(capsys, script(loop(step.format("error"), "predict(x)")))
    assert (status, [obstacle["code"] for obstacle in report["found"][0]["obstacles"]]) == (1, ["PG101"])


def test_what_trains_though_it_comes_later(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    """Many calls that only act come before the first update, as in reinforcement learning: both are found."""
    acts = "@torch.no_grad()\ndef act(x):\n    return net(x).argmax()\n"
    path = script(loop(acts + STEP.format(logs=""), "[act(x) for _ in range(64)]; train_step(x)"))
    status, report = check(capsys, path)
    assert status == 0
    assert {found["name"] for found in report["found"]} == {"act", "train_step"}


def test_the_outermost_of_what_repeats(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    """Of a step with many micro-batches the step, not the model that has been called often enough within the first."""
    step = "def train_step(x):\n    for _ in range(12):\n        net(x).pow(2).mean().backward()\n    optimizer.step()\n"
    status, report = check(capsys, script(loop(step + "    optimizer.zero_grad()\n")))
    (found,) = report["found"]
    assert (status, found["name"]) == (0, "train_step")


def test_nothing_slower_is_offered(capsys: pytest.CaptureFixture[str], script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(loop(STEP.format(logs="")))
    monkeypatch.setattr(Candidate, "worth", property(lambda one: False))
    _, report = check(capsys, path)
    assert report["found"][0]["patch"] == ""
    main(["check", path])
    out = capsys.readouterr().out
    assert "0 things worth recording" in out
    assert "pg.record(" not in out


SHAPES = {
    "function": (STEP, "train_step(x)", ["@pg.record"]),
    "function with cuts": (STEP.replace("{logs}", "; loss.item()"), "train_step(x)", ['@pg.record(fallback="split")']),
    "decorated": ("@torch.enable_grad()" + STEP, "train_step(x)", ["@pg.record"]),
    "no function": ("", BY_HAND, ["net = pg.record(net)", "optimizer.step = pg.record(optimizer.step)"]),
    "imported": ("import phonograph\n" + STEP, "train_step(x)", ["@phonograph.record"]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_git_applies_the_fix(
    capsys: pytest.CaptureFixture[str], script: Any, tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints is a patch and nothing else; the script with it runs, and is recorded whole, or with cuts."""
    monkeypatch.setattr(Findings, "pays", property(lambda one: one.records or one.cut_ms is not None))
    steps, call, lines = SHAPES[shape]
    path = Path(script(loop(steps.format(logs=""), call).lstrip("\n")))
    main(["check", "--fix", str(path)])
    patch = capsys.readouterr().out
    assert [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and "record" in line] == lines
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    main(["check", "--fix", str(path)])
    patch = capsys.readouterr().out
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    linecache.checkcache()
    status, report = check(capsys, str(path))
    assert (status, {found["recorded"] for found in report["found"]}) == (0, {True})


def test_what_cannot_be_checked(capsys: pytest.CaptureFixture[str], script: Any) -> None:
    """Exit status 2: no script, nothing found, a script that fails."""
    assert main(["check", "nowhere.py"]) == 2
    assert main(["check", script("print(1)")]) == 2
    assert main(["check", script(loop(STEP.format(logs=""))), "--fn", "nobody"]) == 2
    assert "no function named nobody was seen at work; there were train_step" in capsys.readouterr().err
    assert main(["check", script("raise ValueError('mine')")]) == 2
    assert "ValueError: mine" in capsys.readouterr().err
