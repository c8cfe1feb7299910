"""C19: one HTML page of all that was recorded, which loads nothing, and runs nothing out of data."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.engine import timeline
from phonograph.engine.ledger import ledgers
from phonograph.observe.page import Page
from tests import forked
from tests.helpers import may_run_live, ramp


class Elements(HTMLParser):
    """What a browser would make of a page: its elements, closed as they were opened, their attributes, and its text."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.attributes: dict[str, set[str]] = {}
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, name, attributes):
        self.names[name] += 1
        if name not in self.VOID:
            self._open.append(name)
        for key, value in attributes:
            self.attributes.setdefault(key, set()).add(value or "")
            if key == "class":
                self.classes.update((value or "").split())

    def handle_endtag(self, name):
        assert self._open.pop() == name

    def handle_data(self, data):
        self.text.append(data)


def page_of(path: Path) -> Elements:
    return Elements(path.read_text(encoding="utf-8"))


def test_c19_a_page_is_written_at_once(device, tmp_path):
    step = pg.record(lambda x: x * 2, name="a step")
    for _ in range(3):
        step(torch.ones(3, device=device))
    pg.report(tmp_path / "page.html")
    text = "".join(page_of(tmp_path / "page.html").text)
    assert "a step 3 calls: 1 live, 2 replayed; 1 recording made" in text
    assert "played 2 ×" in text


def test_c19_a_timed_block_shows_each_kind(device, tmp_path):
    step = pg.record(lambda x: x * 2, name="timed", keep="always")
    with pg.report(tmp_path / "page.html"):
        for _ in range(8):
            step(torch.ones(3, device=device))
    found = page_of(tmp_path / "page.html")
    assert all(found.classes[kind] > 1 for kind in ("live", "captured", "replayed")), "beside the key of the drawing"
    assert "too few calls" in found.text


def test_c19_a_timed_block_compares_with_live(device, tmp_path):
    """Also where a replay is faster beyond doubt."""
    step = pg.record(lambda x: x * 2, name="compared")
    with pg.report(tmp_path / "page.html"):
        for _ in range(80):
            step(torch.ones(3, device=device))
    assert pg.stats(step).live >= 6
    assert "too few calls" not in page_of(tmp_path / "page.html").text


def test_c19_outside_of_blocks_nothing_is_timed(device, tmp_path):
    step = pg.record(lambda x: x * 2, keep="always")
    with pg.report(tmp_path / "page.html"):
        step(torch.ones(3, device=device))
    before = len([*step._trials.timeline])
    for _ in range(5):
        step(torch.ones(3, device=device))
    assert len([*step._trials.timeline]) == before == 1
    assert not step._trials.timing


def test_c19_what_is_timed_is_bounded(device, tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "_REPLAYS", 4)
    step = pg.record(lambda x: x * 2, keep="always")
    with pg.report(tmp_path / "page.html"):
        for _ in range(20):
            step(torch.ones(3, device=device))
    assert [m.kind for m in step._trials.timeline].count(timeline.REPLAYED) == 4


@may_run_live
def test_c19_no_data_becomes_markup(device, tmp_path):
    """Names, reasons, paths and lines of source are text, whatever is in them."""
    name = '<script>alert("1")</script><img src=x onerror=alert(2)>'

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b>layer</b>", nn.Linear(3, 3, device=device))

        def forward(self, x):
            return self.get_submodule("<b>layer</b>")(x)

    live = pg.record(lambda x: x * x.sum().item(), name=name)  # "</pre><script>alert(3)</script>"
    model = pg.record(Holder())
    for _ in range(4):
        live(ramp(device, 3))
        with torch.no_grad():
            model(ramp(device, 3))
    with pg.report(tmp_path / "page.html"):
        live(ramp(device, 3))
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Elements(source)
    assert found.names.keys().isdisjoint({"script", "img", "b>layer<", "iframe", "link", "object", "a", "base", "form"})
    assert found.attributes.keys().isdisjoint({"src", "href", "style", "srcset", "action", "data"})
    assert not [key for key in found.attributes if key.startswith("on")]
    assert name in "".join(found.text)
    assert "$" not in source.partition("<body>")[0], "all of the template is filled in"


