"""Gradients of the tiny run on several meshes, in its own process: `python -m tests.train.sharded TARGET DATA OUT`."""

import dataclasses
import shutil
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np

from train.loop import Trainer
from train.step import gradients

MESHES = ((1, 1, 1), (2, 2, 2), (8, 1, 1), (1, 2, 4))


def main(out: Path, run) -> None:
    """Saves loss, metrics and every gradient of the first update, by mesh."""
    for shape in MESHES:
        devices = jax.devices()[: int(np.prod(shape))]
        trainer = Trainer(
            dataclasses.replace(run, out=str(out / "x".join(map(str, shape))), mesh=shape), devices=devices
        )
        step = jax.jit(partial(gradients, trainer.config))
        with jax.set_mesh(trainer.mesh):
            state = trainer.state
            gradient, metrics = step(state.params, state.step, trainer._frozen, trainer._target, trainer._batch(0))
        leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path((gradient, metrics))}
        np.savez(out / f"{'x'.join(map(str, shape))}.npz", **jax.device_get(leaves))
        np.savez(out / f"{'x'.join(map(str, shape))}_after.npz", **trainer.train(until=2))
    # The run of 2 x 2 x 2 goes on there, and on four devices.
    shutil.copytree(out / "2x2x2", out / "fewer")
    for name, shape in (("2x2x2", (2, 2, 2)), ("fewer", (1, 4, 1))):
        again = dataclasses.replace(run, out=str(out / name), mesh=shape)
        trainer = Trainer(again, devices=jax.devices()[: int(np.prod(shape))])
        assert trainer.step == 2
        np.savez(out / f"{name}_resumed.npz", **trainer.train(until=4))


if __name__ == "__main__":
    from configs.tiny import run

    target, data, out = map(Path, sys.argv[1:])
    main(out, dataclasses.replace(run, target=str(target), data=(str(data),), batch_size=8))
