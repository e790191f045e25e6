"""The page of families, as the parity tests find them."""

import math
from collections.abc import Mapping
from pathlib import Path

from tests import layouts, models
from tests.ranks.parity import Deviation
from uneven.modelspec import FAMILIES
from uneven.modelspec.families import BY_PLAN

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"

FEATURES: Mapping[str, str] = {
    "llama": "grouped queries; biases, tied embeddings and a padding row in a second model",
    "mistral": "sliding window",
    "qwen2": "biases of queries, keys and values; 14 query heads on 2 key/value heads",
    "qwen3": "norms of each query and key head",
    "gemma2": "softcaps on scores and logits, scaled embedding, sliding windows, tied",
    "gemma3_text": "norms of each query and key head, scaled embedding, sliding windows, tied",
    "granite": "multipliers of embedding, residuals, attention and logits; biases",
    "olmo2": "query and key norms over the full width, which is divided",
    "phi3": "one projection to queries, keys and values, one to gate and up",
    "phi": "layer norms and biases everywhere, norms of each head, head with a bias, parallel branches",
    "gpt_neox": "queries, keys and values of a head side by side in one projection",
    "cohere2": "parallel branches, sliding windows, scaled logits, tied",
    "mixtral": "experts divided by width or whole, balance loss of the router",
    "qwen3_moe": "the same beside a dense layer",
    "deepseek_v3": "latent attention, shared experts, routing by groups",
    "gpt_oss": "attention sinks, sliding windows, interleaved gate and up, experts with biases, whole",
}

INTRODUCTION = """# Families

Every family below is divided and compared with one process that runs the stock model of transformers on the
same batch: its loss, and every gradient on every device, in float64. The largest relative errors are in the
table, rounded up to a power of ten; a test fails above 1e-12. This page is written by
[test_parity.py](../../tests/ranks/test_parity.py).

The number of layouts counts degrees 1 to 4, unequal shares, replicas of unlike degrees (2+1, 4+3, 3+2+1),
devices without heads, channels or vocabulary rows, scattered units, and another division in each layer.

| `model_type` | what is special about it | layouts | loss | gradients |
|---|---|---|---|---|
"""

BY_PLAN_TEXT = """
## By transformers' own plan

These families have no entry in the table of `modelspec/families.py`. Their `base_model_tp_plan` names the
projections that are divided, and the model on the meta device gives the shapes (`parallel/describe.py`). Each
is compared with one process on 3+2+1 devices of unequal shares, and on five of which one has no heads.

| `model_type` | layouts | loss | gradients |
|---|---|---|---|
"""

END = """
Any other family is refused by name. So are, within these families: dropout, bidirectional attention,
quantized weights, rotary embeddings whose frequencies depend on the length of the text (`dynamic`,
`longrope`), and, for GPT-OSS, experts divided by width, since its experts add biases.
"""


def write_page(found: Mapping[str, Mapping[str, Deviation]]) -> None:
    """Write the page, if all models were compared on all their layouts."""
    num_layouts = len(layouts.WORLDS) + len(layouts.SPECIAL)
    if any(len(found.get(name, {})) < num_layouts for name in models.MODELS):
        return
    if any(name not in found for name in BY_PLAN):
        return
    by_family: dict[str, list[Deviation]] = {}
    for name, config in models.MODELS.items():
        by_family.setdefault(config["model_type"], []).extend(found[name].values())
    rows = [f"| `{family}` | {FEATURES[family]} | {_numbers(by_family[family])} |" for family in FAMILIES]
    by_plan = [f"| `{family}` | {_numbers(list(found[family].values()))} |" for family in BY_PLAN]
    PAGE.write_text(INTRODUCTION + "\n".join(rows) + "\n" + BY_PLAN_TEXT + "\n".join(by_plan) + "\n" + END)


def _numbers(errors: list[Deviation]) -> str:
    loss = max(each.loss for each in errors)
    return f"{len(errors)} | {_rounded_up(loss)} | {_rounded_up(max(each.worst_gradient for each in errors))}"


def _rounded_up(error: float) -> str:
    return "0" if error == 0 else f"1e{math.ceil(math.log10(error))}"
