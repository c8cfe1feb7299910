"""Train a small real network twice from one seed, live and recorded, and compare speed and every number.

Exit status 0 if all losses and the final weights are bitwise equal, 1 if not, 2 if the demo could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import phonograph as pg
from phonograph.cli import digits, gpt, machine
from phonograph.cli.console import CannotRun, table
from phonograph.cli.race import Job, Outcome, race
from phonograph.shapes.progress import progress

HELP = "train a small real network live and recorded, and compare"

_BLOCK = 25  # steps between two turns
_SEED = 0
_SECONDS = (
    45.0  # for each job, where nobody has said how many steps: with imports and decoding two minutes, on a busy machine too
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU where there is one)")
    parser.add_argument(
        "--steps", type=_positive, help="training steps of each run (default: 1000, the GPT's 400, or as many as 45 s give)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return int(text)


@dataclass(frozen=True)
class Training:
    """The result of one job; steps/s are of the steps after the first block, which warms up and records."""

    job: str
    what: str
    steps: int
    live_steps_per_second: float
    recorded_steps_per_second: float
    recordings: int
    replays: int
    live_calls: int
    refusals: dict[str, int]
    pool_bytes: int
    first_loss: float
    last_loss: float
    losses_equal: bool
    weights_equal: bool
    test_accuracy: float | None = None

    @property
    def equal(self) -> bool:
        return self.losses_equal and self.weights_equal


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding with the trained GPT, one byte a step."""

    live_bytes_per_second: float
    recorded_bytes_per_second: float
    recordings: int
    replays: int
    text_equal: bool
    text: str


