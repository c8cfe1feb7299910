"""Print the reasons for which a call runs live, each with its code, what to do, and a line that gives it.

Without a code, all of them, as a page of the documentation.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import phonograph
from phonograph.cli.console import CannotRun
from phonograph.reasons import DIFFERS, Reason, code_of, reasons

HELP = "what the reasons to run live mean, by their codes"
SOURCE = Path(phonograph.__file__).parent

_BESIDES = {"NoSignature": 0, "Effect": 0, "Failure": 1, "refusal": 1, "Diverged": 1}
"""What makes a refusal besides its classes, or not as these, and at which argument its reason stands; next is the remedy."""
_PARTS = {
    "Failure": f"{DIFFERS} {{}}", "Diverged": f"{DIFFERS} {{}}",
    "refusal": f"communicates with other ranks ({DIFFERS}){{}}",
}  # fmt: skip
"""What of a reason these are given."""
_DEPTH = 6  # names that stand for names
_MANY = 4  # remedies, of which only the general one is shown
_FIRST = ("PG101", "PG103", "PG301", "PG401", "PG501", "PG502", "PG509", "PG1401")
"""Those that programs meet on their first day."""
_HEAD = """# Reasons to run live

<!-- Written by `python -m phonograph reasons` from the places in the source where they are raised: do not edit. -->

A call that cannot be recorded runs live, with the right result, and `RunsLive`, `pg.stats(f).refusals` and `pg.explain(f)` say
why. A warning ends with the code of its reason, and `phonograph reasons PG101` prints what stands here. All reasons of a script
are found in one run by `phonograph check train.py` ([Check before you record](check.md)).

An ellipsis stands for what differs: an expression of yours, a name, a number. *As in* is a line from a program of the tests
that is told this. Where no remedy is given, do it outside of what is recorded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", help="one of them, as PG101")


def run(arguments: argparse.Namespace) -> int:
    if arguments.code is None:
        print(page(), end="")
        return 0
    for reason in reasons():
        if reason.code == arguments.code.upper():
            print(_entry(reason, remedies().get(reason.code, ())))
            return 0
    raise CannotRun(f"no reason has the code {arguments.code}")


def _entry(reason: Reason, advice: Iterable[str]) -> str:
    lines = [f"{reason.code}: {reason.words}", *(f"  {remedy}" for remedy in advice)]
    return "\n".join([*lines, *([f"  as in: {reason.example}"] if reason.example else [])])


def page() -> str:
    """The page of the documentation, in Markdown."""
    advice, lines, subject = remedies(), [_HEAD.rstrip(), *_commonest()], ""
    for reason in reasons():
        if reason.subject != subject:
            subject = reason.subject
            lines += ["", f"## {subject}"]
        lines += ["", *_item(reason, advice.get(reason.code, ()))]
    return "\n".join(lines) + "\n"


def _commonest() -> list[str]:
    words = {reason.code: reason.words for reason in reasons()}
    return ["", "The commonest:", "", *(f"- [{code}](#{code.lower()}) {words[code]}" for code in _FIRST)]


def _item(reason: Reason, advice: Sequence[str]) -> Iterator[str]:
    """A paragraph for each of these: a table would be too wide for a narrow screen."""
    yield f'<a id="{reason.code.lower()}"></a>**{reason.code}** {reason.words}'
    if advice:
        yield f"<br>*Do:* {'; or: '.join(advice)}"
    if reason.example:
        yield f"<br>*As in:* `` {reason.example} ``"


def remedies() -> dict[str, tuple[str, ...]]:
    """What to do, by codes, as the places say that raise them."""
    found: dict[str, dict[str, None]] = {}
    for raised in raised_in(SOURCE):
        for words in raised.reasons:
            found.setdefault(code_of(words), {}).update(dict.fromkeys(r for r in raised.remedies if r.strip(f"{DIFFERS}; ")))
    return {code: tuple(texts)[-1:] if len(texts) > _MANY else tuple(texts) for code, texts in found.items()}


# -- the source


class Raised(NamedTuple):
    """A place that makes a refusal: all texts that its reason, and its remedy, may be. ``…`` is what only a call knows."""

    reasons: Sequence[str]
    remedies: Sequence[str]
    where: str


