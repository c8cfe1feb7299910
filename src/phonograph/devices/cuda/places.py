"""Which memory the nodes of a captured graph read and write.

Nobody tells. But two know a part of it each, and what neither knows counts as read and written:

* The operator that has launched a node. Its schema says which arguments it writes; where these lie, its tensors say. All that
  is allocated while it runs may be written, whatever it is for.
* The driver, which has what the node is given. A kernel gets at memory by addresses, and those are among its parameters: each
  word that lies in a block which the operator does not account for stands for the whole block.

So a node may touch anything of which the driver does not tell what it is given, or that no operator has launched (compiled
code does that). The same goes for operators that are not torch's own, whose schema nobody has looked at, and for those that
keep something elsewhere: a table of addresses, a state in a library's handle.

Kernels of libraries (cuBLAS, cuDNN) may share more than their words tell: a workspace, counters by which blocks wait for each
other. They stay in the order in which they were captured, all of them (`LIBRARIES`), but for those of `_PRODUCTS`: of these it
was measured.

The copies at the two ends are given other addresses before each launch, of which nothing can be known here. They come before
and after everything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..._torch import cuda as torch_cuda
from ..._torch.dynamic import Args, Kwargs
from ..._torch.modes import without_modes
from ..._torch.operators import OpOverload
from ..._torch.tensors import has_memory
from ...aten.operators import Meaning, meaning, operands, tensors_in, written_by
from ...memory.pool import extent, memory_of
from ...memory.spans import Spans
from ..order import Block, Node, hidden
from .allocator import Hold

__all__ = ["LIBRARIES", "Blocks", "Given", "Notebook", "Noted", "lies", "lifetimes", "note", "placed"]

Range = tuple[int, int]
"""An address, and how many bytes."""

LIBRARIES = hidden(1)
"""What stands for all that kernels of libraries may share."""
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"))
# Whose kernels touch no more than what the operator is given and gives, and blocks that their words lie in. So it was found on
# an H200 with torch 2.11 (CUDA 13.0), for 231 products of TF32, bfloat16 and float64, of shapes that come to 88 different
# kernels, or rows of them: all that was allocated was filled with one pattern and then another, and the 23 that left it changed
# (split-K in cuBLAS's workspace or cuBLASLt's) had words there, each time. A kernel of which the driver does not tell the words
# is not known.
_TORCHS_OWN = (b"2at6native", b"2at4cuda", b"3cub", b"6thrust", b"13pytorch_flash")  # in kernels' names
# They have tables of addresses in memory, or state in a handle: those of linear algebra, and recurrent networks.
_ELSEWHERE = ("linalg", "::lu_", "_lu_", "cholesky", "triangular", "ormqr", "orgqr", "geqrf", "svd", "lstsq", "rnn", "lstm",
              "gru", "miopen", "sparse", "grouped_mm", "fft", "ctc_loss")  # fmt: skip
_NOWHERE_ELSE = ("linalg_vector_norm", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell")  # which are kernels of torch's own


class Noted(NamedTuple):
    """An operator of the call."""

    name: str
    begins: int
    ends: int
    """Which nodes it has launched: those of these numbers, without the last."""
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    allocated: tuple[int, int] = (0, 0)
    """Likewise, of the allocations of the process."""
    made: tuple[int, ...] = ()
    """The addresses of results that have memory of their own."""
    known: bool = True
    """Whether all that it touches is told by what it is given and allocates."""


class Given(NamedTuple):
    """A node of a graph, as the driver tells of it."""

    words: Sequence[int] | None
    """All that may be an address; None if that is not known."""
    kernel: bytes = b""
    end: bool = False
    """Whether it is a copy at one of the two ends."""


def note(m: Meaning, args: Args, kwargs: Kwargs, out: object, begins: int, ends: int, allocated: tuple[int, int]) -> Noted:
    """What an operator has touched, which has just been called so."""
    made = [t for t in tensors_in((out,), []) if has_memory(t)]
    given = [t for t in operands(args, kwargs) if has_memory(t)]
    writes = [lies(t) for t in written_by(m, args, kwargs) if has_memory(t)]
    old = {memory_of(t)[0] for t in given}
    # A result of its own may be a part of what it has written, and one on an argument's memory is a view.
    writes += [memory_of(t) if memory_of(t)[0] not in old else lies(t) for t in made]
    new = tuple(memory_of(t)[0] for t in made if memory_of(t)[0] not in old)
    known = m.compiled and not _keeps(m.name)
    return Noted(m.name, begins, ends, tuple(map(lies, given)), tuple(writes), allocated, new, known)


def lies(t: torch.Tensor) -> Range:
    """From the first to the last byte of a tensor."""
    return t.data_ptr(), extent(t) * t.element_size()


def _keeps(name: str) -> bool:
    """Whether an operator of this name may keep something elsewhere."""
    return any(part in name for part in _ELSEWHERE) and not any(part in name for part in _NOWHERE_ELSE)


class Notebook:
    """The operators of one capture, and memory that is used once.

    If memory was given to another as soon as it is free, as allocators do, one would have to wait for the other for this alone.
    So each result is said to be used by another stream as well: the allocator gives nothing away that is, until the capture is
    over. Where that takes too much, the largest may be used again: what works on these fills a GPU alone, and gains least by
    company. If that is too much as well, all may, and who comes later waits."""

    def __init__(self, device: int, captured: Callable[[], int], beside: torch.cuda.Stream, largest: float) -> None:
        """`captured` are the nodes so far, `beside` is another stream than that of the capture, and `largest` are the bytes of
        a result beyond which its memory may be used again."""
        self._noted: list[Noted] = []
        self._device, self._captured, self._beside, self._largest = device, captured, beside, largest
        self._ended = 0
        self._taken = Taken(device)

    def begin(self) -> Begun:
        """An operator is going to be called."""
        return Begun(self._captured(), *_allocated(self._device), len(self._noted))

    def end(self, func: object, args: Args, kwargs: Kwargs, out: object, begun: Begun) -> None:
        """It has been called."""
        count, nbytes = _allocated(self._device)
        nodes, allocated = (begun.nodes, self._captured()), (begun.allocations, count)
        if not isinstance(func, OpOverload):
            self._noted.append(Noted(str(func), *nodes, allocated=allocated, known=False))
            return
        alone = len(self._noted) == begun.noted  # it does not consist of others
        self._noted.append(noted := note(meaning(func), args, kwargs, out, *nodes, allocated))
        made = {memory_of(t)[0]: t for t in tensors_in((out,), []) if t.is_cuda and has_memory(t)} if noted.made else {}
        made = {at: t for at, t in made.items() if at in noted.made}
        with without_modes():
            for t in made.values():
                if memory_of(t)[1] <= self._largest:
                    t.record_stream(self._beside)
        if self._largest and alone and count - begun.allocations == len(made) + 1:  # there was one more, which is free again
            self._taken.take(nbytes - begun.nbytes - sum(memory_of(t)[1] for t in made.values()))

    def noted(self, allocated: Sequence[Range]) -> list[Noted] | None:
        """The operators, with allocations by their numbers among these, which were the last when it was closed; None where what
        they have made does not lie there."""
        first = self._ended - len(allocated)
        numbered = [one._replace(allocated=(one.allocated[0] - first, one.allocated[1] - first)) for one in self._noted]
        for one in numbered:
            begin, end = one.allocated
            if begin < 0 or not {*one.made} <= {at for at, _ in allocated[begin:end]}:
                return None
        return numbered

    def release(self) -> None:
        """The capture is over, or given up."""
        self._taken.release()

    def close(self) -> None:
        """Nothing more is allocated by the capture. What it has let go of is free for others."""
        self._ended, _ = _allocated(self._device)
        torch_cuda.raw_free(torch_cuda.raw_alloc(1, 0))  # the allocator looks whenever somebody asks for memory


class Begun(NamedTuple):
    """What there was when an operator began."""

    nodes: int
    allocations: int
    """In the process."""
    nbytes: int
    """That were asked for in these."""
    noted: int
    """How many operators."""


def _allocated(device: int) -> tuple[int, int]:
    """How many allocations there were in the process, and the bytes that were asked for."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    return found["allocation"]["all"]["allocated"], found["requested_bytes"]["all"]["allocated"]


