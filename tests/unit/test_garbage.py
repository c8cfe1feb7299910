"""Where the garbage collector is held off, and where code of the user's runs within."""

import gc
import threading

from phonograph.python.gc_control import telling_collections, uncollected


def test_it_is_held_off_and_goes_on():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off():
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_whether_it_is_at_work():
    heard, before = [], list(gc.callbacks)
    with telling_collections() as collecting:

        def callback(phase, info):
            heard.append((phase, collecting()))

        gc.callbacks.insert(1, callback)  # between ours
        gc.collect()
        assert not collecting()
        gc.callbacks.remove(callback)
    assert heard == [("start", True), ("stop", True)]
    assert gc.callbacks == before


def test_a_callback_that_takes_itself_from_the_list():
    """The one after it is passed over then."""

    def once(phase, info):
        if phase == "stop":
            gc.callbacks.remove(once)

    before = list(gc.callbacks)
    gc.callbacks.append(once)
    with telling_collections() as collecting:
        gc.collect()
        assert not collecting()
    assert gc.callbacks == before


def test_another_thread_is_not_at_work():
    answers = []

    def callback(phase, info):
        asking = threading.Thread(target=lambda: answers.append(collecting()))
        asking.start()
        asking.join()
        answers.append(collecting())

    with telling_collections() as collecting:
        gc.callbacks.insert(1, callback)
        gc.collect()
        gc.callbacks.remove(callback)
    assert answers == [False, True] * 2


def test_where_it_starts_at_any_line():
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(20):
            with telling_collections() as collecting:
                assert not collecting()
    finally:
        gc.set_threshold(*before)
