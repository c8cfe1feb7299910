"""C19: `explain` has numbers, says what tells recordings apart and what they rely on; the log has a line for each recording."""

import html
import linecache
import logging
import re
import sys
import types
from html.parser import HTMLParser

import pytest
import torch

import phonograph as pg
from phonograph.engine import figures
from phonograph.engine import profitability as paying
from phonograph.engine.explanation import Explanation
from phonograph.statistics import Counters
from tests.helpers import may_run_live, ramp


class Ticking(paying.Clock):
    """By which a replay takes so many seconds, and a live call of a trial three times as many; the device takes as long."""

    def __init__(self, replay):
        self.replay = replay

    def times(self, took):
        seconds = self.replay * (3 if took.live else 1)
        return seconds, seconds


def scaled(x, by=2, *, more=0):
    return x * by + more


def lines(f):
    return pg.explain(f).splitlines()


def whys(f):
    return [line.partition("; why: ")[2] for line in lines(f) if "; why: " in line]


def test_c19_times_are_those_of_the_trial(device, monkeypatch):
    """Both kinds of calls were timed, so that what was saved is known."""
    monkeypatch.setattr(paying, "clock", Ticking(0.002))
    monkeypatch.setattr(paying.Trial, "_in_doubt", lambda _: True)
    f = pg.record(scaled)
    for _ in range(60):
        f(ramp(device, 4))
    played = pg.stats(f).replayed
    assert any(re.fullmatch(rf"  played {played}x: 2 ms a call \(median of \d+\), live 6 ms", line) for line in lines(f))
    spent = pg.stats(f).recording_seconds
    assert 0 < spent < 60
    saved = f"about {played * 0.004:.2g} s saved so far"
    assert re.fullmatch(rf"{spent:.2g} s spent recording; \S+ MiB in the pool; {saved}", lines(f)[1])


def test_c19_without_a_live_call_there_is_a_bound(device, monkeypatch):
    """Fast beyond doubt: what its operators take at least, and the last call before the recording, in which much begins."""
    monkeypatch.setattr(paying, "clock", Ticking(1e-6))
    f = pg.record(scaled)
    for _ in range(20):
        f(ramp(device, 4))
    (line,) = [line for line in lines(f) if "played 19x" in line]
    assert line.endswith("live at least 0.002 ms (1 us an operator; 0.001 ms the last one before it)")
    assert lines(f)[1].endswith("; at least 1.9e-05 s saved so far")


def test_c19_what_is_not_on_trial_was_not_timed(device):
    f = pg.record(scaled, keep="always")
    for _ in range(4):
        f(ramp(device, 4))
    assert any("played 3x, which was not timed; live " in line for line in lines(f))
    assert "saved" not in lines(f)[1]


def test_c19_failed_recordings_took_time_too(device):
    f = pg.record(lambda x: x * x.sum().item(), fallback="live")
    f(ramp(device, 4))
    with pytest.warns(pg.RunsLive):
        f(ramp(device, 4))
    assert pg.stats(f).recorded == 0
    assert pg.stats(f).recording_seconds > 0


@pytest.mark.parametrize(
    ("args", "by_name", "why"),
    [
        ([(8,)], {}, "`x` is float32[8], and was float32[4]"),
        ([(4,), 3], {}, "it is given 2 positional arguments, and was given 1"),
        ([(4,)], {"more": 1}, "it is given `more` by name"),
    ],
    ids=["shape", "position", "name"],
)
def test_c19_a_new_signature_is_told_by_its_argument(device, args, by_name, why):
    f = pg.record(scaled)
    for _ in range(3):
        f(ramp(device, 4))
    for _ in range(3):
        f(ramp(device, *args[0]), *args[1:], **by_name)
    assert whys(f) == ["the first", why]


def test_c19_of_equal_shapes_it_is_another_property(device):
    f = pg.record(scaled)
    for x in (ramp(device, 4, 4), ramp(device, 4, 4).t(), ramp(device, 4, 4).requires_grad_()):
        for _ in range(3):
            f(x.detach() if not x.requires_grad else x)
    assert whys(f)[:2] == ["the first", "`x` has stride (1, 4), and had (4, 1)"]
    assert whys(f)[2] == "`x` has requires_grad True, and had False"


