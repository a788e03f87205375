"""Joining the processes of a run: one for each host of a TPU pod slice or GPU cluster."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which process of the run this is.

    Attributes:
      processes: how many there are; `auto` asks the cluster (Cloud TPU, SLURM, Kubernetes, Open MPI) for all of this.
      process: number of this one, from 0, on plain hosts.
      coordinator: host:port where process 0 listens, on plain hosts.
    """

    processes: str = "1"
    process: int = 0
    coordinator: str = ""

    def join(self) -> None:
        """Waits for all processes; must run before JAX is asked for devices.

        Raises:
          ValueError: numbers that do not fit, no coordinator, or `auto` found no cluster.
        """
        if self.processes == "auto":
            try:
                jax.distributed.initialize()
            except ValueError as error:
                raise ValueError(
                    f"--processes auto found no cluster ({error}). On plain hosts pass --processes N --process I "
                    "--coordinator HOST:PORT."
                ) from error
            return
        count = int(self.processes) if self.processes.isdigit() else 0
        if count < 1 or not 0 <= self.process < count:
            raise ValueError(
                f"expected --processes N or auto, and --process within 0..N-1; got {self.processes}, {self.process}."
            )
        if count == 1:
            return
        if not self.coordinator:
            raise ValueError("several processes need --coordinator HOST:PORT of process 0.")
        jax.distributed.initialize(self.coordinator, count, self.process)


def is_main() -> bool:
    """Whether this process writes files and speaks."""
    return jax.process_index() == 0
