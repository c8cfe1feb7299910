"""Branches and loops that go on by what a tensor holds, without the host: `cond`, `switch`, `while_loop` and `repeat`."""