def test_c19_values_and_settings_are_told(device):
    f = pg.record(scaled)
    for by in (2, 3):
        for _ in range(3):
            f(ramp(device, 4), by)
    with torch.no_grad():
        for _ in range(3):
            f(ramp(device, 4), 3)
    assert whys(f) == ["the first", "`by` is 3, and was 2", "is_grad_enabled is False, and was True"]


class Settings:
    def __init__(self):
        self.rate = 3


settings = Settings()


def rated(x):
    return x * len(settings.rate)


def test_c19_a_change_is_told_with_its_line(device):
    settings.rate = "abc"
    f = pg.record(rated)
    for _ in range(3):
        f(ramp(device, 4))
    settings.rate = "abcd"
    for _ in range(3):
        f(ramp(device, 4))
    where = f"{__file__}:{rated.__code__.co_firstlineno + 1}"
    assert f"settings.rate has changed (read at {where})" in whys(f)
    assert f"relies on settings.rate = 'abcd' (read at {where})" in lines(f)


def test_c19_recordings_that_take_turns_are_told(device):
    f = pg.record(lambda x: x.repeat(1 << 16), keep="always")
    held = [f(ramp(device, 1)) for _ in range(4)]
    assert len(held) == 4
    assert "results of earlier calls are held in the memory of the others" in whys(f)


@may_run_live
def test_c19_each_recording_is_one_line_of_the_log(device, caplog):
    with caplog.at_level(logging.INFO, "phonograph"):
        f = pg.record(scaled)
        for n in (4, 8):
            for _ in range(3):
                f(ramp(device, n))
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("recorded scaled")]
    assert len(told) == 2
    assert re.fullmatch(r"recorded scaled in \S+ s: \d+ operators, \S+ MiB; why: the first", told[0])
    assert told[1].endswith("why: `x` is float32[8], and was float32[4]")


def test_c19_long_captures_say_so(caplog, monkeypatch):
    """On a thread of its own, which ends with the capture; nobody who does not listen pays for it."""
    monkeypatch.setattr(figures, "_TOLD_AFTER", 0.001)
    counters, asleep = Counters(), figures.threading.Event()
    with caplog.at_level(logging.INFO, "phonograph"), figures.telling("step", counters) as seconds:
        while not any(r.getMessage().startswith("recording step: ") for r in caplog.records):
            asleep.wait(0.001)
            assert seconds() < 60
    threads = [t for t in figures.threading.enumerate() if t.name == "phonograph-progress"]
    for t in threads:
        t.join(10)
    assert not any(t.is_alive() for t in threads)
    monkeypatch.setattr(figures.threading, "Thread", None)
    with caplog.at_level(logging.WARNING, "phonograph"), figures.telling("step", counters):
        pass
    assert counters.recording_seconds > 0


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        self.text.append(data)


def test_c19_a_notebook_shows_a_page(device):
    """All of the text, and nothing of the user's but as text."""
    f = pg.record(scaled, name="<script>alert(1)</script>")
    for _ in range(3):
        f(ramp(device, 4))
    told = pg.explain(f)
    assert type(told) is Explanation
    page = Tags()
    page.feed(told._repr_html_())
    assert set(page.tags) == {"div", "details", "summary"}
    assert page.text == [line.strip() for line in told.splitlines()]
    assert html.escape(f.name) in told._repr_html_()
    said = []
    told._repr_pretty_(types.SimpleNamespace(text=said.append), False)
    assert said == [str(told)]


CELL = """
@pg.record(fallback="live")
def cell(x):
    return x * x.sum().item()
"""


@pytest.mark.parametrize("kind", ["known", "older"])
def test_c19_a_cell_is_told_as_ipython_tells_it(device, monkeypatch, kind):
    filename = "/tmp/ipykernel_1/77.py" if kind == "known" else "<ipython-input-2-0a1b2c3d>"
    linecache.cache[filename] = (len(CELL), None, CELL.splitlines(True), filename)
    if kind == "known":
        cells = types.SimpleNamespace(format_code_name=lambda name: ("Cell", "In[2]") if name == filename else None)
        shell = types.SimpleNamespace(compile=cells)
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    space = {"pg": pg}
    exec(compile(CELL, filename, "exec"), space)
    space["cell"](ramp(device, 3))
    with pytest.warns(pg.RunsLive, match=r"at Cell In\[2\], line 4 \("):
        space["cell"](ramp(device, 3))
    assert "ipy" not in pg.explain(space["cell"])
