"""A bar that shows how far something is, where rich is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    import rich.console
    import rich.progress

    HAVE_RICH = True
except ImportError:
    HAVE_RICH = False

__all__ = ["progress"]


@contextmanager
def progress(label: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(n)``. The bar goes to stderr, so that stdout stays clean; nothing is drawn without rich."""
    if not (shown and HAVE_RICH):
        yield lambda steps: None
        return
    with rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda steps: bar.advance(task, steps)
