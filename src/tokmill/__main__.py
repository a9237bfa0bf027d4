"""`python -m tokmill` is the `tokmill` command."""

from tokmill.cli import entry

entry()
