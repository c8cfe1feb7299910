"""A bar that shows how far something is, where rich is installed."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def _without_draws() -> Iterator[None]:
    """Python's random generator stands afterwards where it stood: rich's styles draw from it when they are made."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def progress(label: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(n)``. The bar goes to stderr, so that stdout stays clean; nothing is drawn without rich."""
    if not (shown and importlib.util.find_spec("rich")):
        yield lambda steps: None
        return
    with _without_draws():
        import rich.console
        import rich.progress

        drawn = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
    with drawn as bar:
        task = bar.add_task(label, total=total)
        yield lambda steps: bar.advance(task, steps)
