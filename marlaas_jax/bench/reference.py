"""Generation by transformers, and by transformers with peft, to compare with. Run by path under an interpreter that has torch.

Imports nothing of this package. Arguments: the model's shape as JSON, the adapters' rank, their number (0: none, as with merged
weights). Reads one request a line as JSON, {"batch", "prompt_tokens", "new_tokens"}, and answers {"wall_s", "cpu_s"}; the first
line that it writes names versions.
"""

import json
import os
import sys
import time


def build(shape: dict):
    """Returns a random model of the shape in float32."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    torch.set_grad_enabled(False)
    config = transformers.LlamaConfig(**shape, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    return transformers.LlamaForCausalLM(config).eval()


def with_adapters(model, count: int, rank: int):
    """Returns the model with `count` random adapters on all linear layers."""
    import peft
    import torch

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    model = peft.get_peft_model(model, config, adapter_name="a0")
    for i in range(1, count):
        model.add_adapter(f"a{i}", config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.eval()


def main() -> None:
    """Serves requests until the input ends."""
    import torch
    import transformers

    shape, rank, num_adapters = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    transformers.logging.set_verbosity_error()
    model = build(shape)
    if num_adapters:
        model = with_adapters(model, num_adapters, rank)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.randint(2, shape["vocab_size"], (request["batch"], request["prompt_tokens"]))
        extra = {}
        if num_adapters:
            extra["adapter_names"] = [f"a{i % num_adapters}" for i in range(request["batch"])]
        cpu, wall = time.process_time(), time.perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=request["new_tokens"],
            max_new_tokens=request["new_tokens"],
            **extra,
        )
        assert out.shape[1] == request["prompt_tokens"] + request["new_tokens"]
        print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main()
