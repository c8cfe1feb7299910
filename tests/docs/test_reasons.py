"""Each reason to run live has a code, and `docs/reasons.md` is what the source says of them."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import io
import linecache
import logging
import os
import random
import re
import socket
import sqlite3
import sys
import types
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.cli import main
from phonograph.cli.reasons import SOURCE, page, raised_in
from phonograph.reasons import code_of, reasons

ROOT = Path(__file__).parents[2]
RAISED = [*raised_in(SOURCE)]
_, *_PARTS = re.split(
    r"^#case (PG\d+)\n", (Path(__file__).parent / "reasons.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
)
PROGRAMS = [*zip(_PARTS[::2], _PARTS[1::2], strict=True)]
KNOWN = {
    "collections": collections, "contextvars": contextvars, "functools": functools, "gc": gc, "io": io, "logging": logging,
    "nn": nn, "os": os, "pg": pg, "pytest": pytest, "random": random, "socket": socket, "sqlite3": sqlite3, "sys": sys,
    "torch": torch, "types": types,
}  # fmt: skip


def test_the_page_is_what_the_source_says() -> None:
    """`python -m phonograph reasons > docs/reasons.md` writes it."""
    written = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    assert written == page(), "run python -m phonograph reasons > docs/reasons.md"


def test_what_is_raised_has_a_code() -> None:
    """A new reason needs a line in `reasons.txt`: the next number of its subject."""
    assert [(raised.where, words) for raised in RAISED for words in raised.reasons if not code_of(words)] == []


def test_most_places_were_found() -> None:
    assert len(RAISED) > 250


def test_each_code_is_of_one_reason_that_is_raised() -> None:
    known = reasons()
    assert [code for code, n in Counter(reason.code for reason in known).items() if n > 1] == []
    assert all(re.fullmatch(r"PG\d{3,4}", reason.code) for reason in known)
    raised = {code_of(words) for place in RAISED for words in place.reasons}
    assert [reason for reason in known if reason.code not in raised and not reason.example] == []


def test_codes_of_a_subject_begin_alike() -> None:
    hundreds = [(reason.code[:-2], reason.subject) for reason in reasons()]
    assert len({*hundreds}) == len({code for code, _ in hundreds}) == len({subject for _, subject in hundreds})


def test_an_example_is_a_line_that_a_test_is_told_of() -> None:
    """Such a test marks the line, and compares the code."""
    tests = "".join(path.read_text(encoding="utf-8") for kind in ("py", "txt") for path in (ROOT / "tests").rglob(f"*.{kind}"))
    assert [reason for reason in reasons() if reason.example and f"{reason.example}  # here" not in tests] == []


@pytest.mark.parametrize(("code", "program"), PROGRAMS, ids=[code for code, _ in PROGRAMS])
def test_a_program_is_told_its_reason(code: str, program: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"  # a real file, so that source lines can be found and quoted
    path.write_text(program, encoding="utf-8")
    linecache.checkcache()
    names = {**KNOWN, "__name__": "example", "x": torch.arange(1.0, 5.0)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(program, str(path), "exec"), names)
        if "pg.record" not in program:
            f = pg.record(names["f"])
            for _ in range(4):
                f(names["x"])
    told = [str(warning.message) for warning in caught if issubclass(warning.category, pg.RunsLive)]
    assert told
    assert all(text.endswith(f" [{code}]") for text in told), told
    marked = {line.removesuffix("  # here").strip() for line in program.splitlines() if line.endswith("  # here")}
    assert [reason.example for reason in reasons() if reason.code == code] == [*marked]


@pytest.mark.parametrize(("told", "code"), [
    ("`x.sum().item()` reads a tensor's value on the host", "PG101"),
    ("takes a sparse_coo tensor as `x`", "PG601"),
    ("takes a tensor with attributes of its own as `x`", "PG611"),
    ("takes `x` on cuda and `y` on cpu", "PG601"),
    ("runs log live, which keeps a tensor that others may write later", "PG903"),
    ("something else", ""),
])  # fmt: skip
def test_the_words_that_say_most_count(told: str, code: str) -> None:
    assert code_of(told) == code


def test_one_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "pg101"]) == 0
    assert "return the tensor" in capsys.readouterr().out
    assert main(["reasons", "PG999"]) == 2
