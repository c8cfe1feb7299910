"""Lines of phonograph are broken on purpose, one at a time, and drawn programs have to notice.

    python -m tests.simulation.mutants --mutants 60 --seed 1 --seconds 60 --out benchmarks/results/mutants.json

Which lines a program reaches is noted first, for so many `--programs`. A mutant is one of the lines that are reached in the
folders that decide (engine, slots, memory, devices), with something in it turned around: a comparison, `and`, `not`, a
condition, a constant, a result; or without what it does. In a process of its own the functions there get that code, and the
programs run that reach it, and then others, until one differs from eager (or raises, dies, hangs), or its time is over.

What it may come to: `differs` and its like are what was wanted. `counts`: all is right, but other calls were replayed than
before. `survives`: nothing could be seen; the line may be there for speed, for another thread, for a GPU, or for an interrupt
(`tests/faults`), or what is wrong is not drawn yet. What is written to a file is added to it, and not run again.
"""

from __future__ import annotations

import argparse
import ast
import gc
import itertools
import json
import os
import pathlib
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

import phonograph
from tests.simulation.check import Differs, check
from tests.simulation.run import drawn
from tests.simulation.world import Ran

FOLDERS = ("engine", "slots", "memory", "devices")
ELSEWHERE = tuple(f"engine/{name}.py" for name in (
    "traces", "reports", "explanation", "figures", "findings", "check", "look", "ledger", "timeline", "repeated_records",
    "uncalled_modules", "budget", "profitability", "trials", "process_groups",
))  # fmt: skip
"""What is told to people, what measures time, and what ranks do."""
CUDA = "devices/cuda"
TOLD = ("__repr__", "explain", "statistics")
OTHER_DEVICES = ("is_cpu", "is_cuda", "'cpu'", "'cuda'", "device.type")
"""What is the same in all that runs on the CPU."""
HANGS = 60.0  # seconds longer than it could take
HOME = os.path.join(os.path.dirname(phonograph.__file__), "")


class Mutant(NamedTuple):
    file: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


# ---- what can be broken --------------------------------------------------------------------------

_OTHERS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip


def broken(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHERS:
        yield ast.Compare(node.left, [_OTHERS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        yield from (ast.BoolOp(node.op, node.values[:i] + node.values[i + 1 :]) for i in range(len(node.values))
                    if len(node.values) > 2)  # fmt: skip
        yield node.values[0]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield node.left
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        yield ast.Pass()


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """All of a file's."""
    lines = text.splitlines()
    for node in _in_functions(ast.parse(text)):
        if getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1) or _on_other_devices(node):
            continue
        line: str = lines[node.lineno - 1]
        start, end = (len(line.encode()[:at].decode()) for at in (node.col_offset, node.end_col_offset))
        for other in broken(node):
            said = ast.unparse(ast.fix_missing_locations(other))
            said = said if isinstance(other, ast.stmt) else f"({said})"
            yield Mutant(file, node.lineno, line, line[:start] + said + line[end:])


def _on_other_devices(node: ast.AST) -> bool:
    """Whether a condition asks where something lies."""
    return isinstance(node, ast.expr) and any(word in ast.unparse(node) for word in OTHER_DEVICES)


def _in_functions(tree: ast.AST, inside: bool = False) -> Iterator[Any]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if node.name not in TOLD:
                for one in node.body:
                    yield from (one, *_in_functions(one, True))
        elif isinstance(node, ast.AnnAssign) and inside and node.value is not None:
            yield from (node.value, *_in_functions(node.value, inside))
        elif not (isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments | ast.Assert) or _is_strict(node)):
            yield from (node, *_in_functions(node, inside)) if inside else _in_functions(node, inside)


def _is_strict(node: ast.AST) -> bool:
    """Whether it says that two are equally long: an assertion."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def files() -> dict[str, str]:
    """Their text, by their places in the package."""
    home = pathlib.Path(HOME)
    found = {str(p.relative_to(home)): p.read_text() for folder in FOLDERS for p in sorted((home / folder).rglob("*.py"))}
    return {name: text for name, text in found.items() if not name.startswith((CUDA, *ELSEWHERE))}


# ---- in a child ----------------------------------------------------------------------------------


class _Lines:
    """The lines of those folders that run."""

    def __init__(self) -> None:
        self.found: set[tuple[str, int]] = set()
        self._known: dict[str, str | None] = {}

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if file not in self._known:
            name = file[len(HOME) :]
            self._known[file] = name if file.startswith(HOME) and name.split(os.sep)[0] in FOLDERS else None
        if (name := self._known[file]) is None:
            return None
        self.found.add((name, frame.f_lineno))
        return self


def _run(i: int) -> tuple[dict[str, Any], Ran]:
    program = drawn("mutants", i)
    return dict(program.options), check(program, torch.device("cpu"))


def _baseline(say: Callable[[Any], None], first: int, last: int) -> None:
    """Which lines a program reaches, and how often it is recorded and replayed (where it is so each time)."""
    for i in range(first, last):
        options, ran = _run(i)
        lines = _Lines()
        sys.settrace(lines)
        try:
            _, again = _run(i)
        finally:
            sys.settrace(None)
        counts = [ran.recorded, ran.replayed]
        stable = options["keep"] == "always" and counts == [again.recorded, again.replayed]
        say({"program": i, "counts": counts if stable else None, "lines": sorted(lines.found)})


def _tried(say: Callable[[Any], None], mutant: Mutant, programs: list[int], counts: dict[int, Any], seconds: float) -> None:
    if not _exchanged(mutant):
        say({"outcome": "left out"})
        return
    gc.collect()
    gc.freeze()  # what is there need not be walked through by each program
    until = time.process_time() + seconds  # others may have the machine, too
    for n, i in enumerate(itertools.chain(programs, itertools.count(max(counts) + 1))):
        if time.process_time() > until:
            return
        if n % 20 == 19:
            gc.collect()
        try:
            _, ran = _run(i)
        except BaseException as error:
            kind = "differs" if isinstance(error, Differs) else "raises"
            say({"outcome": kind, "program": i, "tried": n + 1, "said": f"{type(error).__name__}: {error}"[:300]})
            return
        other = counts.get(i) is not None and counts[i] != [ran.recorded, ran.replayed]
        say({"tried": n + 1, **({"outcome": "counts", "program": i} if other else {})})


def _exchanged(mutant: Mutant) -> bool:
    """Give the functions of the file their code with that line. (To import all anew would take longer than most programs.)"""
    path = HOME + mutant.file
    lines = pathlib.Path(path).read_text().splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after + "\n"
    new, changed = {_place(code): code for code in _codes(compile("".join(lines), path, "exec", dont_inherit=True))}, False
    gc.unfreeze()
    for f in gc.get_objects():
        if type(f) is not FunctionType or f.__code__.co_filename != path:
            continue
        code = new.get(_place(f.__code__), f.__code__)
        if f.__code__ != code and len(code.co_freevars) == len(f.__code__.co_freevars):
            f.__code__, changed = code, True
    return changed


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def forked(work: Callable[..., None], *args: Any, seconds: float) -> tuple[list[Any], str]:
    """What a child says, and how it ends."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(read)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        status = 1
        try:
            with os.fdopen(write, "w") as out:
                work(lambda what: print(json.dumps(what), file=out, flush=True), *args)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    said, until = b"", time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, until - time.monotonic()))
        more = os.read(read, 1 << 20) if ready else b""
        said += more
        if not more:
            break
    hangs = not ready
    if hangs:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(child, 0)
    lines = [json.loads(line) for line in said.decode().splitlines() if line.endswith("}")]
    return lines, "hangs" if hangs else "" if status == 0 else "dies"


