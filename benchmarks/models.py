"""Models of transformers, timm and diffusers, small and with random weights, as people train and ask them, with one line:
recorded with the options as they are, and equal to the bit?

    python benchmarks/models.py --device cpu
    python benchmarks/models.py --device cpu --only gpt2 bert --ways train

A case is a model in one way, 20 calls with another batch each, beside a twin that is not recorded. Dropout is the library's.

    train              a step: forward with labels, backward, AdamW as torch makes it
    train, padded      ... with a mask that is another in each call
    no_grad, inference forward, with such a mask

Compared are all results, parameters, buffers, the optimizer's state and the generator's. `recorded`: the last call was played,
or ran live only to be timed. Where it was not, replays were measured to be no faster (which a busy machine decides), or `why`
says what stood in the way. `cuts` are the places where a replay waits for a number of the host's.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import harness
import phonograph as pg
from coverage_models import CLASSES, TASKS, TRANSFORMERS, Batch, loss_of
from phonograph.testing import assert_same

CALLS, ROWS = 20, 2
WAYS = {"train": None, "train, padded": None, "no_grad": torch.no_grad, "inference": torch.inference_mode}
MOST, OF = 27, 30
UNMASKED = ("gpt2", "bert", "vit", "llama", "t5")  # in training without a mask
TARGET = (
    f"of {OF} models of transformers {MOST} recorded in training and inference, if replays are measured to be faster; all "
    "equal to the bit; nothing raised; no look of the host in a replay of " + ", ".join(UNMASKED)
)
MASKED = {"continue", "fill in", "encode", "translate", "read a page"}
KINDS = (
    "gpt2", "gpt_neox", "opt", "bloom", "llama", "mistral", "qwen3", "gemma3_text", "mixtral", "mamba",
    "bert", "roberta", "distilbert", "deberta-v2", "modernbert", "longformer", "xlnet",
    "t5", "bart", "whisper", "vit", "dinov2", "beit", "swin", "convnext", "resnet", "clip", "siglip",
    "wav2vec2", "hubert",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`step(model, batch)` gives a loss, or what comes of a forward."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]
    labels: Callable[[Batch], Batch] = lambda batch: {}
    padded: Callable[[Batch, int], Batch] | None = None


# ---- transformers --------------------------------------------------------------------------------


def _as_it_comes(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a configuration, but for those that switch dropout off."""
    kept = {name: x for name, x in options.items() if "drop" not in name and name != "apply_spec_augment"}
    return {name: _as_it_comes(x) if isinstance(x, dict) else x for name, x in kept.items()}


def _mask(batch: Batch, i: int) -> Batch:
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -3 - i % 5 :] = 0
    mask[1, -1 - i % 7 :] = 0
    return batch | {"attention_mask": mask}


def _transformer(kind: str) -> Case:
    task, options = next((task, options) for task, known, options in TRANSFORMERS if known == kind)
    made_by, inputs, labels, _ = TASKS[task]

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **_as_it_comes(options))
        model: nn.Module = getattr(transformers, made_by).from_config(config)
        return model

    def batch(_: int) -> Batch:
        made = {name: x[:ROWS] if x.dim() else x for name, x in inputs().items()}
        return {name: x for name, x in made.items() if name != "attention_mask"}

    padded = _mask if task in MASKED else None
    return Case(build, batch, lambda model, b: model(**b), lambda out, b: loss_of(out), labels, padded)


# ---- timm and diffusers --------------------------------------------------------------------------


def _timm(name: str, side: int = 32, **options: Any) -> Case:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
        return model

    def loss(out: Tensor, b: Batch) -> Tensor:
        return F.cross_entropy(out, b["y"])

    return Case(
        build, lambda _: {"x": torch.randn(ROWS, 3, side, side)}, lambda model, b: model(b["x"]), loss,
        lambda b: {"y": torch.randint(CLASSES, (ROWS,))},
    )  # fmt: skip


def _denoising(kind: str, shape: tuple[int, ...], given: dict[str, tuple[int, ...]], **options: Any) -> Case:
    """A model of diffusers that tells noise, as it is trained."""

    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, kind)(**options)
        model.scheduler = diffusers.DDPMScheduler()  # type: ignore[assignment]
        return model

    def batch(_: int) -> Batch:
        made = {name: torch.randn(ROWS, *size) if size else torch.randint(9, (ROWS,)) for name, size in given.items()}
        return {"x": torch.randn(ROWS, *shape), **made}

    def forward(model: Any, b: Batch) -> Any:
        times, noise = torch.randint(0, 1000, (ROWS,), device=b["x"].device), torch.randn_like(b["x"])
        noisy = model.scheduler.add_noise(b["x"], noise, times)
        return model(noisy, timestep=times, **{name: b[name] for name in given}).sample, noise

    return Case(build, batch, forward, lambda out, b: F.mse_loss(out[0][:, : out[1].shape[1]], out[1]))


