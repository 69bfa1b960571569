"""Sizes of all measurements: for a real device, and so small that a simulated device can run
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

BYTES = 2
"""Bytes of an element: weights, keys and values are bfloat16."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A dense model with Qwen3's architecture."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151_936
    is_tied: bool = False

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        """Input and output widths of a layer's matrix products."""
        return MappingProxyType(
            {
                "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim),
                "o": (self.heads * self.head_dim, self.hidden),
                "gate_up": (self.hidden, 2 * self.intermediate),
                "down": (self.intermediate, self.hidden),
            }
        )

    @property
    def weights(self) -> int:
        """Weight elements that a step reads: all layers' products, and the output layer."""
        return self.layers * sum(map(prod, self.products.values())) + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    def step_bytes(self, rows: int, context: float) -> float:
        """Return the bytes that a decode step reads: weights, and KV of `rows` requests with
        `context` tokens each."""
        return self.weights * BYTES + rows * context * self.kv_bytes

    def prompt_flops(self, tokens: int) -> float:
        """Return the operations of one prompt: matrix products, causal attention, and the output
        layer for one token."""
        body = (self.weights - self.vocab * self.hidden) * 2 * tokens
        attention = 2 * self.heads * self.head_dim * tokens * tokens * self.layers
        return body + attention + 2 * self.vocab * self.hidden

    def config(self, context: int) -> dict[str, object]:
        """Return the content of its config.json."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": context,
            "tie_word_embeddings": self.is_tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True, slots=True)
class Sizes:
    """`rows`: row counts of products, the most important first. `decode`: groups of requests of an
    attention step, (requests, context tokens of each). `extend`: (tokens before, prompt tokens).
    `prompts`: prompt lengths. `draws`: batch sizes that also run top-p sampling."""

    geometries: Mapping[str, Geometry]
    copy_bytes: int
    square: int
    nodes: int
    rows: tuple[int, ...]
    cached: int
    decode: tuple[tuple[tuple[int, int], ...], ...]
    extend: tuple[tuple[int, int], ...]
    attention_of: str
    batches: tuple[int, ...]
    draws: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int
    prompt: int
    tokens: int
    profiled: tuple[int, ...]
    profile_steps: int
    peers: tuple[int, ...]
    rounds: int
    repeats: int
    settings: Mapping[str, object]


REAL = Sizes(
    geometries=MappingProxyType(
        {
            "0.6B": Geometry(1024, 3072, 28, 16, 8, is_tied=True),
            "8B": Geometry(4096, 12288, 36, 32, 8),
        }
    ),
    copy_bytes=1 << 31,
    square=8192,
    nodes=400,
    rows=(1, 32, 128, 8, 64, 256, 4, 16, 2),
    cached=256 << 20,
    decode=(
        *(((count, length),) for length in (200, 2048) for count in (1, 32, 128, 256)),
        *(((count, 8192),) for count in (1, 32, 128)),
        ((1, 32768), (31, 200)),
    ),
    extend=((0, 2048), (0, 8192), (8192, 512)),
    attention_of="8B",
    batches=(1, 32, 128, 8, 256),
    draws=(1, 32),
    prompts=(128, 512, 2048, 8192),
    context=8704,
    prompt=128,
    tokens=128,
    profiled=(1, 32),
    profile_steps=20,
    peers=(1, 32),
    rounds=5,
    repeats=20,
    settings=MappingProxyType({}),
)
DRY = Sizes(
    geometries=MappingProxyType(
        {
            "0.6B": Geometry(64, 128, 2, 4, 2, 16, 512, is_tied=True),
            "8B": Geometry(64, 128, 2, 4, 2, 64, 512),
        }
    ),
    copy_bytes=1 << 16,
    square=64,
    nodes=4,
    rows=(1, 3),
    cached=1 << 15,
    decode=(((1, 20),), ((2, 20),), ((1, 40), (2, 3))),
    extend=((0, 24), (16, 8)),
    attention_of="8B",
    batches=(1, 2),
    draws=(1,),
    prompts=(8, 40),
    context=256,
    prompt=8,
    tokens=6,
    profiled=(1,),
    profile_steps=2,
    peers=(1, 2),
    rounds=1,
    repeats=1,
    # A simulated device interprets Triton's kernels, which takes seconds per token; only the parts
    # that measure kernels run them.
    settings=MappingProxyType({"kernels": "reference", "attention_backend": "gathered", "kv_cache_memory": "16M"}),
)
"""A dry run: every path of the code, and no figures."""