class Taken:
    """Temporary memory of the last operators, which others cannot have in the meantime.

    An operator gives it back before it returns, and the next one would get the same: a matrix product for its workspace, say.
    They would wait for each other, though each of them is content with any. So what has just become free is taken, and given
    back when there is more than so much; whoever works at the same time has others."""

    def __init__(self, device: int) -> None:
        self._device, self._held = device, Hold()
        self._row: list[Range] = []

    def take(self, nbytes: int) -> None:
        if 0 < nbytes <= _TAKEN // 2:
            self._row.append((self._held.take(nbytes, torch_cuda.raw_stream(self._device)), nbytes))
        while sum(n for _, n in self._row) > _TAKEN:
            self._held.drop(self._row.pop(0)[0])

    def release(self) -> None:
        self._row.clear()
        self._held.release()


_TAKEN = 8 << 20  # bytes: eight workspaces of cuBLASLt's


class Blocks:
    """Blocks of memory, each of which is taken as a whole. Where several have the same bytes, they count as one."""

    def __init__(self, known: Iterable[Range], ask: Callable[[int], Range | None]) -> None:
        """`ask` tells of an address elsewhere."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, nbytes in sorted({block for block in known if block[1] > 0}):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], start + nbytes)
            else:
                self._starts.append(start)
                self._ends.append(start + nbytes)
        self._ask, self._asked = ask, dict[int, Range | None]()

    def at(self, word: int) -> Range | None:
        """The block in which an address lies; None if it is none."""
        i = bisect_right(self._starts, word) - 1
        if i >= 0 and word < self._ends[i]:
            return self._starts[i], self._ends[i] - self._starts[i]
        if word not in self._asked:
            self._asked[word] = self._ask(word) if word >= _LEAST else None
        return self._asked[word]


_LEAST = 1 << 20  # an address is not less


def placed(nodes: Sequence[Given], noted: Sequence[Noted], allocated: Sequence[Range], blocks: Blocks) -> list[Node]:
    """Nodes of a graph, by the memory that they touch."""
    operators = _operator_of(len(nodes), noted)
    found, now = dict[int, Node](), _Now(allocated)
    for number in sorted(range(len(nodes)), key=lambda i: _begins(operators[i])):
        now.until(_begins(operators[number]))
        found[number] = _node(number, nodes[number], operators[number], now, blocks)
    return [found[number] for number in range(len(nodes))]


def _begins(operator: Noted | None) -> int:
    return operator.allocated[0] if operator is not None else 0


def _operator_of(count: int, noted: Sequence[Noted]) -> list[Noted | None]:
    """The operator that has launched each node: of those that consist of others, the innermost."""
    owner: list[Noted | None] = [None] * count
    for operator in sorted(noted, key=lambda one: one.begins - one.ends):  # the largest first
        for number in range(operator.begins, operator.ends):
            owner[number] = operator
    return owner


def _node(number: int, given: Given, operator: Noted | None, now: _Now, blocks: Blocks) -> Node:
    name = f"node {number} ({operator.name if operator is not None else 'no operator'})"
    if given.words == []:
        return Node(name)  # it does nothing
    if given.end or given.words is None or operator is None or not operator.known:
        return Node(name, everything=True)
    reads, writes, own = [*operator.reads], [*operator.writes], now.allocated[slice(*operator.allocated)]
    nbytes = Spans(reads).nbytes + Spans(writes).nbytes
    library = given.kernel and not any(part in given.kernel for part in _TORCHS_OWN)
    if not (library and operator.name in _PRODUCTS):
        writes += own
    accounted = Spans([*reads, *writes])
    others = {block for word in given.words if not accounted.meets(word, 1) for block in _lies_in(word, own, now, blocks)}
    shared = LIBRARIES if library and operator.name not in _PRODUCTS else Spans()
    return Node(name, Spans([*reads, *others]), Spans([*writes, *others]) | shared, nbytes=nbytes)


def _lies_in(word: int, own: Sequence[Range], now: _Now, blocks: Blocks) -> Iterable[Range]:
    """The blocks that an address may mean which an operator's node is given: those of the operator's own, and that which was
    there when it began."""
    found = [one for one in own if _has(one, word)]
    if (before := now.at(word)) is not None:
        found.append(now.allocated[before])
    if not found and (block := now.ever(word) or blocks.at(word)) is not None:
        found.append(block)
    return found


def _has(block: Range, word: int) -> bool:
    return block[0] <= word < block[0] + block[1]


def lifetimes(noted: Sequence[Noted], allocated: Sequence[Range]) -> list[Block]:
    """Allocations as blocks, which are used by operators: by their numbers, in turn."""
    users: list[list[int]] = [[] for _ in allocated]
    now = _Now(allocated)
    for number, operator in enumerate(noted):
        now.until(operator.allocated[1])
        for i in range(*operator.allocated):
            users[i].append(number)
        for start, _ in (*operator.reads, *operator.writes):
            if (lies_in := now.at(start)) is not None:
                users[lies_in].append(number)
    return [Block(nbytes, tuple(them)) for them, (_, nbytes) in zip(users, allocated, strict=True) if them]


class _Now:
    """Which allocation lies where, after some of them."""

    def __init__(self, allocated: Sequence[Range]) -> None:
        self.allocated = allocated
        self._begun = 0
        self._ever = Spans(allocated)
        self._there: list[tuple[int, int]] = []  # addresses, with the allocation's number

    def until(self, number: int) -> None:
        """So many have begun. Each takes the place of those that lay there."""
        for begun in range(self._begun, number):
            start, nbytes = self.allocated[begun]
            first = bisect_left(self._there, (start,))
            last = bisect_left(self._there, (start + nbytes,))
            if first and self._end(first - 1) > start:
                first -= 1
            self._there[first:last] = [(start, begun)]
        self._begun = max(self._begun, number)

    def at(self, address: int) -> int | None:
        i = bisect_right(self._there, (address, len(self.allocated))) - 1
        return self._there[i][1] if i >= 0 and address < self._end(i) else None

    def ever(self, address: int) -> Range | None:
        """For an address where nothing lies now: what lay there last. Where something will, and nothing has, it may be in
        memory that is older than all this: that can be anywhere."""
        if not self._ever.meets(address, 1):
            return None
        gone = next((one for one in self.allocated[self._begun - 1 :: -1] if _has(one, address)), None) if self._begun else None
        starts, ends = zip(*((start, start + nbytes) for start, nbytes in self.allocated), strict=True)
        return gone or (min(starts), max(ends) - min(starts))

    def _end(self, i: int) -> int:
        start, number = self._there[i]
        return start + self.allocated[number][1]
