"""`python -m ostinato`: the same as the `ostinato` command."""

from ostinato.cli.main import main

if __name__ == "__main__":
    main()
