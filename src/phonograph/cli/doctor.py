"""Say what is here and what it means for recording, and record something tiny on every device to be sure.

Exit status 0 if recording works on each device present, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch

import phonograph as pg
from phonograph._torch import native
from phonograph.cli import machine, tested
from phonograph.cli.console import table
from phonograph.devices.cuda import conditional
from phonograph.distributed import nccl
from phonograph.options import switched_off

HELP = "say what is here and whether recording works"

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    status: Status
    value: str
    meaning: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    trials = [trial(device) for device in machine.devices()]
    findings = [*_software(os.environ), *_cuda(), *_allocator(os.environ), *_switches(os.environ), *_nccl(os.environ)]
    works = all(finding.status == "ok" for finding in trials)
    if arguments.json:
        rows = [asdict(finding) for finding in (*findings, *trials)]
        known = {"works": works, "versions": machine.versions(), "torch_tested": tested.RELEASES}
        print(json.dumps({**known, "findings": rows}))
    else:
        _print(findings + trials, works)
    return 0 if works else 1


def _print(findings: list[Finding], works: bool) -> None:
    rows = [(finding.what, finding.status, _said(finding)) for finding in findings]
    table("phonograph doctor", ("what", "", "here, and what it means for recording"), rows)
    print("recording works on every device here" if works else "recording does NOT work on every device here")


def _said(finding: Finding) -> str:
    return f"{finding.value}: {finding.meaning}" if finding.meaning else finding.value


def trial(device: torch.device) -> Finding:
    """Record and replay a function with two inputs, an output and a side effect on this device."""
    try:
        return _trial(device)
    except Exception as error:  # whatever goes wrong here is the finding
        return Finding(f"recording on {device}", "problem", f"{type(error).__name__}: {error}", "recording fails here")


def _trial(device: torch.device) -> Finding:
    total = torch.zeros(4, device=device)

    @pg.record
    def add(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 2

    inputs = [torch.full((4,), float(number), device=device) for number in range(5)]
    outputs = [add(x) for x in inputs]
    expected = [2.0 * sum(range(number + 1)) for number in range(5)]
    stats = pg.stats(add)
    what = f"recording on {device}"
    if [output[0].item() for output in outputs] != expected:
        return Finding(what, "problem", "wrong result", "please report this, with the output of this command")
    if not stats.replayed:
        reasons = "; ".join(stats.refusals) or "no reason given"
        return Finding(what, "problem", "ran live", f"nothing was recorded: {reasons}")
    return Finding(what, "ok", f"{stats.recorded} recorded, {stats.replayed} replayed", machine.hardware(device))


def _software(environment: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("python", "ok", platform.python_version())
    yield Finding("phonograph", "ok", machine.installed("phonograph") or "run from source")
    switch = environment.get("PHONOGRAPH")
    if switch is not None:
        off = switched_off()
        yield Finding("PHONOGRAPH", "problem" if off else "ok", switch, "nothing is recorded at all" if off else "")
    yield torch_release(str(torch.__version__))
    yield helper(native.instead)


def helper(instead: str) -> Finding:
    """Whether the helper in C is in use."""
    if not instead:
        return Finding("helper in C", "ok", "in use")
    return Finding("helper in C", "note", instead, "all works without it; the host time of a replay grows with the parameters")


def torch_release(version: str) -> Finding:
    """Whether phonograph can be used with this release of torch, and whether its tests were run with it."""
    usable, meaning = tested.compared(version)
    return Finding("torch", "ok" if usable else "problem", version, meaning)


def _cuda() -> Iterator[Finding]:
    driver = machine.driver()
    if torch.version.cuda is None:
        here = f"none; the driver is {driver}" if driver else "none"
        yield Finding("CUDA in torch", "problem" if driver else "note", here, _no_cuda_meaning(driver))
        return
    yield Finding("CUDA in torch", "ok", torch.version.cuda)
    yield Finding("driver", "ok" if driver else "note", driver or "not found", "" if driver else "no NVIDIA GPU to use")
    if driver and not torch.cuda.is_available():
        yield Finding("GPU", "problem", "not usable", "a driver is here, but torch finds no device it can use")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
        yield branches(index)
    yield _bindings()


def _no_cuda_meaning(driver: str | None) -> str:
    if driver:
        return "this torch cannot use the GPU: install a CUDA build of it"
    return "functions of CPU tensors are recorded on the CPU device"


def _gpu(index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return Finding(f"GPU {index}", "ok", f"{properties.name}, sm_{properties.major}{properties.minor}, {memory}")


def branches(index: int) -> Finding:
    """Whether branches and loops by what a tensor holds can be recorded on this GPU."""
    what, known = f"pg.cond, pg.while_loop on GPU {index}", conditional.kinds(index)
    if conditional.WHILE not in known:
        return Finding(what, "note", "run live", "the driver has no conditional nodes: install one of CUDA 12.4 or newer")
    if conditional.SWITCH not in known:
        return Finding(what, "ok", "recorded", "one node for each branch: a driver of CUDA 12.8 or newer needs one for all")
    return Finding(what, "ok", "recorded")


def _bindings() -> Finding:
    found = machine.installed("cuda-bindings")
    if found:
        return Finding("cuda-bindings", "ok", found, "a replay is launched through the driver directly")
    meaning = "replays go through torch's own call, a little slower: pip install cuda-bindings"
    return Finding("cuda-bindings", "note", "missing", meaning)


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings as torch reads them: ``PYTORCH_ALLOC_CONF``, or the older name."""
    text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    pairs = (item.partition(":") for item in text.split(",") if item.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


_ALLOCATOR_MEANING: dict[tuple[str, str], tuple[Status, str]] = {
    ("backend", "cudaMallocAsync"): (
        "problem",
        "recordings need torch's own allocator, which can hand out the same addresses again: unset it",
    ),
}


def _allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in allocator_settings(environment).items():
        status, meaning = _ALLOCATOR_MEANING.get((name, value), ("ok", ""))
        yield Finding(f"allocator: {name}", status, value, meaning)
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        meaning = "no memory can be had while a graph is captured: unset it"
        yield Finding("PYTORCH_NO_CUDA_MEMORY_CACHING", "problem", "set", meaning)


_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "a debugging aid: every launch waits, so what is measured is not what recording gives",
    "CUBLAS_WORKSPACE_CONFIG": "",
    "TORCH_LOGS": "TORCH_LOGS=+phonograph shows every recording and refusal",
}


