"""Where blocks start and what they predict."""

import jax
import jax.numpy as jnp
import numpy as np

from train.anchors import block_labels, candidates, sample_anchors

SUPERVISED = jnp.array([[0, 0, 1, 1, 1, 0, 1, 1, 1, 0]], bool)
SEGMENTS = jnp.array([[0, 0, 0, 0, 0, 1, 1, 1, 2, -1]])


def test_an_anchor_and_its_successor_are_supervised_in_one_document():
    assert jnp.flatnonzero(candidates(SUPERVISED, SEGMENTS)[0]).tolist() == [2, 3, 6]


def test_labels_run_to_the_end_of_the_document():
    tokens = jnp.arange(10, 20)[None]
    anchors, keep = jnp.array([[2, 3, 6, 0]]), jnp.array([[True, True, True, False]])
    index, labels, mask = block_labels(tokens, SUPERVISED, SEGMENTS, anchors, keep, 4)
    assert mask[0].astype(int).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert labels[0, 0, :2].tolist() == [13, 14]
    assert index.max() < 10


def test_labels_end_at_the_first_unsupervised_token():
    supervised = jnp.array([[1, 1, 0, 1, 1]], bool)
    _, _, mask = block_labels(
        jnp.zeros((1, 5), int), supervised, jnp.zeros((1, 5), int), jnp.zeros((1, 1), int), jnp.ones((1, 1), bool), 4
    )
    assert mask[0, 0].tolist() == [True, False, False, False]


def test_samples_are_distinct_ascending_candidates():
    supervised = jax.random.bernoulli(jax.random.key(0), 0.5, (8, 50))
    segments = jnp.sort(jax.random.randint(jax.random.key(1), (8, 50), 0, 4), axis=1)
    anchors, keep = sample_anchors(jax.random.key(2), supervised, segments, 6)
    valid = candidates(supervised, segments)
    for row, kept, allowed in zip(anchors, keep, valid, strict=True):
        chosen = row[kept]
        assert len(chosen) == min(6, int(allowed.sum()))
        assert (np.diff(chosen) > 0).all() and allowed[chosen].all()


def test_every_candidate_is_drawn_about_equally_often():
    supervised, segments = jnp.ones((1, 11), bool), jnp.zeros((1, 11), int)
    keys = jax.random.split(jax.random.key(0), 2000)
    anchors, _ = jax.vmap(lambda key: sample_anchors(key, supervised, segments, 3))(keys)
    share = np.bincount(anchors.ravel(), minlength=11) / 2000
    np.testing.assert_allclose(share[:10], 0.3, atol=0.05)
    assert share[10] == 0


def test_more_anchors_than_tokens():
    anchors, keep = sample_anchors(jax.random.key(0), SUPERVISED, SEGMENTS, 25)
    assert anchors.shape == (1, 25) and anchors[keep].tolist() == [2, 3, 6] and not anchors[~keep].any()
