"""Which drafter a file of temperatures was fitted for."""

import hashlib

import jax
import numpy as np
from flax import nnx


def drafter_fingerprint(drafter: nnx.Module) -> str:
    """16 hex digits of the drafter's arrays, the same for every name, order and wider dtype they are kept in."""
    digests = []
    for leaf in jax.tree.leaves(nnx.state(drafter)):
        array = np.asarray(leaf)
        digest = hashlib.sha256(str(array.shape).encode())
        digest.update(np.ascontiguousarray(array.astype(np.float32)).data)
        digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]
