"""Python's own objects: code, frames, modules, containers, and who wrote them."""
