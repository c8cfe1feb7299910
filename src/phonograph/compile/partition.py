"""A graph of Dynamo's in parts: what may be recorded, and what has to run live between.

Rules decide for each node: first what the user says is recorded (`record=`), then what he says runs live (`live=`), then what
is known: operators whose result, or its shape, depends on the values in tensors; all that works with such a shape, for as long
as it does; operators that torch says no CUDA graph may have; tensors on the host, where the others are on a GPU.

The nodes are then put in an order with few changes between both kinds. They may change places where neither needs the other,
and where nobody could tell: what draws random numbers stays in its order, and nothing passes by what writes. Each part is a
graph of its own, with a backward of its own, as if Dynamo's graph had ended there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import TorchDispatchMode

from .. import operators
from ..errors import Refusal
from ..torch_private import depends_on_data, fake_mode_of, unbacked
from ..watch import storage_id

__all__ = ["Part", "Rule", "checked", "parts"]

Rule: TypeAlias = str | OpOverload | OpOverloadPacket | Callable[[Node], bool]
"""An operator (its name has ``::``), the name of a module (with ``*`` for any), or a function of a node of the graph."""

_GRAD_MODE = "_set_grad_enabled"
_MODES = ("_enter_autocast", "_exit_autocast", _GRAD_MODE)  # `split_module` repeats autocast's in each part
_HOST = "works with a tensor on the host"
_UNSAFE: Any = getattr(torch.Tag, "cudagraph_unsafe", None)


def checked(option: str, rules: Any) -> tuple[Rule, ...]:
    """Rules as the user gives them.

    Raises:
        TypeError: one of them is nothing of the kind.
    """
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise TypeError(f"{option} takes a list of operators, names of modules, and functions of a node")
    for rule in rules:
        if not (isinstance(rule, str) or callable(rule)):
            raise TypeError(f"{option} takes operators, names of modules, and functions of a node, not {rule!r}")
    return tuple(rules)


@dataclass
class Part:
    """Some nodes that come one after the other, as a graph of its own. `inputs` are fake tensors, and numbers."""

    graph: GraphModule
    inputs: list[Any]
    live: bool
    reasons: list[str]
    single: bool  # it gives one value, and its graph a tuple of that

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What the other parts call, where `function` stands for the graph."""
        return (lambda *args: function(*args)[0]) if self.single else function


def parts(gm: GraphModule, live: Sequence[Rule], record: Sequence[Rule]) -> tuple[GraphModule, dict[str, Part]] | None:
    """The graph with a call of a submodule for each part, and those; None if all of it may be recorded.

    Raises:
        Refusal: some of it may not, and it cannot be cut there.
    """
    if not (live or any(map(_suspicious, gm.graph.nodes))):
        return None
    facts = _Facts.of(gm)
    why = {node: reason for node in gm.graph.nodes if node.op.startswith("call_")
           and (reason := _why_live(node, facts, live, record))}  # fmt: skip
    if not why:
        return None
    if not facts.whole:
        raise Refusal(f"cannot be split where {_list(why)[0]}: it changes a mode of torch's", "leave the mode as it is")
    _together(gm, why)
    order = min((_ordered(gm, why, facts, first) for first in (False, True)), key=len)
    number = {node: i for i, (_, nodes) in enumerate(order) for node in nodes}
    if _shared(gm, number, facts):
        raise Refusal(f"cannot be split where {_list(why)[0]}: parts would share a tensor that one of them writes",
                      "write a clone of it")  # fmt: skip
    end = next(node for node in gm.graph.nodes if node.op == "output")
    for node in number:
        end.prepend(node)
    values = {node.name: node.meta.get("example_value") for node in gm.graph.nodes}
    split = split_module(gm, gm, lambda node: number[node], keep_original_order=True)
    found = {}
    for i, (is_live, nodes) in enumerate(order):
        name = f"submod_{i}"
        reasons = _list({node: why[node] for node in nodes if node in why})
        found[name] = _part(split.get_submodule(name), values, is_live, reasons)  # type: ignore[arg-type]
    return split, found


def _part(graph: GraphModule, values: dict[str, Any], live: bool, reasons: list[str]) -> Part:
    output = next(node for node in graph.graph.nodes if node.op == "output")
    single = not isinstance(output.args[0], (tuple, list))
    if single:
        output.args = ((output.args[0],),)
        graph.recompile()
    inputs = [_as_input(values[node.name]) for node in graph.graph.nodes if node.op == "placeholder"]
    return Part(graph, inputs, live, reasons, single)


