"""Many sizes, few recordings: arguments are padded to declared sizes."""
