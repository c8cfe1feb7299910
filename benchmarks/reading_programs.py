"""What the tests' reading programs read, and whether it is noticed when that changes: before the next replay, or by the audit
that is due there.

    python benchmarks/reading_programs.py --device cpu

Each program runs twice, each time in a process of its own: once nothing is changed, over an audit as well, and once what it
reads is changed right before an audit. No change may be found where there is none.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import harness
import phonograph as pg

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.contract.c09_python_values import programs

CLAIM = "reading_programs"
TARGET = "of the programs all but 8 noticed before the next replay or found by the audit due there, and no false alarm"
MOST = 8
FIRST = 8  # replays, after which the first audit is
SECONDS = 120  # a program has
NOTICED, FOUND, LIVE, QUIET = "noticed", "found by the audit", "runs live", "no alarm"
_APART = multiprocessing.get_context("fork")

Look = Callable[[str, str], str]


def changed(text: str, device: str) -> str:
    """What comes of a change right before an audit."""
    with tempfile.TemporaryDirectory() as folder:
        program, f, recorded, x = _begun(text, folder, device)
        for _ in range(FIRST + 2):
            before = recorded(x)
            if pg.stats(recorded).replayed == FIRST:
                break
        else:
            return LIVE if not pg.stats(recorded).replayed else f"replays {pg.stats(recorded).replayed} calls only"
        program.change()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            right = torch.equal(recorded(x), f(x))
        if right and not torch.equal(f(x), before):
            return FOUND if any(issubclass(one.category, pg.Stale) for one in said) else NOTICED
        return "changes nothing" if right else "missed"


def unchanged(text: str, device: str) -> str:
    """What comes of an audit where nothing is changed."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, f, recorded, x = _begun(text, folder, device)
        right = all(torch.equal(recorded(x), f(x)) for _ in range(FIRST + 6))
        stale = any(issubclass(one.category, pg.Stale) for one in said)
        found = pg.stats(recorded).recorded
    return "wrong" if not right else "an alarm" if stale else f"recorded {found} times" if found > 1 else QUIET


def _begun(text: str, folder: str, device: str):
    """The program, its function, that recorded, and an argument."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:  # which are none of its modules
        del sys.modules[name]
    sys.path[:0] = [folder, str(Path(folder, "site-packages"))]
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore", pg.RunsLive)
    program = programs.load(text, Path(folder), torch.device(device))
    f = programs.function_of(program)
    return program, f, pg.record(f, keep="always"), torch.arange(1.0, 4.0, device=device)


def apart(look: Look, text: str, device: str) -> str:
    """What comes of it in a process of its own."""
    receiving, sending = _APART.Pipe(duplex=False)

    def run() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sending.send(look(text, device))

    child = _APART.Process(target=run)
    child.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(SECONDS) else f"no answer in {SECONDS} s"
    except EOFError:
        return "fails"
    finally:
        child.kill()
        child.join()


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="only programs of these names")
    arguments = parser.parse_args()
    report, total, others = harness.Report(CLAIM, TARGET, arguments), 0, 0
    for group, found in programs.GROUPS.items():
        texts = {name: text for name, text in found.items() if not arguments.only or name in arguments.only}
        texts = {name: text for name, text in texts.items() if "\ndef count(" not in f"\n{text}"}
        after = {name: apart(changed, text, arguments.device) for name, text in texts.items()}
        without = {name: apart(unchanged, text, arguments.device) for name, text in texts.items()}
        report.figures[group] = {
            "programs": len(texts),
            "what is changed": dict(Counter(after.values())),
            "nothing is changed": dict(Counter(without.values())),
            "found by the audit": [name for name, what in after.items() if what == FOUND],
            "others": {name: what for name, what in after.items() if what not in (NOTICED, FOUND)},
            "false alarms": {name: what for name, what in without.items() if what != QUIET},
        }
        print(group, report.figures[group], file=sys.stderr, flush=True)
        total += len(texts)
        others += len([what for what in after.values() if what not in (NOTICED, FOUND, LIVE)])
    report.figures |= {"programs": total, "neither noticed nor found": others}
    alarms = any(report.figures[group]["false alarms"] for group in programs.GROUPS)
    if not arguments.only:
        report.decide(others <= MOST and not alarms)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