def _as_input(value: Any) -> Any:
    """A fake value as the compiler of a part is given it: where it was made is another part's business."""
    if not isinstance(value, torch.Tensor) or value.is_leaf:
        return value
    with fake_mode_of(value) or nullcontext():
        return value.detach().requires_grad_(value.requires_grad)


def _suspicious(node: Node) -> bool:
    """Whether a node may be none to record, going by what Dynamo has noted."""
    target = node.target
    overloads = [getattr(target, name) for name in target.overloads()] if isinstance(target, OpOverloadPacket) else [target]
    return depends_on_data(node.meta.get("example_value")) or any(map(_is_unsafe, overloads))


def _is_unsafe(operator: Any) -> bool:
    return isinstance(operator, OpOverload) and _UNSAFE is not None and _UNSAFE in operator.tags


# -- what nodes do


@dataclass
class _Seen:
    """What the operators of one node do."""

    names: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    random: bool = False
    alone: bool = False
    """Nothing may pass by it."""
    written: set[int] = field(default_factory=set)
    """Storages, as what follows."""
    gives: set[int] = field(default_factory=set)


class _Looking(TorchDispatchMode):
    """Notes the operators of the node that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = _Seen()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        meaning, now = operators.meaning(func), self.now
        if meaning.name.startswith("prim::"):  # what fake tensors ask of themselves
            return func(*args, **kwargs)
        now.names.add(meaning.name)
        if meaning.refusable and not any(map(depends_on_data, operators.operands(args, kwargs))):
            try:
                operators.check(meaning, args, kwargs)
            except Refusal as refusal:
                now.reasons.append(refusal.reason)
        if _is_unsafe(func):
            now.reasons.append(f"{meaning.name} is tagged cudagraph_unsafe")
        now.random = now.random or meaning.random
        now.written |= set(map(storage_id, operators.written_by(meaning, args, kwargs)))
        return func(*args, **kwargs)


class _Facts(Interpreter):
    """What the nodes of a graph do: they run, with fake tensors."""

    def __init__(self, gm: GraphModule, mode: Any) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._known: set[int] = set()
        self.seen: dict[Node, _Seen] = {}
        self.whole = False
        self.mode = mode
        self._looking = _Looking()

    @classmethod
    def of(cls, gm: GraphModule) -> _Facts:
        """What can be known. Not much where a node does what no cut may come between: it changes a mode of torch's."""
        values = [node.meta.get("example_value") for node in gm.graph.nodes]
        mode = next((mode for mode in map(fake_mode_of, values) if mode is not None), None)
        facts = cls(gm, mode)
        if mode is None or any(map(_keeps_a_state, gm.graph.nodes)):
            facts.seen = {node: _Seen() for node in gm.graph.nodes}
            return facts
        with mode, unbacked(mode), facts._looking, torch.no_grad():
            facts.run(*[node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"])
        facts.whole = True
        return facts

    def run_node(self, n: Node) -> Any:
        self._looking.now = self.seen[n] = _Seen()
        if n.op == "call_function" and getattr(n.target, "__name__", "") in _MODES:
            self.seen[n].alone = True
            return None
        result, seen = super().run_node(n), self.seen[n]
        seen.written &= self._known  # and not what it makes for itself
        seen.alone = bool(seen.written)
        seen.gives = {storage_id(t) for t in _tensors(result)}
        self._known |= seen.gives
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return self.mode.from_tensor(found) if isinstance(found, torch.Tensor) else found


def _keeps_a_state(node: Node) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") in _MODES or node.users:
        return False
    return node.meta.get("example_value") is None and not isinstance(node.target, (OpOverload, OpOverloadPacket))


# -- rules


def _why_live(node: Node, facts: _Facts, live: Sequence[Rule], record: Sequence[Rule]) -> str:
    """Why a node is not recorded; empty if it is."""
    seen = facts.seen[node]
    if any(_meant(rule, node, seen) for rule in record):
        return ""
    for rule in live:
        if _meant(rule, node, seen):
            name = rule if isinstance(rule, str) else getattr(rule, "__name__", str(rule))
            return f"runs live, as live={name!r} says"
    values = [node.meta.get("example_value"), *(n.meta.get("example_value") for n in node.all_input_nodes)]
    if seen.reasons:
        return seen.reasons[0]
    if any(map(depends_on_data, values)):
        return "works with a shape that depends on data"
    tensors = [x for value in values for x in _tensors(value)]
    if any(t.is_cpu and t.dim() for t in tensors) and any(t.is_cuda for t in map(_tensor, facts.seen) if t is not None):
        return _HOST
    return ""


def _tensor(node: Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [t for x in value for t in _tensors(x)]
    return [value] if isinstance(value, torch.Tensor) else []


def _meant(rule: Rule, node: Node, seen: _Seen) -> bool:
    if isinstance(rule, OpOverload):
        return rule._schema.name in seen.names and (not isinstance(node.target, OpOverload) or node.target is rule)
    if isinstance(rule, OpOverloadPacket):
        return rule._qualified_op_name in seen.names
    if not isinstance(rule, str):
        return bool(rule(node))
    if "::" in rule:
        name = rule.split(".", 1)[0]
        return name in seen.names or name == f"aten::{getattr(node.target, '__name__', node.target)}"
    return any(fnmatchcase(path, rule) for path in _modules(node))


def _modules(node: Node) -> list[str]:
    """The modules that a node belongs to, the outermost first: their names in the model."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    plain = [re.sub(r"(?:\._modules)?\['?(\w+)'?\]", r".\1", path) for path in paths]
    return [path.split(".", 2)[2] if path.count(".") > 1 else "" for path in plain]


def _said(node: Node) -> str:
    """A node, and the line of the user's that it is."""
    lines = re.findall(r'File "(.+?)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    where = f" at {lines[-1][0]}:{lines[-1][1]}" if lines else ""
    return f"{getattr(node.target, '__name__', node.target)}{where}"


def _list(why: dict[Node, str]) -> list[str]:
    firsts = {reason: node for node, reason in reversed(why.items())}
    return [f"{_said(node)}: {reason}" for reason, node in reversed(firsts.items())]


def _shared(gm: GraphModule, number: dict[Node, int], facts: _Facts) -> bool:
    """Whether a tensor that the graph makes and writes, or a view of something that it writes, goes from one part to another:
    what its autograd graph becomes there is not for a part to say."""
    written = {storage for node in number for storage in facts.seen[node].written}
    inputs = [node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    given = [storage for node in inputs for storage in facts.seen[node].gives if storage in written]
    crossing = [node for node in number if any(number.get(user) != number[node] for user in node.users)]
    return len(set(given)) < len(given) or any(not written.isdisjoint(facts.seen[node].gives) for node in crossing)


# -- the order


def _together(gm: GraphModule, why: dict[Node, str]) -> None:
    """What takes a result apart goes with what gave it; and a block in another grad mode is of one kind."""
    for block in _blocks(gm):
        reason = next((why[node] for node in block if node in why), "")
        for node in block if reason else ():
            why.setdefault(node, reason)
    for node in gm.graph.nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        several = source is not None and isinstance(source.meta.get("example_value"), (tuple, list))
        if several and getattr(node.target, "__name__", "") == "getitem":
            why.pop(node, None)
            if source in why:
                why[node] = why[source]


def _blocks(gm: GraphModule) -> Iterator[list[Node]]:
    """The nodes of each block in another grad mode than the graph begins in, with those that begin and end it."""
    block: list[Node] = []
    outer: object = None
    for node in gm.graph.nodes:
        sets = node.op == "call_function" and getattr(node.target, "__name__", "") == _GRAD_MODE
        if sets and not block:
            outer = not node.args[0]
        if sets or block:
            block.append(node)
        if sets and node.args[0] is outer:
            yield block
            block = []
    yield [node for node in block if node.op.startswith("call_")]


def _ordered(gm: GraphModule, why: dict[Node, str], facts: _Facts, live_first: bool) -> list[tuple[bool, list[Node]]]:
    """Parts, each with whether it runs live: as many nodes as are ready of one kind, then of the other."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    needs = _needs(nodes, facts)
    done: set[Node] = set()
    order: list[tuple[bool, list[Node]]] = []
    live = live_first
    while len(done) < len(nodes):
        taken = []
        for node in nodes:  # in their order, so that one look is enough
            if node not in done and (node in why) is live and needs[node] <= done:
                taken.append(node)
                done.add(node)
        if taken:
            order.append((live, taken))
        live = not live
    return order


def _needs(nodes: list[Node], facts: _Facts) -> dict[Node, set[Node]]:
    """For each node those that have to come before."""
    known, needs = set(nodes), dict[Node, set[Node]]()
    barrier: Node | None = None
    random: Node | None = None
    since: list[Node] = []
    for node in nodes:
        needs[node] = {n for n in node.all_input_nodes if n in known}
        needs[node] |= {n for n in (barrier,) if n is not None}
        if facts.seen[node].random:
            needs[node] |= {n for n in (random,) if n is not None}
            random = node
        if facts.seen[node].alone:
            needs[node] |= set(since)
            barrier, since = node, []
        since.append(node)
    return needs
