"""The `ostinato` command."""
