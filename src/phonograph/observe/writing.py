"""`pg.report`: writes the page, now, and again at the end of a block in which all calls are timed."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch

from ..engine.ledger import asking, ledgers
from .page import Page
from .trace import load, measured

__all__ = ["Report"]


class Report:
    """One page, in a file. As a context manager it times the calls in its block, and writes the page again at its end."""

    def __init__(self, path: str | os.PathLike[str], trace: str | os.PathLike[str] | None = None) -> None:
        self._path, self._trace = Path(path), Path(trace) if trace is not None else None
        _check_folder(self._path)

    def write(self) -> None:
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # what is still on its way is not timed yet
        replays = measured(load(self._trace)) if self._trace is not None and self._trace.exists() else {}
        _replace(self._path, str(Page(ledgers(), replays)))

    def __enter__(self) -> Report:
        asking(self, True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.write()
        finally:
            asking(self, False)


def _check_folder(path: Path) -> None:
    """Raise unless a page can be written there. (What it replaces need not be writable: it is moved in its place.)"""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"pg.report({str(path)!r}): there is no folder {folder}; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"pg.report({str(path)!r}): that is a folder; give the name of a file in it")
    if not os.access(folder, os.W_OK | os.X_OK) and (path.is_file() or not path.exists()):
        raise PermissionError(f"pg.report({str(path)!r}): the folder {folder} is not writable, and the page is written in it "
                              "before it is moved into place")  # fmt: skip


def _replace(path: Path, text: str) -> None:
    """Write a file beside it, and move that in its place: where writing fails, as on a full disk, the old page stays."""
    if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
