"""`python -m train configs/RUN.py [--field value ...]`: distils a drafter."""

import runpy
import sys
from pathlib import Path

import tyro

from dspark_jax.cli.mistakes import told_in_one_line
from train.config import RunConfig
from train.distributed import Processes, first
from train.loop import Trainer

Options = tuple[tyro.conf.OmitArgPrefixes[RunConfig], tyro.conf.OmitArgPrefixes[Processes]]


def main() -> None:
    """Trains to the end of the run and exports the drafter."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m train configs/RUN.py [--field value ...]")
    with told_in_one_line("train"):
        run = runpy.run_path(sys.argv[1]).get("run") if Path(sys.argv[1]).is_file() else None
        if not isinstance(run, RunConfig):
            raise ValueError(f"{sys.argv[1]} is no run; expected a Python file that sets `run` to a RunConfig.")
        prog, default = f"python -m train {sys.argv[1]}", (run, Processes())
        run, processes = tyro.cli(Options, default=default, args=sys.argv[2:], prog=prog)
        processes.join()
        trainer = Trainer(run)
        epoch = trainer.data.steps_per_epoch
        if first():
            print(f"{epoch} steps an epoch; starting at step {trainer.step} of {run.steps}", flush=True)
        trainer.train()
        path = trainer.export()
        if first():
            print(f"exported {path}")


if __name__ == "__main__":
    main()
