"""torch's own databases (`op_db`, `module_db`, `optim_db`), recorded and live: every bit the same, or live with a reason.

    python benchmarks/operators.py --device cpu --at-once 1 --seconds 3000     # goes on where it has stopped
    python benchmarks/operators.py --at-once 16 --seconds 520 --only 'linalg' --ways forward pair
    python benchmarks/operators.py --device cpu --fallback split --ways forward pair   # what needs the host, cut out
    python benchmarks/operators.py --page > docs/operators.md

A case is a sample of a member in one way (`operator_cases.py`). It is *recorded* (right, and replayed), *live* for a reason,
*differs*, *raises* where live does not, or *differs from itself*: so do two live plays from the same seeds. Workers have
members in processes of their own, and where one dies, that is a row of its member; another takes its place.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

HERE = str(Path(__file__).parent)
sys.path[:] = [p for p in sys.path if p != HERE] + [HERE]  # numba, which torch's tests import, wants a package `coverage`
import harness  # noqa: E402
import phonograph as pg  # noqa: E402
from phonograph.comparison import assert_same  # noqa: E402
from phonograph.reasons import code_of  # noqa: E402

CLAIM = "operators"
TARGET = "no case differs, raises or ends its process"
SAVED = 30  # seconds between two versions of the results
LONGEST = 180  # seconds that a member has for one way
TASKS = 400  # that a worker has before another takes its place
RECORDED, DIFFERS, RAISES, CRASHES, ITSELF, NONE = "recorded", "differs", "raises", "crashes", "itself", "none"
WRONG = (DIFFERS, RAISES, CRASHES)
DIGITS = "digits"
CANNOT = "cannot be compared"
LIVE_AGAIN = 25  # live plays, to see whether those differ from each other
UNFILLED = re.compile(r"empty|(new_)?empty_(like|strided|permuted)|new_empty")  # results nobody has written to
DOCUMENTED = re.compile(r"linalg\.(svdvals|eigvalsh|cond|matrix_norm|norm)|norm\.nuc")  # docs/limits.md: other last digits
LIVE = re.compile(r"PG\d+|live")

Row = dict[str, Any]


# ---- one case ------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Failures of phonograph's own, which become live calls."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:3])}"[:300]


def case(member: Any, way: str, i: int, fallback: Any) -> tuple[str, str]:
    """What comes of it, and more of what is wrong."""
    recorded: list[Any] = []

    def record(f: Any) -> Any:
        recorded.append(pg.record(f, keep="always", fallback=fallback))
        return recorded[-1]

    try:
        live = member.play(way, i, lambda f: f)
    except Exception:
        return NONE, ""
    heard = Heard()
    logging.getLogger("phonograph").addHandler(heard)
    try:
        return judged(member, way, i, live, record, recorded, heard)
    finally:
        logging.getLogger("phonograph").removeHandler(heard)
        for each in recorded:
            pg.reset(each)


def judged(member: Any, way: str, i: int, live: Any, record: Any, recorded: list[Any], heard: Heard) -> tuple[str, str]:
    try:
        found = member.play(way, i, record)
    except Exception as error:
        return RAISES, first(error)
    said = difference(found, live, way)
    if said and DOCUMENTED.fullmatch(member.name) and not difference(found, live, way, tolerance=1e-4):
        return DIGITS, ""
    if said:
        if UNFILLED.fullmatch(member.name):
            return ITSELF, ""
        again = differs_from_itself(member, way, i, live)
        if again == CANNOT:
            return NONE, ""
        return (ITSELF, "") if again else (DIFFERS, said)
    if heard.said:
        return RAISES, heard.said[0][:300]
    stats = pg.stats(recorded[0])
    if stats.replayed:
        return RECORDED, ""
    return (code_of(max(stats.refusals, key=stats.refusals.__getitem__)) if stats.refusals else "") or "live", ""


def differs_from_itself(member: Any, way: str, i: int, live: Any) -> str:
    """What one of some more live plays shows otherwise; `CANNOT` where live cannot be compared with live."""
    for _ in range(LIVE_AGAIN):
        try:
            again = difference(member.play(way, i, lambda f: f), live, way)
        except Exception:
            return "raises"
        if again:
            return CANNOT if again.startswith("RuntimeError") else again
    return ""


def difference(found: object, live: object, way: str, *, tolerance: float = 0.0) -> str:
    try:
        with torch.inference_mode(way == "inference"):
            assert_same(found, live, "play", tolerance=tolerance)
    except (AssertionError, RuntimeError) as error:
        return first(error)
    return ""


# ---- workers -------------------------------------------------------------------------------------


def work(pipe: Any, device: str, fallback: str) -> None:
    """Take members and ways, and tell what comes of their cases."""
    from operator_cases import members

    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - samples print
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = members(device)
    pipe.send([(name, known[name].ways) for name in known])
    while (task := pipe.recv()) is not None:
        name, way = task
        row, said = Counter[str](), list[str]()
        try:
            n = known[name].count(way)
        except Exception:
            n = 0
        for i in range(n):
            try:
                what, more = case(known[name], way, i, fallback)
            except Exception as error:  # of the comparison
                what, more = RAISES, first(error)
            row[what] += 1
            said += [f"{i}: {more}"] if more else []
        pipe.send((dict(row), said))
        if device == "cuda":
            torch.cuda.synchronize()  # a process whose context is lost has done its last member


class Worker:
    """A process, and what it is at."""

    _gpus = itertools.cycle(range(torch.cuda.device_count()))

    def __init__(self, device: str, fallback: str) -> None:
        if device == "cuda":  # each has one, in turn
            os.environ["CUDA_VISIBLE_DEVICES"] = str(next(self._gpus))
        # CUDA does not survive a fork; where there is none, what was imported need not be imported again.
        context = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device, fallback), daemon=True)
        self.process.start()
        theirs.close()
        self.task: tuple[str, str] | None = None
        self.since, self.done, self.ready = time.monotonic(), 0, False

    def give(self, task: tuple[str, str]) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def end(self) -> int | None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


class Sweep:
    """All members and ways that are asked for and not yet in the results."""

    def __init__(self, arguments: Any, results: dict[str, dict[str, Row]]) -> None:
        self.arguments, self.results = arguments, results
        self.tasks: deque[tuple[str, str]] | None = None
        self.workers: list[Worker] = []
        self.until = time.monotonic() + arguments.seconds

    def run(self, save: Callable[[], None]) -> None:
        """All that there is time for; what there is of it is saved now and then."""
        self.workers = [self._worker() for _ in range(self.arguments.at_once)]
        saved = time.monotonic()
        while any(w.task or not w.ready for w in self.workers) or (self.tasks and time.monotonic() < self.until):
            self._turn()
            if time.monotonic() > saved + SAVED:
                save()
                saved = time.monotonic()
            if time.monotonic() > self.until + 15:
                break
        for worker in self.workers:
            worker.end()

    def _worker(self) -> Worker:
        return Worker(self.arguments.device, self.arguments.fallback)

    def _turn(self) -> None:
        ready = connection.wait([w.pipe for w in self.workers], timeout=1)
        for worker in list(self.workers):
            if worker.pipe in ready:
                self._hear(worker)
            elif worker.task and time.monotonic() - worker.since > LONGEST:
                self._lost(worker, f"no answer in {LONGEST} s")

    def _hear(self, worker: Worker) -> None:
        try:
            said = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            self._lost(worker, f"ends with {worker.process.exitcode}")
            return
        if not worker.ready:
            worker.ready = True
            self._plan(said)
        else:
            self._note(worker, *said)
        self._next(worker)

    def _plan(self, known: list[tuple[str, tuple[str, ...]]]) -> None:
        if self.tasks is not None:
            return
        chosen = [(name, way) for name, ways in known for way in ways if self._wanted(name, way)]
        self.tasks = deque(chosen)

    def _wanted(self, name: str, way: str) -> bool:
        a = self.arguments
        there = self.results.get(name, {}).get(way)
        due = a.again or there is None or (a.wrong and not there.keys().isdisjoint(WRONG))
        return due and (not a.ways or way in a.ways) and (not a.only or re.search(a.only, name) is not None)

    def _note(self, worker: Worker, row: Row, said: list[str]) -> None:
        name, way = worker.task or ("", "")
        self.results.setdefault(name, {})[way] = {**row, **({"said": said[:2]} if said else {})}
        worker.task, worker.done = None, worker.done + 1
        if said:
            print(name, way, row, *said[:2], sep="  ", file=sys.stderr, flush=True)

    def _lost(self, worker: Worker, why: str) -> None:
        worker.end()
        if worker.task:
            self._note(worker, {CRASHES: 1}, [why])
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        self.workers.remove(worker)
        if self.tasks and time.monotonic() < self.until:
            self.workers.append(self._worker())

    def _next(self, worker: Worker) -> None:
        if not self.tasks or time.monotonic() > self.until:
            worker.end()
            self.workers.remove(worker)
        elif worker.done >= TASKS:
            worker.end()
            self._replace(worker)
        else:
            worker.give(self.tasks.popleft())


# ---- the results ---------------------------------------------------------------------------------


def path_of(arguments: Any) -> Path:
    """Each fallback has results of its own; those of `live` are the ones that docs/operators.md shows."""
    folder: Path = arguments.out
    fallback = "" if arguments.fallback == "live" else f"_{arguments.fallback}"
    return folder / f"{CLAIM}_{arguments.device}{fallback}.json"


def load(path: Path) -> dict[str, dict[str, Row]]:
    return json.loads(path.read_text(encoding="utf-8"))["members"] if path.exists() else {}


def totals(results: dict[str, dict[str, Row]]) -> dict[str, dict[str, int]]:
    """Cases by database and way."""
    found: dict[str, Counter[str]] = {}
    for name, ways in results.items():
        for way, row in ways.items():
            count = found.setdefault(f"{name.partition(':')[0]} {way}", Counter())
            count["members"] += 1
            for what, n in row.items():
                if what != "said":
                    count["live" if LIVE.fullmatch(what) else what] += n
    return {key: dict(count) for key, count in found.items()}


def write(arguments: Any, report: Any, results: dict[str, dict[str, Row]]) -> None:
    """One line a member, so that a change of one is a change of its line."""
    head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in report.as_json().items()]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(ways)}" for name, ways in sorted(results.items()))
    path = path_of(arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join([*head, f' "members": {{\n{lines}\n }}']) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--at-once", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="workers (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=500, help="after which no member begins (default: %(default)s)")
    parser.add_argument("--only", help="members whose names this regular expression finds")
    parser.add_argument("--ways", nargs="*", help="only in these ways")
    parser.add_argument("--fallback", choices=("live", "split", "auto"), default="live", help="(default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="those as well that are in the results")
    parser.add_argument("--wrong", action="store_true", help="those as well that were wrong")
    parser.add_argument("--page", action="store_true", help="print docs/operators.md, and run nothing")
    arguments = parser.parse_args()
    if arguments.page:
        import operators_page

        print(operators_page.page(arguments.out), end="")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = load(path_of(arguments))
    if arguments.device == "cpu":
        import operator_cases  # noqa: F401 - before the forks
    sweep, report = Sweep(arguments, results), harness.Report(CLAIM, TARGET, arguments)

    def save() -> None:
        report.figures = totals(results)
        report.decide(not sweep.tasks and not any(count.get(what) for count in report.figures.values() for what in WRONG))
        write(arguments, report, results)

    try:
        sweep.run(save)
    finally:
        save()
    for key, count in report.figures.items():
        print(f"{key:20s} {count}")
    return {True: 0, False: 1, None: 3}[report.met]


if __name__ == "__main__":
    raise SystemExit(main())
