"""What a `ReadSet` notices of the reading programs of the tests.

    python .ci/noted.py [program ...]

Each program runs in a process of its own: a call of it is noted, once nothing is changed, and once what it reads is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from tests.contract.c09_python_values import programs  # noqa: E402

from phonograph._torch.skipped_frames import hide  # noqa: E402
from phonograph.reads.readset import ReadSet  # noqa: E402

hide()
NOTICED, LIVE, ALARM, MISSED, WRONG = "noticed", "live", "false alarm", "missed", "another result"
KINDS = (NOTICED, LIVE, ALARM, MISSED, WRONG)
SECONDS = 60


def noted(text: str) -> str:
    """What comes of a change to what a noted call has read."""
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:  # which are none of its modules
            del sys.modules[name]
        sys.path[:0] = [folder, str(Path(folder, "site-packages"))]
        sys.dont_write_bytecode = True
        program = programs.load(text, Path(folder), torch.device("cpu"))
        f, x = programs.function_of(program), torch.arange(1.0, 4.0)
        before = [f(x) for _ in range(3)][-1]
        reads = ReadSet()
        with reads.noting(f):
            result = f(x)
        if not torch.equal(result, before):
            return WRONG
        if reads.refused:
            return f"{LIVE} ({reads.refused[0]})"
        f(x)
        if alarms := reads.changed():
            return f"{ALARM}: {[read.place.path for read in alarms][:3]}"
        program.change()
        found = reads.changed()
        if torch.equal(f(x), before):
            return "changes nothing"
        return NOTICED if found else MISSED


def apart(text: str) -> str:
    """The same in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        warnings.simplefilter("ignore")
        try:
            said = noted(text)
        except BaseException as e:  # whatever it is, it is what comes of it
            said = f"fails: {type(e).__name__}: {e}"
        os.write(write, said.encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said or "no answer"


def all_of(names: list[str], every: int) -> dict[str, str]:
    """What comes of one program in so many, by its name; of these, if any are named."""
    texts = {f"{group}/{name}": text for group, found in programs.GROUPS.items() for name, text in found.items()}
    texts = {name: text for name, text in texts.items() if "\ndef count(" not in f"\n{text}"}
    texts = {name: text for name, text in texts.items() if not names or name.rpartition("/")[2] in names}
    return {name: apart(text) for name, text in [*texts.items()][::every]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="run one program in so many")
    parser.add_argument("--json", action="store_true", help="tell only how many there are of each kind")
    arguments = parser.parse_args()
    found = all_of(arguments.programs, arguments.every)
    counts = dict.fromkeys(KINDS, 0) | Counter(re.split(r"[:(]", said)[0].strip() for said in found.values())
    print(json.dumps(counts) if arguments.json else counts)
    if not arguments.json:
        print(*(f"{name:60}{said}" for name, said in found.items() if said != NOTICED), sep="\n")


if __name__ == "__main__":
    main()
