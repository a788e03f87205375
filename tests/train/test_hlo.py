"""What is counted in HLO text: lines as XLA writes them, and whole steps against what their shapes ask for."""

import dataclasses

import jax
import pytest

from configs import tiny, tiny_eagle3, tiny_mtp
from dspark_jax.hlo import count
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.splash import tiles_at_most
from dspark_jax.sharding import make_mesh
from train.flops import model_flops, splash_cost
from train.plan import step_shapes

PROGRAM = """HloModule jit_step, entry_computation_layout={(f32[8,16]{1,0})->f32[8,16]{1,0}}

%sliced (stack: bf16[5,4,16], at: s32[]) -> bf16[4,16] {
  %stack = bf16[5,4,16]{2,1,0} parameter(0)
  %at = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %slice.1 = bf16[4,16]{1,0} dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={1,4,16}
}

%body.3 (carry: (s32[], f32[8,16], bf16[5,4,16])) -> (s32[], f32[8,16], bf16[5,4,16]) {
  %carry = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, /*index=2*/bf16[5,4,16]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%carry), index=1
  %all = bf16[5,4,16]{2,1,0} get-tuple-element(%carry), index=2
  %w = bf16[4,16]{1,0} fusion(%all, %i), kind=kLoop, calls=%sliced
  %whole = bf16[16,16]{1,0} all-gather(%w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %y = f32[8,16]{1,0:T(8,128)S(1)} convolution(%x, %whole), dim_labels=bf_io->bf
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %two)
  ROOT %out = (s32[]{:T(128)}, f32[8,16]{1,0}, bf16[5,4,16]{2,1,0}) tuple(%next, %y, %all)
}

%condition.3 (carry.1: (s32[], f32[8,16], bf16[5,4,16])) -> pred[] {
  %carry.1 = (s32[], f32[8,16], bf16[5,4,16]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %end = s32[] constant(10)
  ROOT %more = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (x.1: f32[8,16], stack.1: bf16[5,4,16]) -> f32[8,16] {
  %x.1 = f32[8,16]{1,0} parameter(0)
  %stack.1 = bf16[5,4,16]{2,1,0} parameter(1)
  %none = s32[] constant(0)
  %start = (s32[], f32[8,16]{1,0}, bf16[5,4,16]{2,1,0}) tuple(%none, %x.1, %stack.1)
  %loop = (s32[], f32[8,16]{1,0}, bf16[5,4,16]{2,1,0}) while(%start), condition=%condition.3, body=%body.3
  ROOT %last = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_counts_as_often_as_it_runs():
    counts = count(PROGRAM)
    assert counts.flops == 5 * 2 * 8 * 16 * 16
    assert counts.collectives == {"all-gather": 5} and counts.sizes == {"all-gather": 5 * 2 * 16 * 16}
    assert counts.wire == 5 * 2 * 16 * 16 * 3 / 4
    # Slice in and out, its index, the counter, shard and whole of the gather, what the product reads (not writes).
    assert counts.bytes == 5 * (2 * (2 * 4 * 16) + 4 + 12 + 2 * (4 + 16) * 16 + 2 * 16 * 16 + 4 * 8 * 16)


def test_the_trip_count_that_xla_found_is_taken():
    known = PROGRAM.replace("body=%body.3", 'body=%body.3, backend_config={"known_trip_count":{"n":"7"}}')
    assert count(known).flops == 7 / 5 * count(PROGRAM).flops
    with pytest.raises(ValueError, match="how often a loop runs"):
        count(PROGRAM.replace("constant(10)", "parameter(1)"))


KERNEL = """ENTRY %main (q: bf16[4,384,128]) -> bf16[4,384,128] {
  %q = bf16[4,384,128] parameter(0)
  %k = bf16[2,1024,128] parameter(1)
  %runs = s32[1,1,2] parameter(2)
  ROOT %splash_mha_dq_segmented.3 = bf16[4,384,128] custom-call(%runs, %q, %k, %k), custom_call_target="tpu_custom_call"
}
"""


BRANCHES = """%updated (pool: f32[64,8], rows: s32[2,1], new: f32[2,8]) -> f32[64,8] {
  %pool = f32[64,8]{1,0} parameter(0)
  %rows = s32[2,1]{1,0} parameter(1)
  %new = f32[2,8]{1,0} parameter(2)
  ROOT %scatter.1 = f32[64,8]{1,0} scatter(%pool, %rows, %new), update_window_dims={1}, to_apply=%sum
}

