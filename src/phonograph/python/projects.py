"""Whose project a source file belongs to, where it lies outside of `site-packages`: the user's own, or a package that was
installed in another way (``pip install -e``, ``pip install --target``, a checkout on PYTHONPATH).

The user's own is what lies with the program: beside the script that runs, in the working directory, in the projects of which
these are part, or in that of code which calls `pg.record`. All else is a package if it was installed, or if it is a project of
its own (a repository, or with a `pyproject.toml`). In doubt it is the user's, whose code is looked at more closely.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from urllib.parse import unquote, urlparse

__all__ = ["is_of_another", "is_the_users"]

_REPOSITORY = (".git", ".hg")
_PROJECT = ("pyproject.toml", "setup.py", "setup.cfg")
_here: set[str] = set()  # where code lies that has called us


def is_the_users(path: str) -> bool:
    """Code in this file calls us: it, and what lies with it, is the user's. Returns whether that is news."""
    place = _own_place(os.path.dirname(path))
    if place in _here or not is_of_another(path):
        return False
    _here.add(place)
    return True


def is_of_another(path: str) -> bool:
    """Whether the file of this path (absolute, and in no `site-packages`) is of somebody else's package."""
    entry = _entry(path)
    if entry is None:
        return False
    top = path[len(entry) :].partition(os.sep)[0]
    if top in _installed_in(entry):
        return True
    if any(_lies_in(path, place) for place in {*_places(), *_here}):
        return False
    if any(_lies_in(path, root) for root in _edited()):
        return True  # which may have no mark of a project in it
    return _root(os.path.dirname(path), _REPOSITORY + _PROJECT) is not None


def _lies_in(path: str, place: str) -> bool:
    return path.startswith(place.rstrip(os.sep) + os.sep)


def _entry(path: str) -> str | None:
    """The innermost directory of `sys.path` in which it lies."""
    found = [entry for entry in _directories() if path.startswith(entry)]
    return max(found, key=len, default=None)


def _directories() -> Iterator[str]:
    here = _working_directory()
    known = (entry for entry in [*sys.path] if here or os.path.isabs(entry))
    return (os.path.join(os.path.normpath(os.path.join(here, entry)), "") for entry in known)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return ""


def _places() -> Iterator[str]:
    """Where the program lies, and where it runs, with the projects around."""
    here, main = _working_directory(), getattr(sys.modules.get("__main__"), "__file__", None)
    beside = os.path.dirname(os.path.join(here, main)) if main else ""
    for place in map(os.path.normpath, filter(os.path.isabs, (beside, here))):
        if os.path.dirname(place) != place:  # the root of all says nothing
            yield place
            yield _own_place(place)


@cache
def _own_place(directory: str) -> str:
    """The project around a directory: the repository, if it is part of one."""
    return _root(directory, _REPOSITORY) or _root(directory, _PROJECT) or directory


@cache
def _root(directory: str, marks: tuple[str, ...]) -> str | None:
    """The innermost directory around, or this one, that has one of these in it."""
    while not any(os.path.exists(os.path.join(directory, mark)) for mark in marks):
        directory, below = os.path.dirname(directory), directory
        if directory == below:
            return None
    return directory


@cache
def _installed_in(entry: str) -> frozenset[str]:
    """What pip has put into a directory: the names of files and directories there."""
    found = set[str]()
    for distribution in metadata.distributions(path=[entry]):
        record = distribution.read_text("RECORD") or ""
        found.update(line.partition(",")[0].partition("/")[0] for line in record.splitlines())
    return frozenset(found)


@cache
def _edited() -> frozenset[str]:
    """The projects that are installed in such a way that they may be edited."""
    found = set[str]()
    for distribution in metadata.distributions():
        said = json.loads(distribution.read_text("direct_url.json") or "{}")
        if said.get("dir_info", {}).get("editable"):
            found.add(os.path.abspath(unquote(urlparse(said["url"]).path)))
    return frozenset(found)
