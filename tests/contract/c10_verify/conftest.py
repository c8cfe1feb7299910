"""What tests of audits share."""

import decimal

import pytest


@pytest.fixture
def hidden():
    """State that nothing of Python's shows: it lies in C, for each thread."""
    with decimal.localcontext() as context:
        context.prec = 2
        yield context
