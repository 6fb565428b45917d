"""``python -m k3rl``: the same as the ``k3rl`` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line, with the current folder importable: plug-ins named by import path may lie there."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from k3rl.cli.app import app

    app()


if __name__ == "__main__":
    main()
