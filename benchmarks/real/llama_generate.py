"""`generate` of transformers with a static cache: the model is recorded; the rival is what generate compiles by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

STEPS, ROUND = 4, 1


def run(device: str, record, compiling: bool = False) -> Iterator[object]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1024, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device).eval()
    model.generation_config.cache_implementation = "static"
    model.generation_config.disable_compile = not compiling

    model = record(model)

    yield model
    for step in range(1_000_000):
        prompt = torch.randint(2, config.vocab_size, (2, 12), device=device)
        text = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=step % 2 == 1, top_k=20
        )
        print(step, text[0, 12:24].tolist())
        yield text


RIVAL = ("generate's own", lambda model: model, {"compiling": True})
