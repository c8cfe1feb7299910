"""Where the numbers of a recorded Llama part from live ones, if they do: of which projection, after which token.

    python benchmarks/decode_bits.py

The Llama of `llama_decode.py` is fed the same 128 tokens in each way, with a cache of its own, in processes with torch's
workspace for cuBLAS and with another (CUBLAS_WORKSPACE_CONFIG), and with attention as torch chooses it and by matmuls alone.
Differences in a row tell whose they are: of steps in one launch from the same steps one by one; of these from a graph captured
by hand; of that from live; of live from itself. Kernels by their names tell whether a library has chosen another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import harness
import phonograph as pg
from workloads import llama_decoding, llama_model

CLAIM, PROMPT = "decode_bits", 16
TARGET = "in one launch, step by step and live: the same bits after each projection and token, wherever live repeats itself"
SETTINGS = {"torch's own": ("", False), "torch's own, attention by matmuls": ("", True), ":4096:8": (":4096:8", False),
            ":4096:8, attention by matmuls": (":4096:8", True)}  # fmt: skip
LIVE, AGAIN, STREAM, HAND = "live", "live again", "live on another stream", "captured by hand"
STEPS, ONE, LATER = "step by step", "one launch", "one launch again"
PAIRS = [(LIVE, AGAIN), (LIVE, STREAM), (LIVE, HAND), (HAND, STEPS), (LIVE, STEPS), (STEPS, ONE), (ONE, LATER), (LIVE, ONE)]
VERDICTS = {
    (LIVE, AGAIN): "live does not repeat itself: nothing can be told",
    (ONE, LATER): "one launch does not repeat itself: something runs out of order there",
    (STEPS, ONE): "one launch is another than its steps one by one: a fault of ours",
    (HAND, STEPS): "steps one by one are others than those captured by hand: a fault of ours",
    (LIVE, HAND): "captured by hand it is another than live: a library's choice",
}

Logs = dict[str, Tensor]
"""What each projection gave, a row a token, in order; the logits last."""


class Decoding:
    """A step that feeds the next token of a text, and notes what each projection gives."""

    def __init__(self, model: Any, device: str, tokens: int) -> None:
        made = llama_decoding(model, device, PROMPT)
        text = torch.randint(500, (1, tokens), generator=torch.Generator().manual_seed(2)).to(device)
        self._position, self._begins = made.position, made.position.clone()
        self._lengths = [layer.cumulative_length for layer in made.cache.layers]
        self.count = count = torch.zeros(1, dtype=torch.int64, device=device)
        self.logs: Logs = {}
        inner = {name: part for name, part in model.model.named_modules() if isinstance(part, nn.Linear)}
        parts = inner | {"logits": model.lm_head}
        self._hooks = [part.register_forward_hook(self._noting(name, tokens)) for name, part in parts.items()]
        self._begin(lambda: made.step(text[:, :1], made.position))

        def step() -> None:
            made.step(text.index_select(1, count), made.position)
            count.add_(1)

        self.step = step

    def _begin(self, step: Callable[[], object]) -> None:
        """Make the logs, whose widths a step tells."""
        step()
        self.restart()

    def _noting(self, name: str, tokens: int) -> Callable[[Any, Any, Tensor], None]:
        def note(_module: Any, _args: Any, given: Tensor) -> None:
            row = given[:, -1]
            if name not in self.logs:
                self.logs[name] = row.new_zeros(tokens, row.shape[1])
            self.logs[name].index_copy_(0, self.count, row)

        return note

    def restart(self) -> None:
        for length in self._lengths:
            length.fill_(PROMPT)
        self._position.copy_(self._begins)
        self.count.zero_()

    def close(self) -> Logs:
        for hook in self._hooks:
            hook.remove()
        return self.logs


def ways(tokens: int, device: str) -> dict[str, Callable[[Decoding], object]]:
    def plainly(step: Callable[[], object], made: Decoding) -> None:
        made.restart()
        for _ in range(tokens):
            step()

    def on_another(made: Decoding) -> None:
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            plainly(made.step, made)
        torch.cuda.current_stream().wait_stream(other)

    def by_hand(made: Decoding) -> None:
        graph, _ = harness.capture(made.step)
        plainly(graph.replay, made)

    def stepwise(made: Decoding) -> None:
        step = pg.record(made.step, keep="always")
        for _ in range(2):  # in the second turn all are replays
            plainly(step, made)

    def launched(made: Decoding, launches: int) -> None:
        def turn(n: Tensor) -> tuple[Tensor]:
            made.step()
            return (n + 1,)

        @pg.record(keep="always")
        @torch.no_grad()
        def write() -> None:
            made.restart()
            pg.while_loop(lambda n: n < tokens, turn, (torch.zeros((), dtype=torch.int64, device=device),))

        for _ in range(launches):
            write()

    live: dict[str, Callable[[Decoding], object]] = {way: lambda made: plainly(made.step, made) for way in (LIVE, AGAIN)}
    captured = {STREAM: on_another, HAND: by_hand} if device != "cpu" else {}
    return live | captured | {STEPS: stepwise, ONE: lambda made: launched(made, 3), LATER: lambda made: launched(made, 4)}


def compare(one: Logs, two: Logs) -> dict[str, object]:
    """Where the first difference is, and how large those of the logits are."""
    rows = {name: (log.view(torch.int16) != two[name].view(torch.int16)).any(1).nonzero() for name, log in one.items()}
    first = {name: int(found[0]) for name, found in rows.items() if len(found)}
    if not first:
        return {"equal": True}
    token = min(first.values())
    part = next(name for name, at in first.items() if at == token)
    logits = one["logits"].float(), two["logits"].float()
    chosen = logits[0].argmax(1) != logits[1].argmax(1)
    return {"equal": False, "first token": token, "first part": part, "of logits": float((logits[0] - logits[1]).abs().max()),
            "other tokens chosen": int(chosen.sum())}  # fmt: skip


def kernels(step: Callable[[], object]) -> Counter[str]:
    """What a call launches on a GPU."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return Counter(e.name for e in profile.events() if e.device_type is torch.autograd.DeviceType.CUDA)