%dear (x.1: f32[64,8]) -> f32[64,8] {
  %x.1 = f32[64,8]{1,0} parameter(0)
  ROOT %twice = f32[64,8]{1,0} add(%x.1, %x.1)
}

%cheap (x.2: f32[64,8]) -> f32[64,8] {
  ROOT %x.2 = f32[64,8]{1,0} parameter(0)
}

ENTRY %main (pool.1: f32[64,8], rows.1: s32[2,1], new.1: f32[2,8], which: s32[]) -> f32[64,8] {
  %pool.1 = f32[64,8]{1,0} parameter(0)
  %rows.1 = s32[2,1]{1,0} parameter(1)
  %new.1 = f32[2,8]{1,0} parameter(2)
  %which = s32[] parameter(3)
  %written = f32[64,8]{1,0} fusion(%pool.1, %rows.1, %new.1), kind=kCustom, calls=%updated
  %ahead = ((f32[64,8]{1,0}), f32[16,8]{1,0:S(1)}, s32[]) slice-start(%written), slice={[0:16], [0:8]}
  %there = f32[16,8]{1,0:S(1)} slice-done(%ahead)
  ROOT %out = f32[64,8]{1,0} conditional(%which, %written, %written), branch_computations={%dear, %cheap}
}
"""


def test_writes_in_place_and_copies_ahead_count_what_they_move():
    rows = 2 * 8 * 4
    moved = 2 * rows + 2 * 4  # what is written, its source and where it goes
    moved += 16 * 8 * 4  # to the chip's own memory
    assert count(BRANCHES, cheapest=True).bytes == moved
    assert count(BRANCHES).bytes == moved + 3 * 64 * 8 * 4, "the dearer branch as well"


def test_kernels_are_told_apart_and_counted_by_their_tiles():
    counts = count(KERNEL)
    ((name, read), times) = counts.kernels.popitem()
    assert times == 1 and counts.flops == 0
    # One tile of 384 queries, and two of 512 keys: blocks at the end of 512 positions see these and their own keys.
    flops, moved = splash_cost(name, read, 512)
    assert flops == 4 * 3 * 2 * 384 * 1024 * 128
    assert moved == 4 * (2 * 2 * 512 * 128 * 2 + 384 * 2 * 128 * 4)
    with pytest.raises(ValueError, match="what it does is not known"):
        splash_cost("ragged_paged_attention", read, 512)


def test_tiles_at_most():
    assert tiles_at_most(4096, 4096, 4096) == (36, 512, 512)
    # Blocks of 7 at 512 anchors: eight tiles of context, and one of the seven of blocks.
    assert tiles_at_most(3584, 7680, 4096) == (7 * 9, 512, 512)


def test_batches_of_products_written_as_dilated_convolutions():
    # 3 products of [8, 16] and [16, 4]: XLA:TPU walks the batch with a window of its size whose other places are gaps.
    line = (
        "  %y = f32[3,8,4] convolution(%x, %w), window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf"
    )
    text = "ENTRY %main (x: f32[3,8,16], w: f32[3,16,4]) -> f32[3,8,4] {\n  %x = f32[3,8,16] parameter(0)\n"
    assert count(f"{text}  %w = f32[3,16,4] parameter(1)\n{line}\n}}\n").flops == 3 * 2 * 8 * 16 * 4


WIDE = {**tiny.TARGET, "hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
KINDS = {
    "gated": dataclasses.replace(tiny.run, markov_head_type="gated", draft_vocab_size=0),
    "rnn": dataclasses.replace(tiny.run, markov_head_type="rnn", share_targets=True),
    "features": dataclasses.replace(tiny.run, cache_features=True),
    "eagle3": dataclasses.replace(tiny_eagle3.run, block_size=2),
    "mtp": tiny_mtp.run,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_products_that_its_shapes_ask_for(kind):
    run = dataclasses.replace(KINDS[kind], chunk=16, query_chunk=32, attention_chunk=8)
    target, mesh = TargetConfig.from_hf(WIDE), make_mesh((1, 1, 1), jax.devices()[:1])
    step, arguments = step_shapes(run, target, mesh)
    asked = sum(model_flops(run, target).values())
    # More by what is computed again in the backward pass of attention.
    assert asked <= count(step.lower(*arguments).as_text("hlo")).flops < 1.15 * asked
