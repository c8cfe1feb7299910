"""Where the garbage collector is held off, and where code of the user's runs within."""

import gc

from phonograph.garbage import collected, uncollected


def test_code_of_the_users_runs_with_the_collector_on():
    with uncollected():
        assert not gc.isenabled()
        with collected(), uncollected():
            assert not gc.isenabled()
        with collected():
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off():
    gc.disable()
    try:
        with uncollected(), collected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
