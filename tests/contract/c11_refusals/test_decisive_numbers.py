"""C1, C8, C11: numbers of tensors by which a call goes on, with `fallback="split"`: `if found_inf.item():`, `if mask.all():`.
What comes after such a number is recorded for that number. Each replay looks whether it is the same; where it is another, the
call is run live from its beginning, and nothing has happened before."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from phonograph.values.host_scalars import COMPARISONS, LEFT_ALIGNED
from tests.helpers import may_run_live, ramp, reasons

pytestmark = may_run_live


def recorded(function, **options):
    return pg.record(function, fallback="split", **options)


def on_by_in(context, x):
    with context:
        y = x @ x.new_ones(3, 3) if x.sum() > 0 else x.sin()
    return y * 2


def on_by_caught(x):
    try:
        assert (x > 0).all()
        return x * 2
    except AssertionError:
        return x.cos()


def on_by_in_a_hook(x):
    leaf = x.clone().requires_grad_()
    y = leaf * 2
    y.register_hook(lambda g: g * 3 if (g > 0).all() else g.sin())
    y.square().sum().backward()
    return leaf.grad


ON_BY = {
    "item": lambda x: x * 2 if x.sign().sum().item() > 0 else x - 1,
    "a truth": lambda x: x * 2 if (x > 0).all() else x - 1,
    "a number of Python's": lambda x: x * 2 if float(x.sum().sign()) > 0 else x - 1,
    "an integer": lambda x: x.sin() * int(x.sign().sum()),
    "an assertion": lambda x: x * 2 if not (x < 0).any().item() else x.abs(),
    "two of one line": lambda x: x * sum(t.item() for t in (x.sign().sum(), x.sign().max())),
    "one that is handed on too": lambda x: (x * 2 if (x > 0).all().item() else x - 1, x.sum().item()),
    "in inference mode": lambda x: on_by_in(torch.inference_mode(), x),
    "in a backward": on_by_in_a_hook,
    "under autocast": lambda x: on_by_in(torch.autocast(x.device.type, torch.bfloat16), x),
    "where an exception is caught": lambda x: on_by_caught(x),
    "a comparison": lambda x: x * 2 if torch.equal(x.sign(), x.abs().sign()) else x - 1,
    "one of a method's": lambda x: x * 2 if x.abs().equal(x) else x - 1,
    "a tolerant one": lambda x: x * 2 if torch.allclose(x, x.abs(), rtol=1e-3) else x - 1,
    "an operator's number": lambda x: x.add(x, alpha=x.sign().sum().item() * 0.5),
    "one that is worked out, in place": lambda x: (x * 2).add_(x.sign().sum().item() * 2),
    "a limit": lambda x: torch.clamp(x, max=x.sign().mean().item() / 2),
    "a size": lambda x: torch.ones(3 + int(x.sign().sum()), device=x.device),
}


@pytest.mark.parametrize("function", ON_BY.values(), ids=ON_BY)
def test_c08_a_number_that_is_another_now_and_then(device, function):
    f = recorded(function)
    signs = [1, 1, 1, 1, 1, -1, 1, 1, 1, -1, 1, 1]
    for n, sign in enumerate(signs):
        x = (ramp(device, 3, start=n) + 1) * sign
        ours, theirs = f(x), function(x)
        assert_same(ours, theirs)
        assert repr(ours) == repr(theirs)
    stats = pg.stats(f)
    assert stats.replayed == 8, reasons(f)  # the first call, one more for each place, and the two others are live
    assert stats.recorded == 1


def test_c08_an_encoder_that_looks_whether_its_mask_is_left_aligned(device):
    """In training, what it sees there changes nothing. (What it does with it else, no recording can hold: nested tensors.)"""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2).to(device)

    def step(x, padded):
        encoder.zero_grad()
        loss = encoder(x, src_key_padding_mask=padded).square().mean()
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in encoder.parameters()]

    f = recorded(step, keep="always")
    for n in range(12):
        padded = torch.arange(5, device=device) >= torch.tensor([[5], [3], [n % 4 + 1]], device=device)
        if n == 8:
            padded = padded.flip(1)
        x = ramp(device, 3, 5, 8, start=n).sin()
        assert_same(f(x, padded), step(x, padded), tolerance=1e-6 if device.type == "cuda" else 0.0)
    assert pg.stats(f).replayed >= 8, reasons(f)


def test_c08_whether_a_mask_is_left_aligned_is_what_torch_says():
    for n, width in ((1, 1), (1, 4), (2, 1), (2, 3), (3, 2)):
        for bits in itertools.product([False, True], repeat=n * width):
            mask = torch.tensor(bits).reshape(n, width)
            given = torch.zeros(n, width, 4), mask
            assert COMPARISONS[LEFT_ALIGNED](*given).item() is torch._nested_tensor_from_mask_left_aligned(*given)


def test_c11_a_number_that_has_changed_for_good(device):
    f = recorded(lambda x: x * 2 if (x > 0).all() else x - 1)
    for n in range(16):
        x = (ramp(device, 3, start=n) + 1) * (1 if n < 8 else -1)
        assert_same(f(x), x * 2 if n < 8 else x - 1)
    assert pg.stats(f).recorded == 2
    assert pg.stats(f).replayed >= 10, reasons(f)


def test_c11_a_number_that_is_another_each_time(device):
    f = recorded(lambda x: x * x.sum().item())
    for n in range(40):
        x = ramp(device, 3, start=n)
        assert_same(f(x), x * x.sum().item())
    assert pg.stats(f).replayed == 0
    assert pg.stats(f).recorded <= 4
    assert "nearly each time" in reasons(f)


class Recipe:
    """Mixed precision with a scaler, after PyTorch's recipe."""

    def __init__(self, device, optimizer, log):
        torch.manual_seed(0)
        self.device, self.log = device, log
        self.dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3)).to(device)
        self.opt = optimizer(self.net.parameters())
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=5)

    def step(self, x, y):
        with torch.autocast(self.device.type, dtype=self.dtype):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        return loss.item() if self.log else loss.detach()

    def there(self):
        scale = self.scaler.state_dict()
        return [copy.deepcopy(x.state_dict()) for x in (self.net, self.opt)], scale, torch.rand(2, device=self.device)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("log", [False, True], ids=["tensor", "item"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_c06_a_scaler_that_leaves_out_a_step(device, optimizer, log):
    """Now and then a gradient is infinite: then the step is left out, counts and momenta stay, and the scale goes down."""
    results = []
    for on in (False, True):
        recipe = Recipe(device, optimizer, log)
        step = recorded(recipe.step) if on else recipe.step
        torch.manual_seed(1)
        seen = []
        for n in range(24):
            x, y = torch.randn(8, 6, device=device), torch.randint(0, 3, (8,), device=device)
            if n in (6, 13, 14):
                x[0, 0] = float("inf")
            seen.append(step(x, y))
            if n in (7, 15):
                seen.append(recipe.there())
        results.append((seen, recipe.there()))
    (plain, ours), fast = results, step
    assert repr(plain[0][-1]) == repr(ours[0][-1])
    assert_same(ours[1], plain[1])
    for a, b in zip(ours[0], plain[0], strict=True):
        if torch.is_tensor(a):
            assert_same(a, b)
        else:
            assert repr(a) == repr(b)
    assert pg.stats(fast).replayed >= 16, reasons(fast)


def test_c02_what_was_drawn_and_written_before_such_a_number_is_taken_back(device):
    class Noisy:
        def __init__(self):
            self.seen = torch.zeros(3, device=device)

        def step(self, x):
            self.seen += x + torch.rand(3, device=device)
            if (x > 0).all():
                self.seen *= 0.5
            return self.seen.clone()

    found = []
    for on in (False, True):
        noisy = Noisy()
        step = recorded(noisy.step) if on else noisy.step
        torch.manual_seed(3)
        found.append([step((ramp(device, 3, start=n) + 1) * (-1 if n in (5, 8) else 1)) for n in range(12)])
    assert_same(found[1], found[0])
    assert pg.stats(step).replayed == 8, reasons(step)


def test_c11_without_split_such_a_call_runs_live(device):
    f = pg.record(lambda x: x * 2 if (x > 0).all() else x - 1, fallback="live")
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n) + 1), (ramp(device, 3, start=n) + 1) * 2)
    assert pg.stats(f).replayed == 0
    assert 'fallback="split"' in reasons(f)


