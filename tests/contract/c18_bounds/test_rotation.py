"""C18: a size that grows in each call is noticed by the third, and what would help is said; where more signatures take turns
than there are places, those that have one keep it, and the others run live."""

import re
import warnings

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons


def said(loop):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop()
    return [str(w.message) for w in caught if w.category is pg.RunsLive]


@pytest.mark.parametrize("warmup", [0, 1])
def test_c18_a_sequence_that_grows_by_one_is_noticed_by_the_third_call(device, warmup):
    f = pg.record(lambda ids, mask: ids * mask, warmup=warmup)
    seen = []

    def loop():
        for n in range(5, 30):
            assert_same(f(ramp(device, 1, n), ramp(device, 1, n)), ramp(device, 1, n) ** 2)
            seen.append(dict(pg.stats(f).refusals))

    (message,) = said(loop)
    assert "a size that grows each time: dimension 1 of `ids` by 1, dimension 1 of `mask` by 1" in message
    assert 'shapes={"ids": {1: [8, 16, 32, 64]}, "mask": {1: [8, 16, 32, 64]}}' in message
    assert [bool(refusals) for refusals in seen[:3]] == [False, False, True]
    assert pg.stats(f).recorded == (0 if warmup else 2)


def test_c18_sizes_that_grow_in_training_are_padded_before_the_call(device):
    """As is recommended; `shapes=` leaves gradients alone."""
    weight = torch.nn.Parameter(ramp(device, 64))

    def step(x):
        weight.grad = None
        (x * weight[: x.numel()]).sin().sum().backward()
        return weight.grad * 1

    f, g, h = pg.record(step), pg.record(step, shapes={"x": {0: [16, 32]}}), pg.record(step)
    told = said(lambda: [f(ramp(device, n)) for n in range(5, 30)])
    assert "pad to a few sizes before the call, or by shapes=" in told[0]
    for n in range(5, 30):
        padded = torch.nn.functional.pad(ramp(device, n), (0, 16 - n if n <= 16 else 32 - n))
        assert_same(h(padded), step(padded))
        said(lambda n=n: g(ramp(device, n)))
    assert pg.stats(h).replayed >= 20
    assert pg.stats(g).replayed == 0


def test_c18_the_line_that_is_recommended_helps(device):
    def generate(ids, mask):
        return (ids * mask).cumsum(1)

    f = pg.record(generate, shapes={"ids": {1: [8, 16, 32, 64]}, "mask": {1: [8, 16, 32, 64]}})
    for _ in range(2):
        replayed = pg.stats(f).replayed
        for n in range(5, 30):
            assert_same(f(ramp(device, 1, n), ramp(device, 1, n)), generate(ramp(device, 1, n), ramp(device, 1, n)))
    assert pg.stats(f).recorded == 3, pg.explain(f)
    assert pg.stats(f).replayed == replayed + 25, pg.explain(f)


@may_run_live
@pytest.mark.parametrize("fallback", ["live", "error"])
def test_c18_sizes_that_come_again_after_they_grew_are_recorded(device, fallback):
    f = pg.record(lambda x: x * 2, fallback=fallback)
    for _ in range(4):
        for n in range(3, 9):
            assert_same(f(ramp(device, n)), ramp(device, n) * 2)
    assert counts(f) == (6, 6, 18), pg.explain(f)


def test_c18_a_few_sizes_in_order_are_no_growth(device):
    f = pg.record(lambda x: x * 2)
    assert said(lambda: [f(ramp(device, n)) for n in (8, 16, 24, 32, 8, 16, 24, 32)]) == []
    f = pg.record(lambda x: x * 2)
    assert said(lambda: [f(ramp(device, n)) for n in (3, 3, 4, 4, 5, 5, 6, 6)]) == []


@pytest.mark.parametrize("order", ["in turn", "at random"])
def test_c18_more_signatures_than_places(device, order):
    f, sizes = pg.record(lambda x: x * 2, max_recordings=4), [3, 5, 9, 17, 33, 65]
    generator = torch.Generator().manual_seed(0)

    def rounds(times):
        for _ in range(times):
            turn = sizes if order == "in turn" else torch.randint(0, 6, (6,), generator=generator).tolist()
            for n in turn if order == "in turn" else [sizes[i] for i in turn]:
                assert_same(f(ramp(device, n)), ramp(device, n) * 2)

    messages = said(lambda: rounds(30))
    assert len(messages) == 1, reasons(f)
    assert "has more signatures in rotation than max_recordings=4" in messages[0]
    assert re.search(r"\(max_recordings=[56], or pad", messages[0])
    assert pg.stats(f).recorded <= 4 + 2, pg.explain(f)
    recorded, replayed = pg.stats(f).recorded, pg.stats(f).replayed
    rounds(30)
    assert pg.stats(f).recorded <= recorded + 1, pg.explain(f)
    assert pg.stats(f).replayed >= replayed + 30 * 3


@may_run_live
def test_c18_what_is_called_now_takes_the_places_of_what_was_called_once(device):
    f = pg.record(lambda x: x * 2, max_recordings=2)
    for sizes in ([3, 5], [9, 17], [3, 5]):
        for _ in range(24):
            for n in sizes:
                assert_same(f(ramp(device, n)), ramp(device, n) * 2)
        replayed = pg.stats(f).replayed
        for n in sizes:
            f(ramp(device, n))
        assert pg.stats(f).replayed == replayed + 2, pg.explain(f)
