"""The command line: ``phonograph check``, ``doctor``, ``reasons``, ``report`` and ``trace``.

A command is a module in this package with three names: ``HELP`` (one line), ``add_arguments(parser)`` and
``run(arguments) -> int``, the exit status. 0 is what one hopes for, 1 means that the command found what it looks for
(a difference, a device that does not record), 2 that it could not look. They are imported when a command is given: all but
``--version`` need torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from phonograph.cli import without_torch
from phonograph.cli.console import CannotRun
from phonograph.version import __version__

_COMMANDS = ("check", "doctor", "reasons", "report", "trace")


class _Parser(argparse.ArgumentParser):
    """Names what is like a word that it does not know."""

    def error(self, message: str) -> NoReturn:
        from phonograph.options import did_you_mean  # which imports torch

        unknown = re.search(r"invalid choice: '(.*?)'|unrecognized arguments: (\S+)", message)
        if unknown and "Did you mean" not in message and "did you mean" not in message:
            choices = [word for action in self._actions for word in action.choices or ()]
            message += did_you_mean(unknown[1] or unknown[2], [*choices, *self._option_string_actions])
        super().error(message)


def _parsers(modules: dict[str, ModuleType]) -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole line, and those of the commands."""
    parser = _Parser(prog="phonograph", description="Record your PyTorch program once; play it back at GPU speed.")
    parser.add_argument("--version", action="version", version=f"phonograph {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    of_commands = dict[str, argparse.ArgumentParser]()
    for name, command in modules.items():
        of_commands[name] = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(of_commands[name])
    return parser, of_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``argv`` defaults to the process's arguments. Without a command, print what
    there is."""
    own, rest = _split(sys.argv[1:] if argv is None else argv)
    if [*own] == ["--version"]:
        print(f"phonograph {__version__}")
        return 0
    try:
        modules = {name: import_module(f"phonograph.cli.{name}") for name in _COMMANDS}
    except (ImportError, AttributeError, OSError) as error:  # as it is imported: there is no torch, or not the one that we need
        return without_torch.run(own, error)
    parser, commands = _parsers(modules)
    arguments, unknown = parser.parse_known_args(own)
    if arguments.command is None and not unknown:
        parser.print_help()
        return 0
    if unknown:
        commands.get(arguments.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.rest = rest
    try:
        status: int = modules[arguments.command].run(arguments)
    except CannotRun as reason:
        print(f"phonograph {arguments.command}: {reason}", file=sys.stderr)
        return 2
    return status


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What is the command's own, and what comes after ``--``."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]