INSIDE = {
    "an index": lambda x, n: x[n],
    "a size": lambda x, n: torch.ones(3, device=x.device).repeat(n),
    "a number to fill with": lambda x, n: torch.full((3,), n, device=x.device),
}


@pytest.mark.parametrize("what", INSIDE)
def test_c11_a_number_that_an_operator_reads(device, what):
    """It is named, and not the number by which the call goes on before."""
    function = INSIDE[what]
    f = recorded(lambda x, n: (x * 2 if (x > 0).all() else x - 1).sum() + function(x, n))
    for i in range(8):
        x, n = ramp(device, 3, start=1), torch.tensor(i % 3, device=device)
        assert_same(f(x, n), (x * 2).sum() + function(x, n))
    assert pg.stats(f).replayed == 0
    assert all("reads a tensor's value on the host" in reason for reason in pg.stats(f).refusals), reasons(f)
    assert len(pg.stats(f).refusals) == 1


def test_c08_a_model_of_transformers_that_looks_into_its_mask(device):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForSequenceClassification(config).to(device)
    ours, theirs = recorded(copy.deepcopy(model)), model
    for n in range(12):
        ids, mask = torch.randint(0, 50, (4, 9), device=device), torch.ones(4, 9, dtype=torch.long, device=device)
        if n in (6, 9):
            mask[1, 5:] = 0
        found = []
        for each in (ours, theirs):
            torch.manual_seed(n)
            each.zero_grad()
            loss = each(ids, attention_mask=mask, labels=torch.arange(4, device=device) % 2).loss
            loss.backward()
            found.append([loss.detach(), *[p.grad.clone() for p in each.parameters() if p.grad is not None]])
        assert_same(*found)
    assert pg.stats(ours).replayed >= 8, reasons(ours)


