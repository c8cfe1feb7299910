"""What a capture or a replay has changed is put back, whatever comes between: Ctrl-C, a MemoryError, an object that objects.

A live run on state that was put back by half would be wrong, and nobody would be told. So each step is run though one before it
has failed, and once more where it has failed itself: an exception may have come before it has done anything.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import NotPutBack

__all__ = ["put_back"]


def put_back(*steps: Callable[[], object]) -> None:
    """Run all of these, each of which may be run twice.

    Raises:
        NotPutBack: one has failed both times.
        KeyboardInterrupt: it came meanwhile. All is put back.
    """
    failed, interrupted = list[BaseException](), list[KeyboardInterrupt]()
    for step in steps:
        for again in (True, False):
            try:
                step()
            except BaseException as e:  # the other steps have to be run all the same
                if isinstance(e, KeyboardInterrupt):
                    interrupted.append(e)
                if not again:
                    failed.append(e)
            else:
                break
    if failed:
        why = f"{type(failed[0]).__name__}: {failed[0]}"
        raise NotPutBack(f"what a call had changed could not be put back ({why}): the state is neither that of before the call "
                         "nor that of after it") from failed[0]  # fmt: skip
    if interrupted:
        raise interrupted[0]
