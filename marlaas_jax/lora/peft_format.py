"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors, as `peft` itself writes and reads them.

PEFT's `lora_A` [R, D] is our `down`, its `lora_B` [F, R] the transpose of our `up`; its scale lora_alpha / r is ours. Nothing
is folded into the tensors, so a round trip is exact. The identity of the base travels in the metadata of the safetensors
file, where no reader trips over it.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from marlaas_jax import patterns
from marlaas_jax.config import MAX_ALPHA, MAX_SEED, MIN_ALPHA
from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound, cut, short
from marlaas_jax.lora.adapter import AdapterSpec, Weights, weight_shapes
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.disk import read_json, write_json
from marlaas_jax.model.hf_names import LAYER_MODULES, module_name
from marlaas_jax.model.identity import require_same
from marlaas_jax.model.safetensors_io import FLOATS, TensorFile, open_file, write_file

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_METADATA = "marlaas"
# Fields that do not change what a finished adapter computes.
_HARMLESS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "runtime_config", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size", "layers_pattern",
    "ensure_weight_tying", "init_lora_weights",
}  # fmt: skip
# Initialisations that also change the base's weights, which are not in the folder.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Everything else must be off. Those that have values other than None, False and empty:
_OFF: dict[str, tuple[Any, ...]] = {"bias": ("none",)}


@dataclasses.dataclass(frozen=True)
class Match:
    """How an adapter's tensors meet a model's modules."""

    matched: tuple[str, ...]  # modules with both factors
    unmatched: tuple[str, ...]  # tensors in the file that belong to no module of this model, or to none the config names
    missing: tuple[str, ...]  # tensors that the config promises and the file lacks


class _Note(msgspec.Struct):
    """What an exporter of this package writes into the tensors' metadata."""

    base: dict[str, str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] = 0
    extra: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Imported:
    """An adapter read from a PEFT folder."""

    spec: AdapterSpec
    weights: Weights  # float32, padded to the bank's rank, zero outside the adapter's own rank and targets
    match: Match
    base: dict[str, str] | None  # identity of the base that it was trained on, if it was exported here
    extra: dict[str, Any]  # what else its exporter wrote


def save(
    folder: Path,
    config: ModelConfig,
    spec: AdapterSpec,
    weights: Weights,
    base: Mapping[str, str],
    base_name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the adapter, cut to its own rank and targets, in float32. `weights` as in a bank, NumPy or JAX, without A.

    `base` is its base's identity; `base_name` (by default the identity's name) is what PEFT shows as the base model; `extra`
    is kept beside the identity (job, version).
    """
    _check_padding(spec, weights)
    tensors = dict(_tensors(config, spec.targets))
    shapes = {key: _stored_shape(config, spec.rank, target, factor) for key, (target, factor, _) in tensors.items()}

    def tensor(key: str) -> np.ndarray:
        target, factor, layer = tensors[key]
        array = np.asarray(weights[target][factor][layer, : spec.rank], np.float32)
        return array if factor == "down" else array.T

    note = {"base": dict(base), "seed": spec.seed, "extra": dict(extra or {})}
    write_file(folder / TENSORS, shapes, "F32", tensor, {_METADATA: json.dumps(note, sort_keys=True)})
    write_json(folder / CONFIG, _config_json(spec, base_name or base["name"]))


def _config_json(spec: AdapterSpec, base_name: str) -> dict[str, Any]:
    """Returns the fields that every version of PEFT since 0.4 and the serving engines know."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": [LAYER_MODULES[target].split(".")[-1] for target in LAYER_MODULES if target in spec.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }


def _check_padding(spec: AdapterSpec, weights: Weights) -> None:
    """Refuses to drop anything: what lies outside the adapter's rank and targets must be zero."""
    for target, factors in weights.items():
        for factor, array in factors.items():
            outside = np.asarray(array)[:, spec.rank if target in spec.targets else 0 :]
            assert not outside.any(), f"{target}.{factor} is not zero outside rank {spec.rank} and targets {spec.targets}"


