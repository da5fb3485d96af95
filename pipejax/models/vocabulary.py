"""Token lookup and the language-modelling loss, whole or cut by vocabulary over devices (arXiv 2411.05288).

With an axis both run on all its devices at once, each on its own rows of the table, under
`jax.shard_map(..., check_vma=False)`. There the transpose of a sum over devices is that sum again, which would count
everything once for each device; so both have their backward written out.

Logits are never kept: the loss goes through blocks of tokens, and under differentiation computes each block's loss and
gradients in one go.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_LOGITS = 2**26  # logits of a block of tokens: 256 MiB in float32

Axis = str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def lookup(table: jax.Array, tokens: jax.Array, vocab_size: int, dtype: Any, axis: Axis) -> jax.Array:
    """Rows of a table.

    Args:
      table: float [rows, h]; with an axis, this device's rows, those from vocab_size on being no tokens.
      tokens: int32 [...], the same on all devices. One that is not in 0 ... vocab_size - 1 gives zeros, and no
        gradient, however the table is cut.
      vocab_size: tokens.
      dtype: of the result.
      axis: mesh axis over whose devices the rows are spread, in order; None for a whole table.

    Returns:
      [..., h], the same on all devices.
    """
    rows, here = _own_rows(table, tokens, vocab_size, axis)
    found = jnp.where(here[..., None], table[jnp.where(here, rows, 0)].astype(dtype), jnp.zeros((), dtype))
    return found if axis is None else lax.psum(found, axis)  # exact in any dtype: all devices but one add zeros


def _lookup_forward(
    table: jax.Array, tokens: jax.Array, vocab_size: int, dtype: Any, axis: Axis
) -> tuple[jax.Array, Any]:
    return lookup(table, tokens, vocab_size, dtype, axis), (table, tokens)


def _lookup_backward(vocab_size: int, dtype: Any, axis: Axis, residuals: Any, dx: jax.Array) -> tuple[jax.Array, None]:
    del dtype
    table, tokens = residuals
    rows, here = _own_rows(table, tokens, vocab_size, axis)
    rows = jnp.where(here, rows, table.shape[0])  # out of bounds: dropped
    return jnp.zeros_like(table).at[rows].add(dx.astype(table.dtype), mode="drop"), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def token_loss(
    x: jax.Array, table: jax.Array, batch: Any, *, vocab_size: int, axis: Axis
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the next token under logits x @ table.T, summed, and what to divide it by.

    Args:
      x: [b, s, h], the last hidden state; the same on all devices.
      table: float [rows, h]; with an axis, this device's rows, those from vocab_size on being no tokens.
      batch: has "targets", int32 [b, s], and may have "weights", float32 [b, s], 0 where a target does not count.
      vocab_size: tokens.
      axis: as for `lookup`.

    Returns:
      The summed loss in nats and the summed weight, float32 scalars. The gradient of x is summed over devices in x's
      dtype, as tensor parallelism does. The loss has no gradient with respect to the weights: zeros.
    """
    targets = batch["targets"].reshape(-1)
    weights = batch.get("weights")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.reshape(-1)
    loss = _summed_loss(x.reshape(-1, x.shape[-1]), table, targets, weights, vocab_size, axis)
    return loss, jnp.sum(weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed_loss(
    x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, vocab_size: int, axis: Axis
) -> jax.Array:
    rows = _rows_of_tokens(table, x.dtype, vocab_size, axis)

    def block(total: jax.Array, item: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, targets, weights = item
        return total + _block_loss(rows, x, targets, weights, vocab_size, axis)[0], None

    return lax.scan(block, jnp.float32(0), _blocks(x, targets, weights, table.shape[0]))[0]


def _loss_forward(
    x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, vocab_size: int, axis: Axis
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss, and its gradients for a cotangent of one."""
    rows = _rows_of_tokens(table, x.dtype, vocab_size, axis)

    def block(
        totals: tuple[jax.Array, jax.Array], item: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        loss, dtable = totals
        x, targets, weights = item
        added, dlogits = _block_loss(rows, x, targets, weights, vocab_size, axis)
        dlogits = dlogits.astype(x.dtype)
        dtable = dtable + jnp.einsum("tv,th->vh", dlogits, x, preferred_element_type=jnp.float32)
        return (loss + added, dtable), dlogits @ rows

    blocks = _blocks(x, targets, weights, table.shape[0])
    (loss, dtable), dx = lax.scan(block, (jnp.float32(0), jnp.zeros(table.shape, jnp.float32)), blocks)
    dx = dx.reshape(-1, x.shape[-1])[: x.shape[0]]
    return loss, (dx if axis is None else lax.psum(dx, axis), dtable.astype(table.dtype))


def _loss_backward(vocab_size: int, axis: Axis, gradients: Any, cotangent: jax.Array) -> Any:
    del vocab_size, axis
    # In float32: a cotangent such as 1 / 7 rounded to bf16 would scale every gradient of the model by 0.998.
    dx, dtable = ((grad.astype(jnp.float32) * cotangent).astype(grad.dtype) for grad in gradients)
    return dx, dtable, None, None


_summed_loss.defvjp(_loss_forward, _loss_backward)


def _blocks(x: jax.Array, targets: jax.Array, weights: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens in blocks [blocks, tokens, ...] of nearly equal size; what fills up the last one weighs nothing."""
    tokens = x.shape[0]
    count = -(-tokens // max(BLOCK_LOGITS // rows, 1))
    size = -(-tokens // count)

    def cut(array: jax.Array) -> jax.Array:
        missing = count * size - tokens
        padded = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array
        return padded.reshape(count, size, *array.shape[1:])

    return cut(x), cut(targets), cut(weights)


def _block_loss(
    rows: jax.Array, x: jax.Array, targets: jax.Array, weights: jax.Array, vocab_size: int, axis: Axis
) -> tuple[jax.Array, jax.Array]:
    """The loss sum of a block of tokens, and the cotangent of its logits [tokens, rows] in float32."""
    logits = jnp.einsum("th,vh->tv", x, rows, preferred_element_type=jnp.float32)
    columns = _first_row(rows, axis) + jnp.arange(rows.shape[0], dtype=jnp.int32)
    hit = columns == targets[:, None]
    if _is_padded(rows, vocab_size, axis):
        hit &= columns < vocab_size  # a target that is no token, of weight 0, may be the number of such a row
        logits = jnp.where(columns < vocab_size, logits, -jnp.inf)
    largest = jnp.max(logits, axis=-1)
    if axis is not None:
        largest = lax.pmax(largest, axis)
    exponentials = jnp.exp(logits - largest[:, None])
    sums = jnp.sum(exponentials, axis=-1), jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    total, target = sums if axis is None else lax.psum(sums, axis)
    loss = jnp.sum((jnp.log(total) + largest - target) * weights)
    return loss, (exponentials / total[:, None] - hit.astype(jnp.float32)) * weights[:, None]


def _rows_of_tokens(table: jax.Array, dtype: Any, vocab_size: int, axis: Axis) -> jax.Array:
    """The rows in the dtype of products, those that are no tokens zero: 0 times what they hold could be NaN."""
    rows = table.astype(dtype)
    if not _is_padded(table, vocab_size, axis):
        return rows
    is_token = _first_row(table, axis) + jnp.arange(table.shape[0], dtype=jnp.int32) < vocab_size
    return jnp.where(is_token[:, None], rows, jnp.zeros((), dtype))


def _is_padded(table: jax.Array, vocab_size: int, axis: Axis) -> bool:
    """Whether any device has rows that are no tokens."""
    return table.shape[0] * (1 if axis is None else lax.axis_size(axis)) > vocab_size


def _own_rows(table: jax.Array, tokens: jax.Array, vocab_size: int, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """Where in this device's rows the tokens stand, and whether they do."""
    rows = tokens - _first_row(table, axis)
    return rows, (rows >= 0) & (rows < table.shape[0]) & (tokens < vocab_size)


def _first_row(table: jax.Array, axis: Axis) -> jax.Array:
    return jnp.int32(0) if axis is None else lax.axis_index(axis) * table.shape[0]
