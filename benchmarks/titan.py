"""torchtitan's trainer on several GPUs: its Llama 3 debug model on real text (`examples/torchtitan_llama.py`), three ways.

    python benchmarks/titan.py                                    # two GPUs: results/titan.json
    python benchmarks/titan.py --nproc 4 --add                    # FSDP2 over tensor parallel as well
    python benchmarks/titan.py --device cpu --quick               # with gloo, where both run live

As it is, with its own graph of a forward and a backward, and with the whole step recorded, each in its own processes. Losses,
norms and weights are compared on each rank, by their bits. A time is that of the slower rank: the median of the last ten steps.
Memory is what the allocator reserves at most.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import harness
import phonograph as pg

CLAIM, TIMED, MEMORY = "titan", 10, 1.02
TARGET = (
    "losses, norms and weights as without it, to the bit; "
    f"at most the time of torchtitan's own graphs, and {MEMORY} x the memory that these reserve"
)
LIVE, GRAPHS, OURS = "as it is", "its own graphs", "phonograph"


def layouts(ranks: int) -> dict[str, int]:
    """Over how many ranks each is tensor parallel."""
    return {"fsdp2": 1, "tp": ranks} if ranks == 2 else {"fsdp2 + tp": 2}


def train(arguments: argparse.Namespace) -> None:
    """One way, on this rank."""
    faulthandler.dump_traceback_later(arguments.limit - 10)
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import torchtitan_llama as example

    if arguments.quick:
        example.STEPS, example.BATCH, example.LENGTH = 4, 1, 16
    example.structured_logger.init_structured_logger(source="training", output_dir="", enable=False)
    chosen = example.config(arguments.tensor_parallel)
    chosen.training.disable_cuda_graphs = arguments.way != GRAPHS
    chosen.dump_folder = str(arguments.folder)
    kept, times, trainer = example.train(example.Recorded if arguments.way == OURS else example.Trainer, chosen)
    found: dict[str, Any] = {
        "numbers": [x for x in kept if not isinstance(x, torch.Tensor)],
        "weights": [
            hashlib.sha256(bytes(t.cpu().contiguous().view(torch.uint8).numpy())).hexdigest() for t in kept[len(times) + 1 :]
        ],
        "ms": times,
        "MiB": torch.cuda.max_memory_reserved() >> 20 if torch.cuda.is_available() else None,
    }
    if arguments.way == OURS:
        stats = pg.stats(trainer.update)
        found |= {"replayed": stats.replayed, "live": stats.live, "recorded": stats.recorded, "reasons": dict(stats.refusals)}
    (arguments.folder / f"{arguments.rank}.json").write_text(json.dumps(found))
    os._exit(0)  # how a process ends is not what is measured


def trained(way: str, tensor_parallel: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank has found, or how its log ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(arguments.nproc)}
    if arguments.device == "cpu":
        common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        for rank in range(arguments.nproc):
            command = [sys.executable, __file__, "--rank", str(rank), "--nproc", str(arguments.nproc), "--folder", name]
            command += ["--way", way, "--tensor-parallel", str(tensor_parallel), "--limit", str(arguments.limit)]
            command += ["--quick"] if arguments.quick else []
            with (folder / f"{rank}.log").open("w") as log:
                own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True))
        for process in processes:
            try:
                process.wait(timeout=arguments.limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        files = [folder / f"{rank}.json" for rank in range(arguments.nproc)]
        if all(file.exists() for file in files):
            return [json.loads(file.read_text()) for file in files]
        logs = [(folder / f"{rank}.log").read_text() for rank in range(arguments.nproc)]
        print(*(log[-6000:] for log in logs), sep="\n----\n", flush=True)
        return [{"error": log[-300:]} for log in logs]


def judged(ways: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ours against both others."""
    good = {way: ranks for way, ranks in ways.items() if "error" not in ranks[0]}
    ms = {way: max(statistics.median(rank["ms"][-TIMED:]) for rank in ranks) for way, ranks in good.items()}
    mib = {way: max(rank["MiB"] or 0 for rank in ranks) for way, ranks in good.items()}
    found: dict[str, Any] = {"ms": ms, "MiB": mib}
    if LIVE in good:
        found["equal"] = {way: all(map(_same, good[LIVE], ranks)) for way, ranks in good.items() if way != LIVE}
        found["losses"] = [good[LIVE][0]["numbers"][n][0] for n in (0, -1)]
    if OURS in good:
        found |= {count: [rank[count] for rank in good[OURS]] for count in ("replayed", "live", "recorded", "reasons")}
        others = [way for way in good if way != OURS]
        found["over"] = {
            way: {"time": ms[OURS] / ms[way], "memory": mib[OURS] / mib[way] if mib[way] else None} for way in others
        }
    return found | {"errors": {way: [rank["error"] for rank in ranks] for way, ranks in ways.items() if way not in good}}


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["numbers"] == b["numbers"] and a["weights"] == b["weights"])


def met(case: dict[str, Any]) -> bool:
    over = case.get("over", {}).get(GRAPHS)
    return bool(over and not case["errors"] and case["equal"][OURS] and over["time"] <= 1 and over["memory"] <= MEMORY)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--nproc", type=int, default=2, help="ranks, each with a GPU (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these of: fsdp2, tp, fsdp2 + tp")
    parser.add_argument("--limit", type=int, default=90, help="seconds that a way may take (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="keep what the file has of others")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--tensor-parallel", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train(arguments)
    report = harness.Report(CLAIM, TARGET, arguments)
    if arguments.add and (file := arguments.out / f"{CLAIM}.json").exists():
        report.figures = json.loads(file.read_text())["figures"]
    for layout, tensor_parallel in layouts(arguments.nproc).items():
        if layout not in (arguments.only or [layout]):
            continue
        ways: dict[str, list[dict[str, Any]]] = {}
        for way in (LIVE, OURS) if arguments.device == "cpu" else (LIVE, OURS, GRAPHS):
            ways[way] = trained(way, tensor_parallel, arguments)
            report.figures[layout] = {"ranks": arguments.nproc, **judged(ways)}
            report.write()
            print(layout, way, json.dumps(report.figures[layout]), flush=True)
    report.decide(all(map(met, report.figures.values())))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
