"""Fifty and more models through `torch.compile(model, backend="phonograph")`: right, recorded, how fast, how large.

    python benchmarks/coverage.py --out part1 --jobs 12 --budget 460 --part 1/2
    python benchmarks/coverage.py --out part2 --jobs 12 --budget 460 --part 2/2
    python benchmarks/coverage.py --report --merge part1/coverage.json part2/coverage.json

A case is a model (`coverage_models.py`) in inference or in training, and runs in a process of its own with a time limit. What
goes wrong there is its row. Rows are appended to `coverage.jsonl` as the cases end, for a run that is cut off; at the end,
`coverage.json` merges them by name, so that a later run of some cases (`--only`, `--part`, `--missing`) replaces these alone.

Inference is `eval()` under `no_grad`. A training step is forward, loss, backward, and an SGD step outside of what is compiled.
Each call gets another batch than the last, of four. A case has two passes:

1.  Deterministic algorithms, one method after the other, each from a clean start (no compiled code, no cached memory) with a
    copy of the same model. After the call that compiles:

        warm     7 calls, in which recordings are made        peak memory `whole` begins here
        steady   8 calls: what is replayed is counted here    peak memory `steady` is of these alone
        kept     6 calls, whose outputs are all kept and only then compared, with the parameters and buffers

    `allocated` is what tensors had at most, `reserved` what was taken from the device for them, above what there was before
    the method's model was made; both hold the model, its gradients and its four batches. A graph's own memory is counted in
    `allocated` while it is recorded, and in `reserved` always. Where Inductor has to measure kernels, which depends on what
    other cases have left in its cache, reduce-overhead's pool keeps the memory that this takes (60 or 120 MiB on an H200).

    Right: bit for bit as `torch.compile(model)`, or as the code that was recorded is when it runs unrecorded (Inductor is not
    asked to let a backward write into what its forward saved), or, where five runs of it differ, no further from it than twice
    what they are from each other.

2.  Without deterministic algorithms, and with nothing left of the first pass: time. All methods are there at once, phonograph
    made last, and take turns. A ratio is the median over the turns of one method's time over the other's in the same turn.
    While a case measures, no other one calls its models: those wait for a lock. They may compile.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from coverage_case import CASES, COMPILE, METHODS, OURS, REDUCE, work
from coverage_models import MODELS

CLAIM = "coverage"
SLOWER_THAN_COMPILE, SLOWER_THAN_REDUCE, MOST = 1.03, 1.05, 0.9
ENOUGH = {"transformers/": 30, "timm/": 20}  # models of each library
MEMORY = "memory over reduce-overhead's"
TARGET = (
    f"all right; none slower than torch.compile by more than {SLOWER_THAN_COMPILE - 1:.0%}; as fast as reduce-overhead or "
    f"faster in {MOST:.0%}, never more than {SLOWER_THAN_REDUCE - 1:.0%} slower; peak memory (reserved, whole) at most that of "
    f"reduce-overhead in {MOST:.0%}; of at least {ENOUGH['transformers/']} models of transformers and {ENOUGH['timm/']} of timm"
)

# Why a case loses, by its name: for the table.
_NOISE = "the spread over the turns includes 1"
_PACKED = (
    "reduce-overhead's pool begins with the large segments that Inductor has measured in, and what comes after may lie "
    "more densely there than in segments of 20 MiB: {} MiB in this run, {} in others of the same program; phonograph {} in all"
)
EXPLANATIONS: dict[str, str] = {
    "transformers/beit training": "indexes with a tensor on the host, which each call copies; reduce-overhead raises there",
    "transformers/marian inference": _NOISE,
    "transformers/hubert training": "nine graphs with Python between them, whose backwards are kept apart from the forwards of "
    "the others (26 MiB). wav2vec2, which is alike, is beside a reduce-overhead that has kept what Inductor measured with",
    "timm/resnet18 training": _NOISE,
    "timm/resnet50 training": _PACKED.format(306, "418", "324 to 328"),
    "timm/vgg11 training": _PACKED.format("2,112", "2,238", "2,206 to 2,208"),
    "timm/resmlp_12_224 inference": _NOISE,
    "timm/resmlp_12_224 training": _PACKED.format(162, "196 (nothing measured) and 224", "192 to 194"),
    "timm/volo_d1_224 training": _PACKED.format(270, "392", "284 to 290"),
}


# ---- all cases -------------------------------------------------------------------------------------


@dataclass
class Running:
    name: str
    process: subprocess.Popen[str]
    row: Path
    log: Path
    until: float

    def over(self) -> bool:
        if self.process.poll() is not None:
            return True
        if time.monotonic() < self.until:
            return False
        self.end()
        return True

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with what compiles for it; it is the leader of its session
        self.process.wait()

    def read(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.row.read_text()) if self.row.exists() else {"case": self.name}
        if self.process.returncode:
            why = "out of time" if self.process.returncode == -9 else f"exit status {self.process.returncode}"
            row["error"] = f"{row.get('error') or ''} ({why}) {self.log.read_text(errors='replace')[-300:]}".strip()
        return row


@contextmanager
def ending_with(running: list[Running]) -> Iterator[None]:
    """Whatever ends this process ends those that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        for one in running:
            one.end()