def _tensors(config: ModelConfig, targets: Iterable[str]) -> Iterable[tuple[str, tuple[str, str, int]]]:
    """Yields (PEFT's key, (target, factor, layer)) in PEFT's order."""
    for layer in range(config.num_layers):
        for target in LAYER_MODULES:
            if target in targets:
                for factor, name in (("down", "lora_A"), ("up", "lora_B")):
                    yield f"{_PREFIX}{module_name(layer, target)}.{name}.weight", (target, factor, layer)


def _stored_shape(config: ModelConfig, rank: int, target: str, factor: str) -> tuple[int, int]:
    width_in, width_out = config.projection_dims()[target]
    return (rank, width_in) if factor == "down" else (width_out, rank)


def load(folder: Path, config: ModelConfig, max_rank: int, base: Mapping[str, str] | None = None) -> Imported:
    """Returns the folder's adapter for a bank of `max_rank`.

    Raises NotFound, InvalidConfig or CorruptFile with one sentence if any tensor would go unused, is missing or misshapen, if
    the adapter needs what this model or bank cannot do, or if it was exported for another base than `base`.
    """
    if not (folder / CONFIG).is_file():
        raise NotFound(f"{folder}: holds no {CONFIG}, so it is not a PEFT adapter")
    document = read_json(folder / CONFIG)
    rank, alpha = _settings(folder, document, max_rank)
    if not (folder / TENSORS).is_file():
        hint = "; adapter_model.bin is a pickle, which is not read" if (folder / "adapter_model.bin").exists() else ""
        raise NotFound(f"{folder}: holds no {TENSORS}{hint}")
    file = open_file(folder / TENSORS)
    targets = _targets(folder, document, config)
    found = match(file, config, targets)
    _refuse_mismatch(folder, found)
    note = _note(file)
    if base is not None and note.base:
        require_same(note.base, base, f"the adapter {folder}: its", "the run's")
    weights = _read(file, config, rank, max_rank, targets)
    return Imported(AdapterSpec(rank, alpha, targets, note.seed), weights, found, note.base, note.extra)


def match(file: TensorFile, config: ModelConfig, targets: Iterable[str]) -> Match:
    """Returns how the tensors of an adapter file meet the modules of `targets`."""
    wanted = {key: place for key, place in _tensors(config, targets)}
    missing = tuple(key for key in wanted if key not in file.entries)
    absent = {(target, layer) for key, (target, _, layer) in wanted.items() if key in missing}
    modules = {(target, layer): None for target, _, layer in wanted.values() if (target, layer) not in absent}
    return Match(
        matched=tuple(module_name(layer, target) for target, layer in modules),
        unmatched=tuple(sorted(set(file.entries) - set(wanted))),
        missing=missing,
    )


def _refuse_mismatch(folder: Path, found: Match) -> None:
    counts = f"{len(found.matched)} modules matched, {len(found.unmatched)} tensors unmatched, {len(found.missing)} missing"
    if found.unmatched:
        raise InvalidConfig(
            f"{folder}: the tensor {found.unmatched[0]} belongs to no module of this model that {CONFIG} names ({counts}); "
            f"names look like {_PREFIX}{module_name(0, 'q')}.lora_A.weight"
        )
    if found.missing:
        raise InvalidConfig(f"{folder}: the tensor {found.missing[0]} is missing ({counts})")


