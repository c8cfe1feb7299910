"""C9: messages that are logged, or would be."""

import contextlib
import gc
import itertools
import logging
from unittest import mock

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp

SAYING = {
    "info": lambda log: log.info("said"),
    "log": lambda log: log.log(logging.DEBUG, "said"),
    "adapter": lambda log: logging.LoggerAdapter(log, {}).debug("said"),
    "asked": lambda log: log.isEnabledFor(logging.INFO) and log.info("said"),
    "level": lambda log: log.getEffectiveLevel() <= logging.INFO and log.info("said"),
}


TURNED_ON = {
    "itself": lambda log, on: log.setLevel(logging.DEBUG if on else logging.WARNING),
    "its parent": lambda log, on: log.parent.setLevel(logging.DEBUG if on else logging.WARNING),
    "all": lambda log, on: logging.disable(logging.NOTSET if on else logging.CRITICAL),
    "enabled": lambda log, on: setattr(log, "disabled", not on),
}


@pytest.fixture
def log(monkeypatch):
    """A logger whose messages are kept, and one that is all that lies between it and the root."""
    log, parent = logging.getLogger("user.inner"), logging.getLogger("user")
    log.said, handler = [], logging.Handler()
    handler.emit = lambda record: log.said.append(record.getMessage())
    log.addHandler(handler)
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "disabled", False)
    yield log
    log.removeHandler(handler)
    logging.disable(logging.NOTSET)
    for each in (log, parent):
        each.setLevel(logging.NOTSET)


@may_run_live
@pytest.mark.parametrize("turn", TURNED_ON.values(), ids=TURNED_ON)
@pytest.mark.parametrize("say", SAYING.values(), ids=SAYING)
def test_c09_a_message_of_a_level_that_is_turned_on_later(device, log, say, turn):
    if turn in (TURNED_ON["all"], TURNED_ON["enabled"]):
        log.setLevel(logging.DEBUG)
    if say is SAYING["level"] and turn in (TURNED_ON["all"], TURNED_ON["enabled"]):
        turn = TURNED_ON["itself"]  # it asks for nothing else

    def f(x):
        say(log)
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(8):
        turn(log, n in (4, 5, 7))
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
        if n == 3:
            assert counts(recorded) == (1, 1, 3)
    assert log.said == ["said"] * 3
    assert "logs a message" in pg.explain(recorded)


def test_c09_a_message_that_nobody_wants(device, log):
    """Is no effect."""

    def f(x):
        log.debug("shape %s", x.shape)
        return x + 1

    log.setLevel(logging.INFO)
    recorded = pg.record(f, warmup=1)
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert counts(recorded) == (1, 1, 5)
    assert log.said == []


class _Verbose(logging.Logger):
    """Decides itself what it lets through."""

    verbose = False

    def isEnabledFor(self, level):  # noqa: N802 - logging's names
        return self.verbose


class _Direct(logging.Logger):
    """Sends a message nowhere else."""

    def _log(self, level, message, *args, **options):
        self.said.append(message)


class _Handling(logging.Logger):
    def handle(self, record):
        self.said.append(record.getMessage())


class _Prefixing(logging.LoggerAdapter):
    def log(self, level, message, *args, **options):
        self.logger.log(level, message, *args, **options)


def set_debug(log, on):
    log.setLevel(logging.DEBUG if on else logging.WARNING)


def set_verbose(log, on):
    log.verbose = on


@may_run_live
@pytest.mark.parametrize(("kind", "turn"), [(_Verbose, set_verbose), (_Direct, set_debug), (_Handling, set_debug)])
def test_c09_a_logger_that_decides_itself(device, log, kind, turn):
    """It is got by its name, so that nothing of it is in reach."""
    made = kind(f"user.{kind.__name__}")
    made.said, made.parent, made.propagate = log.said, logging.root, False
    made.addHandler(log.handlers[0])
    logging.root.manager.loggerDict[made.name] = made
    name = made.name

    def f(x):
        logging.getLogger(name).debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(8):
        turn(made, n in (3, 4, 6))
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["said"] * 3


@may_run_live
@pytest.mark.parametrize("adapter", [logging.LoggerAdapter, _Prefixing])
def test_c09_a_package_that_logs_for_the_user(device, log, adapter):
    """Its own class of adapters, a function that is given the logger, a hook that is the logger's method."""
    space = {"adapter": adapter(log, {}), "log": log}
    exec(compile("def says(x):\n    adapter.debug('adapted')\n    log.debug('said')\n    return x", "/site-packages/says.py",
                 "exec"), space)  # fmt: skip
    says, adapted = space["says"], space["adapter"]
    net = torch.nn.Identity()
    net.register_forward_hook(lambda *_: None)
    net._forward_hooks[0] = log.debug  # torch calls it

    def f(x):
        adapted.debug("seen")
        return says(x) + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        set_debug(log, n in (3, 4))
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["seen", "adapted", "said"] * 2


