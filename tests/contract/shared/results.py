"""C1-C5: results. What a call returns, draws, mutates and hands out is what eager would have, for as long as it is."""

import dataclasses

import torch


@dataclasses.dataclass
class Prediction:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None
    name: str = "p"
