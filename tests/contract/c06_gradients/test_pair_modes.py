"""C6, C7: modes and state between the forward and the backward of a pair."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import Both, assert_recorded, batch, perceptron
from tests.helpers import may_run_live


def test_c06_train_and_eval_and_no_grad_in_turn(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).to(device)
    both = Both(net)
    optimizers = both.optimizers()
    for n in range(12):
        x, y = batch(device, n)
        results = []
        for module, optimizer in zip(both, optimizers, strict=True):
            torch.manual_seed(n)
            if n % 3 == 2:
                module.eval()
                with torch.no_grad():
                    results.append(module(x))
            else:
                module.train()
                optimizer.zero_grad()
                loss = F.mse_loss(module(x), y)
                loss.backward()
                optimizer.step()
                results.append((loss, torch.rand(1, device=device)))
        assert_same(*results)
        both.check()
    assert both.stats.replayed >= 8, pg.explain(both.recorded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c06_autocast(device, dtype):
    both = Both(perceptron(device))
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            with torch.autocast(device.type, dtype):
                out = module(x)
                assert out.dtype is dtype
            F.mse_loss(out.float(), y).backward()
        both.check()
    assert_recorded(both, 4)


@pytest.mark.parametrize("scale", [8.0, 2.0**20], ids=["never skips", "skips at first"])
def test_c06_a_gradient_scaler_around_a_recorded_module(device, scale):
    both = Both(perceptron(device))
    optimizers = both.optimizers(torch.optim.AdamW, fused=True)
    scalers = [torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=3) for _ in both]
    for n in range(12):
        x, y = batch(device, n)
        for module, optimizer, scaler in zip(both, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16):
                out = module(x)
            scaler.scale(F.mse_loss(out.float(), y) * 100).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        both.check()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_recorded(both, 11)


CHANGES = {
    "a new storage": lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2),
    "loaded": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "frozen": lambda m: m[2].requires_grad_(False),
    "another layer": lambda m: m.__setitem__(1, nn.Sigmoid()),
    "double": lambda m: m.double(),
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 3)),
    "a hook": lambda m: m[0].weight.register_hook(lambda g: g * 2),
}


@may_run_live
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_c08_the_module_changes(device, change):
    both = Both(perceptron(device))
    for n in range(9):
        x, y = batch(device, n)
        if n == 4:
            torch.manual_seed(0)
            for module in both:
                change(module)
        for module in both:
            module.zero_grad()
            kind = next(module.parameters()).dtype
            F.mse_loss(module(x.to(kind)), y.to(kind)).backward()
        both.check()
    assert both.stats.replayed >= 6, pg.explain(both.recorded)


@pytest.mark.parametrize("rows", [1, 7])
def test_c07_another_batch_size(device, rows):
    both = Both(perceptron(device))
    for n in range(8):
        x, y = batch(device, n, rows if n % 2 else 5)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        both.check()
    assert_recorded(both, 6)


@pytest.mark.parametrize("train", [True, False])
def test_c06_two_forwards_of_a_module_with_running_statistics(device, train):
    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device).train(train))
    for n in range(5):
        for module in both:
            module.zero_grad()
            sum(F.mse_loss(module(x), y) for x, y in (batch(device, 2 * n + i) for i in range(2))).backward()
        both.check()
    assert_recorded(both, 8)


@may_run_live
def test_c06_a_saved_tensor_is_written_inside(device):
    weight = nn.Parameter(torch.ones(3, device=device))

    def f(x):
        y = (weight * x).exp()
        return y.add_(1) * 2

    recorded = pg.record(f, warmup=0)
    for n in range(3):
        for function in (recorded, f):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                function(torch.full((3,), float(n), device=device)).sum().backward()


def test_c08_a_weight_that_was_saved_itself_changes_places(device):
    """Then eager reads the new one in the backward."""
    weights = [nn.Parameter(torch.full((3,), 2.0, device=device)) for _ in range(2)]
    recorded = pg.record(lambda x: weights[0] * x, warmup=1)
    for n in range(6):
        found = []
        for f, weight in ((recorded, weights[0]), (lambda x: weights[1] * x, weights[1])):
            x = torch.full((3,), float(n), device=device, requires_grad=True)
            out = f(x)
            weight.data = torch.full((3,), 3.0 + n, device=device)
            out.sum().backward()
            found.append(x.grad)
        assert_same(*found)


def test_c08_weights_change_places_between_forward_and_backward(device):
    """As eager does, the backward reads the weights that its forward has read, though nobody else holds them."""
    both = Both(perceptron(device))
    for n in range(8):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            loss = F.mse_loss(module(x), y)
            for p in module.parameters():
                p.data = p.data * 0.5
            torch.full((64,), 7.0, device=device)
            loss.backward()
        both.check()
