"""What a call has read outside of its arguments: noted by a gate as it is read, and kept in one table."""
