"""What tests of bounds share."""

import warnings

import pytest

import phonograph as pg


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        yield
