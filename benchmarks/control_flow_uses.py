"""Control flow on the device where people need it: texts until their end, several updates in a call, skipped steps.

    python benchmarks/control_flow_uses.py [--only llama toy ppo epoch scaler]

A call of the first two writes 128 tokens, and would end where the end token comes, which does not come. Step by step the host
looks at each token for that; in one launch (`pg.while_loop`) the device does. Each eighth batch of the scaler has infinite
gradients; host syncs are those that torch counts (`set_sync_debug_mode`).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for equal matmuls live and captured

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
import phonograph as pg
from harness import COMPILED
from ppo_update import minibatches, updater
from workloads import llama_decoding, llama_model, plain

CLAIM = "control_flow_uses"
TOKENS, END, UPDATES, PROMPT = 128, -1, 8, 16
ONE, STEPWISE = "one launch", "step by step"
LIMITS = {"llama": 1.02, "toy": 3.0, "ppo": 1.15}
TARGET = (
    f"one launch at least {LIMITS['llama']} x (llama) and {LIMITS['toy']:g} x (toy) as fast as step by step, eight updates in "
    f"a call {LIMITS['ppo']} x as fast as eight calls; a scaler's steps without host syncs, equal to live"
)

Wrap = Callable[[Any], Any]
Text = Callable[[], Tensor]
Step = Callable[[Tensor], Tensor]
RECORD = partial(pg.record, keep="always")  # what is timed is what was recorded
Decoder = Callable[[Wrap], tuple[Step, Tensor, Callable[[], object]]]


# ---- texts


def step_by_step(step: Step, first: Tensor, restart: Callable[[], object]) -> Text:
    """The host looks at each token."""

    def write() -> Tensor:
        restart()
        token, text = first, []
        while len(text) < TOKENS and int(token) != END:
            token = step(token)
            text.append(token)
        return torch.cat(text, 1)

    return write


def in_one(step: Step, first: Tensor, restart: Callable[[], object], record: Callable[..., Any]) -> Text:
    """The device looks at each token."""

    def goes_on(token: Tensor, count: Tensor, _: Tensor) -> Tensor:
        return (token[0] != END) & (count < TOKENS)

    def turn(token: Tensor, count: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        token = step(token)
        return token, count + 1, text.index_copy_(1, count, token)

    @record
    def write(first: Tensor) -> Tensor:
        restart()
        count, text = first.new_zeros(1), first.new_full((1, TOKENS), END)
        with torch.no_grad():
            return pg.while_loop(goes_on, turn, (first, count, text))[2]

    return lambda: write(first)


def texts(
    decoding: Callable[[Callable[[Any], Any]], tuple[Step, Tensor, Callable[[], object]]],
) -> dict[str, Callable[[], Text]]:
    def stepwise(wrap: Wrap = plain, record: Callable[..., Any] = RECORD) -> Text:
        step, first, restart = decoding(wrap)
        return step_by_step(record(step), first, restart)

    def whole(wrap: Wrap = plain) -> Text:
        return in_one(*decoding(wrap), RECORD)

    return {
        "live": lambda: stepwise(record=lambda f: f),
        STEPWISE: stepwise,
        ONE: whole,
        STEPWISE + COMPILED: lambda: stepwise(torch.compile),
        ONE + COMPILED: lambda: whole(torch.compile),
    }


def llama(device: str) -> dict[str, Callable[[], Text]]:
    """A Llama of 1.2 billion weights, as `llama_decode.py` has it, and its own `generate` with a static cache."""
    model = llama_model(device)

    def decoding(wrap: Wrap) -> tuple[Step, Tensor, Callable[[], object]]:
        made = llama_decoding(model, device, PROMPT, wrap)
        lengths, begins = [layer.cumulative_length for layer in made.cache.layers], made.position.clone()

        def restart() -> None:
            for length in lengths:
                length.fill_(PROMPT)
            made.position.copy_(begins)

        return lambda token: made.step(token, made.position), made.token.clone(), restart

    prompt = torch.randint(500, (1, PROMPT), device=device)
    model.generation_config.update(cache_implementation="static", disable_compile=True, eos_token_id=None, pad_token_id=0)

    def generate() -> Text:
        mask = torch.ones_like(prompt)
        return lambda: model.generate(prompt, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)

    return {**texts(decoding), "generate": generate}


def toy(device: str) -> dict[str, Callable[[], Text]]:
    """The Llama of two layers of `examples/decode_until_eos.py`, greedy."""
    path = Path(__file__).parents[1] / "examples" / "decode_until_eos.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    example = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.Llama().to(device).eval()

    def decoding(wrap: Wrap) -> tuple[Step, Tensor, Callable[[], object]]:
        position = torch.zeros(1, dtype=torch.int64, device=device)

        def following(token: Tensor) -> Tensor:
            with torch.no_grad():
                return model(token, position).argmax(-1, keepdim=True)

        chosen = wrap(following)

        def step(token: Tensor) -> Tensor:
            token = chosen(token)
            position.add_(1)
            return token

        return step, torch.tensor([[7]], device=device), position.zero_

    return texts(decoding)


# ---- updates


def ppo(device: str) -> dict[str, Callable[[], harness.Step]]:
    """The update of `ppo_update.py`, eight times a call."""
    data = minibatches(device)
    stacks = [[torch.stack(columns) for columns in zip(*data[i : i + UPDATES], strict=True)] for i in range(0, 32, UPDATES)]

    def calls(wrap: Wrap = plain) -> harness.Step:
        update, feed = RECORD(updater(device, wrap)), itertools.cycle(data)

        def step() -> None:
            for _ in range(UPDATES):
                update(*next(feed))

        return step

    def one(wrap: Wrap = plain) -> harness.Step:
        update, feed = RECORD(updater(device, wrap), steps=UPDATES), itertools.cycle(stacks)
        return lambda: update(*next(feed))

    return {
        STEPWISE: calls,
        ONE: one,
        STEPWISE + COMPILED: lambda: calls(torch.compile),
        ONE + COMPILED: lambda: one(torch.compile),
    }


def epoch(device: str) -> dict[str, Callable[[], harness.Step]]:
    """Likewise, with what programs do between: the rows of a rollout are shuffled, and each update gets its own."""
    rollout = [torch.cat(columns) for columns in zip(*minibatches(device, UPDATES), strict=True)]

    def shuffled() -> Tensor:
        return torch.randperm(len(rollout[0]), device=device).view(UPDATES, -1)

    def calls(wrap: Wrap = plain) -> harness.Step:
        update = RECORD(updater(device, wrap))

        def step() -> None:
            for rows in shuffled():
                update(*(column[rows] for column in rollout))

        return step

    def one(wrap: Wrap = plain) -> harness.Step:
        update = RECORD(updater(device, wrap), steps=UPDATES)

        def step() -> None:
            rows = shuffled()
            update(*(column[rows] for column in rollout))

        return step

    return {
        STEPWISE: calls,
        ONE: one,
        STEPWISE + COMPILED: lambda: calls(torch.compile),
        ONE + COMPILED: lambda: one(torch.compile),
    }


# ---- skipped steps

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam, capturable": lambda p: torch.optim.Adam(p, lr=1e-3, capturable=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def scaled(device: str, optimizer: Callable[[Any], torch.optim.Optimizer], record: Callable[..., Any]) -> tuple[Any, ...]:
    """The losses of 40 steps, the weights, the scaler's state, how often the host waited in the last 32, and the step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    opt = optimizer(net.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=6)
    half = torch.float16 if device == "cuda" else torch.bfloat16

    @record
    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        with torch.autocast(device, dtype=half):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    batches = [(torch.randn(128, 64, device=device), torch.randint(0, 10, (128,), device=device)) for _ in range(40)]
    for x, _ in batches[5::8]:
        x[0, 0] = torch.inf
    losses = [step(*batch) for batch in batches[:8]]
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        losses += [step(*batch) for batch in batches[8:]]
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    syncs = sum("called a synchronizing" in str(one.message) for one in waits)
    weights = [w.detach() for w in net.parameters()]
    return torch.stack(losses).nan_to_num(), weights, scaler.state_dict(), syncs, step


