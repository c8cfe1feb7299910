"""A program is run twice, plainly and recorded, and one that differs is shrunk: statements, blocks and options go that are not
needed."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.simulation.grammar import Program
from tests.simulation.world import KEPT, Ran, World

__all__ = ["Differs", "check", "shrunk"]

_names = itertools.count()


class Differs(AssertionError):
    """The first turn after which something is not as in eager, and what."""


def check(program: Program, device: torch.device) -> Ran:
    """Run a program plainly and recorded, and compare.

    Raises:
        Differs: something can be seen to be different.
    """
    name = f"/drawn/program{next(_names)}.py"
    plain = World(device, None).run(program.text, name)
    recorded = World(device, dict(program.options), plain).run(program.text, name)
    for n, (ours, theirs) in enumerate(zip(recorded.turns, plain.turns, strict=True)):
        theirs |= {
            path: True for path in theirs if path.endswith(": written") and ours.get(path)
        }  # what is put back is written
        if ours != theirs:
            raise Differs(f"turn {n}: {_difference(ours, theirs)}")
        if recorded.alive[n] > plain.alive[n] + KEPT:
            raise Differs(f"turn {n}: {recorded.alive[n]} arguments are alive, plainly {plain.alive[n]}")
    return recorded


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    paths = [path for path in {**theirs, **ours} if ours.get(path, "-") != theirs.get(path, "-")]
    said = (f"{path}: {str(ours.get(path, '-'))[-160:]}, plainly {str(theirs.get(path, '-'))[-160:]}" for path in paths[:4])
    return "; ".join(said)


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest that is found by taking a smaller one that still fails, again and again."""
    changed = True
    while changed:
        changed, at = False, 0
        while at < len(edits := [*_edits(program)]):
            smaller = edits[at]()
            if smaller is not None and fails(smaller):
                program, changed = smaller, True
            else:
                at += 1
    return program


def _edits(program: Program) -> Iterator[Callable[[], Program | None]]:
    """What makes it smaller: each gives another program, or None if that is none."""
    for i in range(len(program.options)):
        yield partial(dataclasses.replace, program, options=program.options[:i] + program.options[i + 1 :])
    blocks = _blocks(ast.parse(program.text))
    for size in (8, 4, 2, 1):
        for number, block in enumerate(blocks):
            for i in range(0, len(block), size) if size == 1 or len(block) >= size else ():
                yield partial(_edited, program, number, slice(i, i + size), "")
    for number, block in enumerate(blocks):
        for i, statement in enumerate(block):
            if isinstance(statement, ast.If | ast.With | ast.For | ast.Try) and not _is_loop(statement):
                for part in ("body", "orelse"):
                    yield partial(_edited, program, number, slice(i, i + 1), part)


def _is_loop(statement: ast.stmt) -> bool:
    return "told" in ast.unparse(statement)


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    return [
        block for node in ast.walk(tree) for name in ("body", "orelse") if isinstance(block := getattr(node, name, None), list)
    ]


def _edited(program: Program, number: int, place: slice, part: str) -> Program | None:
    """With nothing in place of these statements in one of its blocks, or with a part of the first."""
    tree = ast.parse(program.text)
    block = _blocks(tree)[number]
    block[place] = getattr(block[place.start], part, [])
    if not block:
        block.append(ast.Pass())
    text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    smaller = len(text) < len(program.text) and "told()" in text
    return dataclasses.replace(program, text=text) if smaller else None
