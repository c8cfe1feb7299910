"""Where a replay leaves the answers of checks (`capture/value_checks.py`), and how it is found out that one was wrong.

Nobody waits for them. There is a page of the host's memory, pinned, on which each check has a byte: 1 while all is well.
The last kernels of a graph put the answers of its checks together, and set the bytes of those that have failed to 0, over the
bus. Nothing but who has found a 0 sets it to 1 again: so it does not matter when that is looked for. Each call of any
recorded function does so, by comparing a few bytes of the host's memory.

Where the user's own code would get the exception, that is too late: what was computed meanwhile is not what it would have. Such
checks are `Awaited`: the replay that makes them waits for their bytes, at the end of the page.
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

__all__ = ["Answers", "Awaited", "CudaChecks"]

_MOST = 4096  # checks of one device's recordings


class CudaChecks:
    """The page of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.checks: list[Check] = []  # by their bytes
        self._awaited = 0  # at the end of the page
        self._page: torch.Tensor | None = None
        self._bytes: Private = None
        self._good = b""

    def answers(self) -> Answers:
        """For the checks of one capture."""
        return Answers(self)

    @property
    def full(self) -> bool:
        """Whether half of it is taken."""
        return len(self.checks) + self._awaited > _MOST // 2

    def make_room(self) -> None:
        """To be called before a capture, in which no page can be taken."""
        if self._page is None:
            with torch.inference_mode(False):
                self._page = torch.ones(_MOST, dtype=torch.bool, device="cpu", pin_memory=True)
            self._bytes = (ctypes.c_char * _MOST).from_address(self._page.data_ptr())

    def places(self, checks: list[Check]) -> torch.Tensor:
        """The bytes of these new checks, as the device sees them."""
        first = len(self.checks)
        self._has_room(len(checks))
        if not first:
            lookouts.append(self.look)
            atexit.register(self._at_exit)
        self.checks += checks
        self._good = b"\1" * len(self.checks)
        return self._there(first, len(checks))

    def awaited(self, checks: list[Check]) -> tuple[torch.Tensor, Awaited]:
        """The same of checks at which nobody looks but who waits for them."""
        assert self._page is not None
        self._has_room(len(checks))
        self._awaited += len(checks)
        first = _MOST - self._awaited
        return self._there(first, len(checks)), Awaited(self._page, first, checks, self.device)

    def _has_room(self, more: int) -> None:
        if len(self.checks) + self._awaited + more > _MOST:
            raise Refusal(f"makes more than {_MOST // 2} checks of values", "pass validate_args=False to distributions")

    def _there(self, first: int, count: int) -> torch.Tensor:
        assert self._page is not None
        storage = storage_at(self._page.data_ptr() + first, count, self.device)
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


class Awaited:
    """Checks of one recording, for which each run of it waits. (It keeps the page, to which its graph writes.)"""

    def __init__(self, page: torch.Tensor, first: int, checks: list[Check], device: torch.device) -> None:
        self._page, self._device, self._checks = page, device, checks
        self._address = page.data_ptr() + first

    @property
    def places(self) -> str:
        """The user's lines that make them."""
        return ", ".join(dict.fromkeys(check.where for check in self._checks))

    def failed(self) -> Check | None:
        """The first that has failed in a run on the current stream, which has ended then."""
        torch.cuda.current_stream(self._device).synchronize()
        first = ctypes.string_at(self._address, len(self._checks)).find(0)
        if first < 0:
            return None
        ctypes.memset(self._address, 1, len(self._checks))
        return self._checks[first]


class Answers:
    """The checks of one capture; the last graph's are `new`."""

    def __init__(self, page: CudaChecks) -> None:
        self._page = page
        self.new: list[tuple[Check, torch.Tensor]] = []
        self.kept = False
        """Whether a graph leaves some on the page."""
        self.awaited: Awaited | None = None
        """Those for which each run waits, once they are kept."""

    def add(self, check: Check, answer: torch.Tensor) -> None:
        check.given.clear()  # their memory is another's by the time that somebody looks
        self.new.append((check, answer))

    def keep(self) -> None:
        """To be captured: what each run does with the answers."""
        new, self.new = self.new, []
        self.kept = True
        late, awaited = [one for one in new if not one[0].awaited], [one for one in new if one[0].awaited]
        with torch.inference_mode(False), torch.no_grad():
            if late:
                self._page.places([check for check, _ in late]).logical_and_(_well(late))
            if awaited:
                places, self.awaited = self._page.awaited([check for check, _ in awaited])
                places.logical_and_(_well(awaited))


def _well(checks: list[tuple[Check, torch.Tensor]]) -> torch.Tensor:
    answers = [(check.good, answer.detach().reshape(())) for check, answer in checks]
    return torch.stack([answer.bool() if good else answer.logical_not() for good, answer in answers])