def start(name: str, number: int, folder: Path, arguments: argparse.Namespace) -> Running:
    row, log = folder / f"{number}.json", folder / f"{number}.log"
    passed = [flag for flag, wanted in (("--quick", arguments.quick), ("--no-times", arguments.no_times)) if wanted]
    command = [sys.executable, __file__, "--case", name, "--row", str(row), "--device", arguments.device, *passed]
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=os.environ | environment
        )
    return Running(name, process, row, log, time.monotonic() + arguments.limit)


def run_all(names: list[str], arguments: argparse.Namespace) -> None:
    end = time.monotonic() + arguments.budget
    waiting, running = list(enumerate(names)), list[Running]()
    made = harness.Report(CLAIM, TARGET, arguments).as_json()
    made = {key: made[key] for key in ("device", "hardware", "versions", "command", "quick")}
    with (
        tempfile.TemporaryDirectory() as folder,
        (arguments.out / f"{CLAIM}.jsonl").open("a") as lines,
        ending_with(running),
    ):
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < arguments.jobs and time.monotonic() < end:
                number, name = waiting.pop(0)
                running.append(start(name, number, Path(folder), arguments))
            time.sleep(0.1)
            for one in [each for each in running if each.over()]:
                running.remove(one)
                row = one.read() | {"made": made, "date": _now()}
                print(_line(row), flush=True)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    if waiting:
        print(f"left out, the budget being spent: {', '.join(name for _, name in waiting)}")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def chosen(arguments: argparse.Namespace) -> list[str]:
    part, of = map(int, arguments.part.split("/"))
    models = list(MODELS)[part - 1 :: of]
    names = [name for name, case in CASES.items() if case.model.name in models and re.search(arguments.only, name)]
    if arguments.missing:
        done = {name for name, row in rows_of(_files(arguments)).items() if not row.get("error")}
        names = [name for name in names if name not in done]
    return names


# ---- the judge -------------------------------------------------------------------------------------


def _files(arguments: argparse.Namespace) -> list[Path]:
    return [arguments.out / f"{CLAIM}.json", *arguments.merge, arguments.out / f"{CLAIM}.jsonl"]


