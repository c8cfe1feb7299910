"""Codes of the reasons to run live.

`reasons.txt` lists them by subject: a code, the words with ``…`` for what differs from case to case, and perhaps a line of a
program of the tests that is told them. The words themselves, and what to do, stand where they are raised.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["DIFFERS", "Reason", "code_of", "reasons"]

DIFFERS = "…"


class Reason(NamedTuple):
    """A line of the list: `words` as they are told, with ``…`` for what differs; `example`, a line of a program, or ""."""

    code: str
    words: str
    subject: str
    example: str = ""

    def says(self, text: str) -> bool:
        return re.fullmatch(re.escape(self.words).replace(DIFFERS, ".*"), text, re.DOTALL) is not None


@cache
def reasons() -> tuple[Reason, ...]:
    """All of the list, in its order."""
    found, subject = list[Reason](), ""
    for line in Path(__file__).with_name("reasons.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            subject = line.removeprefix("## ")
        elif line.startswith(" "):
            found[-1] = found[-1]._replace(example=line.strip())
        elif line:
            code, _, words = line.partition(" ")
            found.append(Reason(code, words, subject))
    return tuple(found)


def code_of(reason: str) -> str:
    """The code of a reason as it is told: of the words that fit it, those that say most. "" for none."""
    fitting = [(len(each.words), each.code) for each in reasons() if each.says(reason)]
    return max(fitting, default=(0, ""))[1]
