"""Environments for reinforcement learning of language models; imports neither JAX nor marlaas_jax.

`protocol.py` is all that an environment needs to know; `registry.py` finds them by name.
"""