def _settings(folder: Path, document: dict[str, Any], max_rank: int) -> tuple[int, float]:
    """Returns (rank, alpha), once every field of the configuration is known to be one that is honoured."""
    path = folder / CONFIG
    if document.get("peft_type") != "LORA":
        raise InvalidConfig(f"{path}: peft_type={short(document.get('peft_type'))} is not supported; supported: 'LORA'")
    for field, value in document.items():
        if field not in _HARMLESS and value and value not in _OFF.get(field, ()):
            raise InvalidConfig(
                f"{path}: {cut(field)}={short(value)} is not supported; allowed: {_OFF.get(field, (None,))[0]!r}"
            )
    initialisation = document.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.lower().startswith(_CHANGES_BASE):
        raise InvalidConfig(
            f"{path}: init_lora_weights={short(initialisation)} changes the base's weights, which is not supported"
        )
    rank, alpha = document.get("r", 8), document.get("lora_alpha", 8)  # PEFT's defaults
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InvalidConfig(f"{path}: r={short(rank)} must be a whole number above 0")
    if rank > max_rank:
        raise InvalidConfig(f"{path}: r={short(rank)} is above the bank's limit, runtime.bank.max_rank={max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not MIN_ALPHA <= alpha <= MAX_ALPHA:
        raise InvalidConfig(f"{path}: lora_alpha={short(alpha)} must be a number from {MIN_ALPHA:g} to {MAX_ALPHA:g}")
    return rank, float(alpha)


def _targets(folder: Path, document: dict[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """Returns our targets for PEFT's `target_modules`: names, a regular expression or "all-linear"."""
    path, wanted = folder / CONFIG, document.get("target_modules")
    excluded = document.get("exclude_modules") or ()
    modules = {module_name(layer, target): target for layer in range(config.num_layers) for target in LAYER_MODULES}

    def selected(pattern: Any) -> set[str]:
        if isinstance(pattern, str):
            return set(modules) if pattern == "all-linear" else patterns.matching(pattern, modules)
        return {name for name in modules if any(name == entry or name.endswith(f".{entry}") for entry in pattern)}

    if not wanted or not isinstance(wanted, str | list) or not isinstance(excluded, str | list | tuple):
        raise InvalidConfig(f"{path}: target_modules={short(wanted)} names no module")
    if isinstance(wanted, list):
        for entry in wanted:
            if not isinstance(entry, str) or not selected([entry]):
                allowed = ", ".join(name.split(".")[-1] for name in LAYER_MODULES.values())
                raise InvalidConfig(
                    f"{path}: target_modules: {short(entry)} matches no module of this model; allowed: {allowed}"
                )
    try:
        chosen = selected(wanted) - selected(excluded)
    except patterns.PatternFault as error:
        what = f"target_modules={short(wanted)}" + (f", exclude_modules={short(excluded)}" if excluded else "")
        raise InvalidConfig(f"{path}: {what}: {error}") from None
    targets = tuple(target for target in LAYER_MODULES if target in {modules[name] for name in chosen})
    if not targets:
        raise InvalidConfig(f"{path}: target_modules={short(wanted)} matches no module of this model")
    left_out = [name for name, target in modules.items() if target in targets and name not in chosen]
    if left_out:
        raise InvalidConfig(f"{path}: target_modules leaves out {left_out[0]}; an adapter covers a projection in all layers")
    return targets


def _note(file: TensorFile) -> _Note:
    try:
        return msgspec.json.decode(file.metadata.get(_METADATA, "{}"), type=_Note)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptFile(f"{file.path}: its {_METADATA!r} metadata cannot be read: {error}") from None


def _read(file: TensorFile, config: ModelConfig, rank: int, max_rank: int, targets: tuple[str, ...]) -> Weights:
    for key, (target, factor, _) in _tensors(config, targets):  # before anything of the size that `rank` claims is made
        entry, wanted = file.entries[key], _stored_shape(config, rank, target, factor)
        if entry.shape != wanted or entry.dtype not in FLOATS:
            found = f"{entry.dtype} {list(entry.shape)}"
            needed = f"this model and r={short(rank)} need a float tensor {short(list(wanted))}"
            raise InvalidConfig(f"{file.path}: {key} is {cut(found)}; {needed}")
    weights = {
        target: {factor: np.zeros(shape, np.float32) for factor, shape in shapes.items()}
        for target, shapes in weight_shapes(config, max_rank).items()
    }
    for key, (target, factor, layer) in _tensors(config, targets):
        array = file.read(key).astype(np.float32)
        if not np.isfinite(array).all():
            raise CorruptFile(f"{file.path}: {key} holds values that are not finite")
        weights[target][factor][layer, :rank] = array if factor == "down" else array.T
    return weights
