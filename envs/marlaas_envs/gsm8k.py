"""gsm8k: grade-school word problems (Cobbe et al. 2021), read from a folder that holds train.jsonl and test.jsonl.

Arguments: path (the folder), chat (default: a user message), answer ("hashes": what follows the last ####; "last": the last
number, lenient). Items given through the job's `data` work too: prompt and a number as answer.
"""

import json
from pathlib import Path

from marlaas_envs.protocol import Action, Env, EnvFamily, EnvLookupError, Item, Source
from marlaas_envs.single_turn import SingleTurn
from marlaas_envs.sources import Listed, check_split
from marlaas_envs.verify import Verdict, last_number, number_after_hashes

_INSTRUCTION = "Think step by step and end with #### and the number."
_VERIFIERS = {"hashes": number_after_hashes, "last": last_number}


class Gsm8k:
    """The published split: train.jsonl for training, test.jsonl held out."""

    prompt_once = True

    def dataset(self, split: str, seed: int, path: str = "", chat: bool = True) -> Source:
        """Returns the problems of a split."""
        check_split(split)
        file = Path(path) / ("train.jsonl" if split == "train" else "test.jsonl")
        if not path or not file.is_file():
            raise EnvLookupError(f"env_args.path={path!r}: must be a folder with train.jsonl and test.jsonl of GSM8K")
        items = []
        with file.open(encoding="utf-8") as lines:  # not splitlines: a text may hold U+2028
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    question, answer = row["question"], row["answer"].rpartition("####")[2].strip()
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    raise EnvLookupError(f"{file}: line {number} is not an object with `question` and `answer`") from None
                prompt = f"{question}\n{_INSTRUCTION}" if chat else f"Q: {question}\nA:"
                items.append({"prompt": prompt, "answer": answer})
        if not items:
            raise EnvLookupError(f"{file}: it is empty")
        return Listed(items)

    def make(self, chat: bool = True, answer: str = "hashes") -> Env:
        """Returns the environment."""
        if answer not in _VERIFIERS:
            raise EnvLookupError(f"env_args.answer={answer!r}: allowed: {', '.join(_VERIFIERS)}")
        verify = _VERIFIERS[answer]

        def score(action: Action, item: Item) -> Verdict:
            verdict = verify(action.text, item["answer"])
            return verdict if action.stopped else Verdict(0.0, verdict.seen)

        return SingleTurn(score, chat)


def family(variant: str) -> EnvFamily:
    """Returns the family; there are no variants."""
    if variant:
        raise EnvLookupError(f"env='gsm8k:{variant}': there are no variants; use env_args path, chat, answer")
    return Gsm8k()
