"""C1: drawn programs do what eager does, in all that can be seen of them. More of them: `make soak SEED=1 SECONDS=600`.

The first programs of seed PHONOGRAPH_FUZZ_SEED (0), and what draws, looks and shrinks.
"""

import ast
import functools
import os
import random
import subprocess
import sys

import pytest
import torch

from tests.forked import ROOT
from tests.helpers import may_run_live
from tests.simulation import mutants
from tests.simulation.check import Differs, check, shrunk
from tests.simulation.grammar import Program, draw
from tests.simulation.run import drawn
from tests.simulation.world import World

SEED = os.environ.get("PHONOGRAPH_FUZZ_SEED", "0")
CPU = torch.device("cpu")


@may_run_live
def test_c01_drawn_programs_do_what_eager_does(device):
    """And a good part of them is played."""
    ran = [check(drawn(SEED, i), device) for i in range(30)]
    assert sum(one.replayed > 0 for one in ran) >= 8
    assert sum(one.replayed for one in ran) >= 60


def test_a_program_is_drawn_again():
    assert draw(random.Random("a").choice) == draw(random.Random("a").choice)
    assert len({drawn("a", i) for i in range(100)}) == 100
    for i in range(300):
        ast.parse(drawn("a", i).text)


SEES = """
class Box:
    __slots__ = ("kept",)

def make():
    count = 0
    def step(x):
        nonlocal count
        count += 1
        return x * count
    return step

net, box, step, out = nn.Linear(2, 2), Box(), make(), None
for n in range(4):
    with told():
        box.kept = [data(n, 2, 2)]
        out = step(box.kept[0])
        HERE
"""


@pytest.mark.parametrize("what", [
    "box.kept.append(1)", "out[0, 0] = 9.0", "out = out.t()", "net.weight.data.mul_(1.0 + n)", "torch.rand(1)",
    "random.random()", "net.bias.grad = torch.ones(2)", "step(out)", "torch.set_grad_enabled(False)",
    "net.bias.requires_grad_(False)", "raise ValueError('here')", "out = out.view(-1)[:2]", "box.kept = box.kept[0]",
    "net.eval()", "out = box.kept[0]", "with torch.no_grad(): net.weight.mul_(1.0)",
])  # fmt: skip
def test_all_that_a_program_leaves_is_seen(what):
    turns = [World(CPU, None).run(SEES.replace("HERE", one), f"/drawn/{what}.py").turns for one in ("pass", what, what)]
    assert turns[0] != turns[1] == turns[2]


def test_a_fault_is_found_and_the_program_shrunk(monkeypatch):
    """Of a recorder that forgets every fifth call."""

    def forgetful(recorded, f, calls, *args):
        calls.append(None)
        return None if recorded and len(calls) % 5 == 0 else f(*args)

    def record(self, f):
        return functools.partial(forgetful, self.options is not None, f, [])  # that shows nothing of itself

    monkeypatch.setattr(World, "record", record)

    def fails(program):
        try:
            check(program, CPU)
        except Exception as error:
            return isinstance(error, Differs)
        return False

    text = SEES.replace("make(), None", "record(make()), None").replace("range(4)", "range(6)")
    text = text.replace("HERE", "if n % 2:\n            with torch.no_grad(): out.mul_(2)\n        held = [out] * 3")
    small = shrunk(Program(text, (("warmup", 2),)), fails)
    assert fails(small)
    assert len(small.text.splitlines()) <= 14
    assert small.options == ()
    assert "torch" not in small.text


def test_lines_that_are_broken_on_purpose_are_still_python():
    for file, text in mutants.files().items():
        lines, found = text.splitlines(), [*mutants.mutants(file, text)]
        assert all(one.before == lines[one.line - 1] != one.after for one in found)
        for one in found[:: max(1, len(found) // 5)]:
            ast.parse("\n".join([*lines[: one.line - 1], one.after, *lines[one.line :]]))


@pytest.mark.slow
def test_a_line_that_is_broken_is_noticed():
    """By the first program that reaches it: an attribute that a call sets, and replays leave as it was."""
    text = mutants.files()["slots/effects.py"]
    one = next(m for m in mutants.mutants("slots/effects.py", text) if "put(one.of, one.name, value)" in m.before)
    mutants._run(0)
    assert mutants.tried(one, mutants.Known({-1: None}, {(one.file, one.line): []}), 120)["outcome"] == "differs"


@pytest.mark.slow
def test_a_process_that_dies_is_named(tmp_path):
    """And what it ran; those after it are run all the same."""
    dying = tmp_path / "sitecustomize.py"
    dying.write_text(
        "import sys, os\n"
        "if '--child' in sys.argv and sys.argv[sys.argv.index('--first') + 1] == '0':\n"
        "    print('{\"begins\": 0}', flush=True)\n"
        "    os._exit(3)\n"
    )
    command = [sys.executable, "-m", "tests.simulation.run", "--seconds", "8", "--seed", "a"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "program 0 failed: the process ends with 3" in ended.stderr
    assert ended.stdout.startswith("seed a: ")
    assert not ended.stdout.startswith("seed a: 1 programs")
