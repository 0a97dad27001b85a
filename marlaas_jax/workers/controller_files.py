"""The run folder as the controller writes it. Strict JSON everywhere: a number that is not finite becomes null (H18).

    RUN/config.yaml  RUN/events.jsonl  RUN/logs/*.log
    RUN/jobs/NAME/  state.json     incarnation, outcome, evaluations: what a resume needs beside the checkpoint
                    batches.jsonl  a line per batch, written before it is sent to be trained
                    metrics.jsonl  a line per trained batch
                    evaluations.jsonl  a line per evaluation; see controller_evals
                    episodes-00000.jsonl ...  segments; the oldest go first
                    checkpoints/   adapter/   summary.json

After a crash the committed step decides: both logs are cut back to it, and a batch that was committed while its line of
metrics was not written yet gets that line from batches.jsonl. So the history of steps has neither gap nor repeat.

What is read back may have been damaged meanwhile: it is checked for types, and a CorruptFile names the file and the line.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NotRequired, TextIO, TypedDict

import msgspec

from marlaas_jax.errors import CorruptFile, StorageError

MAX_SEGMENT_BYTES = 16 << 20
MAX_SEGMENTS = 8

Count = Annotated[int, msgspec.Meta(ge=0)]


class Rollback(TypedDict):
    """What an incarnation or an older one did for a step after this one is undone."""

    step: Count
    incarnation: Count
    time: float


class EtaMark(TypedDict):
    """The forecast of a moment, in seconds; `active_s` is how long the job had run then."""

    share: float
    step: Count
    active_s: float
    expected_s: float
    low_s: float
    high_s: float
    basis: str


class State(TypedDict, total=False):
    """What is read back from state.json; it holds more, for people."""

    incarnation: Count
    state: str
    steps: Count
    rollback_to: Count | None  # the committed step that it goes on from; None: the newest
    rollbacks: list[Rollback]
    steps_asked: Count
    stop: dict[str, Any]
    stop_reason: str
    stop_asked: str
    adapter: str | None
    eval_before: float | None
    used_after: dict[str, float]
    eta_marks: list[EtaMark]
    eval_after: float | None


class Row(TypedDict):
    """What a line of batches.jsonl or metrics.jsonl holds beside its figures."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    tickets: NotRequired[list[tuple[int, int]]]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write into one sentence that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from None


def finite(value: Any) -> Any:
    """Returns the value with every non-finite float replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def to_line(record: dict[str, Any]) -> str:
    """Returns the record as one line of strict JSON."""
    return json.dumps(finite(record), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a log; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read ({error.strerror or error})") from None
    records = []
    for number, line in enumerate(text.split("\n")[:-1], 1):  # not splitlines: a text may hold U+2028 and its like
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise CorruptFile(f"{path}: line {number} is not a JSON object")
        records.append(record)
    return records


def read_rows(path: Path, last_step: int) -> dict[int, dict[str, Any]]:
    """Returns the lines of batches.jsonl or metrics.jsonl by step, up to `last_step`."""
    rows = {}
    for number, row in enumerate(read_lines(path), 1):
        figures = {name: value for name, value in row.items() if name not in Row.__annotations__}
        wrong = next((name for name, value in figures.items() if not isinstance(value, int | float | None)), None)
        if wrong is not None:
            raise CorruptFile(f"{path}: line {number}: {wrong}={figures[wrong]!r:.60} must be a number or null")
        try:
            msgspec.convert(row, Row)
        except msgspec.ValidationError as error:
            raise CorruptFile(f"{path}: line {number}: {error}") from None
        if row["step"] <= last_step:
            rows[row["step"]] = row
    return rows


def read_state(path: Path) -> dict[str, Any]:
    """Returns what state.json holds."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        msgspec.convert(state, State)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CorruptFile(f"{path}: cannot be read ({error})") from None
    return state


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes the document so that a crash leaves the old file or the new one."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(finite(document), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)


