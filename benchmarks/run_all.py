"""Every benchmark, each in a process of its own, the cheap ones first.

    python benchmarks/run_all.py --out results --budget 1200

What does not fit into the budget (seconds) is left out and named. Exit status 0 if every one that ran met its target.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = (
    "tiny_kernels",
    "host_time",
    "first_calls",
    "audits",
    "reading_programs",
    "ppo_update",
    "true_edges",
    "digits_cpu",
    "bitwise",
    "loss_curves",
    "activation_memory",
    "compile_overhead",
    "control_flow",
    "data_dependent",
    "llama_decode",
    "decode_bits",
    "pairs",
    "gpt2_step",
    "control_flow_uses",
)
LEAST_SECONDS = 20  # not worth starting with less


def run(script: str, out: Path, quick: bool, seconds: float) -> str:
    command = [sys.executable, str(HERE / f"{script}.py"), "--out", str(out), *(["--quick"] if quick else [])]
    try:
        status = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return "out of time"
    return {0: "done", 1: "target missed"}.get(status, f"failed (exit status {status})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help=f"which ones (default: {' '.join(SCRIPTS)})")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them (default: 1800)")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    begin, verdicts = time.monotonic(), {}
    for script in arguments.scripts or SCRIPTS:
        left = arguments.budget - (time.monotonic() - begin)
        started = time.monotonic()
        verdict = run(script, arguments.out, arguments.quick, left) if left > LEAST_SECONDS else "left out: no time"
        verdicts[script] = f"{verdict} ({time.monotonic() - started:.0f} s)"
    print("\n" + "\n".join(f"{script:14s} {verdict}" for script, verdict in verdicts.items()))
    return 0 if all(verdict.startswith("done") for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
