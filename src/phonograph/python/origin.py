"""Whose code a source file is, and the user's own line: the innermost frame that is not the library's, torch's or the
standard library's."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache, lru_cache
from types import CodeType, FrameType

import torch

from .._torch.autograd import on_thread_of_autograds
from .._torch.dynamic import Thing
from .places import place
from .projects import is_of_another, is_the_users

__all__ = ["BACKWARD", "LIBRARY", "STDLIB", "USER", "belongs_to_user", "called_by", "has_called", "in_package", "is_compiled",
           "is_ours", "is_torchs", "is_users", "origin", "runs_through", "users_frame", "users_level", "users_line",
           "works_for", "written_out"]  # fmt: skip

BACKWARD = "_engine_run_backward"
"""The function of torch's that each backward goes through."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = tuple({sysconfig.get_paths()[k] + os.sep for k in ("stdlib", "platstdlib")} | {os.path.dirname(os.__file__) + os.sep})
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_COMPILED = (os.sep + "torchinductor_", os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.sep + "torchinductor_")
_GENERATED = ("<eval_with_key>", *_COMPILED)
_READERS = ("<frozen importlib", "<frozen zipimport", os.sep + "importlib" + os.sep, os.sep + "linecache.py")

USER, STDLIB, LIBRARY = "user", "stdlib", "library"


@cache
def is_users(filename: str) -> bool:
    """Whether a source file is the user's own (not ours, torch's, the standard library's or an installed package's, and not
    written by a compiler)."""
    if filename.startswith(("<frozen", "<string>")):
        return filename == "<string>"
    path = os.path.abspath(filename) if not filename.startswith("<") else filename
    return not _is_known_as_anothers(path) and not is_of_another(path)


def _is_known_as_anothers(path: str) -> bool:
    return any(part in path for part in (*_LIBRARIES, *_COMPILED)) or path.startswith((_OURS, _TORCH, *_STDLIB))


def has_called(frame: FrameType | None) -> None:
    """Code that runs in this frame calls us, perhaps by functions of ours: it is the user's."""
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        belongs_to_user(frame.f_code.co_filename)


def belongs_to_user(filename: str) -> None:
    """The code of this file, and what lies with it, is the user's."""
    if filename in _callers or filename.startswith("<"):
        return
    _callers.add(filename)
    path = os.path.abspath(filename)
    if not _is_known_as_anothers(path) and is_the_users(path):
        for whose in (is_users, origin, _elsewhere):
            whose.cache_clear()


_callers: set[str] = set()


@cache
def is_ours(filename: str) -> bool:
    """Whether a source file is of this library."""
    return filename.startswith(_OURS)


def written_out(expression: str, names: dict[str, object]) -> Thing:
    """The value of a Python expression that this library has made: code that it defines is code of this library."""
    return eval(_code_of(expression), names)


@lru_cache(maxsize=1024)
def _code_of(expression: str) -> CodeType:
    """(Most differ in nothing but how many values they read.)"""
    return compile(expression, __file__, "eval")


@cache
def is_compiled(filename: str) -> bool:
    """Whether a source file was written by Inductor."""
    return any(part in filename for part in _COMPILED)


@cache
def is_torchs(filename: str) -> bool:
    """Whether a source file is torch's, or of this library."""
    return filename.startswith((_OURS, _TORCH))


@cache
def origin(filename: str) -> str:
    """Whose code it is: `USER`'s, `STDLIB`'s, or `LIBRARY` for all else. Code that a compiler generated is a library's; so
    is what reads source files to import them or to show a line of them, whoever made it do so."""
    if any(mark in filename for mark in (*_GENERATED, *_READERS)):
        return LIBRARY
    if is_users(filename):
        return USER
    if filename.startswith("<frozen"):
        return STDLIB
    ours = filename.startswith((_OURS, _TORCH)) or any(part in filename for part in _LIBRARIES)
    return STDLIB if filename.startswith(_STDLIB) and not ours else LIBRARY


def works_for(frame: FrameType | None) -> str:
    """For whom this frame works: the origin of the innermost code that is not the standard library's."""
    while frame is not None:
        whose = origin(frame.f_code.co_filename)
        if whose is not STDLIB:
            return whose
        frame = frame.f_back
    return LIBRARY


def runs_through(frame: FrameType | None, place: str) -> bool:
    """Whether a frame is called, directly or not, by code of this file of a library, or by this function there:
    `torch/nn/modules/transformer.py:_detect_is_causal_mask`."""
    file, _, function = (os.sep + place.replace("/", os.sep)).partition(":")
    while frame is not None:
        if frame.f_code.co_filename.endswith(file) and function in ("", frame.f_code.co_name):
            return True
        frame = frame.f_back
    return False


def called_by(frame: FrameType | None, code: CodeType) -> bool:
    """Whether a frame is called, directly or not, by this code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def users_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user's own code. On a thread of autograd's, it is that which runs the backward."""
    at = frame or sys._getframe(1)
    return _users(at)[0] or _users(_runs_backward())[0]


def users_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame of the user's own code; and, if a package runs by then, of the package's:
    ``train.py:80, in einops/einops.py:512``."""
    own, theirs = _users(frame or sys._getframe(1))
    own = own or _users(_runs_backward())[0]
    if own is None:
        return place(theirs.f_code.co_filename, theirs.f_lineno) if theirs is not None else ""
    line = place(own.f_code.co_filename, own.f_lineno)
    return line if theirs is None else f"{line}, in {_in_package(theirs)}"


def in_package(frame: FrameType) -> bool:
    """Whether the user's own code has called an installed package, of which this frame is."""
    own, theirs = _users(frame)
    return own is not None and theirs is not None


def _users(at: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """The innermost frame of the user's own code, and that of a package within."""
    theirs: FrameType | None = None
    while at is not None:
        filename = at.f_code.co_filename
        if is_users(filename):
            return at, theirs
        if theirs is None and _elsewhere(filename):
            theirs = at
        at = at.f_back
    return None, theirs


def _runs_backward() -> FrameType | None:
    """Who runs the backward for which autograd calls this thread, which has no frames but ours; None if that is not known."""
    if not on_thread_of_autograds():
        return None
    found = []
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None and at.f_code.co_name != BACKWARD:
            at = at.f_back
        found += [] if at is None else [at]
    return found[0] if len(found) == 1 else None


def users_level() -> int:
    """The `stacklevel` with which who asks makes a warning one about the user's own line. Between that and us may be packages,
    and torch, whose `Module.__call__` calls a recorded model."""
    at, level = sys._getframe(1), 1
    while at.f_back is not None and origin(at.f_code.co_filename) is not USER:
        at, level = at.f_back, level + 1
    return level


def _in_package(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    for part in _LIBRARIES:
        path = path.rpartition(part)[2]
    return f"{path}:{frame.f_lineno}"


@cache
def _elsewhere(filename: str) -> bool:
    """Whether a file is nobody's of those, and was not written by a compiler."""
    others = any(part in filename for part in _LIBRARIES) or not filename.startswith(_STDLIB)
    return others and not filename.startswith(("<", _OURS, _TORCH)) and not is_compiled(filename)
