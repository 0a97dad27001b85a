"""RUN/jobs/NAME/evaluations.jsonl: one line per evaluation, in the order in which they ended.

Like the metrics it is cut back to the committed step after a crash: an evaluation of a step that has to be trained anew is
done anew, and no other is done twice.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from marlaas_jax.errors import CorruptFile
from marlaas_jax.rollout.commands import EvalDone
from marlaas_jax.workers.controller_files import Log, read_lines

Count = Annotated[int, msgspec.Meta(ge=0)]


class Line(TypedDict):
    """What a line holds that is read back."""

    phase: Literal["before", "during", "after"]
    step: Count
    version: int
    reward_mean: float | None
    reward_std_error: float | None
    num_scored: Count
    num_items: Count
    time: NotRequired[float]
    incarnation: NotRequired[Count]


class Evaluations:
    """The evaluations of one job's history."""

    def __init__(self, folder: Path, clock: Callable[[], float]):
        self._log = Log(folder / "evaluations.jsonl")
        self._clock = clock
        self.lines: list[dict[str, Any]] = []

    def cut_back(self, step: int) -> None:
        """Makes the log end with the committed step."""
        self.lines = [line for line in _read(self._log.path) if line["step"] <= step]
        if self.lines or self._log.path.is_file():
            self._log.rewrite(self.lines)

    def add(self, done: EvalDone, incarnation: int) -> None:
        """Appends an evaluation that ended."""
        line = figures(done) | {"incarnation": incarnation, "time": self._clock()}
        self._log.write(line)
        self.lines.append(line)

    def past(self, job: str) -> tuple[EvalDone, ...]:
        """Returns them as the rollouts take them."""
        names = [name for name in Line.__annotations__ if name not in ("time", "incarnation")]
        return tuple(EvalDone(job, **{name: line[name] for name in names}) for line in self.lines)

    def last(self) -> dict[str, Any] | None:
        """Returns the line of the newest, None where there is none."""
        return self.lines[-1] if self.lines else None

    def close(self) -> None:
        """Closes the file."""
        self._log.close()


def figures(done: EvalDone) -> dict[str, Any]:
    """Returns an evaluation's figures as events and files have them."""
    return {
        "phase": done.phase,
        "step": done.step,
        "version": done.version,
        "reward_mean": done.reward_mean,
        "reward_std_error": done.reward_std_error,
        "num_scored": done.num_scored,
        "num_items": done.num_items,
    }


def _read(path: Path) -> list[dict[str, Any]]:
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        try:
            msgspec.convert(line, Line)
        except msgspec.ValidationError as error:
            raise CorruptFile(f"{path}: line {number}: {error}") from None
    return lines
