"""Sampling requests as the service takes them, and its answers as plain values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marlaas_jax.client.records import Choice, Completion

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def text(model: str, prompt: str | Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a completion."""
    given = prompt if isinstance(prompt, str) else list(prompt)
    return {"model": model, "prompt": given, "logprobs": 0, "return_token_ids": True, **options}


def chat(model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a chat completion."""
    return {"model": model, "messages": list(messages), "logprobs": True, "return_token_ids": True, **options}


def completion(document: Mapping[str, Any]) -> Completion:
    """Returns a whole answer."""
    usage = document["usage"]
    return Completion(
        document["model"], document["version"], list(choices(document)), usage["prompt_tokens"], usage["completion_tokens"]
    )


def choices(document: Mapping[str, Any]) -> Iterator[Choice]:
    """Yields the choices of an answer, or of one chunk of it."""
    for choice in document["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        said = choice.get("text", message.get("content")) or ""
        logprobs = choice.get("logprobs") or {}
        of_tokens = [entry["logprob"] for entry in logprobs.get("content", ())] or logprobs.get("token_logprobs", [])
        if said or choice["finish_reason"] or choice.get("token_ids"):
            yield Choice(choice["index"], said, choice["finish_reason"], choice.get("token_ids", []), of_tokens)
