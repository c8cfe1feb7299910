"""Watching a call while it is captured: operators, effects of Python code, checks, and what runs live in between."""
