"""Training loops of other packages, which know nothing of recording: they train a recorded model as they train any other."""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from tests.examples.test_examples import EXAMPLES, LOOPS, ON_RANKS
from tests.helpers import reasons

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say of themselves and of each other


@functools.cache  # what is frozen is never collected: models of the test itself must not be
def package(name: str) -> Any:
    """The installed package, or a skipped test."""
    found = pytest.importorskip(name)
    gc.collect()
    gc.freeze()  # so that the collection after each later test does not walk through all of it
    return found


@pytest.fixture
def one_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device for a trainer that takes all that it finds, with deterministic kernels; forgotten by `accelerate` before
    and after."""
    if device.type == "cuda":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(device.type == "cuda")
    forget_device()
    yield device
    forget_device()
    torch.use_deterministic_algorithms(False)


def forget_device() -> None:
    if importlib.util.find_spec("accelerate"):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(params=[name for name in LOOPS if name not in ON_RANKS])
def loop(request: pytest.FixtureRequest, one_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example, imported, for this device."""
    package(LOOPS[request.param])
    spec = importlib.util.spec_from_file_location(request.param, EXAMPLES / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "0")  # it would set it, for later tests as well
        spec.loader.exec_module(example)
    monkeypatch.setattr(example, "DEVICE", one_device.type)
    return example


def assert_recorded(model: nn.Module, live: int) -> None:
    """Nearly all calls were replays, forward and backward; the others warmed up."""
    stats = pg.stats(model)
    assert stats.refusals == {}, pg.explain(model)
    assert stats.replayed > 0
    assert stats.live <= live, pg.explain(model)


def test_c06_a_trainer_trains_a_recorded_model_as_any_other(loop: ModuleType, tmp_path: Path) -> None:
    """Accumulating gradients, evaluating in the middle, saving, resuming: losses and weights are those of the live run."""
    live = loop.network()
    expected = loop.train(live, f"{tmp_path}/live")
    recorded = pg.record(loop.network())
    assert loop.train(recorded, f"{tmp_path}/recorded") == expected
    # One warm-up for training and one for evaluation; both again where saving changes something.
    assert_recorded(recorded, live=4)

    resumed = pg.record(loop.network())
    later = loop.train(resumed, f"{tmp_path}/recorded", resume=True)
    assert later == expected[-len(later) :]
    assert_recorded(resumed, live=4)
    for model in (recorded, resumed):
        assert model.state_dict().keys() == live.state_dict().keys()
        assert all(map(torch.equal, live.state_dict().values(), model.state_dict().values()))


def test_c06_accelerate_with_a_lower_precision(one_device: torch.device) -> None:
    """`prepare` puts autocast around the forward of a model that is recorded already."""
    accelerate = package("accelerate")
    losses: list[list[float]] = []
    nets = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    pg.record(nets[1])
    for net in nets:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=one_device.type == "cpu", mixed_precision="bf16")
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        losses.append([])
        for _ in range(6):
            x = torch.randn(4, 8, device=one_device)
            loss = F.cross_entropy(model(x), x.argmax(1) % 4)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    assert pg.stats(nets[1]).replayed == 5, pg.explain(nets[1])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_c09_accelerate_accumulates_in_a_recorded_step_and_a_scheduler_sets_the_rate(
    one_device: torch.device, precision: str
) -> None:
    """A kind of call that steps the optimizer, and one that does not: neither looks at the rate."""
    accelerate = package("accelerate")

    def trained(record: Any) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        forget_device()
        accelerator = accelerate.Accelerator(
            cpu=one_device.type == "cpu", mixed_precision=precision, gradient_accumulation_steps=2
        )
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)

        def step(x: torch.Tensor) -> torch.Tensor:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), x.argmax(1) % 4)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        step, found = record(step), []
        for n in range(40):
            found.append(step(torch.randn(4, 8, generator=torch.Generator().manual_seed(n)).to(one_device)))
            schedule.step()
        return step, [*found, *net.parameters()]

    (recorded, ours), (_, theirs) = trained(pg.record), trained(lambda f: f)
    assert all(map(torch.equal, ours, theirs))
    assert pg.stats(recorded).live <= 4, pg.explain(recorded)


