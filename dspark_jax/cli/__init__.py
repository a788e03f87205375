"""The `dspark` console command."""

from collections.abc import Sequence
from typing import Annotated

import tyro

from dspark_jax.cli.calibrate import Calibrate
from dspark_jax.cli.evaluate import Evaluate
from dspark_jax.cli.generate import Generate
from dspark_jax.cli.inspect import Inspect
from dspark_jax.cli.mistakes import told_in_one_line
from dspark_jax.cli.profile import Profile

Command = (
    Annotated[Generate, tyro.conf.subcommand("generate", description="Generate text, drafted and verified.")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate", description="Measure accepted lengths on prompts.")]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate", description="Make confidences probabilities.")]
    | Annotated[Profile, tyro.conf.subcommand("profile", description="Measure what steps cost here.")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect", description="Print what a checkpoint is.")]
)


def main(args: Sequence[str] | None = None) -> None:
    """Runs a subcommand; users' mistakes end with one line on stderr and exit code 2."""
    command = tyro.cli(Command, prog="dspark", args=args, config=(tyro.conf.OmitSubcommandPrefixes,))
    with told_in_one_line("dspark"):
        command.run()
