"""Give the kernels of recordings in a trace of torch's profiler the names of the modules that they come from.

Each gets `module`, `operator` and `pass` among its arguments, and each stream a track that shows the modules one after the
other: in Perfetto, or chrome://tracing. Exit status 1 if the trace has no kernel of a recording, 2 if it is no trace.
"""

from __future__ import annotations

import argparse

from phonograph.cli.console import CannotRun
from phonograph.observe.trace import annotate, load, save

HELP = "give the kernels in a profiler's trace the names of modules"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="a trace as torch.profiler's export_chrome_trace writes it (.json or .json.gz)")
    parser.add_argument("output", help="the same with names")


def run(arguments: argparse.Namespace) -> int:
    try:
        trace = load(arguments.trace)
    except (OSError, ValueError) as error:
        raise CannotRun(str(error)) from None
    named = annotate(trace)
    save(trace, arguments.output)
    whole = sum(named)
    if not whole:
        print("no kernel of a recording: profile replays with ProfilerActivity.CUDA and ProfilerActivity.CPU")
        return 1
    print(f"{named.of_modules / whole:.1%} of {whole * 1e3:.3g} ms in kernels of recordings is a module's or an optimizer's, "
          f"{named.elsewhere / whole:.1%} of other lines and copies, {named.unknown / whole:.1%} unknown")  # fmt: skip
    return 0