def run(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    _make_deterministic(device)
    torch.set_num_threads(1)  # the network is tiny: threads would only wait for each other
    shown = not arguments.json
    trainings = [_train_digits(device, arguments.steps, shown)]
    decoding = None
    if device.type == "cuda":
        training, outcome = _train_gpt(device, arguments.steps, shown)
        trainings.append(training)
        decoding = _decode(outcome)
    equal = all(training.equal for training in trainings) and (decoding is None or decoding.text_equal)
    (_print_json if arguments.json else _print_tables)(device, trainings, decoding, equal)
    return 0 if equal else 1


def _device(wanted: str) -> torch.device:
    try:
        return machine.pick_device(wanted)
    except ValueError as error:
        raise CannotRun(str(error)) from None


def _make_deterministic(device: torch.device) -> None:
    """Ask CUDA for kernels that give the same bits every time; the CPU's do."""
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, so before the first matmul
    torch.use_deterministic_algorithms(True)
    # Filling new memory with NaN is for finding bugs; it would slow the live run down and flatter the recorded one.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _train_digits(device: torch.device, wanted: int | None, shown: bool) -> Training:
    images, labels = digits.load(device)
    outcome = _raced("digits", lambda n: digits.make_job(images, labels, n, _SEED), wanted, 1000, device, shown)
    accuracy = digits.accuracy(outcome.recorded.job.weights(), images, labels)
    return _training(digits.DESCRIPTION, outcome, accuracy)


def _train_gpt(device: torch.device, wanted: int | None, shown: bool) -> tuple[Training, Outcome]:
    text = gpt.load(device)
    outcome = _raced("gpt", lambda n: gpt.make_job(text, n, _SEED), wanted, 400, device, shown)
    return _training(gpt.DESCRIPTION, outcome), outcome


def _raced(
    name: str, make_job: Callable[[int], Job], wanted: int | None, usual: int, device: torch.device, shown: bool
) -> Outcome:
    """Both runs of a job: as many steps as are `wanted`, else the `usual` ones, as far as they come in time."""
    steps, seconds = (wanted, float("inf")) if wanted else (usual, _SECONDS)
    if shown:
        print(f"{name}: {steps:,} steps live and recorded" + ("" if wanted else f", at most {seconds:.0f} s"), file=sys.stderr)
    with progress(name, 2 * steps, shown=shown) as advance:
        return race(lambda: make_job(steps), steps, device, block=_BLOCK, advance=advance, seconds=seconds)


def _training(what: str, outcome: Outcome, accuracy: float | None = None) -> Training:
    stats, losses = outcome.stats, outcome.recorded.losses
    return Training(
        job=outcome.recorded.job.name,
        what=what,
        steps=len(losses),
        live_steps_per_second=outcome.live.steps_per_second,
        recorded_steps_per_second=outcome.recorded.steps_per_second,
        recordings=stats.recorded,
        replays=stats.replayed,
        live_calls=stats.live,
        refusals=dict(stats.refusals),
        pool_bytes=stats.pool_bytes,
        first_loss=losses[0].item(),
        last_loss=losses[-1].item(),
        losses_equal=outcome.losses_equal,
        weights_equal=outcome.weights_equal,
        test_accuracy=accuracy,
    )


def _decode(outcome: Outcome) -> Decoding:
    """Write with the live run's weights live and with the recorded run's recorded: the texts must agree."""
    live = gpt.Writer(outcome.live.job.weights())
    recorded = gpt.Writer(outcome.recorded.job.weights(), pg.record)
    live_text, live_speed = _timed(lambda: live.write(b"def "))
    text, speed = _timed(lambda: recorded.write(b"def "))
    stats = pg.stats(recorded.step)
    return Decoding(
        live_bytes_per_second=live_speed,
        recorded_bytes_per_second=speed,
        recordings=stats.recorded,
        replays=stats.replayed,
        text_equal=torch.equal(live_text, text),
        text=bytes(text.tolist()).decode(errors="replace"),
    )


def _timed(write: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What the second of two runs wrote, and its steps/s; the first one warms up and records."""
    write()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    text = write()
    torch.cuda.synchronize()
    return text, (len(text) - 1) / (time.perf_counter() - begin)


def _print_json(device: torch.device, trainings: list[Training], decoding: Decoding | None, equal: bool) -> None:
    report: dict[str, object] = {
        "device": str(device),
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
        "training": [asdict(training) | {"ratio": _ratio(training)} for training in trainings],
        "decoding": asdict(decoding) if decoding else None,
        "equal": equal,
    }
    print(json.dumps(report))


def _ratio(training: Training) -> float | None:
    """Recorded over live; None where too few steps ran to time any."""
    live = training.live_steps_per_second
    return training.recorded_steps_per_second / live if live else None


def _print_tables(device: torch.device, trainings: list[Training], decoding: Decoding | None, equal: bool) -> None:
    print(f"{machine.hardware(device)}, torch {torch.__version__}, device {device}\n")
    for training in trainings:
        table(training.what, ("", ""), _training_rows(training))
    if decoding:
        table("greedy decoding with that GPT, a static key/value cache", ("", ""), _decoding_rows(decoding))
    print("live and recorded agree, bit for bit" if equal else "LIVE AND RECORDED DIFFER")


def _training_rows(training: Training) -> list[tuple[str, str]]:
    ratio = _ratio(training)
    rows = [
        ("live", f"{training.live_steps_per_second:,.0f} steps/s"),
        ("recorded", f"{training.recorded_steps_per_second:,.0f} steps/s" + (f" ({ratio:.2f} x)" if ratio else "")),
        ("steps", f"{training.steps:,} each, loss {training.first_loss:.3f} to {training.last_loss:.3f}"),
        ("recordings", f"{training.recordings}; {training.replays:,} steps replayed, {training.live_calls} live"),
        ("memory", f"{training.pool_bytes / 2**20:.2f} MiB in the pool"),
        ("losses", "bitwise equal at every step" if training.losses_equal else "NOT EQUAL"),
        ("final weights", "bitwise equal" if training.weights_equal else "NOT EQUAL"),
    ]
    if training.test_accuracy is not None:
        rows.append(("test images", f"{training.test_accuracy:.1%} right"))
    return rows + [("ran live because", f"{reason} ({count} x)") for reason, count in training.refusals.items()]


def _decoding_rows(decoding: Decoding) -> list[tuple[str, str]]:
    return [
        ("live", f"{decoding.live_bytes_per_second:,.0f} bytes/s"),
        ("recorded", f"{decoding.recorded_bytes_per_second:,.0f} bytes/s"),
        ("recordings", f"{decoding.recordings}; {decoding.replays:,} steps replayed"),
        ("texts", "equal" if decoding.text_equal else "NOT EQUAL"),
        ("text", repr(decoding.text)),
    ]
