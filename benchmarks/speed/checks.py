"""What needs no clock: log-probs against transformers' own, and the vocabulary's share of memory.

python -m benchmarks.speed.checks W1_MODEL W2_MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.memory.vocabulary import measure
from zoo.batch import Batch, collate
from zoo.models.policy import Policy

SIZES = {"W1": (4, 8, 29, 64), "W2": (2, 4, 90, 96)}  # prompts, G, tokens of either part


def parity(model: Any, sizes: tuple[int, int, int, int]) -> dict[str, float]:
    """Largest difference of packed log-probs from log-softmax over transformers' own logits."""
    batch = _batch(int(model.config.vocab_size), sizes)
    with torch.no_grad():
        ours = Policy(model, packed=True)(batch).logprobs
        theirs = torch.zeros_like(ours)
        for row in range(batch.input_ids.shape[0]):
            length = int(batch.lengths[row])
            ids = batch.input_ids[row : row + 1, :length]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            found = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            theirs[row, 1:length] = found.float()
    mask = batch.completion_mask
    gap = (ours - theirs)[mask].abs()
    return {"absolute": float(gap.max()), "relative": float((gap / theirs[mask].abs()).max())}


def _batch(vocabulary: int, sizes: tuple[int, int, int, int]) -> Batch:
    groups, group, prompt, new = sizes
    draw = torch.Generator().manual_seed(0)

    def ids(count: int, length: int) -> list[list[int]]:
        lengths = [length - (i * 5) % (length // 2) for i in range(count)]
        return [torch.randint(3, vocabulary, (n,), generator=draw).tolist() for n in lengths]

    prompts = [p for p in ids(groups, prompt) for _ in range(group)]
    names = [str(i) for i in range(groups)]
    return collate(prompts, ids(len(prompts), new), group_size=group, prompt_ids=names)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Any] = {"parity": {}}
    for name, folder in zip(("W1", "W2"), sys.argv[1:], strict=False):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found["parity"][name] = parity(model, SIZES[name])
    few, many = (growth.added - 2 * growth.weights for growth in measure())  # beyond the gradients
    found["vocabulary"] = {"extra_bytes": few, "extra_bytes_of_twice_the_tokens": many}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
