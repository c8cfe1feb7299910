"""The CPU device: a tape of operators over fixed memory."""
