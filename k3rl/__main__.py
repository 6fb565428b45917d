"""``python -m k3rl``: the same as the ``k3rl`` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from k3rl.cli.app import app

    app()


if __name__ == "__main__":
    main()
