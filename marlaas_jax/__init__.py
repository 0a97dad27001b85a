"""Multi-tenant reinforcement learning of language models with LoRA, on JAX and TPUs.

Axis letters (capitals are logical dims, never sharding; mesh axes are lower-case words):

    A adapter slot of a bank (slot 0 = null adapter, all zeros)    R rank, padded to the bank's maximum
    S decode slot      C cache position      B batch row      T token time       P prompt position
    M block of a micro-batch (one group, or a part of one)         G rollout in its group
    L layer            D model width         F MLP or projection output width
    N query heads      K key/value heads     Q query heads per key/value head    H head width
    V vocabulary

Arrays end in their dims: ``logits_BTV``. ``logprobs`` are natural logarithms. Importing this package loads no JAX.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marlaas_jax.client.asynchronous import AsyncClient
    from marlaas_jax.client.blocking import Client

__all__ = ["AsyncClient", "Client"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Returns a client class; imported only where one is used."""
    if name == "AsyncClient":
        from marlaas_jax.client.asynchronous import AsyncClient

        return AsyncClient
    if name == "Client":
        from marlaas_jax.client.blocking import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
