"""Record one step of text generation with a key/value cache of fixed size.

    python examples/decode.py

The step reads and writes the cache in place, takes the position as a tensor and moves it on: so every step is the same
work on the same memory, and one recording serves the whole text. The tokens must be those that the live run chose.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phonograph as pg

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 512, 128, 4, 3, 160
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    """Attention over everything written so far, then a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).view(1, 1, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        written = (torch.arange(LENGTH, device=x.device) <= position).view(1, 1, 1, LENGTH)
        y = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=written)
        x = x + self.out(y.reshape(1, 1, WIDTH))
        return x + self.feed(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        x = self.tokens(token) + self.places(position)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(x[:, -1])


def decode_step(model: Model) -> Callable[[Tensor, Tensor], Tensor]:
    """(token (1, 1), position (1,)) -> the next token (1, 1); the position moves on by one, in place."""

    @torch.no_grad()
    def step(token: Tensor, position: Tensor) -> Tensor:
        following = model(token, position).argmax(-1, keepdim=True)
        position.add_(1)
        return following

    return step


def write(step: Callable[[Tensor, Tensor], Tensor], first: int) -> list[int]:
    """A whole text from its first token, greedily."""
    token = torch.tensor([[first]], device=DEVICE)
    position = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    written = [token]
    for _ in range(LENGTH - 1):
        token = step(token, position)
        written.append(token)  # kept for good: no later step may overwrite it
    return torch.cat(written, 1)[0].tolist()


def main() -> None:
    torch.manual_seed(0)
    model = Model().to(DEVICE).eval()
    live, recorded = decode_step(model), pg.record(decode_step(model))
    texts = {}
    for name, step in (("live", live), ("recorded", recorded)):
        write(step, 7)  # warms up, and records
        begin = time.perf_counter()
        texts[name] = write(step, 7), write(step, 11)
        print(f"{name:9s} {2 * (LENGTH - 1) / (time.perf_counter() - begin):8,.0f} tokens/s")
    print(pg.stats(recorded))
    assert texts["live"] == texts["recorded"], "the tokens differ"
    print("the same tokens")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    main()
