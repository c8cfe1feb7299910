"""``python -m phonograph`` is the ``phonograph`` command."""

from phonograph.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
