"""`python -m etude.trainer.main_grpo key=value …`: `etude train` with the GRPO defaults."""

from etude.cli.main import main

if __name__ == "__main__":
    import sys

    main(["train", "--root", "grpo_trainer", *sys.argv[1:]])
