"""Recording and playing: a call's way through a recorded function."""
