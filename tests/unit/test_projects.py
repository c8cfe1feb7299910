"""Whose project a source file belongs to: the user's, or a package's that lies outside of `site-packages`."""

import json
import os
import sys
from importlib import metadata

import pytest

from phonograph.python import origin as where
from phonograph.python import projects
from phonograph.python.projects import is_of_another


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the user's project, in which they work; nothing around is remembered."""

    def forget():
        for known in (
            projects._own_place,
            projects._root,
            projects._installed_in,
            projects._edited,
            where.is_users,
            where.origin,
        ):
            known.cache_clear()
        projects._here.clear()
        where._callers.clear()

    user = made(tmp_path / "user", "pyproject.toml", "scripts/train.py", "src/mine/__init__.py", "beside.py")
    monkeypatch.chdir(user / "scripts")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(user / "scripts" / "train.py"), raising=False)
    forget()
    yield tmp_path
    forget()


def made(root, *files):
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return root


def installed(target, name, *, editable=None):
    """What pip notes of a package."""
    info = target / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if editable is None:
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/inner/more.py,,\n{name}-1.0.dist-info/METADATA,,\n")
    else:
        (info / "RECORD").write_text(f"__editable__.{name}.pth,,\n")
        (info / "direct_url.json").write_text(json.dumps({"url": editable.as_uri(), "dir_info": {"editable": True}}))


def on_the_path(monkeypatch, *entries):
    for entry in entries:
        monkeypatch.syspath_prepend(str(entry))


def test_what_pip_has_put_on_the_path_is_a_package(place, monkeypatch):
    target = made(place / "target", "lib/__init__.py", "lib/inner/more.py", "other.py")
    installed(target, "lib")
    on_the_path(monkeypatch, target)
    assert is_of_another(str(target / "lib" / "inner" / "more.py"))
    assert not is_of_another(str(target / "other.py"))  # which pip has not put there
    assert where.origin(str(target / "lib" / "__init__.py")) is where.LIBRARY


def test_also_where_it_lies_in_the_working_directory(place, monkeypatch):
    target = made(place / "user" / "scripts" / "vendored", "lib/__init__.py")
    installed(target, "lib")
    on_the_path(monkeypatch, target)
    assert is_of_another(str(target / "lib" / "__init__.py"))


@pytest.mark.parametrize("mark", ["pyproject.toml", "setup.py", ".git/HEAD"])
@pytest.mark.parametrize("folder", ["", "src"])
def test_a_checkout_on_the_path_is_a_package(place, monkeypatch, mark, folder):
    root = made(place / "checkout", mark, os.path.join(folder, "lib/__init__.py"))
    on_the_path(monkeypatch, root / folder)
    assert is_of_another(str(root / folder / "lib" / "__init__.py"))


def test_a_project_that_was_installed_to_be_edited_is_a_package(place, monkeypatch):
    """It is found by what pip noted, whatever lies in it."""
    root, site = made(place / "edited", "lib/__init__.py"), place / "site"
    installed(site, "lib", editable=root)
    on_the_path(monkeypatch, site, root)
    assert metadata.distribution("lib").read_text("direct_url.json")
    assert is_of_another(str(root / "lib" / "__init__.py"))


def test_but_not_the_users_own_project(place, monkeypatch):
    """Whether they have it on the path, or have installed it to be edited."""
    user, site = place / "user", place / "site"
    installed(site, "mine", editable=user)
    on_the_path(monkeypatch, site, user / "src", user)
    for name in ("scripts/train.py", "scripts/model.py", "src/mine/__init__.py", "src/mine/deep/down.py", "beside.py"):
        assert not is_of_another(str(user / name)), name
        assert where.is_users(str(user / name)), name


def test_in_doubt_it_is_the_users(place, monkeypatch):
    """A folder of modules, a package without any notes, what is on no path."""
    helpers = made(place / "helpers", "tools.py", "kit/__init__.py")
    on_the_path(monkeypatch, helpers)
    assert not is_of_another(str(helpers / "tools.py"))
    assert not is_of_another(str(helpers / "kit" / "__init__.py"))
    assert not is_of_another(str(made(place / "elsewhere", "setup.py", "run.py") / "run.py"))


def test_who_calls_us_is_the_user(place, monkeypatch):
    """A project that is installed to be edited, and begun by a command of its own."""
    root = made(place / "project", "pyproject.toml", "app/__init__.py", "app/train.py", "app/model.py")
    on_the_path(monkeypatch, root)
    model = str(root / "app" / "model.py")
    assert not where.is_users(model)
    space = {}
    exec(compile("import sys\nfrom phonograph.python.origin import has_called\ndef record(): has_called(sys._getframe())",
                 str(root / "app" / "train.py"), "exec"), space)  # fmt: skip
    space["record"]()
    assert where.is_users(model)


def test_the_root_of_all_is_no_place_of_the_users(place, monkeypatch):
    root = made(place / "checkout", "setup.py", "lib/__init__.py")
    on_the_path(monkeypatch, root)
    monkeypatch.chdir("/")
    assert is_of_another(str(root / "lib" / "__init__.py"))


def test_a_working_directory_that_is_gone_is_no_place(place, monkeypatch):
    root = made(place / "checkout", "setup.py", "lib/__init__.py")
    gone = place / "gone"
    gone.mkdir()
    on_the_path(monkeypatch, root, "")
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert is_of_another(str(root / "lib" / "__init__.py"))
    assert where.is_users(str(place / "user" / "scripts" / "train.py"))
