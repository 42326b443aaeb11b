"""The `ostinato` command: arguments, tables and progress bars over what the rest returns."""
