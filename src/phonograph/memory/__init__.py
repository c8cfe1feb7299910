"""The memory that recordings share: who may overwrite what, views of it, and loans."""
