"""What a recording costs once: the calls up to the first replay, in live steps.

    python benchmarks/set_up.py
    python benchmarks/set_up.py --device cpu --only PPO --profile    # where the time of one goes
    python benchmarks/set_up.py --device cpu --beside OTHER/src      # and what other sources take, in turn, as ratios

Each program runs in a process of its own. A number is the milliseconds that its first calls take beyond live ones, over those
of a live step: warm-up, capture and instantiation together, for the first model of the process, and the least of later ones.
The function has run live before, so that what torch does once is not counted. On the CPU it is this thread's time.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
import host_time
import phonograph as pg
import ppo_update
from real.sac import Actor, SoftQ

CLAIM = "set_up"
LIMITS = {"8 tiny": 100.0, "13 parameters": 15.0, "PPO": 8.0, "SAC": 6.0, "GPT-2": 5.0, "1,000 parameters": 12.0}
TARGET = "first recordings beyond a live call, in live steps: " + ", ".join(f"{name} {most:g}" for name, most in LIMITS.items())
CALLS, LIVE, AGAIN, TURNS = 4, 30, 5, 3

Program = tuple[Callable[..., Any], Sequence[Any]]


def trained(model: nn.Module, loss_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def tiny(device: str) -> Program:
    return host_time.chain, host_time.inputs(device, count=1)[0]


def mlp(device: str) -> Program:
    layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 10, bias=False)).to(device)
    batch = torch.randn(16, 32, device=device), torch.zeros(16, dtype=torch.long, device=device)
    return trained(model, lambda model, x, y: F.cross_entropy(model(x), y)), batch


def ppo(device: str) -> Program:
    return ppo_update.updater(device), ppo_update.minibatches(device, 1)[0]


def sac(device: str) -> Program:
    """Updates of critics and actor in one step, as one function."""
    actor = Actor(17, 6).to(device)
    qs = nn.ModuleList([SoftQ(17, 6) for _ in range(2)]).to(device)
    critics, actors = (torch.optim.Adam(m.parameters(), lr=1e-3, fused=True) for m in (qs, actor))

    def update(obs: Tensor, actions: Tensor, following: Tensor, rewards: Tensor) -> Tensor:
        with torch.no_grad():
            action, log_prob = actor.get_action(following)
            wanted = rewards + 0.99 * (torch.min(*[q(following, action) for q in qs]) - 0.2 * log_prob)
        critics.zero_grad()
        loss = sum(F.mse_loss(q(obs, actions), wanted) for q in qs)
        loss.backward()
        critics.step()
        action, log_prob = actor.get_action(obs)
        actor_loss = (0.2 * log_prob - torch.min(*[q(obs, action) for q in qs])).mean()
        actors.zero_grad()
        actor_loss.backward()
        actors.step()
        return actor_loss.detach()

    return update, [torch.randn(shape, device=device) for shape in ((256, 17), (256, 6), (256, 17), (256,))]


class Block(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(wide), nn.LayerNorm(wide), heads
        self.attn, self.proj = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.fc, self.out = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, wide = x.shape
        parts = self.attn(self.ln_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, wide))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, wide: int = 128, words: int = 512, length: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, wide), nn.Embedding(length, wide)
        self.blocks, self.ln_f = nn.ModuleList([Block(wide, heads) for _ in range(layers)]), nn.LayerNorm(wide)
        self.head = nn.Linear(wide, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def gpt(device: str) -> Program:
    tokens = torch.randint(512, (4, 64), device=device)
    return trained(GPT().to(device), lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten())), [tokens]


class Residual(nn.Module):
    def __init__(self, given: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, wide, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)
        same = given == wide and stride == 1
        conv = nn.Conv2d(given, wide, 1, stride, bias=False)
        self.short = nn.Identity() if same else nn.Sequential(conv, nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        made = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(made + self.short(x))


def resnet(device: str) -> Program:
    wides = [16, 16, 32, 32, 64, 64, 128, 128]
    blocks = [Residual(a, b, 2 if b > a else 1) for a, b in zip([16, *wides], wides, strict=False)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).to(device)
    batch = torch.randn(8, 3, 32, 32, device=device), torch.zeros(8, dtype=torch.long, device=device)
    return trained(model, lambda model, x, y: F.cross_entropy(model(x), y)), batch


def thousand(device: str) -> Program:
    weights = nn.ParameterList([nn.Parameter(torch.randn(4, device=device)) for _ in range(1000)])
    return trained(weights, lambda weights, x: (torch.stack([*weights]) * x).square().mean()), [torch.randn(4, device=device)]


PROGRAMS: dict[str, Callable[[str], Program]] = {
    "8 tiny": tiny,
    "13 parameters": mlp,
    "PPO": ppo,
    "SAC": sac,
    "GPT-2": gpt,
    "1,000 parameters": thousand,
    "ResNet-18": resnet,
}


def milliseconds(call: Callable[[], object]) -> float:
    harness.synchronize()
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    begin = clock()
    call()
    harness.synchronize()
    return (clock() - begin) * 1e3


def costs(name: str, device: str, profiler: cProfile.Profile | None = None, calls: int = CALLS) -> dict[str, float]:
    """Those of one program of this name."""
    function, batch = PROGRAMS[name](device)
    live = statistics.median(milliseconds(lambda: function(*batch)) for _ in range(LIVE))
    gc.collect()
    step = pg.record(function)
    if profiler is not None:
        profiler.enable()
    took = [milliseconds(lambda: step(*batch)) for _ in range(calls)]
    if profiler is not None:
        profiler.disable()
    stats = step.stats()
    assert stats.recorded, stats
    beyond = sum(max(0.0, one - live) for one in took)
    return {"live ms": live, "beyond ms": beyond, "live steps": beyond / live, "recorded": stats.recorded}


def in_this_process(name: str, device: str) -> dict[str, Any]:
    first, *others = [costs(name, device) for _ in range(1 + AGAIN)]
    again = min(others, key=lambda found: found["beyond ms"])
    return {"first": _rounded(first), "second": _rounded(again)}


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 3) for name, number in numbers.items()}


def profiled(name: str, device: str) -> None:
    """Print where the time of a first recording goes, and of later ones."""
    for what, count in (("first", 1), ("later", AGAIN)):
        profiler = cProfile.Profile()
        for _ in range(count):
            print(f"# {what}: {costs(name, device, profiler)}")
        for order in ("tottime", "cumtime"):
            pstats.Stats(profiler).sort_stats(order).print_stats(45)


def in_own_process(name: str, device: str, sources: str | None = None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", device, "--only", name, "--here"]
    path = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_turn(name: str, device: str, sources: str | None) -> dict[str, Any]:
    """What one program takes; with other sources, the least of some processes of each."""
    if sources is None:
        return in_own_process(name, device)
    ours, theirs = zip(
        *[(in_own_process(name, device), in_own_process(name, device, sources)) for _ in range(TURNS)], strict=True
    )
    found = _least(ours)
    for kind, other in _least(theirs).items():
        found[kind]["over others"] = round(found[kind]["beyond ms"] / other["beyond ms"], 3)
        found[kind]["of others"] = other
    return found


def _least(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each kind, that which has taken least."""
    return {kind: dict(min((run[kind] for run in runs), key=lambda one: one["beyond ms"])) for kind in runs[0]}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS), help="only these programs")
    parser.add_argument("--profile", action="store_true", help="print profiles, and write nothing")
    parser.add_argument("--beside", metavar="SOURCES", help="compare with these sources of phonograph, in processes in turn")
    parser.add_argument("--here", action="store_true", help="in this process, and print JSON only")
    arguments = parser.parse_args()
    names, device = arguments.only or list(PROGRAMS), arguments.device
    if device == "cpu":
        torch.set_num_threads(1)
    if arguments.profile or arguments.here:
        for name in names:
            print(json.dumps(in_this_process(name, device)) if arguments.here else profiled(name, device))
        return 0
    report = harness.Report(f"{CLAIM}_cpu" if device == "cpu" else CLAIM, TARGET, arguments)
    for name in names:
        with harness.trying(report, name):
            found = in_turn(name, device, arguments.beside)
            report.figures[name] = found
            steps = {kind: round(one["live steps"], 1) for kind, one in found.items()}
            steps |= {f"{kind}, over others": one["over others"] for kind, one in found.items() if "over others" in one}
            report.rows.append(harness.Row(name, wall_us=found["first"]["live ms"] * 1e3, notes=steps))
    report.decide(all(report.figures.get(name, {}).get("first", {}).get("live steps", 1e9) <= most
                      for name, most in LIMITS.items()))  # fmt: skip
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
