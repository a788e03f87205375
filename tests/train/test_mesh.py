"""What a run computes does not depend on how it lies on devices."""

import os
import subprocess
import sys

import numpy as np
import pytest

from dspark_jax.sharding import make_mesh
from tests.train.conftest import write_answers
from tests.train.sharded import MESHES

TOLERANCE = 1e-5
NAMES = ["x".join(map(str, mesh)) for mesh in MESHES]


@pytest.fixture(scope="module")
def computed(tmp_path_factory, tiny_directory):
    """The directory of what eight virtual devices computed."""
    out = tmp_path_factory.mktemp("meshes")
    data = out / "answers.jsonl"
    write_answers(data)
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "tests.train.sharded", str(tiny_directory), str(data), str(out)]
    subprocess.run(command, env={**os.environ, **flags}, check=True, timeout=900)
    return out


@pytest.mark.parametrize("name", NAMES[1:])
def test_loss_and_gradients_are_those_of_one_device(computed, name):
    one, many = (np.load(computed / f"{which}.npz") for which in (NAMES[0], name))
    assert one.files == many.files and any("fc" in key for key in one.files)
    for key in one.files:
        np.testing.assert_allclose(many[key], one[key], atol=TOLERANCE, rtol=TOLERANCE, err_msg=key)


@pytest.mark.parametrize("name", NAMES[1:])
def test_updates_go_on_alike(computed, name):
    one, many = (np.load(computed / f"{which}_after.npz") for which in (NAMES[0], name))
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-4)


def test_a_run_goes_on_with_fewer_devices(computed):
    same, fewer = (np.load(computed / f"{which}_resumed.npz") for which in ("2x2x2", "fewer"))
    for key in same.files:
        np.testing.assert_allclose(fewer[key], same[key], atol=TOLERANCE, rtol=TOLERANCE, err_msg=key)


@pytest.mark.parametrize("shape", [(3, 1, 1), (-1, -1, 1), (1, 1), (0, 1, 1), (2, 1, 1)])
def test_a_mesh_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match="mesh must be sizes of data, fsdp, tensor whose product is the 1 devices"):
        make_mesh(shape)