# ---- all of them ---------------------------------------------------------------------------------


class Known(NamedTuple):
    """What the programs do in the source as it is."""

    counts: dict[int, Any]
    reaches: dict[tuple[str, int], list[int]]


def known(programs: int) -> Known:
    counts, reaches = dict[int, Any](), dict[tuple[str, int], list[int]]()
    for first in range(0, programs, 50):
        lines, how = forked(_baseline, first, min(programs, first + 50), seconds=3600)
        for line in lines:
            counts[line["program"]] = line["counts"]
            for file, at in line["lines"]:
                reaches.setdefault((file, at), []).append(line["program"])
        if how:
            raise SystemExit(f"a program fails as it is ({how}), after {len(counts)}")
    return Known(counts, reaches)


def tried(mutant: Mutant, known: Known, seconds: float) -> dict[str, Any]:
    begun, programs = time.monotonic(), known.reaches[mutant.file, mutant.line]
    said, how = forked(_tried, mutant, programs, known.counts, seconds, seconds=6 * seconds + HANGS)
    found = {"outcome": "survives", "tried": 0}
    for one in said:
        found |= one
    return {**mutant._asdict(), **found, **({"outcome": how} if how else {}), "of": len(programs),
            "seconds": round(time.monotonic() - begun)}  # fmt: skip


def chosen(seed: str, known: Known, n: int, only: str) -> list[Mutant]:
    every = [
        m for file, text in files().items() for m in mutants(file, text) if (file, m.line) in known.reaches and only in file
    ]
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for m in every:
        by_line.setdefault((m.file, m.line), []).append(m)
    draw = random.Random(seed)
    return [draw.choice(by_line[at]) for at in draw.sample(sorted(by_line), min(n, len(by_line)))]


FOUND = ("differs", "raises", "dies", "hangs")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--programs", type=int, default=200, help="that are drawn (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="any text (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="of the processor for each, at most (default: %(default)s)")
    parser.add_argument("--until", type=float, default=3600, help="seconds after which none is begun (default: %(default)s)")
    parser.add_argument("--only", default="", help="files whose names contain this")
    parser.add_argument("--out", type=pathlib.Path, help="where to write the report, as JSON; what is there is not run again")
    options = parser.parse_args()
    begun = time.monotonic()
    done = json.loads(options.out.read_text())["mutants"] if options.out and options.out.exists() else []
    torch.set_num_threads(1)
    for i in range(3):
        _run(i)  # what is imported late is there
    as_is = known(options.programs)
    again = {(one["file"], one["line"], one["after"]) for one in done}
    for mutant in chosen(options.seed, as_is, options.mutants, options.only):
        if (mutant.file, mutant.line, mutant.after) in again or time.monotonic() - begun > options.until:
            continue
        done.append(tried(mutant, as_is, options.seconds))
        print(f"{done[-1]['outcome']} ({done[-1]['tried']} programs, {done[-1]['seconds']} s) {mutant}", flush=True)
        if options.out:
            outcomes = {kind: sum(one["outcome"] == kind for one in done) for kind in (*FOUND, "counts", "survives")}
            options.out.write_text(json.dumps({**outcomes, "seed": options.seed, "mutants": done}, indent=1) + "\n")
    print(f"{sum(one['outcome'] in FOUND for one in done)} of {len(done)} are noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
