"""C14-C20: living with others. Threads, streams, nesting, memory, pickling, the end of things, bounds, being told."""

import os
import pathlib
import subprocess
import sys

import phonograph as pg


def run_python(code, *arguments):
    source = str(pathlib.Path(pg.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