def test_c09_another_accelerator_ends_the_accumulation_of_a_recorded_step(one_device: torch.device) -> None:
    """The number of micro-batches belongs to the process (`findings/second_accelerator_ends_accumulation.sh`): it has changed
    where nobody touched what the step has."""
    accelerate = package("accelerate")

    def trained(record: Any) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        forget_device()
        accelerate.state.GradientState._reset_state()
        first = accelerate.Accelerator(cpu=one_device.type == "cpu", gradient_accumulation_steps=4)
        model, optimizer = first.prepare(net := nn.Linear(8, 4), torch.optim.SGD(net.parameters(), lr=0.1))

        def step(x: torch.Tensor) -> torch.Tensor:
            with first.accumulate(model):
                loss = F.cross_entropy(model(x), x.argmax(1) % 4)
                first.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        step, found = record(step), []
        for n in range(40):
            if n == 20:
                accelerate.Accelerator(cpu=one_device.type == "cpu")
            found.append(step(torch.randn(4, 8, generator=torch.Generator().manual_seed(n)).to(one_device)))
            found.append(net.weight.detach().clone())
        return step, found

    (recorded, ours), (_, theirs) = trained(functools.partial(pg.record, keep="always")), trained(lambda f: f)
    accelerate.state.GradientState._reset_state()
    assert all(map(torch.equal, ours, theirs))
    assert pg.stats(recorded).replayed >= 25, pg.explain(recorded)


def test_c09_a_step_of_fabric_with_a_scheduler(device: torch.device) -> None:
    fabric = package("lightning.fabric").Fabric(accelerator=device.type, devices=1)

    def trained(record: Any) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        model, optimizer = fabric.setup(net, inner)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 20)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), x.argmax(1) % 4)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step, found = record(step), []
        for n in range(20):
            found.append(step(torch.randn(4, 8, generator=torch.Generator().manual_seed(n)).to(device)))
            schedule.step()
        return step, [*found, *net.parameters()]

    (recorded, ours), (_, theirs) = trained(pg.record), trained(lambda f: f)
    assert all(map(torch.equal, ours, theirs))
    # On a GPU the norm that has to be finite is looked at between two recordings, which have to be measured first.
    assert pg.stats(recorded).replayed >= (19 if device.type == "cpu" else 10), pg.explain(recorded)


# -- transformers

SHAPE = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}


def llama(device: torch.device, **config: Any) -> nn.Module:
    transformers = package("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, max_position_embeddings=16, **config)).to(device)


def bert(device: torch.device, **config: Any) -> nn.Module:
    transformers = package("transformers")
    shape = {**SHAPE, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**shape, **config)).to(device)


def calls(model: nn.Module, device: torch.device, **more: Any) -> list[Any]:
    """Four calls of a language model, with the backward of each."""
    found = []
    for n in range(4):
        ids = torch.arange(n, n + 24, device=device).view(3, 8) % 64
        model.zero_grad()
        found.append(model(input_ids=ids, **more))
        found[-1].logits.square().mean().backward()
    return found


def padded(device: torch.device) -> torch.Tensor:
    """Which positions of each row are no padding, as (3, 8)."""
    return torch.arange(8, device=device) < torch.tensor([[8], [5], [3]], device=device)


def test_c04_a_model_output_is_one_again(device: torch.device) -> None:
    model, mask = bert(device, output_hidden_states=True, return_dict=True), padded(device)[:, None, None]
    expected = calls(model, device, attention_mask=mask)
    pg.record(model)
    found = calls(model, device, attention_mask=mask)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        assert list(one.keys()) == list(other.keys()) == ["logits", "hidden_states"]
        assert one.loss is None
        assert len(one.hidden_states) == 3
        assert torch.equal(one["logits"], other.logits)
        assert all(map(torch.equal, one.hidden_states, other.hidden_states))
    assert pg.stats(model).replayed == 3, pg.explain(model)


