"""Pictures of a run, from its metrics files. Imports matplotlib only when a picture is drawn."""

import json
from pathlib import Path
from typing import Any

SMOOTHING_STEPS = 3
EVALUATIONS = "; points: held-out items, with the standard error"
EXPLANATION = f"thin: each batch; thick: mean of the last {SMOOTHING_STEPS}"


def read_metrics(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the metric rows of each job of a run folder, in step order, as far as they can be read."""
    return _read(run_dir, "metrics.jsonl")


def read_evaluations(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the evaluations of each job of a run folder, in step order, as far as they can be read."""
    return _read(run_dir, "evaluations.jsonl")


def _read(run_dir: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(run_dir.glob(f"jobs/*/{name}")):
        rows[path.parent.name] = []
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):  # not splitlines: U+2028 is no line's end
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # cut short by a crash, or damaged
                break
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows[path.parent.name].append(row)
    return rows


def reward_figure(
    rows_by_job: dict[str, list[dict[str, Any]]],
    title: str = "",
    evaluations_by_job: dict[str, list[dict[str, Any]]] | None = None,
) -> Any:
    """Returns a matplotlib figure: reward over steps, one color per job; evaluations as points with their standard error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    has_points = False
    for name, rows in rows_by_job.items():
        rewards_by_step = [(row["step"], row.get("rollout/reward_mean")) for row in rows]
        points = [(step, reward) for step, reward in rewards_by_step if isinstance(reward, int | float)]
        if not points:
            continue
        steps, rewards = zip(*points, strict=True)
        (line,) = axes.plot(steps, rewards, linewidth=0.8, alpha=0.4)
        smooth = [
            sum(rewards[max(0, i - SMOOTHING_STEPS + 1) : i + 1]) / len(rewards[max(0, i - SMOOTHING_STEPS + 1) : i + 1])
            for i in range(len(rewards))
        ]
        axes.plot(steps, smooth, linewidth=2, color=line.get_color(), label=name)
        has_points |= _draw_evaluations(axes, (evaluations_by_job or {}).get(name, []), line.get_color())
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the batch")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    explanation = EXPLANATION + (EVALUATIONS if has_points else "")
    axes.set_title("\n".join(filter(None, (title, explanation))), fontsize="medium")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(ncols=1 + len(rows_by_job) // 12, fontsize="small")
    return figure


def _draw_evaluations(axes: Any, rows: list[dict[str, Any]], color: Any) -> bool:
    """Draws a job's evaluations; False if there are none."""
    points = {row["step"]: row for row in rows if isinstance(row.get("reward_mean"), int | float)}
    if not points:
        return False
    steps = sorted(points)
    means = [points[step]["reward_mean"] for step in steps]
    errors = [points[step].get("reward_std_error") or 0.0 for step in steps]
    axes.errorbar(steps, means, yerr=errors, color=color, linestyle=":", marker="o", markersize=4, capsize=2)
    return True


def write_reward_plot(run_dir: Path) -> Path:
    """Draws the run's reward curves to RUN/rewards.png; returns that path."""
    path = run_dir / "rewards.png"
    reward_figure(read_metrics(run_dir), run_dir.name, read_evaluations(run_dir)).savefig(path, dpi=120)
    return path