def _autoencoder(kind: str, **options: Any) -> Case:
    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, kind)(**options)
        return model

    def forward(model: Any, b: Batch) -> Any:
        found = model.encode(b["x"]).latent_dist
        return model.decode(found.sample()).sample, found.kl()

    def loss(out: Any, b: Batch) -> Tensor:
        return F.mse_loss(out[0], b["x"]) + 1e-6 * out[1].mean()

    return Case(build, lambda _: {"x": torch.randn(ROWS, 3, 16, 16)}, forward, loss)


_UNET = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}
_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
}

CASES: dict[str, Case] = {
    **{f"transformers/{kind}": _transformer(kind) for kind in KINDS},
    "timm/resnet18": _timm("resnet18"),
    "timm/mobilenetv3_small_050": _timm("mobilenetv3_small_050"),
    "timm/convnext_atto": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    "timm/vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=32, depth=2),
    "timm/swin_tiny_patch4_window7_224": _timm(
        "swin_tiny_patch4_window7_224", 112, img_size=112, depths=(1, 1, 1, 1), embed_dim=24,
    ),
    "timm/beit_base_patch16_224": _timm("beit_base_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=4),
    "timm/mixer_s16_224": _timm("mixer_s16_224", img_size=32),
    "diffusers/UNet2DModel": _denoising(
        "UNet2DModel", (3, 16, 16), {}, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **_UNET,
    ),
    "diffusers/UNet2DConditionModel": _denoising(
        "UNet2DConditionModel", (4, 16, 16), {"encoder_hidden_states": (7, 32)}, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **_UNET,
    ),
    "diffusers/DiTTransformer2DModel": _denoising(
        "DiTTransformer2DModel", (4, 8, 8), {"class_labels": ()}, num_embeds_ada_norm=10, out_channels=8, norm_num_groups=8,
        **_DIT,
    ),
    "diffusers/PixArtTransformer2DModel": _denoising(
        "PixArtTransformer2DModel", (4, 8, 8), {"encoder_hidden_states": (7, 32)}, cross_attention_dim=32, caption_channels=32,
        out_channels=8, norm_num_groups=8, **_DIT,
    ),
    "diffusers/AutoencoderKL": _autoencoder(
        "AutoencoderKL", block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
}  # fmt: skip


# ---- a case in one way ---------------------------------------------------------------------------


def seed(n: int) -> None:
    torch.manual_seed(n)
    random.seed(n)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(n)


def played(case: Case, way: str, device: str, record: bool) -> tuple[list[Any], pg.Stats | None, str]:
    """What 20 calls give and leave, the counts, and whether the last one was "played", before what explains the rest."""
    seed(0)
    model, mode = case.build().to(device), WAYS[way]
    training = mode is None
    model.train(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if training else None

    def step(batch: Batch) -> Any:
        if optimizer is None:
            with mode() if mode is not None else nullcontext():
                return tensors(case.forward(model, batch))
        optimizer.zero_grad()
        loss = case.loss(case.forward(model, batch), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    f: Any = pg.record(step) if record else step
    results: list[Any] = []
    before = None
    for i in range(CALLS):
        seed(100 + i)
        batch = case.batch(i)
        batch |= case.labels(batch) if training else {}
        batch = case.padded(batch, i) if case.padded is not None and way != "train" else batch
        batch = {name: x.to(device) for name, x in batch.items()}
        before = pg.stats(f) if record else None
        results.append([t.detach().clone() for t in tensors(f(batch))])
    results += [
        *model.parameters(),
        *model.buffers(),
        *tensors(optimizer.state_dict() if optimizer else []),
        torch.get_rng_state(),
    ]
    results = [[t.detach().cpu() for t in tensors(one)] for one in results]
    stats = pg.stats(f) if record else None
    last = "played" if stats is not None and before is not None and stats.refusals == before.refusals else "live"
    return results, stats, f"{last}\n{pg.explain(f)}" if record else ""


def tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def equal(a: Any, b: Any) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def row(case: Case, way: str, device: str) -> dict[str, Any]:
    begun = time.perf_counter()
    live, _, _ = played(case, way, device, record=False)
    results, stats, said = played(case, way, device, record=True)
    assert stats is not None
    found: dict[str, Any] = {"recorded": said.startswith("played"), "equal": equal(results, live)}
    if not found["equal"]:
        found["live equals itself"] = equal(played(case, way, device, record=False)[0], live)
    found |= {"live": stats.live, "replayed": stats.replayed, "recordings": stats.recorded, "timed": stats.timed}
    cuts = re.findall(r"live between its segments: (?:(.*) at .*, in (.*)|(.*))", said)
    found["cuts"] = [" in ".join(filter(None, one)) for one in cuts[: len(cuts) // max(stats.recorded, 1)]]  # of one recording
    found["why"] = dict(stats.refusals)
    found["recorded"] = found["recorded"] and stats.replayed > 0
    return found | {"seconds": round(time.perf_counter() - begun, 1)}


def chosen(arguments: Any) -> Iterator[tuple[str, str, Case]]:
    for name, case in CASES.items():
        library, _, kind = name.partition("/")
        if importlib.util.find_spec(library) is None:
            continue
        if not arguments.only or kind in arguments.only or name in arguments.only:
            ways = [way for way in WAYS if way != "train, padded" or case.padded is not None]
            yield from [(name, way, case) for way in ways if not arguments.ways or way in arguments.ways]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="only these models")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], help="only in these ways")
    parser.add_argument("--add", action="store_true", help="go on where a run has stopped: keep the rows that are there")
    arguments = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("needs transformers; timm and diffusers are tried if they are there")
        return 3
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report = harness.Report(f"models_{arguments.device}", TARGET, arguments)
    written = arguments.out / f"{report.claim}.json"
    rows: dict[str, dict[str, Any]] = json.loads(written.read_text())["figures"]["rows"] if arguments.add else {}
    for name, way, case in chosen(arguments):
        title = f"{name} {way}"
        if title in rows:
            continue
        try:
            rows[title] = row(case, way, arguments.device)
        except Exception as error:
            rows[title] = {"recorded": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(title, json.dumps(rows[title]), file=sys.stderr, flush=True)
        conclude(report, rows)
        report.write()
    conclude(report, rows)
    return harness.finish(report)


def is_slower(found: dict[str, Any]) -> bool:
    """Whether it was recorded, and replays were measured to be no faster."""
    return not found["recorded"] and found.get("recordings", 0) > 0 and found.get("timed", 0) > 0


def settled(each: list[dict[str, Any]]) -> bool:
    return all(found["recorded"] or is_slower(found) for found in each)


def conclude(report: harness.Report, rows: dict[str, dict[str, Any]]) -> None:
    by_model: dict[str, list[dict[str, Any]]] = {}
    for title, found in rows.items():
        by_model.setdefault(title.partition(" ")[0], []).append(found)
    figures: dict[str, Any] = {}
    for library in ("transformers", "timm", "diffusers"):
        models = {name: each for name, each in by_model.items() if name.startswith(f"{library}/")}
        figures[library] = {
            "models": len(models),
            "recorded in each way": sum(all(one["recorded"] for one in each) for each in models.values()),
            "recorded, or measured to be no faster": sum(map(settled, models.values())),
            "not": {
                name: sorted({why for one in each if not one["recorded"] for why in one.get("why", {"an error": 1})})
                for name, each in models.items() if not settled(each)
            },
        }  # fmt: skip
    reads = {name: len(rows.get(f"transformers/{name} train", {}).get("cuts", [])) for name in UNMASKED}
    wrong = [title for title, found in rows.items() if not found.get("equal", True) and found.get("live equals itself")]
    raised = [title for title, found in rows.items() if "error" in found]
    report.figures |= figures | {
        "cases": len(rows), "measured to be no faster": sum(is_slower(found) for found in rows.values()),
        "differ": wrong, "raised": raised, "reads of the host in a replay of a step": reads,
        "reasons": dict(Counter(why for found in rows.values() if not found["recorded"] for why in found.get("why", {}))),
        "rows": rows,
    }  # fmt: skip
    theirs = figures["transformers"]
    share = theirs["recorded, or measured to be no faster"] >= MOST / OF * theirs["models"]
    if theirs["models"] >= OF and not (report.arguments.only or report.arguments.ways):
        report.decide(share and not wrong and not raised and not any(reads.values()))


if __name__ == "__main__":
    raise SystemExit(main())
