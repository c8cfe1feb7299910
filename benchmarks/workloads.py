"""The real models that several benchmarks share. On the CPU they shrink, so that the scripts can be tried there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Wrap = Callable[[nn.Module], Callable[..., Any]]


def plain(model: Any) -> Callable[..., Any]:
    return model  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Training:
    """A training job from its seed: `step(*batch)` returns the loss and updates the model."""

    step: Callable[..., Tensor]
    batches: list[tuple[Tensor, ...]]
    model: nn.Module

    def forever(self) -> Iterator[tuple[Tensor, ...]]:
        return itertools.cycle(self.batches)


def training(
    model: nn.Module, loss_of: Callable[..., Tensor], batches: list[Any], beside: Callable[..., Any] = plain, **options: Any
) -> Training:
    """`beside` makes the optimizer's step faster, `options` are the optimizer's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{"fused": True, **options})
    apply = beside(optimizer.step)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*batch)
        loss.backward()
        apply()
        return loss.detach()

    return Training(step, batches, model)


def gpt2(device: str, wrap: Wrap = plain, **optimizer_options: Any) -> Training:
    """GPT-2 124M from transformers, bf16, dropout on, 2 x 256 tokens a step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1024} if device == "cpu" else {}
    config = GPT2Config(n_positions=512, use_cache=False, **small)
    model = GPT2LMHeadModel(config).to(device, torch.bfloat16).train()
    called = wrap(model)
    batches = [(torch.randint(config.vocab_size, (2, 256), device=device),) for _ in range(8)]
    # transformers asks whether the stream is capturing and then builds another mask than in a live call. With a mask
    # given, live and captured are the same program.
    seen = torch.ones(1, 1, 256, 256, dtype=torch.bool, device=device).tril()

    def loss_of(tokens: Tensor) -> Tensor:
        return called(input_ids=tokens, labels=tokens, attention_mask=seen).loss

    return training(model, loss_of, batches, **optimizer_options)


def resnet50(device: str, wrap: Wrap = plain, **optimizer_options: Any) -> Training:
    """ResNet-50 from timm, bf16 autocast, channels last, 16 images of 224 x 224 a step."""
    return _images("resnet50", 16, device, wrap, **optimizer_options)


def mobilenet(device: str, wrap: Wrap = plain, **optimizer_options: Any) -> Training:
    """MobileNetV3 (large) from timm, likewise, 32 images a step."""
    return _images("mobilenetv3_large_100", 32, device, wrap, **optimizer_options)


def _images(name: str, most: int, device: str, wrap: Wrap, **optimizer_options: Any) -> Training:
    import timm

    torch.manual_seed(0)
    rows, side = (2, 64) if device == "cpu" else (most, 224)
    model = timm.create_model(name).to(device, memory_format=torch.channels_last).train()
    called = wrap(model)

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            return F.cross_entropy(called(images), labels)

    def batch() -> tuple[Tensor, Tensor]:
        images = torch.randn(rows, 3, side, side, device=device).to(memory_format=torch.channels_last)
        return images, torch.randint(1000, (rows,), device=device)

    return training(model, loss_of, [batch() for _ in range(8)], **optimizer_options)


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding: `step(token, position)` returns the next token and moves the position on, in place."""

    step: Callable[[Tensor, Tensor], Tensor]
    token: Tensor  # (1, 1) the first token to feed
    position: Tensor  # (1, 1) where it stands
    cache: Any  # transformers' StaticCache


def llama_model(device: str) -> nn.Module:
    """A Llama of 1.2 billion weights (those of Llama-3.2-1B in shape, drawn at random), bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    if device == "cpu":
        shape |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "vocab_size": 512}
    torch.manual_seed(0)
    with torch.device(device):  # drawn on the GPU, where it takes a second
        return LlamaForCausalLM(LlamaConfig(max_position_embeddings=2048, **shape)).to(torch.bfloat16).eval()


def llama_decoding(model: nn.Module, device: str, prompt: int = 16, wrap: Callable[[Any], Any] = lambda f: f) -> Decoding:
    """A step over a static cache of its own, `prompt` random tokens already read."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=1024)
    generator = torch.Generator().manual_seed(1)
    read = torch.randint(500, (1, prompt), generator=generator).to(device)
    with torch.no_grad():
        model(input_ids=read, past_key_values=cache, use_cache=True)

    def following(token: Tensor, position: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
            return logits[:, -1].argmax(-1, keepdim=True)

    choose = wrap(following)

    def step(token: Tensor, position: Tensor) -> Tensor:
        chosen = choose(token, position)
        position.add_(1)
        return chosen

    return Decoding(step, torch.tensor([[5]], device=device), torch.tensor([[prompt]], device=device), cache)
