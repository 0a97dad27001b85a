"""Takes a job back to an earlier committed step: what that means for the files in its folder.

`intend` writes one entry into state.json, and that is the roll-back; everything newer stays as it is. When the job goes on
next, as a new incarnation, the device reads that step, removes the newer ones once it has read it, and the logs are cut back.
Until then whoever reads the folder leaves out what is undone. A crash at any moment leaves the old state or the new one.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from marlaas_jax.errors import StorageError
from marlaas_jax.workers.controller_files import State, read_state, write_json, writing
from marlaas_jax.workers.controller_status import PAUSED

HELD = "held"


def committed(folder: Path) -> dict[int, Path]:
    """Returns the committed steps in a job's folder, the oldest first; one being written has another name until then."""
    names = {path: path.stem.removeprefix("step-") for path in (folder / "checkpoints").glob("*")}
    found = {int(name): path for path, name in names.items() if name.isdigit() and path.suffix != ".tmp"}
    return dict(sorted(found.items()))


def hold(folder: Path, path: Path) -> None:
    """Keeps a step that a save which still runs may prune. Raises StorageError, also where it has gone already."""
    release(folder)
    try:
        if path.is_dir():
            shutil.copytree(path, folder / HELD / path.name, copy_function=_link)
        else:
            (folder / HELD).mkdir()
            _link(str(path), str(folder / HELD / path.name))
    except (OSError, shutil.Error) as error:
        raise StorageError(f"{path}: cannot be held ({error})") from None


def put_back(folder: Path) -> None:
    """Puts the held step where it was if it is gone from there. Nobody may have the job's checkpoints open."""
    for path in (folder / HELD).glob("*"):
        place = folder / "checkpoints" / path.name
        if not place.exists():
            with writing(place):
                os.replace(path, place)


def release(folder: Path) -> None:
    """Lets go of what is held."""
    shutil.rmtree(folder / HELD, ignore_errors=True)


def intend(folder: Path, step: int, now: float) -> dict[str, Any]:
    """Takes the job back to `step`; returns state.json as it was. Raises StorageError or CorruptFile.

    Episodes of this incarnation or an older one that were meant for a later step are undone from here on.
    """
    before = read_state(folder / "state.json")
    incarnation = before.get("incarnation", 0)
    earlier = [mark for mark in before.get("rollbacks", ()) if mark["incarnation"] != incarnation]
    mark = {"step": step, "incarnation": incarnation, "time": now}
    changes = {"state": PAUSED, "steps": step, "rollback_to": step, "rollbacks": [*earlier, mark], "eval_after": None}
    write_json(folder / "state.json", before | changes)
    return before


def withdraw(folder: Path, before: dict[str, Any]) -> None:
    """Undoes `intend`, as long as the job did not go on."""
    write_json(folder / "state.json", before)


def pending(state: State) -> int | None:
    """Returns the step to go back to when the job goes on next, None for the newest."""
    return state.get("rollback_to")


def remove_result(folder: Path) -> None:
    """Removes the adapter and the summary of steps that are undone."""
    with writing(folder):
        if (folder / "adapter").is_dir():
            shutil.rmtree(folder / "adapter")
        (folder / "summary.json").unlink(missing_ok=True)


def is_undone(step: int | None, incarnation: int, state: State) -> bool:
    """Whether what an incarnation did for a step was taken back."""
    marks = state.get("rollbacks", ())
    return step is not None and any(step > mark["step"] and incarnation <= mark["incarnation"] for mark in marks)


def _link(source: str, target: str) -> str:
    """Gives a file a second name, or copies it where the file system knows no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