def test_c04_a_cache_in_the_result_is_one_again(device: torch.device) -> None:
    mask = padded(device)[:, None, None] & torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    model = llama(device)
    expected = calls(model, device, attention_mask=mask)
    pg.record(model)
    for one, other in zip(calls(model, device, attention_mask=mask), expected, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert type(one.past_key_values) is type(other.past_key_values)
        pairs = zip(one.past_key_values.layers, other.past_key_values.layers, strict=True)
        assert all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)
    assert pg.stats(model).replayed == 3, pg.explain(model)

    for option in ({"use_cache": False}, {}):
        model = pg.record(llama(device, use_cache=bool(option)))
        calls(model, device, attention_mask=mask, **option)
        assert pg.stats(model).replayed == 3, pg.explain(model)


@pytest.mark.parametrize("make", [llama, bert])
def test_c11_a_mask_that_is_looked_into_is_refused_with_the_way_around(device: torch.device, make: Any) -> None:
    """On a GPU transformers would not look if it saw that a capture is going on, and would go another way than live."""
    model = pg.record(make(device, use_cache=False), fallback="live")
    calls(model, device, attention_mask=padded(device))
    assert pg.stats(model).replayed == 0
    assert "pass a four-dimensional attention_mask" in reasons(model)


@pytest.mark.parametrize("make", [llama, bert])
def test_c11_a_four_dimensional_mask_is_the_way_around(device: torch.device, make: Any) -> None:
    mask = padded(device)[:, None, None]
    if make is llama:
        mask = mask & torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    model = make(device, use_cache=False)
    expected = calls(model, device, attention_mask=padded(device))
    pg.record(model)
    found = calls(model, device, attention_mask=mask)
    kept = padded(device) if make is llama else ...
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits[kept], other.logits[kept])
    assert pg.stats(model).replayed == 3, pg.explain(model)


def test_c11_an_attention_that_gets_no_mask_is_the_other(device: torch.device) -> None:
    transformers = package("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("causal", sdpa_attention_forward)
    torch.manual_seed(0)
    usual = llama(device, use_cache=False)
    torch.manual_seed(0)
    model = pg.record(llama(device, use_cache=False, attn_implementation="causal"))
    for one, other in zip(calls(model, device), calls(usual, device), strict=True):
        assert torch.equal(one.logits, other.logits)
    assert pg.stats(model).replayed == 3, pg.explain(model)


def test_c09_a_trainers_own_training_step(one_device: torch.device, tmp_path: Path) -> None:
    """The trainer counts operations beside it."""
    transformers = package("transformers")
    data = [{"input_ids": torch.arange(n, n + 8) % 64, "labels": torch.tensor(n % 2)} for n in range(96)]

    def trained(record: Any) -> tuple[Any, nn.Module]:
        forget_device()
        torch.manual_seed(0)
        model = bert(torch.device("cpu"))
        chosen = transformers.TrainingArguments(
            f"{tmp_path}", per_device_train_batch_size=4, max_steps=24, logging_steps=8, report_to=[], save_strategy="no",
            use_cpu=one_device.type == "cpu", disable_tqdm=True, warmup_steps=4,
        )  # fmt: skip
        trainer = transformers.Trainer(model, chosen, train_dataset=data)
        trainer.training_step = record(trainer.training_step)
        trainer.train()
        return trainer.training_step, model

    (recorded, ours), (_, theirs) = trained(pg.record), trained(lambda f: f)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert pg.stats(recorded).live <= 3, pg.explain(recorded)


# -- lightning


def test_c11_a_lightning_module_is_refused_with_its_network_as_the_remedy(device: torch.device) -> None:
    lightning = package("lightning")

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    live, recorded = Line(), Line()
    recorded.load_state_dict(live.state_dict())
    pg.record(recorded)
    for module in (live, recorded):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator=device.type, devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(16, 4), 4))
    assert torch.equal(live.net.weight, recorded.net.weight)
    assert "call pg.record on the network in it" in reasons(recorded)
