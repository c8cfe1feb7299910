"""Where a replay leaves the answers of checks (`capture/value_checks.py`), and how it is found out that one was wrong.

Nobody waits for them. There is a page of the host's memory, pinned, on which each check has a byte: 1 while all is well.
The last kernels of a graph put the answers of its checks together, and set the bytes of those that have failed to 0, over the
bus. Nothing but who has found a 0 sets it to 1 again: so it does not matter when that is looked for. Each call of any
recorded function does so, by comparing a few bytes of the host's memory.
"""

from __future__ import annotations

import atexit
import ctypes

import torch

from ..._torch.dynamic import Private
from ..._torch.tensors import storage_at
from ...capture.value_checks import Check, lookouts
from ...errors import Refusal
from ...statistics import logger

__all__ = ["Answers", "CudaChecks"]

_MOST = 4096  # checks of one device's recordings


class CudaChecks:
    """The page of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.checks: list[Check] = []  # by their bytes
        self._page: torch.Tensor | None = None
        self._bytes: Private = None
        self._good = b""

    def answers(self) -> Answers:
        """For the checks of one capture."""
        return Answers(self)

    @property
    def full(self) -> bool:
        """Whether half of it is taken."""
        return len(self.checks) > _MOST // 2

    def make_room(self) -> None:
        """To be called before a capture, in which no page can be taken."""
        if self._page is None:
            with torch.inference_mode(False):
                self._page = torch.ones(_MOST, dtype=torch.bool, device="cpu", pin_memory=True)
            self._bytes = (ctypes.c_char * _MOST).from_address(self._page.data_ptr())

    def places(self, checks: list[Check]) -> torch.Tensor:
        """The bytes of these new checks, as the device sees them."""
        assert self._page is not None
        first = len(self.checks)
        if first + len(checks) > _MOST:
            raise Refusal(f"makes more than {_MOST // 2} checks of values", "pass validate_args=False to distributions")
        if not first:
            lookouts.append(self.look)
            atexit.register(self._at_exit)
        self.checks += checks
        self._good = b"\1" * len(self.checks)
        storage = storage_at(self._page.data_ptr() + first, len(checks), self.device)
        return torch.empty(0, dtype=torch.bool, device=self.device).set_(storage)

    def look(self) -> None:
        """Raise the exception of a check that has failed since."""
        if self._failed():
            raise self._found()

    def _failed(self) -> bool:
        return bool(self._bytes[: len(self._good)] != self._good)

    def _found(self) -> Exception:
        assert self._page is not None
        torch.cuda.synchronize(self.device)  # a replay that is under way may have found it as well
        first: int = self._bytes[: len(self._good)].index(0)
        ctypes.memset(self._page.data_ptr(), 1, _MOST)
        return self.checks[first].error()

    def _at_exit(self) -> None:
        torch.cuda.synchronize(self.device)
        if self._failed():
            logger.error("a check failed in the last replays, and no call came after them to raise it: %r", self._found())


class Answers:
    """The checks of one capture; the last graph's are `new`."""

    def __init__(self, page: CudaChecks) -> None:
        self._page = page
        self.new: list[tuple[Check, torch.Tensor]] = []

    def add(self, check: Check, answer: torch.Tensor) -> None:
        check.given.clear()  # their memory is another's by the time that somebody looks
        self.new.append((check, answer))

    def keep(self) -> None:
        """To be captured: what each run does with the answers."""
        new, self.new = self.new, []
        with torch.inference_mode(False), torch.no_grad():
            well = [_well(check, answer) for check, answer in new]
            self._page.places([check for check, _ in new]).logical_and_(torch.stack(well))


def _well(check: Check, answer: torch.Tensor) -> torch.Tensor:
    answer = answer.detach().reshape(())
    return answer.bool() if check.good else answer.logical_not()
