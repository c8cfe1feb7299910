"""C9: numbers that change from call to call are followed wherever they are read: coefficients, temperatures, learning rates of
optimizers of the user's. What cannot be followed makes a new recording, or runs live; nothing is ever stale."""

import math

import numpy as np
import torch
import torch.nn.functional as F

import phonograph as pg

CALLS = 30


def assert_followed(recorded, calls=CALLS):
    stats = pg.stats(recorded)
    assert stats.recorded <= 3, pg.explain(recorded)
    assert stats.replayed >= calls - 5, pg.explain(recorded)


NOT_FOLLOWED = {
    "a branch": lambda x, w, s: x * 2 if s.t > 0.35 else x + s.t,
    "truth": lambda x, w, s: x * 2 if s.t - 0.3125 else x + 1,
    "an int": lambda x, w, s: x * int(s.t * 10),
    "a range": lambda x, w, s: sum(x * i for i in range(int(s.t * 8))) + x,
    "rounding": lambda x, w, s: x * round(s.t, 1) + math.floor(s.t * 4) + s.t // 0.25 + s.t % 0.25,
    "a shape": lambda x, w, s: x[: math.ceil(s.t * 4)] + 1,
    "a text": lambda x, w, s: x * float(f"{s.t:.2f}"),
    "percent": lambda x, w, s: x * float("%.1f" % s.t),  # noqa: UP031
    "repr": lambda x, w, s: x * len(repr(s.t)),
    "float": lambda x, w, s: x * float(s.t),
    "a key": lambda x, w, s: x * {0.25: 3.0}.get(s.t, 4.0),
    "its class": lambda x, w, s: x * s.t if type(s.t) is float else x,
    "numpy": lambda x, w, s: x * float(np.exp(s.t)) + float(np.clip(s.t, 0, 0.3)) + float(np.asarray(s.t)),
    "a list in a tensor": lambda x, w, s: x[:, :2] * torch.tensor([s.t, 1.0]) if x.device.type == "cpu" else x * s.t,
    "dropout": lambda x, w, s: F.dropout(x, s.t),
    "a tensor of integers": lambda x, w, s: x * torch.tensor(s.t, dtype=torch.int32, device=x.device),
    "smoothing of weighted classes": lambda x, w, s: F.cross_entropy(x, x.argmax(1), w.detach().abs(), label_smoothing=s.t),
    "smoothing of probabilities": lambda x, w, s: F.cross_entropy(x, x.softmax(1), label_smoothing=s.t),
    "points": lambda x, w, s: x[0] * torch.linspace(0, s.t, 8, device=x.device),
    "a slope": lambda x, w, s: F.leaky_relu(x, s.t),
    "a norm": lambda x, w, s: F.layer_norm(x, (8,), eps=s.t),
    "the gradient of a power": lambda x, w, s: torch.autograd.grad(((x * w).abs() ** s.t).sum(), w),
    "the gradient of a mean": lambda x, w, s: torch.autograd.grad((x * w).lerp(x, s.t).sum(), w),
    "it is returned": lambda x, w, s: (x * s.t, s.t),
    "isclose": lambda x, w, s: x * 3 if math.isclose(s.t, 0.25) else x,
    "hidden": lambda x, w, s: x * s.cos(s.t),
    "complex": lambda x, w, s: x * (s.t * 1j),
    "a modulus": lambda x, w, s: x * divmod(s.t, 0.2)[1],
    "its digits": lambda x, w, s: x * s.t.as_integer_ratio()[0] * 1e-9 + s.t.is_integer() + s.t.real,
}
