"""Generate whole texts in one launch each: until the end token is drawn, or the cache is full.

    python examples/decode_until_eos.py

A small Llama writes with a key/value cache of fixed size and draws each token on the device. The loop is `pg.while_loop`: live
it is Python's `while`, which looks at each token on the host; recorded it is a loop of the graph. The texts must be the same.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phonograph as pg

VOCABULARY, WIDTH, HEADS, KEY_HEADS, LAYERS, LENGTH, END = 96, 128, 4, 2, 2, 129, 0
HEAD = WIDTH // HEADS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Each head (1, heads, 1, features) rotated by its position."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Layer(nn.Module):
    """Attention over all that is written so far, and SwiGLU."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, KEY_HEADS, LENGTH, HEAD), persistent=False)

    def forward(self, x: Tensor, position: Tensor, angles: Tensor) -> Tensor:
        y = self.norms[0](x)
        query, key, value = (f(y).view(1, 1, -1, HEAD).transpose(1, 2) for f in (self.query, self.key, self.value))
        self.keys.index_copy_(2, position, turned(key, angles))
        self.values.index_copy_(2, position, value)
        keys, values = (kept.repeat_interleave(HEADS // KEY_HEADS, 1) for kept in (self.keys, self.values))
        written = (torch.arange(LENGTH, device=x.device) <= position).view(1, 1, 1, LENGTH)
        y = F.scaled_dot_product_attention(turned(query, angles), keys, values, attn_mask=written)
        x = x + self.out(y.reshape(1, 1, WIDTH))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(HEAD // 2) / (HEAD // 2)), persistent=False)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        x = self.tokens(token)
        for layer in self.layers:
            x = layer(x, position, position * self.frequencies)
        return self.head(self.norm(x))[:, -1]


State = tuple[Tensor, Tensor, Tensor]


def writer(model: Llama) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(first token (1, 1), temperature ()) -> the text (1, LENGTH), filled up with END; its length (1,)."""

    def goes_on(token: Tensor, position: Tensor, _: Tensor) -> Tensor:
        return (token[0] != END) & (position < LENGTH - 1)

    @torch.no_grad()
    def write(first: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        def step(token: Tensor, position: Tensor, text: Tensor) -> State:
            chances = (model(token, position) / temperature).softmax(-1)
            token, position = torch.multinomial(chances, 1), position + 1
            return token, position, text.index_copy(1, position, token)

        position = torch.zeros(1, dtype=torch.int64, device=first.device)
        text = torch.full((1, LENGTH), END, device=first.device).index_copy(1, position, first)
        _, position, text = pg.while_loop(goes_on, step, (first, position, text))
        return text, position + 1

    return write


def main() -> None:
    torch.manual_seed(0)
    model = Llama().to(DEVICE).eval()
    live = writer(model)
    recorded = pg.record(writer(model), keep="always")  # how long a call takes depends on the text: times prove nothing
    texts = {}
    for name, write in (("live", live), ("recorded", recorded)):
        torch.manual_seed(1)
        texts[name], begin = [], time.perf_counter()
        for n in range(24):
            if n == 4:  # warm, and recorded
                begin = time.perf_counter()
            text, length = write(torch.tensor([[n + 1]], device=DEVICE), torch.tensor(1.0 + n % 3, device=DEVICE))
            texts[name].append(text[0, : int(length)].tolist())
        tokens = sum(len(text) - 1 for text in texts[name][4:])
        print(f"{name:9s} {tokens / (time.perf_counter() - begin):8,.0f} tokens/s")
    print(f"texts of {min(map(len, texts['live']))} to {max(map(len, texts['live']))} tokens")
    print(pg.stats(recorded))
    assert texts["live"] == texts["recorded"], "the tokens differ"
    print("the same tokens")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    main()
