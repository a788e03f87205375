"""`python -m train configs/RUN.py [--field value ...]`: distils a drafter."""

import sys

import tyro

from dspark_jax.cli.mistakes import told_in_one_line
from train.config import RunConfig, read_config
from train.loop import Trainer


def main() -> None:
    """Trains to the end of the run and exports the drafter."""
    with told_in_one_line("train"):
        run, args = read_config("train")
        run = tyro.cli(RunConfig, default=run, args=args, prog=f"python -m train {sys.argv[1]}")
        trainer = Trainer(run)
        epoch = trainer.data.steps_per_epoch
        print(trainer.counts)
        print(f"{epoch} steps an epoch; starting at step {trainer.step} of {run.steps}", flush=True)
        trainer.train()
        print(f"exported {trainer.export()}")


if __name__ == "__main__":
    main()