def only_in_one(model: Any, device: str) -> dict[str, list[str]]:
    """Kernels that a live step launches and a recorded one does not, and the other way round."""
    made = Decoding(model, device, 16)
    live, recorded = kernels(made.step), pg.record(made.step, keep="always")
    for _ in range(4):
        recorded()
    replayed = kernels(recorded)
    made.close()
    return {"live": sorted(live - replayed), "replayed": sorted(replayed - live)}


def one_process(device: str, tokens: int, matmuls: bool, file: Path) -> None:
    """All ways with the environment as it is, into a file. Attention may be by `matmuls` alone: faster kernels of it do not
    repeat themselves."""
    for fast in ("flash", "mem_efficient", "cudnn") if matmuls else ():
        getattr(torch.backends.cuda, f"enable_{fast}_sdp")(False)
    model, logs = llama_model(device), dict[str, Logs]()
    for way, run in ways(tokens, device).items():
        made = Decoding(model, device, tokens)
        run(made)
        logs[way] = {name: log.cpu() for name, log in made.close().items()}
    found = {f"{a} / {b}": compare(logs[a], logs[b]) for a, b in PAIRS if a in logs and b in logs}
    names = only_in_one(model, device) if device != "cpu" else {}
    torch.save((found, names, logs[LIVE]), file)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--into", type=Path, help="what each of its own processes is told")
    parser.add_argument("--matmuls", action="store_true")
    arguments = parser.parse_args()
    tokens = 24 if arguments.quick or arguments.device == "cpu" else 128
    if arguments.into is not None:
        one_process(arguments.device, tokens, arguments.matmuls, arguments.into)
        return 0
    report, logs, equal = harness.Report(CLAIM, TARGET, arguments), list[Logs](), list[bool]()
    with tempfile.TemporaryDirectory() as folder:
        for name, (setting, matmuls) in SETTINGS.items():
            environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
            environment |= {"CUBLAS_WORKSPACE_CONFIG": setting} if setting else {}
            command = [sys.executable, __file__, "--device", arguments.device, "--into", str(Path(folder) / "logs")]
            command += ["--quick"] * arguments.quick + ["--matmuls"] * matmuls
            with harness.trying(report, name):
                subprocess.run(command, env=environment, check=True)
                found, names, live = torch.load(Path(folder) / "logs")
                logs.append(live)
                apart = [text for (a, b), text in VERDICTS.items() if not found.get(f"{a} / {b}", {"equal": True})["equal"]]
                if found[f"{LIVE} / {AGAIN}"]["equal"]:
                    equal += [pair["equal"] for pair in found.values()]
                report.figures[name] = found | {"kernels only": names, "verdict": next(iter(apart), "equal")}
                report.figures[name]["live / live with torch's own"] = compare(logs[0], live)
    if not report.rows:
        report.decide(bool(equal) and all(equal))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
