"""Partition of a Dynamo graph into parts that are recorded and parts that run live.

Rules decide for each node, in this order: `record=` and `live=` of the user; then operators whose result or shape depends on
the values in tensors, and operators that work with such a shape; operators that torch tags as unsafe for CUDA graphs; tensors
on the host, if others are on a GPU.

Nodes are then ordered so that the kind changes seldom. Two nodes may swap if neither needs the other and nobody could tell:
random draws keep their order, and nothing moves past a write. Each part is a graph with a backward of its own, as if Dynamo's
graph had ended there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.split_module import split_module

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.dynamo import depends_on_data, fake_mode_of, unbacked
from .._torch.modes import TorchDispatchMode
from .._torch.operators import OpOverload, OpOverloadPacket
from .._torch.tensors import storage_id
from ..aten import operators
from ..errors import Refusal
from ..values.wording import operator as written

__all__ = ["Part", "Rule", "checked", "parts"]

Rule: TypeAlias = str | OpOverload | OpOverloadPacket | Callable[[Node], bool]
"""An operator (its name has ``::``), the name of a module (with ``*`` for any), or a function of a node of the graph."""

_GRAD_MODE = "_set_grad_enabled"
_MODES = ("_enter_autocast", "_exit_autocast", _GRAD_MODE)  # `split_module` repeats autocast's in each part
_HOST = "works with a tensor on the host"
_UNSAFE: object = getattr(torch.Tag, "cudagraph_unsafe", None)


def checked(option: str, rules: object) -> tuple[Rule, ...]:
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
    inputs: list[object]
    live: bool
    reasons: list[str]
    single: bool  # it gives one value, and its graph a tuple of that

    def called(self, function: Callable[..., Thing]) -> Callable[..., object]:
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
    why = {node: reason for node in facts.seen if node.op.startswith("call_")
           and (reason := _why_live(node, facts, live, record))}  # fmt: skip
    if not why:
        return None
    if facts.unclear:
        raise Refusal(f"cannot be split where {_list(why)[0]}: {facts.unclear}", "do that outside of what is compiled")
    _together(gm, why)
    if not why:  # the rules named nothing but what goes with something else
        return None
    order = min((_ordered(gm, why, facts, first) for first in (False, True)), key=len)
    number = {node: i for i, (_, nodes) in enumerate(order) for node in nodes}
    if _shared(gm, number, facts):
        raise Refusal(f"cannot be split where {_list(why)[0]}: parts would share a tensor that one of them writes",
                      "write a clone of it")  # fmt: skip
    if _saved(gm, number, facts):
        raise Refusal(f"cannot be split where {_list(why)[0]}: a part writes what another may have saved for its backward",
                      "write it outside of what is compiled")  # fmt: skip
    values = {node.name: node.meta.get("example_value") for node in gm.graph.nodes}
    split = _cut(gm, number, why)
    found = {}
    for i, (is_live, nodes) in enumerate(order):
        name = f"submod_{i}"
        reasons = _list({node: why[node] for node in nodes if node in why})
        found[name] = _part(split.get_submodule(name), values, is_live, reasons)  # type: ignore[arg-type]
    return split, found


def _cut(gm: GraphModule, number: dict[Node, int], why: dict[Node, str]) -> GraphModule:
    """The graph in parts. That may fail: where a size that depends on data gets its name in a later part, for instance."""
    before = [node for node in gm.graph.nodes if node in number]
    try:
        _reorder(gm, number)
        return split_module(gm, gm, lambda node: number[node], keep_original_order=True)
    except Exception as error:
        _reorder(gm, before)
        raise Refusal(f"cannot be split where {_list(why)[0]}: {_in_words(error)}", "name other nodes") from error


def _reorder(gm: GraphModule, nodes: Iterable[Node]) -> None:
    end = next(node for node in gm.graph.nodes if node.op == "output")
    for node in nodes:
        end.prepend(node)


def _in_words(error: Exception) -> str:
    return f'"{str(error).strip().partition(chr(10))[0] or type(error).__name__}"'


def _part(graph: GraphModule, values: dict[str, object], live: bool, reasons: list[str]) -> Part:
    output = next(node for node in graph.graph.nodes if node.op == "output")
    single = not isinstance(output.args[0], (tuple, list))
    if single:
        output.args = ((output.args[0],),)
        graph.recompile()
    inputs = [_as_input(values[node.name]) for node in graph.graph.nodes if node.op == "placeholder"]
    return Part(graph, inputs, live, reasons, single)


def _as_input(value: Thing) -> object:
    """A fake value as the compiler of a part is given it: where it was made is another part's business."""
    if not isinstance(value, torch.Tensor) or value.is_leaf:
        return value
    with fake_mode_of(value) or nullcontext():
        return value.detach().requires_grad_(value.requires_grad)


def _suspicious(node: Node) -> bool:
    """Whether a node may be none to record, going by what Dynamo has noted."""
    return depends_on_data(node.meta.get("example_value")) or any(map(_is_unsafe, _operators(node)))


