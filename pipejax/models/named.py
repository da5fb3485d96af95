"""Models by name: the demo's, those of the PipeOffload paper (arXiv 2503.01328), and Llama 3 (arXiv 2407.21783)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pipejax.models import gpt, llama
from pipejax.models.attention import Implementation

_VOCAB = 50_304  # GPT-2's 50,257, rounded up to a multiple of 128
_PAPER_KV_HEADS = 8


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A model to build, and how the source runs it.

    Attributes:
      name: what it is called here.
      summary: one line.
      num_layers: blocks.
      batch_size: sequences in a batch.
      length: tokens in a sequence.
      head_width: of an attention head.
      parts: from length and attention implementation to embed, block and head, as `pj.Pipeline` takes them.
    """

    name: str
    summary: str
    num_layers: int
    batch_size: int
    length: int
    head_width: int
    parts: Callable[[int, Implementation], tuple[Any, Any, Any]]


def named_models() -> dict[str, NamedModel]:
    """All of them, by name."""
    models = (
        _gpt("gpt-tiny", layers=16, heads=4, hidden=64, batch=32, length=128, vocab=256, kv_heads=4),
        _gpt("gpt-5.8b", layers=32, heads=32, hidden=4096, batch=32),
        _gpt("gpt-10.5b", layers=38, heads=40, hidden=5120, batch=64),
        _gpt("gpt-18.1b", layers=46, heads=48, hidden=6144, batch=128),
        _gpt("gpt-42.9b", layers=62, heads=64, hidden=8192, batch=256),
        _gpt("gpt-66.6b", layers=62, heads=80, hidden=10240, batch=256),
        _gpt("gpt-83.8b", layers=78, heads=80, hidden=10240, batch=256),
        _llama("llama3-8b", layers=32, heads=32, hidden=4096, mlp=14_336),
        _llama("llama3-70b", layers=80, heads=64, hidden=8192, mlp=28_672),
    )
    return {model.name: model for model in models}


def _gpt(
    name: str,
    *,
    layers: int,
    heads: int,
    hidden: int,
    batch: int,
    length: int = 4096,
    vocab: int = _VOCAB,
    kv_heads: int = _PAPER_KV_HEADS,
) -> NamedModel:
    def parts(length: int, attention: Implementation) -> tuple[Any, Any, Any]:
        config = gpt.Config(
            vocab_size=vocab,
            hidden_size=hidden,
            num_heads=heads,
            num_layers=layers,
            max_length=length,
            dtype=jnp.bfloat16,
            attention=attention,
            num_kv_heads=kv_heads,
        )
        return _bound(gpt, config)

    summary = f"GPT, {layers} layers, hidden {hidden}, {heads} heads, {kv_heads} of keys and values"
    return NamedModel(name, summary, layers, batch, length, hidden // heads, parts)


def _llama(name: str, *, layers: int, heads: int, hidden: int, mlp: int) -> NamedModel:
    def parts(length: int, attention: Implementation) -> tuple[Any, Any, Any]:
        del length  # rotary positions have no longest one
        config = llama.Config(
            vocab_size=128_256,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=8,
            mlp_size=mlp,
            dtype=jnp.bfloat16,
            attention=attention,
        )
        return _bound(llama, config)

    summary = f"Llama, {layers} layers, hidden {hidden}, {heads} heads, 8 of keys and values, MLP {mlp}"
    return NamedModel(name, summary, layers, batch_size=128, length=8192, head_width=hidden // heads, parts=parts)


def _bound(module: Any, config: Any) -> tuple[Any, Any, Any]:
    embed, block, head = (functools.partial(getattr(module, part), config) for part in ("Embed", "Block", "Head"))
    return embed, block, head