def looks_at(mask, q):
    """As transformers does, for each kind of attention."""
    if mask.bool().all():
        return True
    return bool(mask.bool()[:, :q].all()) and bool((~mask.bool()[:, q:]).all())


def by_a_mask_of_each_kind(x, mask):
    for _ in range(3):
        x = x * 2 if looks_at(mask, mask.shape[1]) else x - mask
    return x


def by_a_mask_that_changes(x, mask):
    mask = mask.clone()
    x = x * 2 if mask.all() else x - 1
    mask[0, 0] = 1
    return x * 3 if mask.all() else x.sin()


def by_floats_alike(x, mask):
    x = x * 2 if (x.cos() > 0.9).all() else x - 1
    return x * mask if (x.cos() > 0.9).all() else x.sin()


def by_others(x, mask):
    x = x * 2 if mask.all() else x - 1
    x = x * 2 if mask.any() else x - 1
    x = x * 2 if mask[:1].all() else x.cos()
    return x * 2 if mask.eq(0).sum() == 1 else x.sin()


def by_a_view_that_is_written(x, mask):
    mask = mask.clone()
    part = mask[:1]
    x = x * 2 if part.all() else x - 1
    mask.zero_()
    return x * 2 if part.all() else x.sin()


LOOKS = {
    "of each kind": (by_a_mask_of_each_kind, 1), "that changes": (by_a_mask_that_changes, 2),
    "floats": (by_floats_alike, 2), "others": (by_others, 4), "a view that is written": (by_a_view_that_is_written, 2),
}  # fmt: skip


@pytest.mark.parametrize(("function", "looks"), LOOKS.values(), ids=LOOKS)
def test_c08_what_was_looked_at_is_looked_at_no_more(device, function, looks):
    f = recorded(function)
    ones = torch.ones(2, 3, dtype=torch.int64, device=device)
    padded, none = ones.clone(), torch.zeros_like(ones)
    padded[0, 0] = 0
    for n, mask in enumerate([padded] * 8 + [ones] * 3 + [padded] * 3 + [none] * 2 + [padded, ones]):
        x = ramp(device, 2, 3) + n
        assert_same(f(x, mask), function(x, mask))
    assert pg.stats(f).replayed >= 7, reasons(f)
    f = recorded(function)
    for _ in range(8):
        f(ramp(device, 2, 3), padded)
    assert pg.explain(f).count("live between its segments: a look at a number") == looks


def test_c19_a_number_that_code_in_c_does_not_know_is_told_as_one_that_is_read(device):
    def function(x):
        return x * torch.tensor([x.sum().item() * 2, 1.0, 2.0], device=x.device)

    f = pg.record(function, keep="always")
    for n in range(5):
        assert_same(f(ramp(device, 3, start=n)), function(ramp(device, 3, start=n)))
    assert "Numeral" not in pg.explain(f)
    assert "`x.sum().item()` reads" in pg.explain(f)
