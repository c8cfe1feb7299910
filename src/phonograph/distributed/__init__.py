"""Other ranks: NCCL's settings, the shared store, what ranks agree on, and a watchdog for replays."""