def scaler(device: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        if device == "cpu" and "capturable" in name:
            continue
        live = scaled(device, optimizer, lambda f: f)
        ours = scaled(device, optimizer, RECORD)
        equal = torch.equal(live[0], ours[0]) and all(map(torch.equal, live[1], ours[1])) and live[2] == ours[2]
        replayed = pg.stats(ours[4]).replayed
        found[name] = {"equal": equal, "syncs live": live[3], "syncs recorded": ours[3], "replayed": replayed, "of": 40}
    return found


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=["toy", "ppo", "epoch", "scaler", "llama"])
    arguments = parser.parse_args()
    report, ratios = harness.Report(CLAIM, TARGET, arguments), {}
    if "scaler" in arguments.only:
        report.figures["scaler"] = scaler(arguments.device)
    for name, make in (("toy", toy), ("ppo", ppo), ("epoch", epoch), ("llama", llama)):
        if name not in arguments.only:
            continue
        before = len(report.rows)
        made = harness.prepare(report, make(arguments.device))
        texts = {method: step() for method, step in made.items()} if "live" in made else {}
        texts.pop("generate", None)  # of another prompt
        equal = {method: [other for other in texts if torch.equal(text, texts[other])] for method, text in texts.items()}
        calls, repeats, settled = (1, 3, 0) if name == "llama" else (4, 3, 0) if name == "toy" else (50, 5, 48)
        harness.measure(report, made, calls, repeats, warmup=1 if settled == 0 else 8, reference=STEPWISE, settled=settled)
        for row in report.rows[before:]:
            row.method = f"{name}: {row.method}"
        speeds = {row.method: 1 / row.ratio for row in report.rows[before:] if row.ratio and ONE in row.method}
        report.figures[name] = {"times as fast as step by step": speeds, "equal": equal}
        ratios[name] = max(speeds.values(), default=float("nan"))
    met = all(ratios.get(name, 0) >= limit for name, limit in LIMITS.items())
    found = report.figures.get("scaler", {}).values()
    report.decide(met and all(x["equal"] and not x["syncs recorded"] for x in found), *ratios.values())
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
