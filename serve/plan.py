"""`python -m serve.plan TARGET DRAFTER`: compiles the server's programs for a TPU slice that is not there.

Needs libtpu (`pip install 'jax[tpu]'`), which compiles without hardware, and of the models only their config.json.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from dspark_jax.checkpoints.drafter import read_drafter_config
from dspark_jax.checkpoints.target import load_target_config
from dspark_jax.chips import CHIPS, GIB, peak_bytes, topology
from dspark_jax.cli.mistakes import told_in_one_line
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.hlo import Counts, count
from dspark_jax.models.decoder import Decoder
from dspark_jax.sharding import laid_out, make_mesh, shardings
from serve.engine.attention import PAGES
from serve.engine.runner import columns_for, empty_slots, page_shape, reach_of
from serve.engine.step import Orders, Plan, run


@dataclasses.dataclass(frozen=True)
class ServePlan:
    """Plan a server.

    Attributes:
      target, drafter: directories (of the target also a hub id); only their config.json is read.
      topology: of the slice; all its chips share the models by heads.
      tokens: anchors and drafts of a step; each is a program. Greedy requests.
      requests: that are decoded in it, at least one token each; context: positions each has.
      slots, max_length, page_size, pages: of the engine.
    """

    target: tyro.conf.Positional[str]
    drafter: tyro.conf.Positional[str]
    topology: str = "v5e:2x4"
    tokens: tuple[int, ...] = (8, 16, 32, 64)
    requests: int = 8
    context: int = 1024
    slots: int = 64
    max_length: int = 4096
    page_size: int = 32
    pages: int = 2048

    def run(self) -> None:
        """Compiles and prints the table."""
        devices = topology(self.topology)
        mesh, chip = make_mesh((1, 1, len(devices)), devices), CHIPS[self.topology.split(":")[0]]
        table = Table(title=f"{self.target} on {self.topology}, {len(devices)} chips share heads, by tokens of a step")
        sizes = "tokens", "peak of HBM", "weights", "keys and values", "bytes moved", "ratio"
        for column in (*sizes, "collectives", "compiled in"):
            table.add_column(column, justify="right")
        for tokens in self.tokens:
            start = time.perf_counter()
            program, weights, kv = self.compiled(mesh, tokens)
            seconds, memory = time.perf_counter() - start, program.memory_analysis()
            counts = count(program.as_text(), cheapest=True)
            moved = counts.bytes - kernel_pages(counts) + kv
            table.add_row(
                str(tokens), f"{peak_bytes(memory) / GIB:.2f} of {chip.memory / GIB:.0f} GiB",
                f"{weights / 1e9:.3f} GB", f"{kv / 1e9:.3f} GB", f"{moved / 1e9:.3f} GB",
                f"{moved / (weights + kv):.2f}",
                f"{sum(counts.collectives.values())}, {sum(counts.sizes.values()) / 1e6:.1f} MB",
                f"{seconds:.0f} s",
            )  # fmt: skip
        Console(width=160).print(table)

    def compiled(self, mesh: Mesh, tokens: int) -> tuple[Any, float, float]:
        """The program of a step, and the bytes of weights and of keys and values that it must read on a device."""
        c, d = load_target_config(self.target), read_drafter_config(self.drafter)
        target = nnx.eval_shape(lambda: Decoder(c, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        if not isinstance(d, DrafterConfig):
            raise ValueError(f"a drafter of {type(d).__name__} cannot be served; give a DSpark or DFlash one.")
        drafter = nnx.eval_shape(lambda: DSpark(d, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        everywhere, by_heads = NamedSharding(mesh, P()), NamedSharding(mesh, PAGES)

        def whole(tree: Any) -> Any:
            return laid_out(tree, jax.tree.map(lambda _: everywhere, tree))

        def pages(config: Any) -> Any:
            one = jax.ShapeDtypeStruct(page_shape(config, self.pages, self.page_size), jnp.bfloat16, sharding=by_heads)
            return (one,) * config.num_layers

        graphs, states = zip(*(nnx.split(model) for model in (target, drafter)), strict=True)
        params = tuple(laid_out(state, shardings(state, mesh)) for state in states)
        head = jax.ShapeDtypeStruct(
            (d.draft_rows, c.hidden_size), jnp.bfloat16, sharding=NamedSharding(mesh, P("tensor", None))
        )
        slots = jax.eval_shape(lambda: empty_slots(self.slots, d.block_size, d.draft_rows, self.max_length, c))
        slots = whole(slots).replace(pages=pages(c), draft_pages=pages(d))
        s, columns = self.slots, columns_for(self.max_length, reach_of(d), self.page_size)
        numbers, flags = jnp.zeros(s, jnp.int32), jnp.zeros(s, bool)
        one, table = jnp.int32(0), jnp.zeros((s, columns), jnp.int32)
        orders = whole(Orders(numbers, numbers, flags, flags, table, one, one, one, jnp.float32(0)))
        plan = Plan(graphs[0], graphs[1], d.block_size, self.page_size, attention="kernel")
        with jax.set_mesh(mesh):
            program = run.lower(plan, (*params, head), slots, orders, tokens, 0).compile()
        # All of the target but the embedding, of which rows are read; of the drafter what injects context.
        read = [nnx.state(layer) for layer in target.layers] + [nnx.state(target.head or target)]
        read += [nnx.state(drafter.fc)]
        sizes = sum(x.size for state in read for x in jax.tree.leaves(state))
        sizes += d.num_layers * 2 * d.num_kv_heads * d.head_dim * d.hidden_size
        heads = c.num_layers * 2 * c.num_kv_heads * c.head_dim
        devices = mesh.shape["tensor"]
        return program, 2 * sizes / devices, 2 * self.requests * self.context * heads / devices


def kernel_pages(counts: Counts) -> int:
    """Bytes of whole pools that calls of the attention kernel are counted with; they read only what they need."""
    return sum(
        times * max(array.bytes for array in arrays if len(array.shape) == 4)
        for (_, arrays), times in counts.kernels.items()
    )


if __name__ == "__main__":
    plan = tyro.cli(ServePlan, prog="python -m serve.plan")
    with told_in_one_line("python -m serve.plan"):
        plan.run()
