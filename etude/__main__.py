"""`python -m etude`: the same program as `etude`."""

from etude.cli.main import main

if __name__ == "__main__":
    main()
