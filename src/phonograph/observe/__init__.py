"""What recorded functions did, for people: one HTML page, and traces whose kernels have the names of modules. Nothing here is
needed to record or to play."""
