"""The user's own line: the innermost frame that is not the library's, torch's or the standard library's."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from types import FrameType

import torch

__all__ = ["is_users", "users_line"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = tuple({sysconfig.get_paths()[k] + os.sep for k in ("stdlib", "platstdlib")})
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


@cache
def is_users(filename: str) -> bool:
    """Whether a source file is the user's own (not ours, torch's, the standard library's or an installed package)."""
    if filename.startswith(("<frozen", "<string>")):
        return filename == "<string>"
    path = os.path.abspath(filename) if not filename.startswith("<") else filename
    if any(part in path for part in _LIBRARIES):
        return False
    return not path.startswith((_OURS, _TORCH, *_STDLIB))


def users_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame of the user's own code, or of any code outside torch and this library."""
    at: FrameType | None = frame or sys._getframe(1)
    fallback = ""
    while at is not None:
        filename = at.f_code.co_filename
        if is_users(filename):
            return f"{filename}:{at.f_lineno}"
        if not fallback and not filename.startswith((_OURS, _TORCH, *_STDLIB)):
            fallback = f"{filename}:{at.f_lineno}"
        at = at.f_back
    return fallback
