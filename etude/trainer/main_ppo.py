"""`python -m etude.trainer.main_ppo key=value …`: the same program as `etude train`."""

from etude.cli.main import main

if __name__ == "__main__":
    import sys

    main(["train", *sys.argv[1:]])
