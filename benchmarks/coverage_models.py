"""The models of `coverage.py`: families of transformers and timm, small, with random weights. Nothing is downloaded.

A model of transformers is a line in a table: what it is asked to do, its type, and what its configuration needs beside the
common sizes. Dropout is off everywhere, so that every method computes the same. Text models of a decoder's kind are bfloat16,
as they are used; all others float32. Of timm's, `maxvit_rmlp_pico_rw_256` keeps its stochastic depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, ROWS, LENGTH, WIDTH, CLASSES = 1000, 4, 96, 128, 10
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]  # a new one each time, without labels
    labels: Callable[[Batch], Batch]  # what a training step is given in addition
    dtype: torch.dtype = torch.float32


def loss_of(output: Any) -> Tensor:
    """The model's own loss; that of random classes; or, where there is neither, something that has a gradient."""
    if getattr(output, "loss", None) is not None:
        return output.loss.float()
    if isinstance(output, Tensor):
        return F.cross_entropy(output.float(), torch.arange(len(output), device=output.device) % output.shape[-1])
    return output[0].float().sin().sum() / len(output[0])


def _ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(5, VOCABULARY, (rows, length))


def _padded() -> Batch:
    """Text whose second half of rows ends early."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[ROWS // 2 :, -LENGTH // 4 :] = 0
    return {"input_ids": _ids() * mask, "attention_mask": mask}


def _pixels(side: int = 64) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, side, side)}


def _classes(batch: Batch) -> Batch:
    return {"labels": torch.randint(CLASSES, (len(next(iter(batch.values()))),))}


def _same_text(batch: Batch) -> Batch:
    return {"labels": batch["input_ids"]}


def _none(_: Batch) -> Batch:
    return {}


# ---- transformers --------------------------------------------------------------------------------

_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_GPT = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 256, "use_cache": False,
    "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256, "hidden_dropout_prob": 0.0, "pad_token_id": 0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "dropout": 0.0, "use_cache": False,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
_VIT = {
    "image_size": 64, "patch_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 256, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES,
    "drop_path_rate": 0.0,
}  # fmt: skip
_WAVE = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "num_labels": CLASSES,
    "conv_dim": (64, 64, 64), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4), "num_feat_extract_layers": 3,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 64, "num_codevectors_per_group": 8,
}  # fmt: skip
_CLIP_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": LENGTH, "projection_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_CLIP_VISION = {
    "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 8, "projection_dim": 64,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip

# What is asked of a model -> (its class, its inputs, its labels, its dtype)
TASKS: dict[str, tuple[str, Callable[[], Batch], Callable[[Batch], Batch], torch.dtype]] = {
    "continue": ("AutoModelForCausalLM", lambda: {"input_ids": _ids()}, _same_text, torch.bfloat16),
    "fill in": ("AutoModelForMaskedLM", _padded, _same_text, torch.float32),
    "encode": ("AutoModel", _padded, _none, torch.float32),
    "translate": (
        "AutoModelForSeq2SeqLM",
        lambda: {"input_ids": _ids(), "decoder_input_ids": _ids(length=LENGTH // 2)},
        lambda batch: {"labels": batch["decoder_input_ids"]},
        torch.float32,
    ),
    "classify an image": ("AutoModelForImageClassification", _pixels, _classes, torch.float32),
    "classify speech": (
        "AutoModelForAudioClassification", lambda: {"input_values": torch.randn(ROWS, 4000)}, _classes, torch.float32,
    ),
    "transcribe": (
        "AutoModelForSpeechSeq2Seq",
        lambda: {"input_features": torch.randn(ROWS, 80, 2 * LENGTH), "decoder_input_ids": _ids(length=LENGTH // 2)},
        lambda batch: {"labels": batch["decoder_input_ids"]},
        torch.float32,
    ),
    "match": (
        "AutoModel", lambda: _pixels() | {"input_ids": _ids()}, lambda _: {"return_loss": torch.tensor(True)}, torch.float32,
    ),
    "match, no loss": ("AutoModel", lambda: _pixels() | {"input_ids": _ids()}, _none, torch.float32),
    "read a page": (
        "AutoModelForMaskedLM",
        lambda: _padded() | {"bbox": torch.randint(0, 500, (ROWS, LENGTH, 2)).repeat(1, 1, 2)},
        _same_text,
        torch.float32,
    ),
}  # fmt: skip

TRANSFORMERS: list[tuple[str, str, dict[str, Any]]] = [
    ("continue", "gpt2", _GPT),
    ("continue", "gpt_neo", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256,
        "attention_types": [[["global", "local"], 1]], "window_size": 32, "use_cache": False, "embed_dropout": 0.0,
    }),
    ("continue", "gpt_neox", _LLAMA | {"hidden_dropout": 0.0}),
    ("continue", "gptj", _GPT | {"rotary_dim": 16}),
    ("continue", "codegen", _GPT | {"rotary_dim": 16}),
    ("continue", "opt", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "ffn_dim": 256, "word_embed_proj_dim": WIDTH, "dropout": 0.0,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "use_cache": False,
    }),
    ("continue", "bloom", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "use_cache": False,
    }),
    ("continue", "mpt", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": 2, "n_heads": 4, "use_cache": False}),
    ("continue", "llama", _LLAMA),
    ("continue", "mistral", _LLAMA | {"sliding_window": 32}),
    ("continue", "qwen2", _LLAMA),
    ("continue", "qwen3", _LLAMA | {"head_dim": 32}),
    ("continue", "gemma", _LLAMA | {"head_dim": 32}),
    ("continue", "gemma2", _LLAMA | {"head_dim": 32, "sliding_window": 32}),
    ("continue", "gemma3_text", _LLAMA | {"head_dim": 32, "sliding_window": 32}),
    ("continue", "phi", _LLAMA | {"embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    ("continue", "phi3", _LLAMA),
    ("continue", "falcon", _LLAMA | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("continue", "stablelm", _LLAMA),
    ("continue", "starcoder2", _LLAMA | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    ("continue", "olmo2", _LLAMA),
    ("continue", "granite", _LLAMA),
    ("continue", "cohere", _LLAMA),
    ("continue", "mixtral", _LLAMA | {"num_local_experts": 4}),
    ("continue", "qwen2_moe", _LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
    }),
    ("continue", "deepseek_v3", _LLAMA | _MLA),
    ("continue", "gpt_oss", _LLAMA | {"num_local_experts": 4, "head_dim": 32, "sliding_window": 32}),
    ("continue", "mamba", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "use_cache": False,
    }),
    ("fill in", "bert", _BERT),
    ("fill in", "roberta", _BERT),
    ("fill in", "distilbert", {
        "vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 256, "n_layers": 2, "n_heads": 4, "dropout": 0.0,
        "attention_dropout": 0.0, "max_position_embeddings": 256,
    }),
    ("fill in", "albert", _BERT | {"embedding_size": 64, "classifier_dropout_prob": 0.0}),
    ("fill in", "electra", _BERT | {"embedding_size": 64}),
    ("fill in", "deberta-v2", _BERT | {
        "relative_attention": True, "position_buckets": 32, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
    }),
    ("fill in", "mpnet", _BERT),
    ("fill in", "convbert", _BERT | {"embedding_size": 64}),
    ("fill in", "roformer", _BERT | {"embedding_size": 64}),
    ("fill in", "fnet", {key: value for key, value in _BERT.items() if key != "attention_probs_dropout_prob"}),
    ("fill in", "modernbert", _LLAMA | {"local_attention": 32, "global_attn_every_n_layers": 2}),
    ("fill in", "longformer", _BERT | {"attention_window": [16, 16]}),
    ("fill in", "big_bird", _BERT | {"block_size": 8, "num_random_blocks": 1, "attention_type": "block_sparse"}),
    ("encode", "xlnet", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 256, "dropout": 0.0,
        "use_mems_eval": False, "use_mems_train": False,
    }),
    ("read a page", "layoutlm", _BERT | {"max_2d_position_embeddings": 512}),
    ("translate", "t5", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
    }),
    ("translate", "bart", _BART),
    ("translate", "pegasus", _BART),
    ("translate", "marian", _BART),
    ("transcribe", "whisper", _BART | {"max_source_positions": LENGTH, "max_target_positions": LENGTH, "num_mel_bins": 80}),
    ("classify an image", "vit", _VIT),
    ("classify an image", "dinov2", _VIT),
    ("classify an image", "beit", _VIT | {"use_relative_position_bias": True}),
    ("classify an image", "swin", {
        "image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "drop_path_rate": 0.0, "num_labels": CLASSES,
    }),
    ("classify an image", "convnext", {"depths": [2, 2], "hidden_sizes": [32, 64], "num_stages": 2, "num_labels": CLASSES}),
    ("classify an image", "resnet", {
        "depths": [2, 2], "hidden_sizes": [64, 128], "embedding_size": 32, "num_labels": CLASSES,
    }),
    ("match", "clip", {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION, "projection_dim": 64}),
    ("match, no loss", "siglip", {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION}),
    ("classify speech", "wav2vec2", _WAVE),
    ("classify speech", "hubert", _WAVE),
]  # fmt: skip


def _transformer(task: str, kind: str, options: dict[str, Any]) -> Model:
    made_by, batch, labels, dtype = TASKS[task]

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **options)
        return getattr(transformers, made_by).from_config(config)  # type: ignore[no-any-return]

    return Model(f"transformers/{kind}", build, batch, labels, dtype)


# ---- timm ----------------------------------------------------------------------------------------

# Name -> side of the images (pixels), what is made smaller. Some of these take images of one size only.
_TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (96, {"zero_init_last": False}),
    "resnet50": (96, {"zero_init_last": False}),
    "nf_resnet26": (96, {}),
    "res2net50_26w_4s": (96, {"layers": (1, 1, 1, 1), "zero_init_last": False}),
    "regnetx_002": (96, {"zero_init_last": False}),
    "repvgg_a0": (96, {}),
    "vgg11": (64, {}),
    "densenet121": (96, {"block_config": (2, 4, 4, 2)}),
    "inception_v3": (96, {}),
    "xception41": (96, {}),
    "hrnet_w18_small": (96, {}),
    "efficientnet_b0": (96, {}),
    "mobilenetv3_small_100": (96, {}),
    "ghostnet_100": (96, {"drop_rate": 0.0}),
    "rexnet_100": (96, {"drop_path_rate": 0.0, "drop_rate": 0.0}),
    "convnext_atto": (96, {}),
    "poolformer_s12": (96, {}),
    "edgenext_xx_small": (96, {}),
    "mobilevit_xxs": (96, {}),
    "fastvit_t8": (96, {}),
    "vit_tiny_patch16_224": (96, {"img_size": 96, "depth": 4}),
    "deit_tiny_patch16_224": (96, {"img_size": 96, "depth": 4}),
    "eva02_tiny_patch14_224": (98, {"img_size": 98, "depth": 4}),
    "beit_base_patch16_224": (96, {"img_size": 96, "depth": 2}),
    "cait_xxs24_224": (96, {"img_size": 96, "depth": 4}),
    "xcit_nano_12_p16_224": (96, {"img_size": 96, "depth": 4}),
    "swin_tiny_patch4_window7_224": (112, {"img_size": 112, "depths": (1, 1, 2, 1), "drop_path_rate": 0.0}),
    "mvitv2_tiny": (96, {"img_size": 96}),
    "levit_128s": (224, {}),
    "pit_ti_224": (224, {}),
    "volo_d1_224": (96, {"img_size": 96}),
    "coat_lite_tiny": (96, {"img_size": 96, "serial_depths": (1, 1, 1, 1)}),
    "maxvit_rmlp_pico_rw_256": (128, {"img_size": 128}),
    "mixer_s16_224": (96, {"img_size": 96}),
    "resmlp_12_224": (96, {"img_size": 96}),
    "gmlp_ti16_224": (96, {"img_size": 96}),
}


def _timm(kind: str, side: int, options: dict[str, Any]) -> Model:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(kind, num_classes=CLASSES, **options)
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # a head of zeros passes no gradient on
                nn.init.normal_(parameter, std=0.02)
        return model

    return Model(f"timm/{kind}", build, lambda: {"x": torch.randn(ROWS, 3, side, side)}, _none)


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        *(_transformer(task, kind, options) for task, kind, options in TRANSFORMERS),
        *(_timm(kind, side, options) for kind, (side, options) in _TIMM.items()),
    )
}
