"""Pictures of a run, from its metrics files. Imports matplotlib only when a picture is drawn."""

import json
from pathlib import Path
from typing import Any

SMOOTHING_STEPS = 3
EXPLANATION = f"thin: each batch; thick: mean of the last {SMOOTHING_STEPS}"


def read_metrics(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the metric rows of each job of a run folder, in step order; a last line cut short by a crash is left out."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(run_dir.glob("jobs/*/metrics.jsonl")):
        rows[path.parent.name] = []
        for line in path.read_text().splitlines():
            try:
                rows[path.parent.name].append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def reward_figure(rows_by_job: dict[str, list[dict[str, Any]]], title: str = "") -> Any:
    """Returns a matplotlib figure: reward over steps, one color per job."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, rows in rows_by_job.items():
        points = [(row["step"], row["rollout/reward_mean"]) for row in rows if row.get("rollout/reward_mean") is not None]
        if not points:
            continue
        steps, rewards = zip(*points, strict=True)
        (line,) = axes.plot(steps, rewards, linewidth=0.8, alpha=0.4)
        smooth = [
            sum(rewards[max(0, i - SMOOTHING_STEPS + 1) : i + 1]) / len(rewards[max(0, i - SMOOTHING_STEPS + 1) : i + 1])
            for i in range(len(rewards))
        ]
        axes.plot(steps, smooth, linewidth=2, color=line.get_color(), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the batch")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.set_title("\n".join(filter(None, (title, EXPLANATION))), fontsize="medium")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(ncols=1 + len(rows_by_job) // 12, fontsize="small")
    return figure


def write_reward_plot(run_dir: Path) -> Path:
    """Draws the run's reward curves to RUN/rewards.png; returns that path."""
    path = run_dir / "rewards.png"
    reward_figure(read_metrics(run_dir), title=run_dir.name).savefig(path, dpi=120)
    return path
