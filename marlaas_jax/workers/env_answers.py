"""What an environment returned, checked and cut to size before it travels.

A reward that is no finite number becomes None with a note: it leaves its group's statistics and nothing else (H24). Text that
is too long is cut with a mark, so that a tool that returns 50 MB costs its episode a truncation and others nothing (H28).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from marlaas_envs.protocol import Done, Observation
from marlaas_jax.messages import EnvDone, EnvError, EnvLoaded, EnvObservation, Item, Message, encode_json
from marlaas_jax.workers.user_calls import MAX_TRACEBACK_CHARACTERS, bounded_traceback

MAX_TEXT_CHARACTERS = 200_000  # of one observation: more than any context holds
MAX_ENCODED_BYTES = 4 << 20  # of one observation's messages and tools
MAX_NOTE_CHARACTERS = 500
MAX_METRICS = 64
MAX_ITEM_BYTES = 8 << 20
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 200  # of a message that another program may have made


class _BadAnswer(Exception):
    pass


def to_message(answer: Any, episode_id: str, attempt: int, turn: int) -> EnvObservation | EnvDone | EnvError:
    """Returns the message for what `reset` (turn 0) or `step` returned; `turn` counts the completion asked for next."""
    try:
        if isinstance(answer, Observation):
            return _observation(answer, episode_id, attempt, turn)
        if isinstance(answer, Done):
            return _done(answer, episode_id, attempt)
        raise _BadAnswer(f"it returned {_short(answer)}, not an Observation or a Done")
    except _BadAnswer as error:
        return EnvError(episode_id, attempt, "bad_answer", str(error))
    except Exception as error:  # the answer's own code runs here too: what it prints as, its mappings and sequences
        return EnvError(episode_id, attempt, "bad_answer", f"its answer cannot be read: {bounded_traceback(error)}")


def cut_to_size(message: Message) -> Message:
    """Returns an answer within the bounds that our own worker keeps, where another program may have made it."""
    replace = msgspec.structs.replace
    match message:
        case EnvLoaded():
            sizes = {"num_train": max(0, message.num_train), "num_eval": max(0, message.num_eval)}
            roles = tuple(role[:40] for role in message.reply_roles[:8])
            return replace(message, error=message.error[:MAX_TRACEBACK_CHARACTERS], reply_roles=roles, **sizes)
        case EnvDone():
            done = Done(message.reward, message.metrics, message.note)
            return to_message(done, message.episode_id, message.attempt, 0)
        case EnvObservation():
            stop = [text[:MAX_STOP_CHARACTERS] for text in message.stop[:MAX_STOPS]]
            seen = Observation(message.text, message.messages, message.tools, stop)
            return to_message(seen, message.episode_id, message.attempt, message.turn)
        case EnvError():
            kind = message.kind if message.kind in ("raised", "timeout", "bad_answer", "lost") else "bad_answer"
            return replace(message, kind=kind, text=message.text[:MAX_TRACEBACK_CHARACTERS])
        case Item() if len(message.item) > MAX_ITEM_BYTES:
            error = f"the item takes {len(message.item)} bytes; {MAX_ITEM_BYTES} is the most allowed"
            return replace(message, item=b"", error=error)
        case Item():
            return replace(message, error=message.error[:MAX_TRACEBACK_CHARACTERS])
    return message


def checked_reward(value: Any) -> tuple[float | None, str]:
    """Returns (reward, note): a finite float and no note, or None and why."""
    if value is None:
        return None, "the reward is None"
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None, f"the reward is {_short(value)}, not a number"
    try:
        reward = float(value)
    except Exception as error:
        return None, f"the reward is {_short(value)}, not one number ({type(error).__name__})"
    if not math.isfinite(reward):
        return None, f"the reward is {reward}"
    return reward, ""


def _done(done: Done, episode_id: str, attempt: int) -> EnvDone:
    reward, note = checked_reward(done.reward)
    metrics: dict[str, float] = {}
    if not isinstance(done.metrics, Mapping):
        raise _BadAnswer(f"Done.metrics is {_short(done.metrics)}, not a mapping of names to numbers")
    for name, value in list(done.metrics.items())[:MAX_METRICS]:
        number, why = checked_reward(value)
        if number is None:
            note = f"{note}; metric {str(name)[:40]}: {why.removeprefix('the reward is ')}".removeprefix("; ")
        else:
            metrics[str(name)[:80]] = number
    if done.note:
        note = f"{note}; {done.note}".removeprefix("; ")
    return EnvDone(episode_id, attempt, reward, metrics, note[:MAX_NOTE_CHARACTERS])


def _observation(seen: Observation, episode_id: str, attempt: int, turn: int) -> EnvObservation:
    if (seen.text is None) == (seen.messages is None):
        raise _BadAnswer("an Observation must have exactly one of text and messages")
    stop = tuple(seen.stop) if not isinstance(seen.stop, str) else (seen.stop,)
    if not all(isinstance(s, str) and s for s in stop):
        raise _BadAnswer(f"Observation.stop is {_short(seen.stop)}, not a sequence of non-empty strings")
    tools = _jsonable(seen.tools, "tools")
    if seen.text is not None:
        if not isinstance(seen.text, str):
            raise _BadAnswer(f"Observation.text is {_short(seen.text)}, not a string")
        return EnvObservation(episode_id, attempt, turn, text=_cut(seen.text, MAX_TEXT_CHARACTERS), tools=tools, stop=stop)
    return EnvObservation(episode_id, attempt, turn, messages=_messages(seen.messages), tools=tools, stop=stop)


def _messages(messages: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise _BadAnswer(f"Observation.messages is {_short(messages)}, not a non-empty sequence of messages")
    room = MAX_TEXT_CHARACTERS
    kept = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _BadAnswer(f"Observation.messages has {_short(message)}, not a mapping with a role")
        message = dict(message)
        if isinstance(message.get("content"), str):
            message["content"] = _cut(message["content"], room)
            room = max(0, room - len(message["content"]))
        kept.append(message)
    return _jsonable(kept, "messages")


def _jsonable(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Returns plain dicts: what goes over the wire must be what the template sees."""
    try:
        encoded = encode_json(list(value))
        if len(encoded) > MAX_ENCODED_BYTES:
            raise _BadAnswer(f"Observation.{name} takes {len(encoded)} bytes; {MAX_ENCODED_BYTES} is the most allowed")
        return msgspec.json.decode(encoded, type=tuple[dict[str, Any], ...])
    except (TypeError, msgspec.MsgspecError, RecursionError) as error:
        raise _BadAnswer(f"Observation.{name} cannot be written as JSON objects ({error})") from None


def _cut(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    return f"{text[:room]}\n[{len(text) - room} characters left out]"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "something without a repr"
    return f"{text[:60]} ({type(value).__name__})"
