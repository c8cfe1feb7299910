"""Small programs for the injection of faults: each is a step with all that it changes, and can be made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import phonograph as pg

__all__ = ["PROGRAMS", "Program", "Same"]

Record = Callable[..., Any]


class Same:
    """What eager has in place of `pg.record`: the function itself, or so many calls of it."""

    def __call__(self, function: Any, steps: int | None = None, **options: Any) -> Any:
        return function if steps is None else lambda x: torch.stack([*map(function, x)])


class Program:
    """The kinds of programs are its subclasses. `call(k)` is the k-th use, `state()` all that it changes."""

    def __init__(self, device: torch.device, record: Record) -> None:
        self.device = device
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.steps, self.losses, self.held = 0, list[Any](), list[Any]()
        self.recorded: list[Any] = []
        self._record = record
        self.prepare()

    def record(self, function: Any, **options: Any) -> Any:
        self.recorded.append(self._record(function, keep="always", **options))
        return self.recorded[-1]

    def batch(self, k: int, *shape: int) -> torch.Tensor:
        shape = shape or (4, 3)
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=self.device).reshape(shape) * 0.7 + k).cos()

    def prepare(self) -> None:
        self.recorded_step = self.record(self.step)

    def step(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def call(self, k: int) -> Any:
        self.optimizer.zero_grad()
        return self.recorded_step(self.batch(k))

    def parameters(self) -> list[torch.Tensor]:
        return list(self.net.parameters())

    def gradients(self) -> list[Any]:
        return [copy(p.grad) for p in self.parameters()]

    def state(self) -> list[Any]:
        """All but gradients."""
        kept = [v for p in self.net.parameters() for v in self.optimizer.state[p].values()]
        tensors = [*self.net.state_dict().values(), *kept, *self.held]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [self.steps, rates, [copy(x) for x in self.losses], *map(copy, tensors)]


def copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


class Training(Program):
    """A whole step with dropout, clipping, a counter and a list."""

    def step(self, x: torch.Tensor) -> Any:
        self.steps += 1
        loss = F.dropout(self.net(x), 0.3).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.detach())
        return loss.detach()


class Verified(Training):
    """The same, verified."""

    def prepare(self) -> None:
        self.recorded_step = self.record(self.step, verify=1)


class Accumulating(Program):
    """Gradients of two calls, and the optimizer's step outside."""

    def step(self, x: torch.Tensor) -> Any:
        loss = self.net(x).square().sum()
        loss.backward()
        self.losses += [loss.detach()]
        return loss.detach()

    def call(self, k: int) -> Any:
        loss = self.recorded_step(self.batch(k))
        if k % 2:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=k % 4 == 1)
        return loss


class Outside(Program):
    """A recorded module, and the backward outside."""

    def prepare(self) -> None:
        self.net = self.record(self.net)

    def call(self, k: int) -> Any:
        self.optimizer.zero_grad()
        loss = self.net(self.batch(k)).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Split(Program):
    """Numbers that are read on the host, cut out."""

    def prepare(self) -> None:
        self.recorded_step = self.record(self.step, fallback="split")

    def step(self, x: torch.Tensor) -> Any:
        loss = self.net(x).square().sum()
        if loss.item() > 1e9:
            loss = loss * 0.5
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        self.losses.append(loss.item())
        return loss.detach()


class Marked(Program):
    """A part that runs live, in the middle."""

    def step(self, x: torch.Tensor) -> Any:
        hidden = self.net(x)
        scale = self.measured(hidden.detach())
        loss = (hidden * scale).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @pg.live
    def measured(self, hidden: torch.Tensor) -> torch.Tensor:
        self.losses.append(float(hidden.sum()))
        return torch.ones_like(hidden) * (1.0 + (hidden.sum() > 0).float())


class Loop(Program):
    """A loop and a branch on the device."""

    def step(self, x: torch.Tensor) -> Any:
        n, y = pg.while_loop(lambda n, y: (n < 5) & (y.sum() < 1e6), lambda n, y: (n + 1, y * 1.5 + 1), (x.sum() * 0, x))
        self.held[:1] = [y]
        return pg.cond(y.sum() > 30, lambda y: y.sin(), lambda y: y.cos() + n, y)

    def call(self, k: int) -> Any:
        with torch.no_grad():
            return self.recorded_step(self.batch(k))


