"""Shape and variant of a Llama-family decoder: frozen and hashable, so it may be static to jit."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`) or position interpolation (`linear`, uses `factor` alone)."""

    kind: str  # "llama3" or "linear"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: RMSNorm, rotary attention with grouped queries, SwiGLU."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    num_layers: int
    model_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # keys further back than this are not seen

    def projection_dims(self) -> dict[str, tuple[int, int]]:
        """Returns (input, output) width of each linear projection by LoRA target name."""
        query, key = self.num_query_heads * self.head_dim, self.num_kv_heads * self.head_dim
        d, f = self.model_dim, self.mlp_dim
        return {"q": (d, query), "k": (d, key), "v": (d, key), "o": (query, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
