"""The contract on a GPU: the tests that need one, with each of the names that programs have for it.

    python benchmarks/contract.py --workers 15

``torch.device("cuda", 0)`` and ``torch.device("cuda")`` are one device, and two keys. With two GPUs, the tests of several ranks
run as well; they are counted apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import torch

import harness

CLAIM = "contract"
TARGET = "no test fails, whichever name the device has"
ROOT = Path(__file__).parents[1]
NAMES = {"cuda:0": "", "cuda": "cuda"}
RANKS = ["tests/contract/c23_ranks/test_ranks.py", "tests/contract/c23_ranks/test_ends.py"]


def counted(name: str, workers: int, *arguments: str) -> dict[str, Any]:
    """What pytest counts, and which tests failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {**os.environ, "PHONOGRAPH_REQUIRE_CUDA": "1", "PHONOGRAPH_TEST_DEVICE": NAMES[name]}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-m", "cuda", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=subprocess.DEVNULL)
        suite = next(ET.parse(report).getroot().iter("testsuite"))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in suite if case.find("failure") is not None
              or case.find("error") is not None]  # fmt: skip
    number = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    passed = number["tests"] - sum(number[key] for key in ("failures", "errors", "skipped"))
    return {"passed": passed, **number, "seconds": float(suite.get("time", 0)), "failed": failed}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--workers", type=int, default=4, help="processes that share the GPU (default: %(default)s)")
    parser.add_argument("tests", nargs="*", default=["tests"], help="only these (default: all)")
    arguments = parser.parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark")
    for name in NAMES:
        report.figures[name] = counted(name, arguments.workers, *plugins, *arguments.tests, *(f"--ignore={r}" for r in RANKS))
    if torch.cuda.device_count() > 1:
        report.figures["two ranks"] = counted("cuda:0", 0, *plugins, *RANKS)
    found = report.figures.values()
    report.decide(all(not one["failed"] and one["passed"] for one in found))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
