"""Programs, drawn as text: what a user might write, put together at random.

A program has *places* (variables, attributes, items, cells of closures) with numbers, tensors and containers in them; functions
that read and write these between the lines of a model's forward, a loss, a backward and an optimizer's step; and a loop that
calls them, holds what they give, and changes the world in between. `choose` picks one of a sequence.

Any list of lines is a program: a line may raise, in each call even, for then a recorded function has to raise as well. What
differs by a promise (docs/limits.md) is not drawn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Choose", "Program", "draw"]

Choose = Callable[[Sequence[Any]], Any]
Lines = list[str]


@dataclasses.dataclass(frozen=True)
class Program:
    """Its text, and the options with which its functions are recorded."""

    text: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"# {dict(self.options)}\n{self.text}"


@dataclasses.dataclass(frozen=True)
class Place:
    """How the functions say it, how the loop does (if it can), and by which other words it may be read."""

    within: str
    outside: str | None
    words: tuple[str, ...] = ()


MADE = """
class Box:
    shared, size = 0.5, 1.0

    @property
    def worked_out(self):
        return self.size * 2

    @worked_out.setter
    def worked_out(self, value):
        self.size = value

    def scaled(self, h):
        return h * self.size

class Slots:
    __slots__ = ("real", "real1", "whole", "flag", "text", "tensor", "kept", "tally")

@dataclasses.dataclass
class Fields:
    other: float = 1.5

class Asking(Box):
    def __getattr__(self, name):
        return getattr(self.inner, name)

