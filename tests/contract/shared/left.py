"""C9: what a call leaves in attributes. `self.steps += 1` is done by each replay, and so is `self.features = x`, if nothing in
the call can depend on what was there; whatever does makes it run live, or be recorded anew. Attributes and results are eager's.
"""

import textwrap

import torch

BASE = """
import functools, operator
class Base:
    def __init__(self): self.n, self.flag = 0, False
"""


def made(source):
    space = {"torch": torch, "__name__": "left_by_the_test"}
    exec(compile(BASE + textwrap.dedent(source), "/users/left.py", "exec"), space)
    return space["Made"](), space.get("number", lambda made: made.n)
