"""Where code stands, as people find it: a file and a line, or the cell of a notebook.

IPython compiles each cell under a name of its own: ``<ipython-input-2-0a1b2c>``, or, in a notebook, a file that is not there.
It knows which cell that was.
"""

from __future__ import annotations

import re
import sys
from typing import Any

__all__ = ["place"]

_OLD = re.compile(r"<ipython-input-(\d+)-")


def place(filename: str, line: int) -> str:
    """``train.py:12``; of a cell ``Cell In[2], line 12``, as IPython has it in tracebacks."""
    cell = _cell(filename)
    return f"{cell}, line {line}" if cell else f"{filename}:{line}"


def _cell(filename: str) -> str:
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(filename)
    if named is not None:
        return " ".join(named)
    old = _OLD.match(filename)
    return f"Cell In[{old[1]}]" if old is not None else ""
