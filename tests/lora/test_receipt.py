"""Job records list what trains (H05)."""

import json

import pytest

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.lora.adapter import AdapterSpec, init_weights
from marlaas_jax.lora.receipt import receipt
from marlaas_jax.model.config import ModelConfig

CONFIG = ModelConfig("llama", 3, 12, 4, 2, 5, 20, 30, 1e4, 1e-5, 64, True)


def test_counts_by_hand():
    """Rank 4, attention only: q 12+20, k 12+10, v 12+10, o 20+12 widths, times rank and layers."""
    found = receipt(CONFIG, AdapterSpec(4, 8.0, ("q", "k", "v", "o"), seed=3))
    assert found.num_trainable == 3 * 4 * (32 + 22 + 22 + 32)
    assert found.modules == (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),) * 3
    assert (found.rank, found.alpha, found.scale, found.seed) == (4, 8.0, 2.0, 3)


@pytest.mark.parametrize("targets", [("down",), ("up", "gate"), ("q", "k", "v", "o", "gate", "up", "down")])
def test_count_is_that_of_the_weights(targets):
    spec = AdapterSpec(2, 4.0, targets)
    weights = init_weights(CONFIG, spec, max_rank=6)
    inside = sum(f[:, : spec.rank].size for t in targets for f in weights[t].values())
    assert receipt(CONFIG, spec).num_trainable == inside


def test_record_is_json_in_the_model_s_order():
    record = json.loads(json.dumps(receipt(CONFIG, AdapterSpec(1, 1.0, ("down", "q"))).to_dict()))
    assert record["targets"] == ["q", "down"] and len(record["modules"]) == 3


def test_targets_that_match_no_module_are_refused():
    with pytest.raises(InvalidConfig, match=r"'lm_head' matches no module.*q, k, v, o, gate, up, down"):
        receipt(CONFIG, AdapterSpec(1, 1.0, ("q", "lm_head")))
    with pytest.raises(InvalidConfig, match="targets"):
        receipt(CONFIG, AdapterSpec(1, 1.0, ()))
