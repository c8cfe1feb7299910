"""What a call has read outside of its arguments: noted by a gate as it is read, and kept in one table."""

import os

CONSTANTS_ARE_READ = os.environ.get("PHONOGRAPH_CONSTANTS", "walked") == "read"
"""Whether what a recording relies on, of packages and beyond, is what its call was heard to read, and not what code names."""
