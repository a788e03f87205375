"""`python -m serve`: an OpenAI-compatible server."""

import dataclasses
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.progress import Progress

from dspark_jax.checkpoints.default import DEFAULT_TARGET
from dspark_jax.cli.mistakes import told_in_one_line
from dspark_jax.cli.models import ModelOptions, progress
from dspark_jax.scheduling import CostTable, Fixed, Plain, Policy, StepCosts, Threshold, load_costs, while_it_pays
from dspark_jax.scheduling.profile import environment
from dspark_jax.sharding import make_mesh
from serve.api.app import create_app
from serve.api.metrics import Metrics
from serve.api.server import Server
from serve.engine.engine import EngineConfig, ServeEngine
from serve.engine.runner import MEASURED_AT


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serve a target, drafted for or not, over HTTP.

    Attributes:
      target, drafter: see `dspark generate`.
      policy: `scheduled` drafts while that pays and verifies what pays, by costs measured at start; `fixed` verifies
        `length` drafts a round; `threshold` those whose survival is at least `survival`; `none` decodes plainly.
      length: None is the whole block. floor: drafts that `scheduled` verifies for every request in any case.
      costs: a file of what steps cost: read if it is there, else measured at start and written.
      calibration: a file of `dspark calibrate`, which makes confidences probabilities.
      host, port: to listen on. name: what clients call the model; default the target's.
      engine: sizes. tensor: devices to split both models over.
      max_body_bytes: of a request. drain_seconds: that running requests have after SIGTERM.
      json_logs: a JSON object a line.

    The environment variable DSPARK_API_KEY, if it is set, is the key that clients must send.
    """

    target: str = DEFAULT_TARGET
    drafter: str = "default"
    policy: Literal["scheduled", "fixed", "threshold", "none"] = "scheduled"
    length: int | None = None
    survival: float = 0.4
    floor: int = 0
    costs: str | None = None
    calibration: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    engine: Annotated[EngineConfig, tyro.conf.OmitArgPrefixes] = EngineConfig()  # noqa: RUF009
    tensor: int = 1
    max_body_bytes: int = 4 << 20
    drain_seconds: float = 60.0
    json_logs: bool = False

    def run(self) -> None:
        """Loads, compiles, measures and serves until it is told to stop."""
        log_to_stderr(self.json_logs)
        self.chosen(StepCosts.from_steps_per_second({1: 1.0}))  # mistakes are told before minutes of work
        listener = self.bound()
        mesh = make_mesh((1, 1, self.tensor), jax.devices()[: self.tensor]) if self.tensor > 1 else None
        models = ModelOptions(
            self.target, "none" if self.policy == "none" else self.drafter, calibration=self.calibration
        )
        target, drafter = models.load(mesh)
        if target.tokenizer is None:
            raise ValueError(f"{target.source} has no tokenizer.json; a server needs one.")
        scaling = drafter and models.scaling(drafter, self.engine.block_size or drafter.config.block_size)
        metrics = Metrics()
        engine = ServeEngine(target.model, drafter, self.engine, scaling=scaling, gauges=metrics, mesh=mesh)
        metrics.watch(engine)

        def measure() -> StepCosts:
            with Progress(console=progress) as bar:
                task = bar.add_task("compiling and measuring programs", total=None)
                return engine.warm_up(lambda done, all: bar.update(task, completed=done, total=all))

        if self.costs is None or drafter is None:
            costs = measure()
        else:
            here = environment(target.model, drafter, engine.runner.block_size) | {"programs": engine.runner.sizes}
            costs = kept(self.costs, measure, here)
        engine.use(self.chosen(costs))
        engine.start()
        app = create_app(
            engine, target.tokenizer, self.name or self.target, api_key=os.environ.get("DSPARK_API_KEY") or None,
            max_body_bytes=self.max_body_bytes, metrics=metrics,
        )  # fmt: skip
        logging.info("serving on http://%s:%d", *listener.getsockname()[:2])
        Server(app, drain_seconds=self.drain_seconds).run(sockets=[listener])
        engine.stop()

    def bound(self) -> socket.socket:
        """The address, held so that one that is taken is told before minutes of work; it refuses until all is ready."""
        listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        return listener

    def chosen(self, costs: StepCosts) -> Policy:
        """The policy asked for, on this machine's costs."""
        if self.policy == "scheduled":
            return while_it_pays(costs, self.floor)
        return {"fixed": Fixed(self.length), "threshold": Threshold(self.survival), "none": Plain()}[self.policy]


def kept(path: str, measure: Callable[[], StepCosts], here: Mapping[str, str]) -> StepCosts:
    """The costs in a file, which is read before anything is measured; those measured `here`, if there is none yet.

    Raises:
      ValueError: the file is of another environment, or broken.
    """
    known = load_costs(path, here).at() if Path(path).exists() else None
    measured = measure()  # in any case, since it compiles
    if known is None:
        CostTable(((MEASURED_AT, measured),), here).save(path)
    return known or measured


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


def log_to_stderr(as_json: bool) -> None:
    """Everything from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("jax").setLevel(logging.WARNING)


if __name__ == "__main__":
    command = tyro.cli(Serve, prog="python -m serve")
    with told_in_one_line("python -m serve"):
        command.run()
