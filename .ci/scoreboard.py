"""How large the source is, and how well it notices what a call reads: figures that a change should not make worse.

    python .ci/scoreboard.py             # in some seconds: sizes, and what a noted call notices of a few programs
    python .ci/scoreboard.py --whole     # all of it, in some ten minutes

Lines of code are those that are neither blank nor a comment, an import, a docstring or a part of `__all__`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phonograph"
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(text: str) -> int:
    """The lines of a module that do something."""
    left_out = {n for node in ast.walk(ast.parse(text)) if _is_no_code(node) for n in range(node.lineno, node.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {n for t in tokens if t.type not in _LAYOUT for n in range(t.start[0], t.end[0] + 1)}
    return len(found - left_out)


def _is_no_code(node: ast.AST) -> bool:
    """Whether a statement is an import, a string by itself, or says what a module's public names are."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    of_all = isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == ["__all__"]
    return of_all or isinstance(node, (ast.Import, ast.ImportFrom))


def size() -> dict[str, object]:
    files = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    code = {path: lines_of_code(text) for path, text in files.items()}
    wings = {name: sum(n for p, n in code.items() if p.parent.name == name) for name in ("engine", "guards", "python", "reads")}
    return {"files": len(files), "lines": sum(text.count("\n") for text in files.values()), "lines of code": sum(code.values()),
            **{f"lines of code in {name}/": n for name, n in wings.items()}}  # fmt: skip


PLACES = """
import torch, phonograph as pg
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
@pg.record(keep="always", audit=0)
def step(x):
    loss = net(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    return loss.detach()
for _ in range(8): step(torch.ones(4, 8))
(player,) = step._shelf
print(len(player.recording.table.constants))
"""


def places() -> int:
    """The places whose change a replay of a small training step would notice."""
    return int(subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, check=True).stdout)


def reading() -> dict[str, object]:
    """What the reading programs come to."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "reading_programs.py", "--device", "cpu", "--out", folder]
        subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, check=False)
        groups = json.loads((Path(folder) / "reading_programs.json").read_text())["figures"]
    rows = [g for g in groups.values() if isinstance(g, dict)]
    what = ("noticed", "found by the audit", "runs live", "missed")
    found = {one: sum(g["what is changed"].get(one, 0) for g in rows) for one in what}
    return {"reading programs": groups["programs"], **found, "false alarms": sum(len(g["false alarms"]) for g in rows)}


FEW = 12  # one program in so many is quick


def noted(every: int) -> dict[str, object]:
    """What becomes of changes to what a noted call of the reading programs has read; by a `ReadSet`, not by the guards."""
    command = [sys.executable, ".ci/noted.py", "--every", str(every), "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, int] = json.loads(said)
    return {"programs noted": sum(found.values()), **{f"noted: {what}": n for what, n in found.items()}}


def growth() -> str:
    """The kinds of objects that grow beside what is read and cause no second recording."""
    tests = "tests/contract/c09_python_values/test_growing.py", "-k", "growth_beside_what_is_read"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed)", said)}
    return f"{counts.get('passed', 0)} of {sum(counts.values())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="run all programs")
    figures = size()
    if parser.parse_args().whole:
        figures |= {"places that a replay relies on": places(), **reading(), "kinds of growth that are quiet": growth()}
        figures |= noted(1)
    else:
        figures |= noted(FEW)
    for name, figure in figures.items():
        print(f"{name:36}{figure!s:>10}")


if __name__ == "__main__":
    main()
