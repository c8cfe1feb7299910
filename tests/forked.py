"""Processes of their own for tests. Each is as fresh as a new interpreter but for what takes seconds to import: it is forked
from one that has imported torch and its compiler, and nothing of phonograph. No CUDA is touched before the fork.

`run` runs a program as `subprocess.run` would, `start` only starts it. Run as the process that forks: `python -m tests.forked`
reads a line of JSON for each program and answers with the process's id; how that has ended it writes into a file.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXPENSIVE = ("torch", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")

Program = str | Path
"""Source text as after `-c`, the path of a script, or the name of a module as after `-m` (`Module`)."""


class Module(str):
    """The name of a module to be run."""


@dataclass
class Ended:
    """How a process has ended (a signal is a negative number), and what it has printed."""

    returncode: int
    stdout: str
    stderr: str


class Started:
    """A running process; its output goes to two files, which may be the same."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid, self._status = pid, status

    def poll(self) -> int | None:
        return int(self._status.read_text()) if self._status.exists() else None

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (ended := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"has not ended after {timeout:.0f} s")
            time.sleep(0.02)
        return ended

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Server:
    """The process that forks the others, of which each process that runs tests has one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "tests.forked"], env=environment(), cwd=ROOT, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="phonograph-forked-")
        self._count = 0
        atexit.register(self._end)

    def start(self, request: dict[str, Any]) -> Started:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        status = Path(self._folder.name) / str(self._count)
        self._process.stdin.write(json.dumps({**request, "status": str(status)}) + "\n")
        self._process.stdin.flush()
        return Started(int(self._process.stdout.readline()), status)

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


_one_at_a_time = threading.Lock()
_server = functools.cache(_Server)


def environment() -> dict[str, str]:
    """What a fresh interpreter needs to find the same phonograph as this one; nothing of pytest's."""
    source = Path(str(importlib.util.find_spec("phonograph").origin)).parents[1]  # type: ignore[union-attr]
    paths = [str(ROOT), str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # One thread: the tensors are small, and threads that wait for each other on a busy machine take for ever.
    return {**own, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def start(
    program: Program, *arguments: str, stdout: Path, stderr: Path, env: Mapping[str, str] | None = None,
    cwd: Path | None = None, warned: str | None = None,
) -> Started:  # fmt: skip
    """Start a program. `env` is put over the environment of this process (torch has read some of it at its import); `warned` is
    how it treats warnings (`"always"`)."""
    kind = "module" if isinstance(program, Module) else "script" if isinstance(program, Path) else "source"
    with _one_at_a_time:
        return _server().start({
            "kind": kind, "program": str(program), "arguments": arguments, "stdout": str(stdout), "stderr": str(stderr),
            "env": {**environment(), **(env or {})}, "cwd": str(cwd or ROOT), "warned": warned,
        })  # fmt: skip


def run(program: Program, *arguments: str, timeout: float = 200, **options: Any) -> Ended:
    """What a program has printed, once it has ended. One that does not end in time is killed: `TimeoutError`."""
    with tempfile.TemporaryDirectory(prefix="phonograph-forked-") as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        started = start(program, *arguments, stdout=out, stderr=err, **options)
        try:
            status = started.wait(timeout)
        except BaseException:
            started.kill()
            raise
        return Ended(status, out.read_text(), err.read_text())


# -- the process that forks


def _serve() -> None:
    """Fork for each line, and note how each child has ended. Returns in a child only to run its program, and at the end."""
    running: dict[int, Path] = {}
    while True:
        for pid in [*running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _write(running.pop(pid), str(os.waitstatus_to_exitcode(status)))
        if not select.select([sys.stdin], [], [], 0.02 if running else None)[0]:
            continue
        line = sys.stdin.buffer.raw.readline()  # nothing is read ahead, which would not be seen to be there
        if not line:
            return
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(**request)
            return
        running[pid] = Path(request["status"])
        print(pid, flush=True)


def _write(path: Path, text: str) -> None:
    """All at once: who waits for the file reads it as soon as it is there."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.rename(path)


def _become(
    kind: str, program: str, arguments: list[str], stdout: str, stderr: str, env: dict[str, str], cwd: str, warned: str | None,
    status: str,
) -> None:  # fmt: skip
    """Run the program as the interpreter would; it is `__main__`, and what it raises goes up to the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it goes with the process that has forked it
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, stdout, os.O_RDWR), (2, stderr, os.O_RDWR)):
        opened = os.open(path, flags | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if warned is not None:
        warnings.simplefilter(warned)  # type: ignore[arg-type]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    file, source = "<string>", program
    if kind == "module":
        main.__spec__ = spec = importlib.util.find_spec(program)
        assert spec is not None
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program}.__main__")
            assert spec is not None
        assert spec.origin is not None
        main.__package__, file = spec.parent, spec.origin
    elif kind == "script":
        file = program
    if kind != "source":
        main.__file__, source = file, Path(file).read_text(encoding="utf-8")
    sys.argv[:] = [file if kind != "source" else "-c", *arguments]
    sys.path[0] = str(Path(file).parent) if kind == "script" else "" if kind == "source" else cwd
    exec(compile(source, file, "exec"), vars(main))


if __name__ == "__main__":
    for expensive in EXPENSIVE:
        importlib.import_module(expensive)
    _serve()
