"""Names for what only its owner knows the type of."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Args", "Context", "Foreign", "Kwargs", "Leaves", "Private", "Reading", "Table", "Thing"]

Args: TypeAlias = tuple[Any, ...]
"""What a function or an operator is called with, by position: its schema says what that is."""
Kwargs: TypeAlias = dict[str, Any]
"""The same by name."""
Leaves: TypeAlias = list[Any]
"""What lies at the leaves of a structure (see `values.pytree`): tensors, numbers, and objects of any class."""
Reading: TypeAlias = tuple[Any, ...]
"""What was read at a place at one time, in the form that the place's own `restore` takes."""
Private: TypeAlias = Any
"""A private object of torch's or of Python's, whose attributes are probed before they are used, or one of ctypes'."""
Context: TypeAlias = Any
"""The `ctx` of an `autograd.Function`, on which its forward leaves what its backward needs."""
Table: TypeAlias = dict[Any, Any]
"""A dictionary of the user's: keys and values of any class."""
Foreign: TypeAlias = Any
"""An object of a package that need not be there: an array of NumPy's, a symbol of Thunder's."""
Thing: TypeAlias = Any
"""An object of anybody's, which is looked into as its class allows: the check of the class comes before."""
