"""Joined arrays are cut apart, by one kernel for all parts of a shape."""

import chex
import jax
import jax.numpy as jnp
import pytest

from curvadion_jax.matrices._cut import cut

TABLE = jnp.arange(16.0).reshape(8, 2)


def cut_table(table):
    return cut(table, [2, 1, 3, 2])


@pytest.mark.parametrize("run", [cut_table, jax.jit(cut_table)])
def test_the_parts_are_the_rows_in_their_order(run):
    parts = [TABLE[:2], TABLE[2:3], TABLE[3:6], TABLE[6:]]
    chex.assert_trees_all_equal(run(TABLE), parts)


def test_every_replica_cuts_its_own_table():
    tables = jnp.stack([TABLE, -TABLE])
    found = jax.jit(jax.vmap(cut_table))(tables)
    chex.assert_trees_all_equal(found[2], jnp.stack([TABLE[3:6], -TABLE[3:6]]))


def test_one_part_is_the_table():
    [part] = cut(TABLE, [8])
    assert part is TABLE


def test_a_cpu_reads_at_run_time_where_a_part_begins():
    # A constant place would be in the kernel, as `slice={[2:4], [0:2]}`.
    compiled = jax.jit(lambda x: cut(2 * x, [2, 2, 2, 2])).lower(TABLE).compile()
    text = compiled.as_text()
    assert "dynamic-slice(" in text
    assert " slice(" not in text


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_an_accelerator_knows_where_a_part_begins(platform):
    traced = jax.jit(cut_table).trace(TABLE)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    starts = [
        f"[{start}:{end}, 0:2]" for start, end in ((0, 2), (2, 3), (3, 6), (6, 8))
    ]
    assert all(start in text for start in starts)
    assert "dynamic_slice" not in text
