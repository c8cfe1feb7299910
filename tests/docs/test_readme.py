"""What the README and the documentation show works when it is pasted into a script, and what they name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import phonograph as pg
from phonograph.guards import module_epochs
from tests import forked

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
PACKAGES = ("transformers", "lightning", "accelerate")


def snippets() -> Iterator[pytest.ParameterSet]:
    """Every ```python block, with the line it starts on."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, found.start(1)) + 1
            yield pytest.param(page, line, found.group(1), id=f"{page.name}:{line}")


@pytest.mark.parametrize(("page", "line", "code"), list(snippets()))
def test_snippet_runs_as_a_script(page: Path, line: int, code: str, tmp_path: Path) -> None:
    """In a process of its own, as a reader runs it: with the real clock, by which recordings that do not pay are dropped."""
    for package in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        if package in PACKAGES:
            pytest.importorskip(package)
    script = tmp_path / f"{page.stem}_{line}.py"  # a real file, so that source lines can be found and quoted
    script.write_text("\n" * (line - 1) + code, encoding="utf-8")
    ended = forked.run(script, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "phonograph itself failed" not in ended.stderr


def test_the_readme_is_short_and_shows_code_early() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 250
    assert next(n for n, line in enumerate(lines) if line.startswith("```")) < 10


def test_the_tour_names_what_exists() -> None:
    tour = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("<!-- tour -->\n```\n")[2].partition("```")[0]
    folder, named = ROOT, []
    for line in tour.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else ROOT
        named.append(folder / name)
        if name == "src/phonograph/":
            folder = ROOT / name
    assert len(named) > 10
    assert [path for path in named if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_heading_lead_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text(encoding="utf-8"))
    assert [(to, heading) for to, heading in links if heading not in headings(page.parent / to if to else page)] == []


def headings(page: Path) -> list[str]:
    """Those of a page, as links name them."""
    text = page.read_text(encoding="utf-8")
    written = [*re.findall(r"^#+ (.*)$", text, re.MULTILINE), *re.findall(r'<a (?:id|name)="(.*?)">', text)]
    named = re.findall(r"^::: (.*)$", text, re.MULTILINE)  # of the API reference
    return [*named, *(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in written)]


def test_included_examples_exist() -> None:
    named = {name for page in PAGES for name in INCLUDE.findall(page.read_text(encoding="utf-8"))}
    assert named
    assert named <= {"CHANGELOG.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py"))}


def test_the_reference_has_all_public_names() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert [name for name in pg.__all__ if not name.startswith("__") and f"::: phonograph.{name}\n" not in page] == []


def test_limits_are_one_page() -> None:
    assert len((ROOT / "docs" / "limits.md").read_text(encoding="utf-8")) <= 6000


def test_details_name_tests_that_there_are() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "details.md").read_text(encoding="utf-8"))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 40
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_what_is_wrapped_is_written_down() -> None:
    """docs/stability.md lists it; whoever looks for who has changed a method of torch's finds it there."""
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert [
        one.name for one in module_epochs.all_wrapped() if f"`{one.name}`" not in page and f".{one.name}`" not in page
    ] == []


def test_fragments_of_the_changelog_have_a_type() -> None:
    types = r"feature|bugfix|doc|removal|misc"
    names = [path.name for path in (ROOT / "changelog.d").iterdir()]
    assert [name for name in names if not re.fullmatch(rf"[\w+.-]+\.({types})(\.\d+)?\.md|_template\.md\.jinja", name)] == []
