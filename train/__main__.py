"""`python -m train configs/RUN.py [--field value ...]`: distils a drafter."""

import sys

import tyro

from dspark_jax.cli.mistakes import told_in_one_line
from train.config import RunConfig, read_config
from train.distributed import Processes, is_main
from train.loop import Trainer
from train.preemption import preemption

Options = tuple[tyro.conf.OmitArgPrefixes[RunConfig], tyro.conf.OmitArgPrefixes[Processes]]


def main() -> None:
    """Trains to the end of the run and exports the drafter.

    Told to stop by SIGTERM, as before a preemption, it saves a checkpoint and ends with exit code 143.
    """
    with told_in_one_line("train"):
        run, args = read_config("train")
        prog, default = f"python -m train {sys.argv[1]}", (run, Processes())
        run, processes = tyro.cli(Options, default=default, args=args, prog=prog)
        processes.join()
        trainer = Trainer(run)
        epoch = trainer.data.steps_per_epoch
        if is_main():
            print(trainer.counts)
            print(f"{epoch} steps an epoch; starting at step {trainer.step} of {run.steps}", flush=True)
        with preemption() as stop:
            trainer.train(stop=stop)
        if trainer.step < run.steps:
            if is_main():
                print(f"stopped by SIGTERM; checkpoint {trainer.step} is saved, and the same command goes on from it")
            raise SystemExit(143)
        path = trainer.export()
        if is_main():
            print(f"exported {path}")


if __name__ == "__main__":
    main()
