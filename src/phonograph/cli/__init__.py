"""The command line: ``phonograph demo``, ``phonograph doctor`` and ``phonograph reasons``.

A command is a module in this package with three names: ``HELP`` (one line), ``add_arguments(parser)`` and
``run(arguments) -> int``, the exit status. 0 is what one hopes for, 1 means that the command found what it looks for
(a difference, a device that does not record), 2 that it could not look.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from phonograph.cli import demo, doctor, reasons
from phonograph.cli.console import CannotRun

_COMMANDS = {"demo": demo, "doctor": doctor, "reasons": reasons}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phonograph", description="Record your PyTorch program once; play it back at GPU speed."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=command.__doc__))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``argv`` defaults to the process's arguments."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = _COMMANDS[arguments.command].run(arguments)
    except CannotRun as reason:
        print(f"phonograph {arguments.command}: {reason}", file=sys.stderr)
        return 2
    return status