def rows_of(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The last row of each case, but none of a run that was cut off before it could tell whether the case is right. One that
    was cut off before it had times keeps those that were there."""
    rows: dict[str, dict[str, Any]] = {}
    for row in itertools.chain(*(_read(file) for file in files if file.exists())):
        known = rows.get(row["case"], {})
        if known.get("date", "") <= row["date"] and ("right" in row or "right" not in known):
            rows[row["case"]] = row if "µs" in row or "µs" not in known else row | _times(known)
    return {name: rows[name] for name in CASES if name in rows}


def _times(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key in ("µs", "CPU threads") or key.startswith(("time over", "spread"))}
    return kept | {"times of": row.get("times of", row["date"])}


def _read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    whole = json.loads(file.read_text())
    return [row | {"made": whole["made"][row["made"]]} for row in whole["cases"]]


def judge(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What the targets ask for, and who fails them."""
    losers: dict[str, dict[str, Any]] = {}

    def lose(name: str, what: str, number: Any) -> None:
        losers.setdefault(name, {"explanation": EXPLANATIONS.get(name, "")})[what] = number

    for name, row in rows.items():
        if row.get("error"):
            lose(name, "error", row["error"])
        for method, error in row.get("errors", {}).items():
            lose(name, f"error of {method}", error)
        if row.get("right") is False:
            lose(name, "not right", row.get("difference"))
        if row.get("recorded", "fully") != "fully":
            lose(name, f"recorded {row['recorded']}", row["reasons"])
        if row.get(f"time over {COMPILE}", 0) > SLOWER_THAN_COMPILE:
            lose(name, f"time over {COMPILE}", row[f"time over {COMPILE}"])
        if row.get(f"time over {REDUCE}", 0) > 1:
            lose(name, f"time over {REDUCE}", row[f"time over {REDUCE}"])
        if (ratio := _memory_ratio(row, "reserved, whole")) is not None and ratio > 1:
            lose(name, MEMORY, round(ratio, 3))
    return _targets(rows), losers


def _targets(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    over_compile = _numbers(rows, lambda row: row.get(f"time over {COMPILE}"))
    over_reduce = _numbers(rows, lambda row: row.get(f"time over {REDUCE}"))
    memory = {
        kind: _numbers(rows, lambda row, kind=kind: _memory_ratio(row, kind))
        for kind in ("reserved, whole", "reserved, steady", "allocated, whole", "allocated, steady")
    }
    judged = [row["right"] for row in rows.values() if "right" in row]
    return {
        "cases": len(rows),
        "models of transformers": _models(rows, "transformers/"),
        "models of timm": _models(rows, "timm/"),
        "models measured whole": {library: _whole(rows, library) for library in ENOUGH},
        "right": f"{sum(judged)} of {len(judged)}",
        "bitwise": sum(bool(row.get("bitwise")) for row in rows.values()),
        "recorded": {how: sum(r.get("recorded") == how for r in rows.values()) for how in ("fully", "partly", "live")},
        "time over torch.compile": _summary(over_compile, SLOWER_THAN_COMPILE),
        "time over reduce-overhead": _summary(over_reduce, 1.0),
        "memory over reduce-overhead": {kind: _summary(ratios, 1.0) for kind, ratios in memory.items()},
        "met": {
            "all right": bool(judged) and all(judged),
            "not slower than torch.compile": bool(over_compile) and max(over_compile) <= SLOWER_THAN_COMPILE,
            "as fast as reduce-overhead": bool(over_reduce)
            and _within(over_reduce, 1.0) >= MOST
            and max(over_reduce) <= SLOWER_THAN_REDUCE,
            "memory": bool(memory["reserved, whole"]) and _within(memory["reserved, whole"], 1.0) >= MOST,
        },
    }


def _numbers(rows: dict[str, dict[str, Any]], of: Callable[[dict[str, Any]], float | None]) -> list[float]:
    return [number for row in rows.values() if (number := of(row)) is not None]


def _models(rows: dict[str, dict[str, Any]], library: str) -> int:
    return len({name.split()[0] for name, row in rows.items() if name.startswith(library) and "right" in row})


def _whole(rows: dict[str, dict[str, Any]], library: str) -> int:
    """Of how many models there are times and memory beside both peers, in inference and in training."""
    whole = [name for name, row in rows.items() if f"time over {REDUCE}" in row and _memory_ratio(row, "reserved, whole")]
    return sum(n == 2 for model, n in Counter(name.split()[0] for name in whole).items() if model.startswith(library))


def _within(ratios: list[float], limit: float) -> float:
    return sum(ratio <= limit for ratio in ratios) / len(ratios)


def _summary(ratios: list[float], limit: float) -> dict[str, Any]:
    if not ratios:
        return {}
    return {
        "cases": len(ratios), "median": round(statistics.median(ratios), 3), "largest": round(max(ratios), 3),
        f"at most {limit}": round(_within(ratios, limit), 3),
    }  # fmt: skip


def _memory_ratio(row: dict[str, Any], kind: str) -> float | None:
    ours, theirs = (row.get("peaks", {}).get(method, {}).get(kind) for method in (OURS, REDUCE))
    return ours / theirs if ours is not None and theirs else None


# ---- the table -------------------------------------------------------------------------------------


def _line(row: dict[str, Any]) -> str:
    right = {True: "right", False: "WRONG", None: "-"}[row.get("right")]
    if right == "right" and not row["bitwise"]:
        right = "right*"
    times = row.get("µs", {})
    cells = [f"{row['case']:44s} {right:6s} {row.get('recorded', '-'):6s}"]
    cells += [f"{times[method]:9,.0f}" if method in times else " " * 9 for method in METHODS]
    for ratio in (row.get(f"time over {COMPILE}"), row.get(f"time over {REDUCE}"), _memory_ratio(row, "reserved, whole")):
        cells.append(f"{ratio:7.3f}" if ratio is not None else " " * 7)
    reasons = "; ".join([*row.get("reasons", {}), *(f"{m}: {e}" for m, e in row.get("errors", {}).items())])
    remark = f"{row['error']}; {reasons}" if row.get("error") else reasons
    return " ".join(cells) + (f"  {remark[:160]}" if remark else "")


def finish(arguments: argparse.Namespace) -> int:
    """Print the table, write `coverage.json`; exit status as of the other benchmarks."""
    rows = rows_of(_files(arguments))
    targets, losers = judge(rows)
    missing = [name for name in CASES if name not in rows or rows[name].get("error")]
    met = _met(rows, targets)
    heads = [*METHODS, "/compile", "/reduce", "memory"]
    print(f"\n{'case':44s} {'':6s} {'':6s} " + " ".join(f"{head[:9]:>{9 if head in METHODS else 7}s}" for head in heads))
    print("\n".join(map(_line, rows.values())))
    print("\nlosers\n" + "\n".join(f"  {name}: {json.dumps(why, ensure_ascii=False)[:300]}" for name, why in losers.items()))
    print(f"\n{json.dumps(targets, indent=1)}\nnot measured: {len(missing)}")
    made: list[dict[str, Any]] = []  # the runs that the rows are of
    for row in rows.values():
        if row["made"] not in made:
            made.append(row["made"])
    cases = [row | {"made": made.index(row["made"])} for row in rows.values()]
    written = {"claim": CLAIM, "target": TARGET, "met": met, "targets": targets, "losers": losers, "not measured": missing}
    written |= {"made": made, "cases": cases}
    (arguments.out / f"{CLAIM}.json").write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    (arguments.out / f"{CLAIM}.jsonl").unlink(missing_ok=True)
    return {None: 0 if arguments.quick else 3, True: 0, False: 1}[met]


def _met(rows: dict[str, dict[str, Any]], targets: dict[str, Any]) -> bool | None:
    """Decided once enough models have been measured on a GPU, in inference and in training; a miss that no other case can mend,
    before."""
    if any(row["made"]["quick"] or row["made"]["device"] == "cpu" for row in rows.values()):
        return None
    if all(targets["models measured whole"][library] >= count for library, count in ENOUGH.items()):
        return all(targets["met"].values())
    return None if targets["met"]["all right"] else False


def _arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose names this regular expression is found in")
    parser.add_argument("--part", default="1/1", help="i/n: every nth model, from the ith")
    parser.add_argument("--missing", action="store_true", help="only cases without a row, or whose row is an error")
    parser.add_argument("--jobs", type=int, default=6, help="cases at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=100, help="seconds a case may take (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no other case is started")
    parser.add_argument("--no-times", action="store_true", help="only the first pass")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="coverage.json of other runs, to be merged")
    parser.add_argument("--report", action="store_true", help="run nothing; judge and print what there is")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    parser.add_argument("--case", choices=list(CASES), metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--timing", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if arguments.case:
        return work(arguments)
    names = chosen(arguments)
    if arguments.list:
        print("\n".join(names))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        run_all(names, arguments)
    return finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
