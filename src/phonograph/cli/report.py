"""Run a script, unchanged, and write what it recorded as one HTML page: calls over time, live and replayed ones side by side,
memory, reasons to run live, and the modules of each recording.

Exit status is the script's; 2 if there is no such script, or no place for the page.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import phonograph as pg
from phonograph.cli.console import CannotRun
from phonograph.observe.page import Report

HELP = "run a script, and write what it recorded as an HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", default="phonograph.html", help="the page (default: %(default)s)")
    parser.add_argument("--trace", help="a trace of torch.profiler that the script exports: device time by module")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")


def _page(arguments: argparse.Namespace) -> Report:
    try:
        return pg.report(arguments.output, trace=arguments.trace)
    except OSError as error:
        raise CannotRun(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    script, argv, path = arguments.script, sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [script, *arguments.arguments], os.getcwd()
    try:
        if arguments.is_module:
            if find_spec(script) is None:
                raise CannotRun(f"no module {script}")
            with _page(arguments):
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not Path(script).is_file():
                raise CannotRun(f"no script {script}")
            sys.path[0] = str(Path(script).resolve().parent)
            with _page(arguments):
                runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0