def raised_in(folder: Path) -> Iterator[Raised]:
    """All places in the files there, but for those that only pass on what was said elsewhere."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    kinds = dict.fromkeys(_derived("Refusal", trees.values()), 0) | _BESIDES
    everywhere = _Names()
    for tree in trees.values():
        everywhere.add(_constants(tree))
    usual = _defaults("remedy", trees.values())
    for path, tree in trees.items():
        for call, names in _calls(tree, _Names(everywhere).add(_constants(tree))):
            if isinstance(call.func, ast.Name) and call.func.id in kinds:
                made = call.func.id
                reason, remedy = _arguments(call, kinds[made], names)
                said = [_PARTS.get(made, "{}").format(text) for text in names.texts(reason)]
                if any(text.strip(f"{DIFFERS} ") for text in said):
                    yield Raised([text for text in said if text.strip(f"{DIFFERS} ")], names.texts(remedy or usual.get(made)),
                                 f"{path.relative_to(folder)}:{call.lineno}")  # fmt: skip


def _derived(base: str, trees: Iterable[ast.Module]) -> set[str]:
    classes = [x for tree in trees for x in ast.walk(tree) if isinstance(x, ast.ClassDef)]
    found, before = {base}, 0
    while len(found) > before:
        before = len(found)
        found |= {x.name for x in classes if any(isinstance(b, ast.Name) and b.id in found for b in x.bases)}
    return found


def _defaults(name: str, trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """What a field or parameter of this name is where it is not given, by class or function."""
    found = dict[str, ast.expr]()
    for x in (x for tree in trees for x in tree.body):
        pairs: Iterable[tuple[str, ast.expr | None]] = ()
        if isinstance(x, ast.ClassDef):
            pairs = [(ast.unparse(y.target), y.value) for y in x.body if isinstance(y, ast.AnnAssign)]
        elif isinstance(x, ast.FunctionDef):
            pairs = zip((y.arg for y in reversed(x.args.args)), reversed(x.args.defaults), strict=False)
        for one, value in pairs:
            if one == name and value is not None:
                found[getattr(x, "name", "")] = value
    return found


def _constants(tree: ast.Module) -> list[ast.stmt]:
    """The constants of a file and of its classes."""
    statements = [*tree.body, *(x for one in tree.body if isinstance(one, ast.ClassDef) for x in one.body)]
    return [x for x in statements if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]).isupper()]


def _arguments(call: ast.Call, at: int, names: _Names) -> tuple[ast.expr | None, ast.expr | None]:
    """The reason and the remedy, as expressions."""
    given = [x for arg in call.args for x in (names.parts(arg.value) if isinstance(arg, ast.Starred) else [arg])]
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    reason, remedy = [*given[at : at + 2], None, None][:2]
    return reason or named.get("reason"), remedy or named.get("remedy")


def _calls(tree: ast.AST, names: _Names) -> Iterator[tuple[ast.Call, _Names]]:
    """The calls in a part of a file, with the names that there are."""
    for x in ast.iter_child_nodes(tree):
        if isinstance(x, ast.Call):
            yield x, names
        inner = _Names(names).add(ast.walk(x)) if isinstance(x, ast.FunctionDef) else names
        yield from _calls(x, inner)


@dataclass
class _Names:
    """What stands for a text in a file or function: by name, all expressions that are assigned."""

    outer: _Names | None = None
    values: dict[str, list[ast.expr]] = field(default_factory=dict)

    def add(self, statements: Iterable[ast.AST]) -> _Names:
        for x in statements:
            if isinstance(x, ast.Assign):
                for target in x.targets:
                    self._assign(target, x.value)
            elif isinstance(x, ast.AnnAssign) and x.value is not None:
                self._assign(x.target, x.value)
        return self

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple):
            for one, part in zip(target.elts, self.parts(value), strict=False):
                self._assign(one, part)

    def of(self, name: str) -> list[ast.expr]:
        return self.values.get(name) or (self.outer.of(name) if self.outer is not None else [])

    def parts(self, value: ast.expr) -> list[ast.expr]:
        """Of a tuple, or of what stands for one."""
        if isinstance(value, ast.Name) and len(known := self.of(value.id)) == 1:
            value = known[0]
        if isinstance(value, ast.BoolOp):  # the last resort
            return self.parts(value.values[-1])
        return value.elts if isinstance(value, ast.Tuple) else value.args if isinstance(value, ast.Call) else []

    def texts(self, value: ast.expr | None, depth: int = _DEPTH) -> list[str]:
        """All that an expression may be."""
        return list(dict.fromkeys(self._texts(value, depth)))

    def _texts(self, value: ast.expr | None, depth: int) -> Iterator[str]:
        inner: list[ast.expr] = []
        match value:
            case ast.Constant(value=str(text)):
                yield text.replace("{}", DIFFERS)
            case _ if not depth:
                yield DIFFERS
            case ast.JoinedStr(values=parts):
                yield from map("".join, product(*(self.texts(part, depth - 1) for part in parts)))
            case ast.FormattedValue(value=ast.Name() as name):
                texts = self.texts(name, depth - 1)
                yield from texts if all(len(text) > len(DIFFERS) for text in texts) else [DIFFERS]
            case ast.BinOp(left=left, right=right, op=ast.Add()):
                yield from map("".join, product(self.texts(left, depth - 1), self.texts(right, depth - 1)))
            case ast.IfExp(body=body, orelse=orelse):
                inner = [body, orelse]
            case ast.BoolOp(values=values) | ast.Dict(values=values):
                inner = values
            case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_, otherwise]):
                inner = [table, otherwise]
            case ast.Call(func=ast.Name(id="next"), args=[_, otherwise]):
                inner = [otherwise]
            case ast.Name(id=name) if known := self.of(name):
                inner = known
            case ast.Attribute(attr=name) if name.isupper() and (known := self.of(name)):
                inner = known
            case None:
                pass
            case _:
                yield DIFFERS
        for one in inner:
            yield from self.texts(one, depth - 1)
