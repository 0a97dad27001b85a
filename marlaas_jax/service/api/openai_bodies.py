"""What a sampling request may hold, in OpenAI's words: what is known, what changes nothing, and a sentence for the rest."""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from marlaas_jax.config import MAX_INT32, MAX_SEED, Section, Temperature, Tokens
from marlaas_jax.errors import InvalidRequest, short
from marlaas_jax.messages import Sampling

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
MAX_CHOICES = 128  # of one request, over all prompts
DEFAULT_TOKENS = 16  # of a completion; a chat's answer may fill the context
HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls")
# Not known here, but taken with a value that changes nothing, as null does everywhere.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (),
    "verbosity": (), "web_search_options": (), "repetition_penalty": (1,), "guided_json": (), "guided_regex": (),
    "prompt_logprobs": (),
}  # fmt: skip
NEUTRAL_OF_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": (), "audio": (), "function_call": (), "tool_calls": ([],), "annotations": ([],),
}  # fmt: skip


def _taken(document: Any, neutral: Mapping[str, tuple[Any, ...]], harmless: tuple[str, ...] = ()) -> Any:
    """Returns the document without what changes nothing. Raises ValueError for what would and is not known."""
    if not isinstance(document, dict):
        return document
    taken = {}
    for name, value in document.items():
        if value is None or name in harmless:
            continue
        if name not in neutral:
            taken[name] = value
        elif value not in neutral[name]:
            allowed = " or ".join(map(repr, neutral[name]))
            raise ValueError(
                f"{name}={short(value)}: is not supported; leave it out" + (f" or give {allowed}" if allowed else "")
            )
    return taken


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    is_good = isinstance(stops, list) and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops)
    if not is_good or len(stops) > MAX_STOPS:
        raise ValueError(f"must be a text or up to {MAX_STOPS}, each of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompt(value: Any) -> Any:
    is_list = isinstance(value, list) and bool(value)
    if not (
        isinstance(value, str)
        or _is_ids(value)
        or (is_list and all(isinstance(entry, str) for entry in value))
        or (is_list and all(map(_is_ids, value)))
    ):
        raise ValueError("must be a text, a list of texts, a list of token ids or a list of lists of token ids; none empty")
    return value


class StreamOptions(Section):
    """How an answer is streamed."""

    include_usage: bool = False  # a last chunk, without choices, says what was used
    include_obfuscation: bool = False  # taken; nothing is added to hide lengths


class SamplingBody(Section):
    """What both sorts of request share."""

    model: Annotated[str, Field(min_length=1, max_length=256)]  # the base's name, JOB or JOB@STEP
    max_tokens: Tokens | None = None
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] = 0  # beyond OpenAI's; 0: off
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0  # beyond OpenAI's; 0: off
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[tuple[str, ...], pydantic.BeforeValidator(_stops, json_schema_input_type=str | list[str])] = ()
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False  # beyond OpenAI's: the ids of prompts and choices too

    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_known(cls, document: Any) -> Any:
        if isinstance(document, dict) and document.get("best_of") == document.get("n", 1):
            document = {name: value for name, value in document.items() if name != "best_of"}
        return _taken(document, NEUTRAL | {"best_of": ()}, HARMLESS)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> Sampling:
        """Returns the settings as the sampler takes them."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, max_tokens, self.stop)

    def seeds(self) -> tuple[int, ...]:
        """Returns a seed per sample of a prompt: the first is the request's own, the others follow from it."""
        if self.seed is None:
            return tuple(secrets.randbelow(MAX_SEED + 1) for _ in range(self.n))
        return tuple(self.seed & MAX_SEED if i == 0 else _derived(self.seed, i) for i in range(self.n))


class Completion(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], pydantic.BeforeValidator(_prompt)]
    # 0: the log-probs of the sampled tokens; those of others are not known
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Returns each prompt. Raises InvalidRequest for too many choices."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_one else list(self.prompt)
        if len(prompts) * self.n > MAX_CHOICES:
            raise InvalidRequest(
                f"n={self.n}: of {len(prompts)} prompts are too many; at most {MAX_CHOICES} choices are allowed"
            )
        return prompts


class TextPart(Section):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ChatMessage(Section):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_call_id: str | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_known(cls, document: Any) -> Any:
        return _taken(document, NEUTRAL_OF_MESSAGE)

    def plain(self) -> dict[str, str]:
        """Returns the turn as chat templates take it; "developer" is OpenAI's newer word for "system"."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | {name: value for name, value in given.items() if value is not None}


class ChatCompletion(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None  # the newer name of max_tokens
    logprobs: bool = False  # of the sampled tokens
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0  # those of other tokens are not known

    @pydantic.model_validator(mode="after")
    def _one_limit(self) -> "ChatCompletion":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError(f"max_completion_tokens={self.max_completion_tokens}: max_tokens={self.max_tokens} says otherwise")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of an answer; None: what the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _derived(seed: int, sample: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED
