"""The README.md beside an adapter: which base it belongs to, where that is on this machine, and how PEFT loads both."""

import dataclasses
from pathlib import Path

from marlaas_jax.model.disk import storage_errors

README = "README.md"
SNIPPET = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = {base!r}
tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), {adapter!r})
"""
PAGE = """# A LoRA adapter for {name}

It was trained on the base model `{name}`, which on the machine of the training lies in

    {folder}

Elsewhere, name the same model there: with another base the adapter gives nonsense.

```python
{snippet}```
"""


@dataclasses.dataclass(frozen=True)
class Base:
    """A base model as a person names it, and its folder on this machine."""

    name: str
    folder: Path


def write(adapter: Path, base: Base) -> None:
    """Writes the page into the adapter's folder."""
    folder = base.folder.resolve()
    snippet = SNIPPET.format(base=str(folder), adapter=str(adapter.resolve()))
    with storage_errors(adapter / README):
        (adapter / README).write_text(PAGE.format(name=base.name, folder=folder, snippet=snippet), encoding="utf-8")
