"""What tests of programs on two ranks share: each file's programs run once on each backend, in one pair of processes."""

import functools
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks

BACKENDS = [pytest.param("gloo"), pytest.param("nccl", marks=pytest.mark.cuda)]


def run(backend: str, module: str, cases: Iterable[str], **options: Any) -> list[dict[str, Any]]:
    """What both ranks have found in these programs of a module; a skipped test where there are not two GPUs for them."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with tempfile.TemporaryDirectory(prefix="phonograph-ranks-") as folder:
        return ranks.start(backend, Path(folder), cases, module, **options)


class Programs:
    """The programs of a module. On the CPU only some run, where it would tell the same of all others."""

    def __init__(self, module: str, cases: Iterable[str], on_the_cpu: Collection[str], lasts: float = ranks.PATIENCE) -> None:
        self._module, self._lasts, self._on_the_cpu = module, lasts, on_the_cpu
        self._cases = [*cases]
        self.found = functools.cache(self._found)

    def _found(self, backend: str) -> list[dict[str, Any]]:
        cases = [case for case in self._cases if backend == "nccl" or case in self._on_the_cpu]
        return run(backend, self._module, cases, lasts=self._lasts)

    def on_each(self, cases: Iterable[str]) -> list[Any]:
        """Parameters (case, backend): each of these cases on each backend that runs it."""
        chosen = [*cases]
        return [
            pytest.param(case, backend, marks=marks, id=f"{case}-{backend}")
            for backend, marks in (("gloo", ()), ("nccl", pytest.mark.cuda))
            for case in chosen if backend == "nccl" or case in self._on_the_cpu
        ]  # fmt: skip
