"""`marlaas export`: a job's adapter as a PEFT folder, or merged into its base."""

from pathlib import Path
from typing import Any

from marlaas_jax.cli.runs import split_source
from marlaas_jax.device import initial
from marlaas_jax.documents import require_path
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.lora import merge, peft_format, readme
from marlaas_jax.model import hf_config, source
from marlaas_jax.model.identity import identity, require_same


def export(run_source: str, out: Path, merged: bool) -> dict[str, Any]:
    """Writes `out`, which must not exist; returns what was written."""
    require_path("--out", str(out))
    require_path("SOURCE", run_source)
    if out.exists():
        raise InvalidConfig(f"--out={out}: exists already; name a new folder")
    run = split_source(run_source)
    folder = source.resolve(run.config.runtime.model)
    state = initial.read_run_step(run_source)  # once: a run that goes on has another newest step by the next time
    base = identity(folder, run.template)
    require_same(base, state.identity, f"the folder {folder}: its", f"that of {run_source!r}")
    spec, weights = initial.adapter_of(state, run_source, hf_config.read(folder), None, base)
    extra = {"job": run.job, "step": state.step}
    if merged:
        merge.merge(folder, out, spec, weights, extra=extra)
    else:
        peft_format.save(out, hf_config.read(folder), spec, weights, base, str(folder.resolve()), extra)
        readme.write(out, readme.Base(run.config.runtime.model, folder))
    return {"path": str(out), "job": run.job, "step": state.step, "form": "merged" if merged else "peft", "rank": spec.rank}
