"""Put the measured tables into the README and docs/measured.md, from the committed results.

    python benchmarks/tables.py          # rewrites what stands between <!-- NAME --> and <!-- /NAME -->

*Times faster* is plain's time over that with the one line, the median over rounds in which both take turns. In brackets: mostly
live. The usual way is the rival that each program names.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real import PROGRAMS
from real_programs import MOSTLY, OURS, right

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "measured.md")

FEW = ("ppo", "nanogpt", "bert", "gpt_fast", "dit", "pinn", "resnet")
"""Of the real programs, those in the README."""
RANKS = {"fsdp2": "FSDP2"}
"""Of the training steps on several GPUs, those in the README: 12 layers of 1,024."""
CALLS = {
    "eager": "eager", "torch.compile": "`torch.compile`", "reduce-overhead": '`torch.compile(mode="reduce-overhead")`',
    "make_graphed_callables": "`torch.cuda.make_graphed_callables`", "by hand": "`torch.cuda.graph`, by hand",
    "by hand and cloned": "… its result cloned", "phonograph": "`pg.record`",
}  # fmt: skip

Results = dict[str, Any]
Row = dict[str, Any]


def load(name: str) -> Results:
    result: Results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def made(*lines: list[str]) -> str:
    """Lines of cells as a table; the first is its head."""
    head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def ms(value: float | None) -> str:
    return "" if value is None else f"{value:#.3g}".rstrip(".") + " ms"


def ours(row: Row) -> str:
    """How many times faster than plain; in brackets if it is mostly live."""
    if not right(row):
        return "differs"
    speed = row.get("speed", {}).get(OURS)
    found = "-" if speed is None else f"{speed:.2f}"
    return found if row.get("played", 0.0) > MOSTLY else f"({found})"


def rival(row: Row) -> str:
    name = row.get("rival", "")
    speed = row.get("speed", {}).get(name)
    if speed is not None:
        return f"{name} {speed:.2f}"
    return f"{name} {'is not ready in 45 s' if 'not ready' in row.get('errors', {}).get(name, '') else 'fails'}"


def cells(row: Row) -> list[str]:
    times = row.get("ms", {})
    return [PROGRAMS[row["program"]], ms(times.get("plain")), ms(times.get(OURS)), ours(row), rival(row)]


HEAD = ["program", "plain, a step", "with one line", "times faster", "the usual way, times faster"]


def speeds(result: Results) -> str:
    found = [row["speed"][OURS] for row in result["rows"] if OURS in row.get("speed", {})]
    return f"{min(found):.2f} to {max(found):.1f} times as fast, {statistics.median(found):.1f} times in the median"


def headline(result: Results) -> str:
    """For whom it is, and how much it gives: a sentence."""
    programs, equal = len(result["rows"]), sum(map(right, result["rows"]))
    same = "all" if equal == programs else str(equal)
    return (
        f"For PyTorch programs in which the GPU waits for Python. With one line, {programs} programs as people write them ran "
        f"{speeds(result)}, on an {card(result)}; {same} gave the results of plain PyTorch, to the bit."
    )


def card(result: Results) -> str:
    return str(result["hardware"]).removeprefix("NVIDIA ").split()[0]


def summary(real: Results, ranks: Results) -> str:
    """How much it gives to programs of several kinds."""
    rows = {row["program"]: row for row in real["rows"]}
    lines = [HEAD, *(cells(rows[name]) for name in FEW if name in rows)]
    for name, title in RANKS.items():
        case, where = ranks["figures"]["cases"][name], f"{title}, {ranks['figures']['ranks']} {card(ranks)}s"
        plain, recorded = case["eager us"] / 1000, case["phonograph us"] / 1000
        by_hand = f"by hand {case['eager us'] / case['by hand us']:.2f}"
        lines.append([where, ms(plain), ms(recorded), f"{plain / recorded:.2f}", by_hand])
    return made(*lines)


def real(result: Results) -> str:
    return made([*HEAD, "recorded share"], *[[*cells(row), f"{row.get('played', 0.0):.2f}"] for row in result["rows"]])


def coverage(result: Results) -> str:
    """A sentence."""
    found = result["targets"]
    models = found["models measured whole"]
    over, reduce = found["time over torch.compile"], found["time over reduce-overhead"]
    return (
        f"Compiled models: of {models['transformers/']} models of transformers and {models['timm/']} of timm (small, inference "
        f"and training; {result['made'][0]['hardware']}) {found['right']} cases were right. In the median of {over['cases']}, "
        f'`backend="phonograph"` took {over["median"]:.2f} × the time of `torch.compile` and {reduce["median"]:.2f} × that of '
        f"`reduce-overhead` (at most {over['largest']:.2f} × and {reduce['largest']:.2f} ×)."
    )


def calls(result: Results) -> str:
    rows = {row["method"]: row for row in result["rows"]}
    found = [[title, f"{rows[name]['cpu_us']:.1f}"] for name, title in CALLS.items()]
    return made(["8 tiny kernels", "µs of the host's time, a call"], *found)


def setup(result: Results) -> str:
    found = result["figures"]["set-up"]["first"]
    return (
        f"Recording a GPT-2 step ({result['hardware']}): a live step takes {found['live ms']:.1f} ms; calls 1 to 3 take "
        f"{found['call 1 ms']:.0f}, {found['call 2 ms']:.0f} and {found['call 3 ms']:.1f} ms."
    )


def tables() -> Iterator[tuple[str, str]]:
    """What stands between which marks."""
    programs = load("real")
    yield "headline", headline(programs)
    yield "summary", summary(programs, load("ranks"))
    yield "real", real(programs)
    yield "coverage", coverage(load("coverage"))
    yield "calls", calls(load("tiny_kernels"))
    yield "setup", setup(load("gpt2_step"))


def put(page: str, name: str, rendered: str) -> str:
    """A page with this between its marks, if it has them."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.partition(begin)
    return f"{before}{begin}\n{rendered}\n{end}{rest.partition(end)[2]}" if found else page


def filled(page: str) -> str:
    for name, rendered in tables():
        page = put(page, name, rendered)
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