class Held(Program):
    """Two recorded functions in turn, whose results are held for some calls."""

    def prepare(self) -> None:
        self.first = self.record(lambda x: (x.tanh(), x.cumsum(0)))
        self.second = self.record(lambda a, b: torch.cat([a, b]).softmax(-1))

    def call(self, k: int) -> Any:
        a, b = self.first(self.batch(k))
        self.held = [*self.held[-4:], a, self.second(a, b)]
        return self.held[-1]


class Sizes(Training):
    """Two sizes of batches in turn."""

    def call(self, k: int) -> Any:
        self.optimizer.zero_grad()
        return self.recorded_step(self.batch(k, 4 + k % 2, 3))


class Scheduled(Training):
    """A learning rate that changes in each call, and one that an argument brings."""

    def prepare(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        super().prepare()

    def call(self, k: int) -> Any:
        loss = super().call(k)
        self.scheduler.step()
        return loss


class Adversaries(Program):
    """Two networks and two optimizers in one step."""

    def prepare(self) -> None:
        self.other = torch.nn.Linear(2, 3).to(self.device)
        self.others = torch.optim.Adam(self.other.parameters(), lr=0.05)
        super().prepare()

    def step(self, x: torch.Tensor) -> Any:
        made = self.other(torch.randn(4, 2, device=x.device))
        self.optimizer.zero_grad()
        judged = (self.net(x) - self.net(made.detach())).mean()
        judged.backward()
        self.optimizer.step()
        self.others.zero_grad()
        fooled = self.net(made).mean()
        fooled.backward()
        self.others.step()
        self.steps += 1
        return judged.detach(), fooled.detach()

    def parameters(self) -> list[torch.Tensor]:
        return [*super().parameters(), *self.other.parameters()]

    def state(self) -> list[Any]:
        mine = list(self.other.parameters())
        kept = [v for p in mine for v in self.others.state[p].values()]
        return [*super().state(), *map(copy, [*mine, *kept])]


class Edited(Program):
    """An argument's container, which each call edits, and a state that the call replaces."""

    def prepare(self) -> None:
        self.carried, self.memory = torch.zeros(3, device=self.device), dict[str, torch.Tensor]()
        super().prepare()

    def step(self, memory: dict[str, torch.Tensor]) -> Any:
        memory["seen"] = memory["x"].mean(0)
        self.carried = self.carried * 0.9 + memory["seen"]
        memory["x"].add_(1)
        return self.carried.sum()

    def call(self, k: int) -> Any:
        self.memory = {"x": self.batch(k)}
        return self.recorded_step(self.memory)

    def state(self) -> list[Any]:
        return [*super().state(), copy(self.carried), {name: copy(value) for name, value in self.memory.items()}]


class Evicting(Sizes):
    """Room for one recording, and two sizes, each for three calls: the fifth call evicts."""

    def prepare(self) -> None:
        self.recorded_step = self.record(self.step, max_recordings=1)

    def call(self, k: int) -> Any:
        return super().call(k // 3)


class Automatic(Split):
    """Cut where that pays."""

    def prepare(self) -> None:
        self.recorded_step = self.record(self.step, fallback="auto")


class Stepped(Program):
    """Three steps of training in each call."""

    def prepare(self) -> None:
        self.recorded_step = self.record(self.step, steps=3)

    def step(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = F.dropout(self.net(x), 0.3).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def call(self, k: int) -> Any:
        return self.recorded_step(self.batch(k, 3, 4, 3))


class Nested(Training):
    """A recorded function within another."""

    def prepare(self) -> None:
        self.inner = self.record(lambda x: x.tanh() * 2)
        super().prepare()

    def step(self, x: torch.Tensor) -> Any:
        return super().step(self.inner(x))


class Padded(Program):
    """Three sizes of batches, padded to one."""

    def prepare(self) -> None:
        self.recorded_step = self.record(self.step, shapes={"x": {0: [6]}})

    def step(self, x: torch.Tensor) -> Any:
        return x.sin() * 2 + 1

    def call(self, k: int) -> Any:
        with torch.no_grad():
            return self.recorded_step(self.batch(k, 4 + k % 3, 3))


KINDS = (
    Training, Verified, Accumulating, Outside, Split, Marked, Loop, Held, Sizes, Scheduled, Adversaries, Edited,
    Evicting, Automatic, Padded, Stepped, Nested,
)  # fmt: skip
PROGRAMS: dict[str, type[Program]] = {kind.__name__: kind for kind in KINDS}