class Log:
    """One file of lines that only grows; a line is with the operating system when `write` returns."""

    def __init__(self, path: Path):
        self.path = path
        self._file: TextIO | None = None

    def write(self, record: dict[str, Any]) -> int:
        """Appends the record; returns the file's size."""
        with writing(self.path):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._drop_partial_line()
                self._file = self.path.open("a", encoding="utf-8", errors="replace")
            self._file.write(to_line(record))
            self._file.flush()
            return self._file.tell()

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Replaces the file's lines; a crash leaves the old ones or the new ones."""
        self.close()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(map(to_line, records)), encoding="utf-8", errors="replace")
            os.replace(temporary, self.path)

    def close(self) -> None:
        """Closes the file; the next write opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be flushed was reported by `write`
                self._file.close()
            self._file = None

    def _drop_partial_line(self) -> None:
        """Removes what a crash left of a line, so that the next one starts afresh."""
        if not self.path.is_file() or not self.path.stat().st_size:
            return
        with self.path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            end = size
            while end > 0:
                start = max(0, end - 65536)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
            if end < size:
                file.truncate(end)


class EpisodeLog:
    """Segments of bounded size; the oldest are deleted beyond `max_segments`."""

    def __init__(self, folder: Path, max_bytes: int = MAX_SEGMENT_BYTES, max_segments: int = MAX_SEGMENTS):
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_segments = max_segments
        numbers = [path.stem.partition("-")[2] for path in folder.glob("episodes-*.jsonl")]
        self._number = max((int(number) for number in numbers if number.isdecimal()), default=0)
        self._log = Log(self._path(self._number))

    def write(self, record: dict[str, Any]) -> None:
        """Appends one episode."""
        if self._log.write(record) < self._max_bytes:
            return
        self._log.close()
        self._number += 1
        self._log = Log(self._path(self._number))
        with writing(self._folder):
            for path in sorted(self._folder.glob("episodes-*.jsonl"))[: 1 - self._max_segments or None]:
                path.unlink()

    def close(self) -> None:
        """Closes the segment in use."""
        self._log.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"episodes-{number:05d}.jsonl"


class JobFiles:
    """The files of one job."""

    def __init__(self, folder: Path, clock: Callable[[], float]):
        self.folder = folder
        self.state: dict[str, Any] = {}
        self.metrics: list[dict[str, Any]] = []  # what metrics.jsonl holds
        self._clock = clock
        self._metrics_log = Log(folder / "metrics.jsonl")
        self._batch_log = Log(folder / "batches.jsonl")
        self._episodes: EpisodeLog | None = None
        self._waiting: dict[int, dict[str, Any]] = {}  # step -> its line, until it is trained

    def open(self, *, resume: bool) -> None:
        """Makes the folder; reads what an earlier process left, or refuses to mix with it."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        state_path = self.folder / "state.json"
        if state_path.is_file():
            if not resume:
                raise StorageError(f"{self.folder}: holds an earlier run; resume it, or choose another run folder")
            self.state = read_state(state_path)
        self._episodes = EpisodeLog(self.folder)

    def save_state(self, **changes: Any) -> None:
        """Changes entries of state.json."""
        self.state |= changes
        write_json(self.folder / "state.json", self.state)

    def cut_back(self, step: int) -> None:
        """Makes both logs end with the committed step."""
        sent, kept = read_rows(self._batch_log.path, step), read_rows(self._metrics_log.path, step)
        for missing in set(sent) - set(kept):
            kept[missing] = sent[missing]
        self.metrics = [kept[number] for number in sorted(kept)]
        self._waiting = {}
        self._batch_log.rewrite([sent[number] for number in sorted(sent)])
        self._metrics_log.rewrite(self.metrics)

    def batch_sent(self, step: int, incarnation: int, metrics: dict[str, float], tickets: tuple[tuple[int, int], ...]) -> None:
        """Writes down a batch that is about to be sent. `step` counts it in: the first is 1."""
        line = {"step": step, "incarnation": incarnation, "time": self._clock(), **metrics, "tickets": list(tickets)}
        self._batch_log.write(line)
        self._waiting[step] = line

    def batch_trained(self, step: int, version: int, metrics: dict[str, float]) -> dict[str, Any]:
        """Writes the batch's line of metrics and returns it."""
        line = self._waiting.pop(step, {"step": step}) | {"version": version, "time": self._clock()} | metrics
        self._metrics_log.write(line)
        self.metrics.append(line)
        return line

    def episode(self, record: dict[str, Any]) -> None:
        """Appends to the episode log."""
        if self._episodes is not None:
            self._episodes.write({"time": self._clock(), "incarnation": self.state.get("incarnation", 0), **record})

    def close(self) -> None:
        """Closes all files."""
        self._metrics_log.close()
        self._batch_log.close()
        if self._episodes is not None:
            self._episodes.close()
