"""Reads what a job leaves in its folder, while it may still be writing: its metrics, episodes, checkpoints and adapter."""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from marlaas_jax.errors import CorruptFile, InvalidRequest, NotFound
from marlaas_jax.workers import roll_back
from marlaas_jax.workers.controller_files import State, read_state

BLOCK_BYTES = 256 << 10
MAX_SCANNED_BYTES = 8 << 20  # of episodes, for one page


@dataclass(frozen=True)
class EpisodeFilter:
    """Which episodes are meant; a field left alone excludes none."""

    step: int | None = None  # the batch that a training episode was meant for; the first is 1
    min_reward: float | None = None
    max_reward: float | None = None
    outcome: str | None = None
    split: str | None = None

    def takes(self, episode: dict[str, Any], groups_per_batch: int) -> bool:
        """Whether the episode is meant."""
        reward = episode.get("reward")
        return (
            (self.step is None or _step(episode, groups_per_batch) == self.step)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and self.outcome in (None, episode.get("outcome"))
            and self.split in (None, episode.get("split"))
        )


def metrics_lines(folder: Path, first_step: int, last_step: int | None) -> Iterator[bytes]:
    """Yields blocks of the lines of metrics.jsonl between two steps, inclusive; none of steps that were rolled back."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return
    if (back_to := roll_back.pending(_state(folder))) is not None:
        last_step = back_to if last_step is None else min(last_step, back_to)
    block = bytearray()
    with path.open("rb") as file:
        for _, line, record in _records(file):
            step = record.get("step", 0)
            if step >= first_step and (last_step is None or step <= last_step):
                block += line
            if len(block) >= BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    yield bytes(block)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Returns the evaluations so far, in the order in which they ended."""
    path = folder / "evaluations.jsonl"
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [record for _, _, record in _records(file)]


def episodes(
    folder: Path, which: EpisodeFilter, groups_per_batch: int, limit: int, cursor: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns a page of episodes, the oldest first, and the cursor of the next; None: that was the last.

    "is_undone" tells the episodes of steps that were rolled back. A page may hold fewer than `limit`, even none, and still not
    be the last: it ends after so many bytes were read.
    """
    number, offset = _parse_cursor(cursor)
    state = _state(folder)
    found: list[dict[str, Any]] = []
    scanned = 0
    for segment in sorted(folder.glob("episodes-*.jsonl")):
        segment_number = int(segment.stem.partition("-")[2])
        if segment_number < number:
            continue
        start = offset if segment_number == number else 0
        try:
            file = segment.open("rb")
        except FileNotFoundError:  # the oldest go when new ones come
            continue
        with file:
            _seek(file, start)
            for end, line, record in _records(file):
                scanned += len(line)
                if which.takes(record, groups_per_batch):
                    step = _step(record, groups_per_batch)
                    found.append(record | {"is_undone": roll_back.is_undone(step, record.get("incarnation", 0), state)})
                if len(found) >= limit or scanned >= MAX_SCANNED_BYTES:
                    return found, f"{segment_number}.{end}"
    return found, None


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Returns the committed steps, the oldest first; "is_undone": after the step that the job was rolled back to.

    Undone steps are there until the job goes on: so long it may still be rolled back to one of them.
    """
    back_to = roll_back.pending(_state(folder))
    return [
        {"step": step, "time": path.stat().st_mtime, "is_undone": back_to is not None and step > back_to}
        for step, path in roll_back.committed(folder).items()
        if path.exists()
    ]


def adapter_files(folder: Path) -> list[Path]:
    """Returns the files of the job's adapter in PEFT form. Raises NotFound before it is written."""
    adapter = folder / "adapter"
    files = sorted(path for path in adapter.rglob("*") if path.is_file())
    if not files or roll_back.pending(_state(folder)) is not None:
        raise NotFound(f"{folder.name}: has no adapter yet; it is written when the job has succeeded")
    return files


def zipped(files: list[Path], base: Path) -> Iterator[bytes]:
    """Yields a zip archive of the files, named relative to `base`, piece by piece."""
    sink = _Sink()
    with zipfile.ZipFile(cast(BinaryIO, sink), "w") as archive:
        for path in files:
            info = zipfile.ZipInfo.from_file(path, str(path.relative_to(base)))
            with path.open("rb") as source, archive.open(info, "w") as target:
                while block := source.read(BLOCK_BYTES):
                    target.write(block)
                    yield sink.take()
    yield sink.take()


def _state(folder: Path) -> State:
    """Returns the job's state.json; an empty one where there is none yet, or none that can be read."""
    try:
        return cast(State, read_state(folder / "state.json"))
    except CorruptFile:
        return {}


class _Sink:
    """A file that cannot be rewound and gives away what was written to it."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def flush(self) -> None:
        """There is nowhere to flush to."""

    def close(self) -> None:
        """Nothing is open."""

    def take(self) -> bytes:
        taken = bytes(self._written)
        self._written.clear()
        return taken


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yields the end, the bytes and the content of each whole line that holds a JSON object."""
    end = file.tell()
    for line in file:
        if not line.endswith(b"\n"):
            return  # it is being written
        end += len(line)
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield end, line, record


def _seek(file: BinaryIO, offset: int) -> None:
    """Goes to the first line that begins at or behind `offset`."""
    if offset > 0:
        file.seek(offset - 1)
        file.readline()


def _step(episode: dict[str, Any], groups_per_batch: int) -> int | None:
    return episode["ticket"] // groups_per_batch + 1 if episode.get("split") == "train" else None


def _parse_cursor(cursor: str | None) -> tuple[int, int]:
    if cursor is None:
        return 0, 0
    number, _, offset = cursor.partition(".")
    if not (number.isdecimal() and offset.isdecimal() and cursor.isascii() and len(cursor) <= 32):
        raise InvalidRequest(f"cursor={cursor[:64]!r}: must be one that an earlier page gave")
    return int(number), min(int(offset), 2**62)
