"""The plain way with transformers alone, and the floor beneath all ways: products of matrices.

A turn generates with `generate` in bfloat16, trains one pass over the same sizes with padding and
all logits (bfloat16 weights, micro-batches of 8 rows, AdamW), and measures how long the matrix
products of either take by themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.speed.protocol import Turns, forget_peak, now, on_gpu, peak_bytes

HALF = torch.bfloat16
ROWS = 8  # of a plain micro-batch: the fastest in a search over 8 and all


class Plain:
    """Both parts of a step on the prompts of a file."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = torch.device("cuda" if on_gpu() else "cpu")
        self.model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=HALF)
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        tokenizer: Any = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        with open(spec["rows"], encoding="utf-8") as file:
            prompts = [json.loads(line)["prompt"] for line in file]
        self.prompts = tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        self.end = tokenizer.eos_token_id
        self.pad = tokenizer.pad_token_id

    def step(self) -> dict[str, Any]:
        forget_peak()
        start = now()
        ids, tokens = self._generate()
        generated = now() - start
        start = now()
        self._train(ids)
        trained = now() - start
        record = {
            "seconds": generated + trained,
            "generate_seconds": generated,
            "train_seconds": trained,
            "tokens_generated": tokens,
            "peak": peak_bytes(),
        }
        if self.spec.get("endless"):
            record |= self._floors()
        return record

    def _generate(self) -> tuple[torch.Tensor, int]:
        new, endless = self.spec["new_tokens"], self.spec.get("endless")
        self.model.eval()
        ids = self.model.generate(
            **self.prompts,
            max_new_tokens=new,
            **({"min_new_tokens": new} if endless else {}),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            num_return_sequences=self.spec["group_size"],
            pad_token_id=self.pad,
            eos_token_id=self.end,
        )
        made = ids[:, self.prompts["input_ids"].shape[1] :]
        ended = (made == self.end).cumsum(1)
        return ids, int(((ended - (made == self.end).long()) == 0).sum())

    def _train(self, ids: torch.Tensor) -> None:
        width = self.prompts["input_ids"].shape[1]
        mask = self.prompts["attention_mask"].repeat_interleave(self.spec["group_size"], 0)
        self.model.train()
        for rows, seen in zip(ids.split(ROWS), mask.split(ROWS), strict=True):
            after = seen.new_ones(rows.shape[0], rows.shape[1] - width)
            logits = self.model(input_ids=rows, attention_mask=torch.cat([seen, after], 1)).logits
            kept = logits[:, width - 1 : -1].float()
            logprobs = kept.log_softmax(-1).gather(-1, rows[:, width:, None])
            weights = torch.linspace(-1, 1, rows.shape[0], device=self.device)[:, None, None]
            (-(logprobs * weights).mean() * rows.shape[0] / ids.shape[0]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _floors(self) -> dict[str, float]:
        """Seconds of the linear maps alone: of decoding row by row, and of forward and backward."""
        spec = self.spec
        rows = spec["groups"] * spec["group_size"]
        prompt = int(self.prompts["attention_mask"].sum())
        layers, head = self._weights()
        decode = _seconds(lambda: _maps(layers, head, rows), 3)
        prefill = _seconds(lambda: _maps(layers, head[:0], prompt), 2)
        group = prompt // spec["groups"] + spec["group_size"] * spec["new_tokens"]
        scored = spec["group_size"] * spec["new_tokens"]
        trained = _seconds(lambda: _backward(layers, head, group, scored), 1)
        return {
            "generate_floor": decode * spec["new_tokens"] + prefill,
            "train_floor": trained * spec["groups"],
        }

    def _weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The linear maps of all layers, those of one input joined, and the head's."""
        layers = []
        for layer in self.model.base_model.layers:
            attention, network = layer.self_attn, layer.mlp
            heads = (attention.q_proj, attention.k_proj, attention.v_proj)
            layers += [
                torch.cat([m.weight.detach() for m in heads]),
                attention.o_proj.weight.detach(),
                torch.cat([network.gate_proj.weight.detach(), network.up_proj.weight.detach()]),
                network.down_proj.weight.detach(),
            ]
        return layers, [self.model.get_output_embeddings().weight.detach()]


def _maps(layers: list[torch.Tensor], head: list[torch.Tensor], rows: int) -> None:
    inputs = {w.shape[1]: w.new_ones(rows, w.shape[1]) for w in [*layers, *head]}
    for weight in (*layers, *head):
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)


def _backward(layers: list[torch.Tensor], head: list[torch.Tensor], rows: int, scored: int) -> None:
    """Forward, the gradient of the input, the gradient of the weight: three products a map."""
    for maps, count in ((layers, rows), (head, scored)):
        for weight in maps:
            x = weight.new_ones(count, weight.shape[1])
            y = torch.nn.functional.linear(x, weight)
            y @ weight
            y.t() @ x


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    """The fastest of some repeats, after one to warm up."""
    best = float("inf")
    with torch.no_grad():
        run()
        for _ in range(repeats):
            start = now()
            run()
            best = min(best, now() - start)
    return best


def main() -> None:
    spec = json.loads(sys.argv[1])
    turns = Turns()
    torch.set_num_threads(spec["threads"])
    transformers.utils.logging.set_verbosity_error()
    turns.serve(Plain(spec).step)


if __name__ == "__main__":
    main()