def _switches(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, meaning in _SWITCHES.items():
        value = environment.get(name)
        if value:
            noted = name == "CUDA_LAUNCH_BLOCKING" and value != "0"
            yield Finding(name, "note" if noted else "ok", value, meaning)


def _nccl(environment: Mapping[str, str]) -> Iterator[Finding]:
    if not (torch.cuda.is_available() and torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return
    yield from nccl_settings(environment, torch.cuda.nccl.version())


_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def nccl_settings(environment: Mapping[str, str], version: tuple[int, ...]) -> Iterator[Finding]:
    """What collectives in recordings will meet, before there is a process group."""
    enough = version >= nccl.ACROSS_HOSTS
    needed = ".".join(map(str, nccl.ACROSS_HOSTS))
    meaning = "" if enough else f"collectives are recorded on one host; for ranks on several hosts, install {needed} or newer"
    yield Finding("NCCL", "ok" if enough else "note", ".".join(map(str, version)), meaning)
    expandable = allocator_settings(environment).get("expandable_segments", "").lower() == "true"
    then = dict(environment)
    nccl.register_nothing(then)
    met = {one.name: one for one in nccl.obstacles(then, version, expandable)}
    told = {name for name in environment if name.startswith("TORCH_NCCL_")} | met.keys()
    for name in sorted(told | {nccl.REGISTERS} | (environment.keys() & {"NCCL_GRAPH_MIXING_SUPPORT"})):
        value = environment.get(name, "not set")
        if name in met:
            yield Finding(name, "problem", value, f"collectives run live with it, {met[name].why}: {met[name].remedy}")
        elif name == _HANDLING and value in ("0", "2"):
            yield Finding(name, "note", value, "a replay that waits for a rank which has died says so, and waits on")
        elif name == nccl.REGISTERS and then.get(name) == "0":
            yield Finding(name, "ok", value, "set to 0 when a collective is recorded" if value == "not set" else "")
        elif name == nccl.REGISTERS:
            yield Finding(
                name, "note", value, "NCCL may then take another way in a recording than live: let all ranks replay alike"
            )
        else:
            yield Finding(name, "ok", value)
