"""C10: audits of calls in which compiled code runs, or a kernel without an operator (on CUDA: elsewhere they run live)."""

import decimal

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.engine import audit
from phonograph.testing import assert_same
from tests.helpers import ramp

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def found(monkeypatch):
    """What the audits have found, of any recording."""
    results = []
    difference = audit.difference

    def noted(*args):
        results.append(difference(*args))
        return results[-1]

    monkeypatch.setattr(audit, "difference", noted)
    return results


def network(device):
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)


def compiled_model(device, **optimizer):
    model = network(device)
    return model, torch.compile(model), torch.optim.AdamW(model.parameters(), lr=0.01, **optimizer), nn.functional.cross_entropy


def compiled_loss(device, **optimizer):
    model = network(device)
    loss = torch.compile(nn.functional.cross_entropy)
    return model, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **optimizer), loss


def stepper(made, clip=False):
    model, called, optimizer, loss_of = made

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(called(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def trained(make, options, device, calls, **recording):
    torch.manual_seed(0)
    step = stepper(make(device, **options), clip=make is compiled_model)
    step = pg.record(step, keep="always", **recording) if recording else step
    losses = []
    for n in range(calls):
        loss = step(ramp(device, 6, 8, start=n), torch.arange(6, device=device) % 4)
        losses.append(loss.item() if n % 3 == 0 else loss)
    return step, torch.tensor([float(loss) for loss in losses])


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=["default", "fused", "plain"])
@pytest.mark.parametrize("make", [compiled_model, compiled_loss])
def test_c10_compiled_steps_are_audited(cuda, found, make, options):
    """The slots are no views, or AOTAutograd would detach them when it is recorded, and only then."""
    audited, losses = trained(make, options, cuda, 9, audit=1)
    assert pg.stats(audited).recorded == 1, pg.explain(audited)
    assert len(found) >= 6
    assert found == [None] * len(found)
    assert "not audited" not in pg.explain(audited)
    torch.testing.assert_close(losses, trained(make, options, cuda, 9)[1])


def test_c10_compiled_inference_is_audited(cuda, found):
    model = torch.compile(network(cuda).eval())
    step = pg.record(torch.no_grad()(lambda x: model(x).softmax(-1)), audit=1, keep="always")
    for n in range(8):
        assert_same(step(ramp(cuda, 3, 8, start=n)), torch.no_grad()(model)(ramp(cuda, 3, 8, start=n)).softmax(-1))
    assert pg.stats(step).recorded == 1, pg.explain(step)
    assert len(found) >= 5
    assert found == [None] * len(found)


def test_c10_hidden_number_of_a_kernel_is_found(cuda, hidden):
    """Nothing but the kernel's own parameter shows it."""
    from tests.contract.kernels import add_number

    def step(x):
        y = x.clone()
        add_number[(1,)](y, y.numel(), decimal.getcontext().prec, block=64)
        return y * 2

    recorded = pg.record(step, audit=1, keep="always")
    for n in range(6):
        assert_same(recorded(ramp(cuda, 40, start=n)), (ramp(cuda, 40, start=n) + 2) * 2)
    assert pg.stats(recorded).recorded == 1, pg.explain(recorded)
    hidden.prec = 5
    with pytest.warns(pg.Stale, match="kernel `add_number` is given other numbers"):
        assert_same(recorded(ramp(cuda, 40)), (ramp(cuda, 40) + 5) * 2)
    for n in range(4):
        assert_same(recorded(ramp(cuda, 40, start=n)), (ramp(cuda, 40, start=n) + 5) * 2)
    assert pg.stats(recorded).recorded == 2, pg.explain(recorded)
