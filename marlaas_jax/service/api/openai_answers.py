"""Completions in OpenAI's shapes, whole or in chunks."""

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from marlaas_jax.service.sampling import Order, Piece
from marlaas_jax.text.incremental import IncrementalText
from marlaas_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Wanted:
    """How an answer is to look."""

    is_chat: bool
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False  # of a stream, at its end; until then each chunk says that it comes


class Answer:
    """One answer; for a stream, the chunks of one."""

    def __init__(self, order: Order, wanted: Wanted, tokenizer: Tokenizer):
        self._order = order
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._id = ("chatcmpl-" if wanted.is_chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._num_sampled = 0
        self._begun: set[int] = set()  # choices of which a chunk was sent
        self._offsets: dict[int, _Offsets] = defaultdict(lambda: _Offsets(tokenizer))

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Returns the answer."""
        by_choice: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            by_choice[piece.choice].append(piece)
        choices = [self._choice(_joined(by_choice[choice])) for choice in sorted(by_choice)]
        last = by_choice[0][-1]
        self._num_sampled = sum(len(piece.token_ids) for parts in by_choice.values() for piece in parts)
        return self._document("", last, choices) | {"usage": self._usage()}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns what is sent for a piece; nothing for tokens that are no text yet, unless they are asked for."""
        self._num_sampled += len(piece.token_ids)
        if not (piece.text or piece.finish_reason or self._wanted.logprobs or self._wanted.token_ids):
            return []
        out = []
        if self._wanted.is_chat and piece.choice not in self._begun:
            opening = {"index": piece.choice, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            out.append(self._document(".chunk", piece, [opening | {"finish_reason": None}]))
            if self._wanted.token_ids and not self._begun:
                out[0]["prompt_token_ids"] = list(self._order.prompts[0])
        choice = self._choice(piece, is_delta=True)
        self._begun.add(piece.choice)
        out.append(self._document(".chunk", piece, [choice]))
        return [chunk | {"usage": None} for chunk in out] if self._wanted.usage else out

    def last_chunk(self, piece: Piece) -> dict[str, Any]:
        """Returns what says at the end of a stream what was used."""
        return self._document(".chunk", piece, []) | {"usage": self._usage()}

    def _document(self, suffix: str, piece: Piece, choices: list[dict[str, Any]]) -> dict[str, Any]:
        document = {
            "id": self._id,
            "object": f"chat.completion{suffix}" if self._wanted.is_chat else "text_completion",
            "created": self._created,
            "model": self._order.model.name,
            "system_fingerprint": piece.fingerprint or None,
            "version": piece.version,
            "choices": choices,
        }
        if self._wanted.token_ids and self._wanted.is_chat and not suffix:
            document["prompt_token_ids"] = list(self._order.prompts[0])
        return document

    def _choice(self, piece: Piece, is_delta: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.choice}
        if not self._wanted.is_chat:
            choice["text"] = piece.text
        elif is_delta:
            choice["delta"] = {"content": piece.text} if piece.text or not piece.finish_reason else {}
        else:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        choice["logprobs"] = self._logprobs(piece) if self._wanted.logprobs else None
        choice["finish_reason"] = piece.finish_reason or None
        if self._wanted.token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if not self._wanted.is_chat and piece.choice not in self._begun:
                choice["prompt_token_ids"] = list(self._order.prompts[piece.choice // len(self._order.seeds)])
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """Returns the log-probs of all sampled tokens, also of those that ended the choice and are not in its text."""
        texts = [self._tokenizer.decode([token], skip_special=False) for token in piece.token_ids]
        if not self._wanted.is_chat:
            offsets = self._offsets[piece.choice].of(piece)
            return {"tokens": texts, "token_logprobs": list(piece.logprobs), "top_logprobs": None, "text_offset": offsets}
        tokens = [
            {"token": text, "logprob": logprob, "bytes": None if "�" in text else list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, piece.logprobs, strict=True)
        ]
        return {"content": tokens, "refusal": None}

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._order.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_sampled,
            "total_tokens": prompt + self._num_sampled,
        }


class _Offsets:
    """Where in a choice's text each of its tokens begins."""

    def __init__(self, tokenizer: Tokenizer):
        self._text = IncrementalText(tokenizer)

    def of(self, piece: Piece) -> list[int]:
        """Returns the offsets of the piece's tokens, in characters."""
        offsets = []
        for token in piece.token_ids:
            offsets.append(len(self._text.text))
            self._text.push(token)
        return offsets


def _joined(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return Piece(
        last.choice,
        tuple(token for piece in pieces for token in piece.token_ids),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        "".join(piece.text for piece in pieces),
        last.finish_reason,
        last.version,
        last.fingerprint,
    )