def other_logger(log, adapter):
    adapter.logger = logging.getLogger("user.other")
    adapter.logger.addHandler(log.handlers[0])
    adapter.logger.setLevel(logging.DEBUG)


def by_hand(log, adapter):
    log.level = logging.DEBUG  # what it remembers of its level is not that yet
    logging.getLogger("user.other").setLevel(logging.INFO)


@may_run_live
@pytest.mark.parametrize("turn", [other_logger, by_hand])
def test_c09_a_level_that_is_set_in_another_way(device, log, turn):
    adapter = logging.LoggerAdapter(log, {})
    log.setLevel(logging.WARNING)

    def f(x):
        adapter.debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        if n == 3:
            turn(log, adapter)
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    logging.getLogger("user.other").handlers.clear()
    assert log.said == ["said"] * 3


@may_run_live
def test_c09_several_loggers_are_asked(device, log):
    others = [logging.getLogger(f"user.inner.{n}") for n in range(3)]

    def f(x):
        for each in others:
            each.debug("said")
        return x + 1

    log.setLevel(logging.WARNING)
    recorded = pg.record(f, warmup=1)
    for n in range(6):
        others[2].setLevel(logging.DEBUG if n in (3, 5) else logging.NOTSET)
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["said"] * 2


@may_run_live
def test_c09_a_logger_of_torchs_that_the_user_asks(device):
    log = logging.getLogger("torch.users")

    def f(x):
        return x * 5 if log.isEnabledFor(logging.DEBUG) else x

    recorded = pg.record(f, warmup=1)
    try:
        for n in range(7):
            set_debug(log, n in (3, 5))
            assert_same(recorded(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    finally:
        log.setLevel(logging.NOTSET)


@may_run_live
@pytest.mark.parametrize("name", ["debug", "isEnabledFor"])
def test_c09_a_method_of_a_logger_that_is_replaced(device, log, name):
    log.setLevel(logging.WARNING)

    def f(x):
        log.debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    with contextlib.ExitStack() as replaced:
        for n in range(6):
            if n == 3:
                replaced.enter_context(mock.patch.object(log, name, log.said.append if name == "debug" else lambda level: True))
            assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == ["said"] * 3
    assert name not in vars(log)  # nothing of it stays for the next test


@may_run_live
def test_c12_a_logger_that_cannot_be_asked(device, log):
    """A level that is none, which the function takes for off; an adapter that has lost its logger."""
    p = torch.ones(3, device=device, requires_grad=True)
    adapter = logging.LoggerAdapter(log, {})

    def f(x):
        with contextlib.suppress(TypeError):
            log.isEnabledFor("INFO")
        with contextlib.suppress(AttributeError):
            adapter.debug("said")
        loss = (p * x).sum()
        loss.backward()
        return loss.detach()

    log.setLevel(logging.WARNING)
    recorded = pg.record(f, warmup=1)
    for n in range(7):
        if n == 3:
            assert counts(recorded) == (1, 1, 2)
            del adapter.logger
        x, p.grad = ramp(device, 3, start=n), None
        assert_same(recorded(x), x.sum())
        assert_same(p.grad, x)


def test_c17_an_adapter_made_in_a_call_is_not_kept(device, log):
    log.setLevel(logging.WARNING)
    recorded = pg.record(lambda x: says_with_a_context(log, x), warmup=1)
    contexts = len([x for x in gc.get_objects() if type(x) is _Context])
    for n in range(4):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    gc.collect()
    assert counts(recorded) == (1, 1, 3)
    assert len([x for x in gc.get_objects() if type(x) is _Context]) == contexts


class _Context:
    pass


def says_with_a_context(log, x):
    logging.LoggerAdapter(log, {"context": _Context()}).debug("said")
    return x + 1


@may_run_live
def test_c09_the_root_gets_a_handler_where_it_has_none(device, log, monkeypatch):
    """`logging.debug` sees to that, whether or not it says something."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    logging.root.manager._clear_cache()

    def f(x):
        logging.debug("said")  # noqa: LOG015 - it is what is tested
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        if n % 3 == 0:
            logging.root.handlers.clear()
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
        assert len(logging.root.handlers) == 1


@may_run_live
def test_c09_messages_that_have_numbers(device, log, monkeypatch):
    """None is made in a capture."""
    numbers = itertools.count()

    class Numbered(logging.LogRecord):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.msg = f"{self.msg} {next(numbers)}"

    monkeypatch.setattr(logging, "_logRecordFactory", Numbered)
    log.setLevel(logging.DEBUG)

    def f(x):
        log.debug("said")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(4):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    assert log.said == [f"said {n}" for n in range(4)]