def test_c19_a_page_loads_nothing(device, tmp_path):
    """Its policy allows no script, no image, no request."""
    pg.report(tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'; style-src 'unsafe-inline'" in page_of(tmp_path / "page.html").attributes["content"]
    assert not [word for word in ("http:", "https:", "url(", "@import", "javascript:") if word in source]


@may_run_live
def test_c19_a_reason_shows_its_line(device, tmp_path):
    def reads(x):
        doubled = x * 2
        return doubled * doubled.sum().item()  # here

    f = pg.record(reads, fallback="live")
    for _ in range(3):
        f(ramp(device, 3))
    pg.report(tmp_path / "page.html")
    found = page_of(tmp_path / "page.html")
    (line,) = [text for text in found.text if "doubled.sum().item()  # here" in text]
    assert line.split()[0].isdigit()
    assert any("def reads(x):" in text for text in found.text), "two lines before"


def test_c19_nothing_recorded_is_said():
    found = Elements(str(Page([], {})))
    assert any("Nothing was recorded" in text for text in found.text)


def test_c19_many_functions_fold(device, tmp_path):
    """A reader sees the twenty largest; the others are there."""
    functions = [pg.record(lambda x: x + 1, name=f"one of many, {i}", keep="always") for i in range(25)]
    with pg.report(tmp_path / "page.html"):
        for _ in range(2):
            for f in functions:
                f(torch.ones(3, device=device))
    found = page_of(tmp_path / "page.html")
    assert any(text.endswith(" more") for text in found.text)
    assert all(f"one of many, {i}" in "".join(found.text) for i in range(25))


def test_c19_a_page_lists_operators_by_module(device, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = pg.record(train, keep="always", name="by module")
    for _ in range(3):
        step(ramp(device, 3))
    pg.report(tmp_path / "page.html")
    text = page_of(tmp_path / "page.html").text
    assert text.count("model") >= 1
    assert "SGD.step" in text
    assert any("forward and" in x and "backward" in x for x in text)


def test_c19_functions_that_are_gone_are_told(device, tmp_path):
    """A script's functions may be gone when its page is written: what they did is kept until then, and none of their memory."""
    with pg.report(tmp_path / "page.html"):
        step = pg.record(lambda x: x * 2, keep="always", name="gone by the end")
        for _ in range(3):
            step(torch.ones(3, device=device))
        kept = weakref.ref(step)
        del step
        gc.collect()
        assert kept() is None
    text = "".join(page_of(tmp_path / "page.html").text)
    assert "gone by the end: 1 operator" in text
    assert "gone by now" in text
    assert not [one for one in ledgers() if one.name == "gone by the end"]


def test_c19_an_exception_in_a_block_passes(tmp_path):
    """The page is written, and nothing is timed any more."""

    def fails():
        with pg.report(tmp_path / "page.html"):
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not timeline.watched()
    assert (tmp_path / "page.html").exists()


def test_c19_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    page, program = (
        tmp_path / "page.html",
        """
import resource, sys, torch, phonograph as pg
f = pg.record(lambda x: x * 2, keep="always")
for _ in range(3): f(torch.ones(3))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    pg.report(sys.argv[1])
except OSError:
    print("told")
""",
    )
    page.write_text("the old one")
    ended = forked.run(program, str(page))
    assert (ended.stdout, ended.returncode) == ("told\n", 0), ended.stderr
    assert page.read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_c19_a_page_in_a_place_that_takes_none_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    page.write_text("the old one")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        pg.report(tmp_path / "nowhere" / "page.html")
    with pytest.raises(IsADirectoryError, match="give the name of a file in it"):
        pg.report(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"the folder .* is not writable"):
        pg.report(page)
    assert page.read_text() == "the old one"