box, slots, fields, space, asking, table = Box(), Slots(), Fields(), SimpleNamespace(), Asking(), {}
box.inner, asking.inner, rows = Box(), SimpleNamespace(rate=0.25), [{}, {}]
"""

HOLDERS = ("box", "slots", "fields", "space", "box.inner", "net")
TABLES = ("table", "rows[0]", "vars(box)")


BACKWARDS: tuple[Lines, ...] = (
    *[["loss.backward()"]] * 6, ["loss.backward(retain_graph=True)"], ["(loss / 2).backward()"],
    ["for part in x.split(2):", "    (net(part).square().sum() / 4).backward()"],
    ["(a,) = torch.autograd.grad(loss, [net[0].weight], create_graph=True)", "(loss + a.square().sum()).backward()"],
    ["for p, g in zip(net.parameters(), torch.autograd.grad(loss, [*net.parameters()], allow_unused=True)):", "    p.grad = g"],
    ["loss.backward(retain_graph=True)", "net(x.roll(1, 0)).tanh().sum().backward()"],
)  # fmt: skip
STEPS: tuple[Lines, ...] = (
    *[["opt.step()"]] * 6, ["opt.step(lambda: loss)"], ["nn.utils.clip_grad_value_(net.parameters(), 0.125)", "opt.step()"],
)  # fmt: skip
SCALED_BACKWARDS: tuple[Lines, ...] = (
    ["scaler.scale(loss).backward()"],
    ["with torch.autocast(DEVICE.type, torch.bfloat16):", "    loss = loss + net(x).float().square().mean()",
     "scaler.scale(loss).backward()"],
    ["scaler.scale(loss * float(extra) if isinstance(extra, int) else loss).backward()"],
)  # fmt: skip
SCALED_STEPS: tuple[Lines, ...] = (
    ["scaler.step(opt)", "scaler.update()"],
    ["scaler.unscale_(opt)", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)", "scaler.step(opt)", "scaler.update()"],
)


_REFUSED = (
    r"\.item\(\)|float\((h|extra)|\.sum\(1?\) > 0\]?|manual_seed|random\.(random|choice|rand)\b|in_thread|\.clear\(\)$|\.pop\("
    r"|'deep'|brief|'has'|^x\[|^x\.(mul|add)_|x\.data|globals\(\)\['|maxlen=2|torch\.tensor\(0\.01|ASGD|print\("
    r"|net\.train\(not|use_reentrant=True|Fails"
)  # what makes each call run live
_FILLS, _LOOKS = (
    r"(kept|held|log|counted)\S*\.append",
    r"(sum|len|bool)\(\S*(kept|held|log|counted)|held\[|counted\[",
)  # in one function


def draw(choose: Choose) -> Program:
    return Drawing(choose).program()


class Drawing:
    """One program, as far as it is drawn."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.setup: Lines = []
        self.name = "net"  # of the recorded function that is drawn
        self.globals: Lines = []
        self.places: dict[str, list[Place]] = {}
        self.style = choose(("function", "function", "method", "closure"))
        self.plays = choose((True, True, False))  # no line is drawn with which each call runs live
        self._refused = re.compile(f"{_REFUSED}|{choose((_FILLS, _LOOKS))}", re.MULTILINE)
        self.cells: Lines = []
        self.nonlocals: Lines = []
        self.methods: Lines = []
        self.rows = choose(("3", "3", "3", "(3, 5)[n % 2]", "3 if n % 5 else 2", "3 if n < 6 else 5"))

    def one_of(self, *kinds: Lines) -> Lines:
        """One of these, with which a call may be recorded if it is to be."""
        while True:
            lines = self.choose(kinds)
            if not (self.plays and self._refused.search("\n".join(lines))):
                return lines

    def maybe(self, of: int, lines: Lines) -> Lines:
        """These lines, in one of so many cases."""
        return lines if self.choose(range(of)) == of - 1 else []

    # -- places

    def _place(self, name: str, first: str) -> Place:
        """Somewhere for a value, with its `first` one."""
        kind = self.choose(("global", "attribute", "attribute", "item", "class", "own", "cell"))
        if kind == "own" and self.style == "method":
            self.setup.append(f"trainer.{name} = {first}")
            return Place(f"self.{name}", f"trainer.{name}", (f"getattr(self, '{name}')", f"vars(self)['{name}']"))
        if kind == "cell" and self.style == "closure":
            self.cells.append(f"{name} = {first}")
            self.nonlocals.append(name)
            return Place(name, None)
        if kind == "class":
            self.setup.append(f"Box.{name} = {first}")
            return Place(f"Box.{name}", f"Box.{name}", (f"box.{name}", f"getattr(Box, '{name}')"))
        if kind == "item":
            of = self.choose(TABLES)
            self.setup.append(f"{of}['{name}'] = {first}")
            at = f"{of}['{name}']"
            return Place(
                at, at, (f"{of}.get('{name}', 1.0)", f"(lambda t: t['{name}'])({of})", f"operator.itemgetter('{name}')({of})")
            )
        if kind == "global":
            self.setup.append(f"{name} = {first}")
            self.globals.append(name)
            return Place(name, name, (f"globals()['{name}']",))
        of = self.choose(HOLDERS)
        self.setup.append(f"{of}.{name} = {first}")
        words = [f"getattr({of}, '{name}')", f"operator.attrgetter('{name}')({of})", f"getattr({of}, 'absent', {of}.{name})"]
        words += [] if of == "slots" else [f"vars({of})['{name}']"]
        words += [f"copy.copy({of}).{name}"] if of not in ("slots", "net") else []
        return Place(f"{of}.{name}", f"{of}.{name}", tuple(words))

    def _make_places(self) -> None:
        firsts = {
            "real": ("0.5", "1.5", "-0.25"), "whole": ("0", "1", "3"), "flag": ("True", "False"), "text": ("'relu'", "'tanh'"),
            "tensor": ("torch.ones(4, device=DEVICE)", "torch.zeros((), device=DEVICE)", "torch.ones(4, device=DEVICE)", "None",
                       "nn.Parameter(torch.ones(4, device=DEVICE))", "data(50)[0]"),
            "kept": ("[]", "[1.0]", "collections.deque(maxlen=3)", "[data(51)[0]]"),
            "tally": ("{}", "{'a': 0.5}", "{'a': data(52)[0]}", "collections.OrderedDict()", "collections.defaultdict(float)"),
        }  # fmt: skip
        for kind, values in firsts.items():
            self.places[kind] = [self._place(f"{kind}{i or ''}" if kind == "real" else kind, self.choose(values))
                                 for i in range(self.choose((1, 1, 2)) if kind == "real" else 1)]  # fmt: skip

    def at(self, kind: str) -> str:
        return self.choose(self.places[kind]).within

    def read(self, kind: str) -> str:
        place = self.choose(self.places[kind])
        return self.choose((place.within,) * 6 + place.words)

    # -- expressions

    def whole(self, depth: int = 1) -> str:
        if depth == 0 or self.choose((0, 0, 1)):
            return self.choose(
                (self.read("whole"), self.at("whole"), "1", "2", f"len({self.at('kept')})", f"len({self.at('tally')})")
            )
        a, b, c = self.whole(depth - 1), self.whole(depth - 1), self.condition(depth - 1)
        return self.choose((f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} // 3)", f"({a} % 3)", f"({a} & {b})",
                            f"({a} >> 1)", f"max({a}, {b})", f"abs({a})", f"({a} if {c} else {b})",
                            f"round({a} / 2)"))  # fmt: skip

    def real(self, depth: int = 1) -> str:
        if depth == 0 or self.choose((0, 0, 1)):
            return self.choose(
                (
                    self.read("real"),
                    self.read("real"),
                    self.at("real"),
                    "0.5",
                    "Box.shared",
                    "sum(dataclasses.astuple(fields))",
                    "asking.rate",
                    "box.size",
                    "box.worked_out",
                )
            )
        a, b, i, c = self.real(depth - 1), self.real(depth - 1), self.whole(depth - 1), self.condition(depth - 1)
        return self.choose((f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} / (1 + {i}))", f"({i} / 7)", f"(0.9 ** {i})",
                            f"({a} * {i})", f"min({a}, {b})", f"math.cos({a})", f"({a} if {c} else {b})",
                            f"round({a}, 1)", f"float('{{}}'.format({a}))", f"float(np.sqrt(abs({a})))"))  # fmt: skip

    def condition(self, depth: int = 1) -> str:
        i, x = self.whole(max(0, depth - 1)), self.real(max(0, depth - 1))
        return self.choose((self.read("flag"), f"{i} % 3 == 0", f"{i} < 4", f"{x} < 0.7", f"{self.read('text')} == 'relu'",
                            f"{i} in (1, 2, 5)", f"bool({self.at('kept')})", f"'a' in {self.at('tally')}",
                            f"not {self.at('flag')}",
                            f"{self.at('tensor')} is None"))  # fmt: skip

    # -- lines of a function; `h` has the shape (rows, 4)

    def computes(self) -> Lines:
        """With h, and with what is outside."""
        x, i, t = self.real(), self.whole(), self.at("tensor")
        return self.one_of(
            [f"h = h * {x}"], [f"h = h + {x}"], [f"h = torch.add(h, h.sin(), alpha={x})"], [f"h = h.roll({i}, 0)"],
            [f"h = h + {t}" if self.choose((0, 1)) else f"h = h + (0 if {t} is None else {t}.sum())"],
            [f"if {t} is not None:", f"    h = h * {t}"],
            [f"h = F.dropout(h, 0.25, training={self.condition()})"], ["h = h + torch.rand_like(h)"],
            ["h = h.clone().mul_(0.5)"],
            [f"h = getattr(torch, {self.read('text')})(h)"], [f"h = h.clamp(-2 - abs({x}), 2)"],
            [f"for _ in range({i} % 3):", "    h = h * 1.5"], ["h = torch.cat([h[:1], h[1:] * 2])"],
            ["h = h.t().contiguous().t()"],
            [f"h = h + sum({self.at('tally')}.values(), 0.0)"], [f"h = h + sum({self.at('kept')}, 0.0)"],
            [f"h = h * torch.tensor({x}, device=DEVICE)"], [f"h = h + torch.full((4,), {x}, device=DEVICE)"],
            ["h = h + x.mean()"], ["h = torch.where(h > 0, h, h * 0.1)"],
            ["h = h[torch.arange(len(h), device=DEVICE).flip(0)]"],
            [f"h = torch.utils.checkpoint.checkpoint(lambda a: torch.tanh(a) * {x}, h, use_reentrant=False)"],
            ["with torch.no_grad():", f"    h = h + h.mean(0) * {x}"],
            ["h = net(h)"] if self.name == "net" else  # a weight used twice within one is cast twice (docs/limits.md)
            ["with torch.autocast(DEVICE.type, torch.bfloat16):", "    h = net(h).float()"],
            ["h = net(h)"], ["try:", f"    h = h / {x}", "except ZeroDivisionError:", "    h = h + 3"],
            [f"h = pg.cond(h.sum() > 0, lambda a: a * {x}, lambda a: a - 1, h)"], ["h = noted(h)"], ["h = Twice.apply(h)"],
            ["h = F.scaled_dot_product_attention(h[None], h[None], h[None])[0]"],
            ["h = h + F.embedding(y, net[0].weight)[:, :4]"],
            ["h = torch.cat(h.split(2, 1)[::-1], 1)"], ["h = h.clone()", f"h[:, 0] = {x}"], ["h = h.clone()", "h[0].mul_(2)"],
            ["h = h.clone()", "h[y % len(h)] += 1"], ["h = h + h[h.detach().sum(1) > 0].sum()"],
            ["if h.detach().sum() > 0:", f"    h = h * {x}"],
            [f"h = h + h.detach().sum().item() * {x}"],
            ["h = torch.einsum('ij,ik->kj', h, h) * 0.125 + h.sum()", "h = h[: len(x)]"],
            ["h = h.sort(1).values"], ["h = h.cumsum(0)"], ["h = h + torch.func.grad(lambda a: a.sin().sum())(h.detach())"],
            ["h = h + torch.randn(h.shape, generator=gen, device=DEVICE)"],
            ["with torch.random.fork_rng():", "    h = h + torch.rand_like(h)"],
            ["h = torch.func.functional_call(net, {k: v * 0.5 for k, v in net.named_parameters()}, (h,))"],
            [f"h = sum([h * k for k in (0.5, {x})])"], ["h = h * cached(2)"], ["h = h * box.worked_out"], ["h = h * extra"],
            ["h = h + extra"],
            [f"with torch.set_grad_enabled({self.condition()}):", "    h = h * 2"],
            ["with contextlib.suppress(IndexError):", "    h = h[[7]]"],
            ["if h.requires_grad:", f"    h.register_hook(lambda g: g * {x})"],
            ["a = h.detach().requires_grad_()", "with torch.enable_grad():",
             "    h = h + torch.autograd.grad(a.sin().sum(), a)[0]"], [f"h = h * (lambda k={x}: k)()"],
             ["h = sum((h, *(w.mean() for w in net.parameters())))"],
            ["h = h + (1.0 if torch.is_grad_enabled() else 2.0)"], [f"h = functools.partial(torch.mul, {x})(h)"],
            ["h = h + len(held)"],
            ["h = h + (0 if seen.get('last') is None else seen['last'].sum())"], ["h = h + np.float32(0.1) * float(extra)"],
            ["h = h[: max(1, len(h) - 1)].repeat(2, 1)[: len(h)]"],
            ["h = box.scaled(h)"], [f"h = torch.linalg.vector_norm(h, {x} + 2.5) + h"], ["h = F.one_hot(y, 4).float() + h"],
            [f"h = h.masked_fill(h > {x}, 0.0)"],
            ["h = inner(h)"], ["h = Fails.apply(h)"], ["h = inner(inner(h))"],
            ["h = torch.utils.checkpoint.checkpoint(net, h, use_reentrant=False)"],
            [f"h = torch.utils.checkpoint.checkpoint(lambda a: F.dropout(a * {x}), h, use_reentrant=True)"],
            ["h = h.unsqueeze(0).expand(2, -1, -1).sum(0)"], ["h = h.double().cumsum(1).float()"],
            ["v = h.clone()", "w = v[:, :2]", "w += 1", "h = v"], ["h = h.clone()", "h.view(-1)[::2] *= 2"],
            ["v = h.reshape(-1)", "h = h + v.sum()"], ["h = h.index_add(0, y % len(h), h)"],
            ["h = h.scatter_add(1, y[:, None] % 4, h[:, :1])"], ["h = h + h.gather(1, y[:, None] % 4)"],
            ["h = h + h.topk(2, 1).values.sum()"], ["h = h + torch.bernoulli(h.detach().sigmoid())"],
            ["h = h + F.gumbel_softmax(h, dim=-1)"], ["h = h + torch.randperm(4, device=DEVICE)"],
            ["h = h + torch.multinomial(h.detach().softmax(-1), 1)"],
            ["h = h + nn.init.normal_(torch.empty(4, device=DEVICE))"],
            ["h = h * random.choice((0.5, 2.0))"], ["h = h + float(np.random.rand())"],
            ["with torch.inference_mode():", "    z = h.detach().sum()", "h = h + z.clone()"],
            ["gc.collect()"], ["cycle = [h]", "cycle.append(cycle)", "h = cycle[1][0] * 2"],
            [f"h = sum(h * k for k in (0.5, {x}))"], [f"h = h + torch.tensor([{x}, 1.0, 2.0, 3.0], device=DEVICE)"],
            ["h = h + nn.utils.parameters_to_vector(net.parameters()).sum()"], ["h = h * (1 + int(net.training))"],
            ["try:", "    h = h.reshape(7, -1)", "except RuntimeError:", f"    h = h * {x}", "finally:", "    log.append(0)"],
            [f"while (k := {i}) < 2 and len(log) % 2:", "    h, k = h + k, 2", "    log.append(k)"],
            ["if held and isinstance(held[-1], torch.Tensor):", "    h = h + held[-1].detach().sum()"],
            [f"vars(box)['deep'] = {{'b': {x}}}", "h = h * vars(box)['deep']['b']"], ["h = h + in_thread(h.detach().sum)"],
            ["h = h * torch.ones_like(h, memory_format=torch.contiguous_format).cumprod(0)"],
            ["a, b = h.chunk(2, 1)", "h = torch.cat([a * b, b.mul(2)], 1)"], ["h = h + F.layer_norm(h, (4,))"],
            ["h = h @ net[0].weight"] if self.name == "net" else
            ["with torch.autocast(DEVICE.type, torch.bfloat16):", "    h = (h @ net[0].weight).float() + net(h).float()"],
            [f"h = torch.where(torch.rand(h.shape, device=DEVICE) < 0.5, h, {x} * h)"],
            ["if isinstance(bag, dict):", "    h = h + sum(v.sum() for v in bag.values() if isinstance(v, torch.Tensor))"],
            ["if isinstance(bag, list):", "    h = h * len(bag) + bag[0].sum()"],
            ["if isinstance(bag, Box):", "    h = h * bag.size"],
        )  # fmt: skip

    def leaves(self, *, plainly: bool = False) -> Lines:
        """Something in a place; but `plainly`, by a condition."""
        i, x, n, r, t = self.whole(), self.real(), self.at("whole"), self.at("real"), self.at("tensor")
        kept, table = self.at("kept"), self.at("tally")
        return self.one_of(
            [f"{n} = {n} + 1"], [f"{n} += 1"], [f"{n} += 2"], [f"{n} = {i} % 7"], [f"{r} = 0.5 * {r} + 0.01 * ({x})"],
            [f"{r} *= 0.9"],
            [f"{r} = 0.9 ** {n}"], [f"{self.at('flag')} = not {self.at('flag')}"],
            [f"{self.at('flag')} = bool({self.condition()})"],
            [f"{self.at('text')} = 'tanh' if {self.condition()} else 'relu'"],
            [f"{t} = h.detach().mean(0)"], [f"{t} = h.detach()[0]"], [f"{t} = h.sum(0)"], [f"{t} = h.detach().sum()"],
            [f"if {t} is not None:", "    with torch.no_grad():", f"        {t}.mul_(0.5).add_({x})"],
            [f"if {t} is not None:", f"    {t} = {t} + 1"], [f"if {t} is not None:", f"    {t}.data = {t}.data * 0.5"],
            [f"if {t} is not None and {t}.dim():", f"    {t}.detach().copy_(h.detach().mean(0))"], [f"{t} = None"],
            [f"{kept}.append(h.detach().sum())"], [f"{kept}.append({x})"], [f"{kept}.append({t})"],
            [f"{kept}.append(h.detach()[0])"],
            [f"if len({kept}) > 2:", f"    {kept}.pop()"], [f"{kept}.clear()"], [f"{kept}.append(float(h.detach().sum()))"],
            [f"{table}['a'] = h.detach().mean()"], [f"{table}['a'] = {x}"], [f"{table}['a'] = {table}.get('a', 0.0) + 0.5"],
            [f"{table}.setdefault('b', 0.5)"], [f"{table}.update(b=h.detach().mean(0))"], [f"{table}.pop('a', None)"],
            ["pass"] if plainly else [f"if {self.condition()}:", *_deeper(self.leaves(plainly=True)), "else:",
            *_deeper(self.computes())],
            [f"if {n} % 3 == 0:", "    log.append(h.detach().sum().item())"],
            [f"if {n} % 4 == 3:", f"    print(n_of({n}), file=out_file)"],
            [f"if {n} > 6 and {n} % 5 == 0:", "    raise ValueError('drawn')"], ["held.append(h)"],
            ["seen['last'] = h.detach()"], ["seen['last'] = h"],
            ["for p in net.parameters():", "    if p.grad is not None:", f"        p.grad.mul_({x})"],
            ["for p in net.parameters():", "    if p.grad is not None:", "        p.grad = p.grad * 0.5"],
            ["with torch.no_grad():", "    torch._foreach_mul_(list(net.parameters()), 0.9)"],
            ["with torch.no_grad():", "    net[0].weight.mul_(0.9)"],
            ["seen['ema'] = {k: v * 0.5 + seen.get('ema', {}).get(k, 0.0) for k, v in net.state_dict().items()}"],
            ["setattr(box, 'tensor', h.detach()[0])"],
            ["box.inner = Box()"],
            ["box.inner = SimpleNamespace(real=0.5, whole=1, flag=True, text='relu', tensor=h.detach()[0], kept=[], tally={})"],
            ["seen['pair'] = (seen.get('pair', (0, 0))[1], h.detach().mean())"],
            ["if hasattr(box, 'brief'):", "    del box.brief", "else:", "    box.brief = h.detach()"],
            ["torch.manual_seed(7)"], ["h = h * random.random()"], ["counted.append(len(counted))"],
            ["seen['lists'] = [*seen.get('lists', []), h.detach().sum()][-3:]"],
            [f"seen.setdefault('by', {{}})[{self.read('text')}] = h.detach().sum()"], ["x.mul_(0.5)"], ["x[0] = 1.0"],
            [f"seen['most'] = max(seen.get('most', 0.0), {x})"],
            ["box.worked_out = 0.25"], ["seen['has'] = [p.grad is not None for p in net.parameters()]"],
            ["held[-1:] = [h.detach()]"], ["counted[:] = [len(counted) + 1]"],
            ["net[0].extra_number = getattr(net[0], 'extra_number', 0) + 1"],
            ["seen['best'] = torch.minimum(seen['best'], h.detach().sum()) if 'best' in seen else h.detach().sum()"],
            ["seen['rate'] = opt.param_groups[0]['lr']"],
            ["opt.param_groups[0]['lr'] *= 0.9"], [f"opt.param_groups[0]['lr'] = 0.05 * {x}"],
            ["seen['now'] = schedule.get_last_lr()"],
            [f"if {n} % 5 == 4:", f"    reset(globals()['{self.name}'])"], ["ema[0].weight.grad = net[0].weight.grad"],
            ["if net[0].weight.grad is not None:", "    net[0].weight.grad.data = net[0].weight.grad.data * 0.5"],
            ["seen['grad'] = net[0].weight.grad"], ["held.append(net[0].weight.grad)"], ["held.append(x)"],
            ["held.append(h.detach().reshape(-1)[:2])"], ["held.append(h[:, 0])"], ["net.train(not net.training)"],
            ["if h.detach().sum() > 9:", "    raise ValueError('large')"], ["opt.zero_grad()"],
            [f"if {n} % 6 == 5:", "    opt.state.clear()"], [f"opt.param_groups[0]['weight_decay'] = {x}"],
            ["x.data = x.data * 0.5"], ["x.add_(1)", "y.add_(1)"], ["net.register_buffer('more', h.detach().mean(0))"],
            ["net.more = h.detach().sum()"], [f"if {n} % 3 == 2:", "    seen.clear()"],
            ["log.append(loss.item()) if 'loss' in locals() else log.append(None)"],
            ["seen['views'] = h.detach().t(), h.detach()[1:]"], ["seen['rng'] = torch.get_rng_state()"],
            ["torch.manual_seed(counted.append(0) or len(counted))"],
            ["net.requires_grad_(True)"], ["seen['last'] = seen.get('last')"], ["gen.manual_seed(5)"],
            [f"box.flagged = {self.condition()}"], ["if getattr(box, 'flagged', False):", "    log.append(1)"],
            ["globals()['out_file'] = io.StringIO()"], [f"fields.other = {x}"], ["rows[-1]['made'] = h.detach().sum()"],
            ["seen['deep'] = {'a': [h.detach().sum(), {'b': h.detach()[0]}]}"],
            ["seen.setdefault('many', collections.deque(maxlen=2)).append(h.detach())"],
            ["with torch.no_grad():", "    for p in net.parameters():", "        p.clamp_(-1, 1)"],
            ["with torch.no_grad():", "    net[0].weight[0] = 0.5"], ["schedule.last_epoch += 1"],
            ["if isinstance(bag, dict):", "    bag['b'] = h.detach().sum()"],
            ["if isinstance(bag, dict):", "    bag.pop('a', None)"],
            ["if isinstance(bag, list):", "    bag.append(h.detach()[0])"],
            ["if isinstance(bag, list):", "    bag[0].mul_(0.5)"],
            ["if isinstance(bag, dict):", f"    bag['n'] = {i}"],
            ["if isinstance(bag, Box):", "    bag.size = h.detach().mean()"],
        )  # fmt: skip

    def some(self, *kinds: Callable[[], Lines], upto: int = 3) -> Lines:
        return [line for _ in range(self.choose(range(upto))) for line in self.choose(kinds)()]

    # -- models, losses, optimizers

    def model(self) -> Lines:
        layers = (
            "nn.Linear(4, 4)", "nn.Linear(4, 4)", "nn.BatchNorm1d(4)", "nn.LayerNorm(4)", "nn.Dropout(0.25)", "nn.Tanh()",
            "nn.ReLU(inplace=True)", "nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))", "Scale()",
            "nn.BatchNorm1d(4, momentum=None)", "nn.BatchNorm1d(4, track_running_stats=False)", "nn.GroupNorm(2, 4)",
            "nn.Hardtanh()", "Attends()", "nn.Sequential(nn.Dropout(0.5), Scale())",
            "nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
            "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))", "nn.Sequential(*[nn.Linear(4, 4)] * 2)",
        )  # fmt: skip
        chosen = [self.choose(layers) for _ in range(self.choose((1, 2, 3)))]
        return [f"net = nn.Sequential(nn.Linear(4, 4), {', '.join(chosen)}).to(DEVICE)"]

    def hooks(self) -> Lines:
        return self.choose((
            ["net[0].weight.register_hook(lambda g: g * 0.5)"], ["net[0].register_forward_hook(lambda m, a, y: y * 1.5)"],
            ["net[0].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])"],
            ["net.register_forward_pre_hook(lambda m, a: (a[0] + 0.125,))"],
            ["net[0].register_full_backward_hook(lambda m, g, o: tuple(None if a is None else a * 2 for a in g))"],
            ["net[-1].register_forward_hook(lambda m, a, y: seen.__setitem__('last', y.detach()))"],
            ["net[0].register_forward_hook(lambda m, a, y: counted.append(len(counted)))"],
            ["net[0].bias.requires_grad_(False)"], ["net[0].tied = net[0].weight"], ["net[-1].tied = net[0]"],
            ["net.register_full_backward_pre_hook(lambda m, g: tuple(a * 0.5 for a in g))"],
            ["net[0].weight.register_hook(lambda g: log.append(0))"],
            ["opt_hook = lambda o, a, k: counted.append(len(counted))"],
        ))  # fmt: skip

    def loss(self) -> str:
        return self.choose((
            "h.square().mean()", "F.cross_entropy(h, y)", "F.smooth_l1_loss(h, x)", "F.mse_loss(h, x)", "h.tanh().sum()",
            "F.binary_cross_entropy_with_logits(h, x.sigmoid())", "(h * torch.rand_like(h)).mean()",
            "F.kl_div(h.log_softmax(-1), x.softmax(-1), reduction='batchmean')", "F.nll_loss(h.log_softmax(-1), y)",
            f"h.square().mean() * {self.real()}",
        ))  # fmt: skip

    def optimizer(self) -> Lines:
        (kind,) = self.one_of(*([kind] for kind in (
            "SGD({}, 0.05)", "SGD({}, 0.05, momentum=0.9)", "SGD({}, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
            "Adam({}, 0.01)", "AdamW({}, 0.01)", "AdamW({}, 0.01, fused=True)", "AdamW({}, 0.01, foreach=True)",
            "Adam({}, 0.01, amsgrad=True, foreach=False)", "SGD({}, 0.05, momentum=0.5, fused=True)", "RMSprop({}, 0.01)",
            "Adagrad({}, 0.05)", "NAdam({}, 0.01)", "RAdam({}, 0.01)", "Adamax({}, 0.01)", "Adadelta({}, 0.5)",
            "Rprop({}, 0.01)", "AdamW({}, torch.tensor(0.01), foreach=False)", "Adam({}, 0.01, foreach=True)",
            "SGD({}, 0.05, momentum=0.9, foreach=True, maximize=True)", "Adam({}, 0.01, fused=True, weight_decay=0.1)",
            "ASGD({}, 0.01)", "Adagrad({}, 0.05, fused=True)",
        )))  # fmt: skip
        groups = self.choose(("net.parameters()", "net.parameters()",
                              "[dict(params=[p]) for p in net.parameters()]",
                              "[dict(params=[net[0].weight], lr=0.02), dict(params=[*net.parameters()][1:])]"))  # fmt: skip
        scheduler = self.choose((
            "ExponentialLR(opt, 0.9)", "StepLR(opt, 3, 0.5)", "CosineAnnealingLR(opt, 10)",
            "LambdaLR(opt, lambda e: 1 / (1 + e))",
            "OneCycleLR(opt, 0.1, total_steps=60, cycle_momentum=False)", "LinearLR(opt, 0.1, total_iters=5)",
            "CyclicLR(opt, 0.01, 0.1, 3, cycle_momentum=False)", "MultiStepLR(opt, [2, 6, 9])", "PolynomialLR(opt, 12)",
            "SequentialLR(opt, [torch.optim.lr_scheduler.ConstantLR(opt), torch.optim.lr_scheduler.StepLR(opt, 2)], [4])",
            "CosineAnnealingWarmRestarts(opt, 4)",
        ))  # fmt: skip
        return [f"opt = torch.optim.{kind.format(groups)}", f"schedule = torch.optim.lr_scheduler.{scheduler}"]

    # -- functions

    def step(self) -> Lines:
        """A step of training."""
        n = self.at("whole")
        every = self.choose((0, 0, 0, 2, 3))
        zero = self.choose(("opt.zero_grad()", "opt.zero_grad()", "opt.zero_grad(set_to_none=False)", "pass"))
        scaled = self.choose(range(6)) == 5
        ends = [
            *self.maybe(3, ["nn.utils.clip_grad_norm_(net.parameters(), 0.5)"]),
            *self.choose(SCALED_STEPS if scaled else STEPS),
            *self.maybe(4, ["schedule.step()"]),
            *self.maybe(
                5,
                [
                    "with torch.no_grad():",
                    "    for a, b in zip(net.parameters(), ema.parameters()):",
                    "        b.lerp_(a, 0.25)",
                ],
            ),
            zero,
        ]
        if every:
            ends = [f"{n} += 1", f"if {n} % {every} == 0:", *_deeper(ends)]
        ends = self.choose((ends, ends, ends, [zero, *ends]))
        return [
            "h = x", *self.maybe(4, [zero]), *self.some(self.leaves), "h = net(x)",
            *self.some(self.computes, self.leaves, upto=4),
            f"loss = {self.loss()}", *self.choose(SCALED_BACKWARDS if scaled else BACKWARDS),
            *self.some(self.leaves), *ends, *self.some(self.leaves), f"return {self.result('loss.detach()')}",
        ]  # fmt: skip

    def learns(self) -> Lines:
        """A step of training but for the update."""
        return ["h = net(x)", *self.some(self.computes, self.leaves), f"loss = {self.loss()}", "loss.backward()",
        *self.some(self.leaves),
                f"return {self.result('loss.detach()')}"]  # fmt: skip

    def updates(self) -> Lines:
        """The update."""
        return [
            "h = x",
            *self.some(self.leaves, lambda: ["nn.utils.clip_grad_norm_(net.parameters(), 0.5)"]),
            "opt.step()",
            "opt.zero_grad()",
        ]

    def around(self) -> Lines:
        """A step of training around a recorded model, in the loop."""
        zero = self.choose(("opt.zero_grad()", "opt.zero_grad(set_to_none=False)", "if n % 2:\n            opt.zero_grad()"))
        step = self.choose(("opt.step()", "opt_step()", "if n % 3:\n            opt.step()"))
        calls = self.choose(
            (
                ["h = net(x)"],
                ["h = net(x)", "h = net(h)"],
                ["h = net(x)", "g = net(x * 0.5)", "h = h + g"],
                ["h = net(x)", "held.append(h)"],
            )
        )
        return [
            zero,
            *calls,
            *self.some(self.computes, upto=2),
            f"loss = {self.loss()}",
            "loss.backward()",
            *self.some(self.leaves, upto=2),
            step,
            "out = loss.detach()",
        ]

    def answer(self) -> Lines:
        """Without a backward."""
        mode = self.choose(("with torch.no_grad():", "with torch.inference_mode():", "if True:", "with torch.no_grad():"))
        first = self.choose(("h = net(x)", "h = x * 1", "h = x"))
        body = [first, *self.some(self.computes, self.leaves, self.computes, upto=6)]
        return [mode, *_deeper(body), f"return {self.result('h')}"]

    def result(self, value: str) -> str:
        n, x = self.at("whole"), self.read("real")
        return self.choose((
            value, value, f"{value}, h.detach()", f"{{'value': {value}, 'n': {n}}}", f"{value}, {x}",
            f"[{value}, h.detach()[0]]", "h",
            f"{value}, x", "None", f"{value}, {self.at('tensor')}", f"{value}, net[0].weight",
            f"h.detach().reshape(-1), {value}",
            f"{value}, {self.at('kept')}", "net[0].weight.grad", f"{value}, {self.condition()}",
        ))  # fmt: skip

    def define(self, name: str, body: Lines) -> Lines:
        options = self.choose(("", "", "", ", warmup=0", ", warmup=2", ", max_recordings=2", ", max_recordings=1", ", verify=3",
                               ", audit=2", ", audit=3, warmup=0"))  # fmt: skip
        known = [f"global {', '.join(self.globals)}"] if self.globals else []
        if self.style == "method":
            self.methods += [f"def {name}(self, x, y, extra=1.0, bag=None):", *_deeper([*known, *body])]
            return [f"{name} = record(trainer.{name}{options})"]
        if self.style == "closure":
            known += [f"nonlocal {', '.join(self.nonlocals)}"] if self.nonlocals else []
            made = [*self.cells, f"def {name}(x, y, extra=1.0, bag=None):", *_deeper([*known, *body]), f"return {name}"]
            return [f"def make_{name}():", *_deeper(made), f"{name} = record(make_{name}(){options})"]
        return [f"def {name}(x, y, extra=1.0, bag=None):", *_deeper([*known, *body]), f"{name} = record({name}{options})"]

    # -- the loop

    def between(self, names: Sequence[str]) -> Lines:
        """What happens before or after a call."""
        name = self.choose(names)
        real, whole, tensor = (self.choose(self.places[k]).outside for k in ("real", "whole", "tensor"))
        kept, table, flag = (self.choose(self.places[k]).outside for k in ("kept", "tally", "flag"))
        mine: list[Lines] = [[f"{real} = {real} + 0.25"], [f"{real} = 1"]] if real else []
        mine += [[f"{whole} = n % 3"], [f"{whole} += 5"], [f"{whole} = {whole} + 0.0"]] if whole else []
        mine += [[f"{tensor} = data(n)[0]"], [f"{tensor} = torch.ones(4, device=DEVICE)"], [f"{tensor} = None"],
                 [f"{tensor}.data = {tensor}.data.clone()"], [f"held.append({tensor})"]] if tensor else []  # fmt: skip
        mine += [[f"{kept}.append(1.0)"], [f"{kept} = []"], [f"{kept}.clear()"], [f"{kept} = {kept}[:]"]] if kept else []
        mine += [[f"{table}['a'] = 0.25"], [f"{table} = dict({table})"], [f"{table}['b'] = data(n)[0]"]] if table else []
        mine += [[f"{flag} = not {flag}"]] if flag else []
        others: list[Lines] = [
            [f"reset({name})"], ["gc.collect()"], ["held.append(out)"], ["held.clear()"], ["out = None"],
            ["torch.manual_seed(n)"],
            ["torch.rand(2)"], ["net.eval()"], ["net.train()"], ["opt.param_groups[0]['lr'] *= 0.5"], ["schedule.step()"],
            ["net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})"],
            ["net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()}, assign=True)"],
            ["saved = copy.deepcopy(net.state_dict())"], ["net.load_state_dict(saved)"],
            ["opt.load_state_dict(copy.deepcopy(opt.state_dict()))"],
            ["net[0].weight.data = net[0].weight.data * 0.5"], ["with torch.no_grad():", "    net[0].weight.mul_(0.5)"],
            ["net[0].weight.requires_grad_(not net[0].weight.requires_grad)"], ["held.append(net[0].weight.grad)"],
            ["net[0].weight.grad = None"], ["for p in net.parameters():", "    p.grad = None"], ["opt.zero_grad()"],
            ["net[0] = copy.deepcopy(net[0])"], ["other = copy.deepcopy(net)"],
            ["net[0].weight = nn.Parameter(net[0].weight.detach() * 0.5)"],
            ["opt = torch.optim.SGD(net.parameters(), 0.05)"], ["schedule.load_state_dict(schedule.state_dict())"],
            ["with torch.no_grad():", "    held[-1].mul_(2)"], ["held[:] = held[-2:]"], ["x = x.t().contiguous().t()"],
            ["x = torch.cat([x, x])[: len(x)]"],
            ["x.requires_grad_()"], ["torch.set_default_dtype(torch.float64 if n % 2 else torch.float32)"],
            ["opt.param_groups[0]['weight_decay'] = 0.01 * n"],
            ["Box.shared += 0.25"], ["box.size += 0.25"], ["asking.inner.rate += 0.5"], ["asking.rate = 2.0"],
            ["vars(box)['size'] = 0.25 * n"], ["box = type(box)()"], ["gen.manual_seed(n)"], ["cached.cache_clear()"],
            ["seen.clear()"], ["seen['last'] = out"], ["x.grad = None"],
            ["net = copy.deepcopy(net)"], ["box = copy.copy(box)"], ["held.append(copy.deepcopy(opt.state_dict()))"],
            ["Box.scaled = lambda self, h: h + 1"],
            ["for g in opt.param_groups:", "    g['lr'] = 0.1 / (1 + n)"], ["counted.clear()"],
            ["torch.use_deterministic_algorithms(n % 2 == 0)"], ["rows.append({})"], ["box.inner = Box()"],
            ["vars(box)['more'] = n"], ["fields.other = n"],
            ["random.random()"], ["np.random.rand()"], ["net.register_forward_hook(lambda m, a, y: y + 0.5)"],
            ["net[0].weight.grad.mul_(2)"],
            ["net.to(torch.float64).to(torch.float32)"], ["held.append(net[0].weight)"], ["x = held[-1]"], ["log.clear()"],
            ["handles.append(net[0].register_forward_hook(lambda m, a, y: y * 1.5))"],
            ["handles.append(net[0].weight.register_hook(lambda g: g * 2))"], ["if handles:", "    handles.pop().remove()"],
            ["x = x[:, [3, 2, 1, 0]]"], ["x = torch.cat([x, x], 1)[:, ::2]"], ["x = x[:1].expand(len(x), 4)"],
            ["x = F.pad(x, (0, 1))[:, :4]"], ["x = F.pad(x, (1, 0))[:, 1:]"], ["x = nn.Parameter(x)"],
            ["with torch.inference_mode():", "    x = x + 0"], ["x = x.to(torch.bfloat16).to(torch.float32)"],
            ["net.to(torch.float64 if n < 8 else torch.float32)", "x = x.to(net[0].weight.dtype)"],
            ["torch.set_float32_matmul_precision('high' if n % 2 else 'highest')"],
            ["if isinstance(out, torch.Tensor):", "    held.append(out.reshape(-1)[:1])"],
            ["if isinstance(out, torch.Tensor):", "    held.append(out.t())"],
            ["if isinstance(out, torch.Tensor):", "    out.detach().add_(1)"],
            ["if isinstance(out, torch.Tensor) and out.requires_grad:", "    out.sum().backward()"],
            ["in_thread(gc.collect)"], ["net.load_state_dict(ema.state_dict())"], ["ema.load_state_dict(net.state_dict())"],
            ["ema[0].weight.grad = net[0].weight.grad"], ["net[0].weight.grad = ema[0].weight.detach()"],
            ["box = copy.deepcopy(box)"], ["vars(net[0]).pop('extra_number', None)"],
            ["net.append(nn.Linear(4, 4).to(DEVICE))"],
            ["net[0], net[1] = net[1], net[0]"], ["net.requires_grad_(n % 2 == 0)"], ["opt.state.clear()"],
            ["opt.add_param_group({'params': [nn.Parameter(torch.ones(2, device=DEVICE))]})"],
            ["seen['rng'] = torch.get_rng_state()"], ["if 'rng' in seen:", "    torch.set_rng_state(seen['rng'])"],
            ["random.seed(n)"], [f"{name}(x)"], [f"look({name})"], [f"out = [{name}(x, y), {name}(x * 0.5, y)]"],
            [f"held.append({name}(x, y))"], ["held[:] = [copy.deepcopy(h) for h in held[-2:] if getattr(h, 'is_leaf', True)]"],
            ["torch.save(net.state_dict(), io.BytesIO())"], ["net = pickle.loads(pickle.dumps(net))"],
            ["net.zero_grad()"], ["net.half().float()"], ["scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)"],
            ["cycle = [out]", "cycle.append(cycle)", "del cycle"], ["net[0].weight.data.mul_(0.5)"],
            ["with torch.no_grad():", "    nn.utils.vector_to_parameters(torch.linspace(-1, 1, count(net)), net.parameters())"],
            [f"other, {name} = {name}, {name}"], ["box.inner, asking.inner = asking.inner, box.inner"],
        ]  # fmt: skip
        lines = self.choose(self.choose((mine or others, others, others)))
        when = self.choose(("", "if n % 4 == 3:", "if n == 6:", "if n == 8:", "if n in (5, 9):", "if n > 7:"))
        return [when, *_deeper(lines)] if when else lines

    def call(self, name: str) -> Lines:
        more = self.choose(
            (
                "",
                "",
                "",
                "",
                ", extra=0.1 * n",
                ", n % 2",
                ", extra=data(n)[0]",
                ", 0.5 if n < 6 else 0.25",
                ", extra=1 + n // 4",
                ", extra=x[0]",
                ", extra=net[0].weight[0]",
                ", extra=np.float32(0.5)",
                ", extra=torch.tensor(0.5)",
                ", *[0.5]",
                ", **{'extra': n > 5}",
                ", extra=x",
                ", extra=net[0].bias.detach()",
                ", bag={'a': x.clone()}",
                *[", bag=bag"] * 4,
                ", bag=[x.clone(), y]",
                ", bag=copy.copy(box)",
            )
        )
        line = self.choose(
            (f"out = {name}(x, y{more})",) * 8
            + (
                f"out = in_thread({name}, x, y{more})",
                f"out = {name}(y=y, x=x)",
                f"out = {name}(*(x, y))",
                f"out = in_thread({name}, x, y{more}) if n % 3 else {name}(x, y{more})",
            )
        )
        around = self.choose(("",) * 8 + ("with torch.autocast(DEVICE.type, torch.bfloat16):", "if n % 3:",
        "for _ in range(2):")
                             + (("with torch.no_grad():",
                             "with torch.inference_mode():") if name.startswith("answer") else ()))  # fmt: skip
        return [around, *_deeper([line])] if around else [line]

    def program(self) -> Program:
        kinds = self.choose(
            (
                ("step",),
                ("step",),
                ("step",),
                ("answer",),
                ("step", "answer"),
                ("answer", "answer"),
                ("learns", "updates"),
                (),
                ("step", "step"),
                ("answer", "step"),
                ("learns", "learns", "updates"),
            )
        )
        self.style = self.style if kinds else "function"
        self._make_places()
        names = [f"{kind}{i or ''}" for i, kind in enumerate(kinds)]
        defined = [line for name, kind in zip(names, kinds, strict=True) for line in self._function(name, kind)]
        trainer = ["class Trainer:", *_deeper(self.methods), "trainer = Trainer()"] if self.style == "method" else []
        model = [
            *self.model(),
            *self.maybe(3, self.hooks()),
            "ema = copy.deepcopy(net)",
            *self.optimizer(),
            "scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3)",
        ]
        bag = self.choose(
            ("", "", "", "bag = {'a': x[0].clone()}", "bag = [x.clone(), n % 2]", "bag = [data(n)] if n % 2 else {'c': x}")
        )
        body = ["x, y = data(n, ROWS), classes(n, ROWS)".replace("ROWS", self.rows), *filter(None, [bag])]
        for name in names:
            body += [*self.maybe(3, self.between(names)), *self.call(name)]
        if not names:
            opt_step = self.choose(("opt_step = record(opt.step)", "opt_step = opt.step"))
            defined = ["net = record(net)", opt_step, "extra, bag = 1.0, None"]
            body += self.around()
        body += self.maybe(2, self.between(names or ["net"]))
        turns = self.choose((10, 12, 14))
        collected = self.maybe(8, [f"gc.set_threshold({self.choose((30, 200))}, 2, 2)"])  # at any moment
        loop = [*collected, f"for n in range({turns}):", *_deeper(["with told():", *_deeper(body)])]
        text = "\n".join([MADE.strip(), KNOWN.strip(), *model, *trainer, *self.setup, *defined, *loop])
        return Program(text + "\n", self.options())

    def _function(self, name: str, kind: str) -> Lines:
        self.name = name
        return self.define(name, getattr(self, kind)())

    def options(self) -> tuple[tuple[str, Any], ...]:
        fallback = self.choose(("live", "live", "live", "split", "auto"))
        pays = self.choose(("always", "always", "always", "pays"))
        return (("fallback", fallback), ("keep", pays))


KNOWN = """
held, log, seen, counted, out, out_file, saved, handles = [], [], {}, [], None, io.StringIO(), {}, []
gen, bag = torch.Generator(DEVICE).manual_seed(3), {}

def n_of(n):
    return n

@functools.cache
def cached(n):
    return n + Box.shared

@pg.live
def noted(h):
    log.append(float(h.detach().sum()))
    return h

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h.cos())
        return h.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 1

    @staticmethod
    def backward(ctx, g):
        if len(held) % 5 == 4:
            raise ValueError("in a backward")
        return g * 2

@record
def inner(h):
    return (h * box.size).tanh() + h

def count(net):
    return sum(p.numel() for p in net.parameters())

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.25, batch_first=True)

    def forward(self, h):
        return self.attention(h[None], h[None], h[None], need_weights=False)[0][0] + h

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by, self.weight = 0.75, nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, h):
        return h * self.weight * self.by
"""


def _deeper(lines: Lines) -> Lines:
    return [f"    {line}" for line in lines or ["pass"]]