def _operators(node: Node) -> list[OpOverload]:
    """The operators that a node may be, if it names one itself."""
    target = node.target
    named = [getattr(target, name) for name in target.overloads()] if isinstance(target, OpOverloadPacket) else [target]
    return [operator for operator in named if isinstance(operator, OpOverload)]


def _is_unsafe(operator: OpOverload) -> bool:
    return _UNSAFE is not None and _UNSAFE in operator.tags


# -- what nodes do


@dataclass
class _Seen:
    """What the operators of one node do."""

    names: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    random: bool = False
    """It draws random numbers; or it may, or may have a state: an operator that is not torch's own."""
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

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        kwargs = kwargs or {}
        meaning, now = operators.meaning(func), self.now
        if meaning.name.startswith("prim::"):  # what fake tensors ask of themselves
            return func(*args, **kwargs)
        now.names.add(meaning.name)
        if meaning.refusable and not any(map(depends_on_data, operators.operands(args, kwargs))):
            try:
                operators.check(meaning, args, kwargs, lambda name: f"`{written(name)}`")
            except Refusal as refusal:
                now.reasons.append(refusal.reason)
        if _is_unsafe(func):
            now.reasons.append(f"{meaning.name} is tagged cudagraph_unsafe")
        now.random = now.random or meaning.random or not meaning.compiled
        now.written |= set(map(storage_id, operators.written_by(meaning, args, kwargs)))
        return func(*args, **kwargs)


class _Facts(Interpreter):
    """What the nodes of a graph do: they run, with fake tensors."""

    def __init__(self, gm: GraphModule, mode: Thing) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._known: set[int] = set()
        self.seen: dict[Node, _Seen] = {}
        self.unclear = ""  # why the nodes may not change places, nor be cut apart
        self.mode = mode
        self._looking = _Looking()

    @classmethod
    def of(cls, gm: GraphModule) -> _Facts:
        """What can be known. Not much where a node does what no cut may come between: it changes a mode of torch's."""
        values = [node.meta.get("example_value") for node in gm.graph.nodes]
        mode = next((mode for mode in map(fake_mode_of, values) if mode is not None), None)
        facts = cls(gm, mode)
        if mode is None or any(fake_mode_of(t) is None for value in values for t in _tensors(value)):
            facts._give_up("tensors of other kinds than torch's own, whose memory nobody sees")
        elif any(map(_keeps_a_state, gm.graph.nodes)):
            facts._give_up("it changes a mode of torch's")
        else:
            facts._look()
        return facts

    def _look(self) -> None:
        given = [node.meta["example_value"] for node in self.graph.nodes if node.op == "placeholder"]
        try:
            with self.mode, unbacked(self.mode), self._looking, torch.no_grad():
                self.run(*given)
        except Exception as error:  # operators of a higher order, for instance, of which not all can be looked into
            self._give_up(f"what it does cannot be told ({_in_words(error)})")

    def _give_up(self, why: str) -> None:
        """Know only which operators the graph names, and those in it."""
        self.unclear = why
        graphs = [module.graph for module in self.module.modules() if isinstance(module, GraphModule)]
        for node in [node for graph in graphs for node in graph.nodes]:
            self.seen[node] = _Seen(names={operator._schema.name for operator in _operators(node)})

    def run_node(self, n: Node) -> object:
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

    def get_attr(self, target: Any, args: Args, kwargs: Kwargs) -> object:
        found = super().get_attr(target, args, kwargs)
        return self.mode.from_tensor(found) if isinstance(found, torch.Tensor) else found


def _keeps_a_state(node: Node) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") in (*_MODES, "setitem") or node.users:
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
    if facts.unclear and any(map(_is_unsafe, _operators(node))):
        return "is tagged cudagraph_unsafe"
    if any(map(depends_on_data, values)):
        return "works with a shape that depends on data"
    tensors = [x for value in values for x in _tensors(value)]
    if any(t.is_cpu and t.dim() for t in tensors) and any(t.is_cuda for t in map(_tensor, facts.seen) if t is not None):
        return _HOST
    return ""


def _tensor(node: Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _tensors(value: object) -> list[torch.Tensor]:
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


def _saved(gm: GraphModule, number: dict[Node, int], facts: _Facts) -> bool:
    """Whether an argument or a buffer that a part writes was read before by another part, which has gradients: what its
    compiler saves for them may be that tensor, where eager would save another."""
    seen = facts.seen
    last = {storage: number[node] for node in sorted(number, key=number.__getitem__) for storage in seen[node].written}
    made = [(node, t) for node in number for t in _tensors(node.meta.get("example_value"))]
    with_gradients = {number[node] for node, t in made if t.requires_grad}
    inputs = [node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    read = [(user, storage) for node in inputs for user in node.users if user in number for storage in seen[node].gives]
    return any(number[user] in with_gradients and number[user] < last.get(storage, -1) and storage not in seen[user].written
               for user, storage in read)  # fmt: skip


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
