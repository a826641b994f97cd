"""zoo's worker: an ordinary run whose loop waits for its turn before every step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.protocol import Turns, forget_peak, now, peak_bytes
from zoo.compose import compose
from zoo.instantiate import structured
from zoo.train import loop


def overrides(spec: dict[str, Any]) -> list[str]:
    """The command line of a contest's run."""
    kind = {"dpo": "pairs", "sft": "examples", "reward_model": "pairs"}.get(
        spec["algorithm"], "prompts"
    )
    rows = Path(spec["rows"])
    found = [
        f"algorithm={spec['algorithm']}",
        "model=hub",
        f"model.path={spec['model']}",
        "model.compute_dtype=bfloat16",
        "data=jsonl",
        f"data.path={rows}",
        f"data.kind={kind}",
        "data.chat=false",
        "data.heldout=0",
        f"train.groups={spec['groups']}",
        "train.steps=1000",
        "train.lr=1e-6",
        "train.schedule=constant",
        f"train.micro_batch_tokens={spec['micro_batch_tokens']}",
        "train.checkpoint_every=0",
        "evaluate.first=false",
        "evaluate.last=false",
        "measure.wandb=disabled",
        "measure.rollouts_per_step=0",
        f"output={spec['output']}",
    ]
    if kind == "prompts":
        found += [
            "reward=function",
            "reward.fn=benchmarks.speed.protocol.score",
            f"rollout.group_size={spec['group_size']}",
            f"rollout.max_new_tokens={spec['new_tokens']}",
        ]
    return found + list(spec.get("overrides", ()))


class Stepping:
    """Stands between a session and the loop: one turn a step, and what was measured in it."""

    def __init__(self, turns: Turns, spec: dict[str, Any]) -> None:
        self.turns = turns
        self.spec = spec

    def train(self, run: Any, session: Any) -> None:
        source = run.source
        if self.spec.get("endless"):
            source.sampling = replace(source.sampling, stop_token_ids=())
        steps = session.steps
        session.steps = lambda: self._steps(run, session, steps())
        _train(run, session)

    def _steps(self, run: Any, session: Any, steps: Iterator[int]) -> Iterator[int]:
        self.turns.reply({"ready": True, "parameters": _count(run)})
        self.turns.await_go()
        highest = 0
        for step in steps:
            forget_peak()
            start = now()
            yield step
            seconds = now() - start
            metrics = _last_line(session.folder / "metrics.jsonl")
            measured = int(metrics.get("memory/rss_peak", 0))  # phases start the mark anew
            highest = max(highest, peak_bytes(), measured)
            record = {"seconds": seconds, "peak": highest, **_described(metrics)}
            if self.spec["algorithm"] == "dpo":
                record["reference_seconds"] = self._reference(run, step)
            self.turns.reply(record)
            self.turns.await_go()

    def _reference(self, run: Any, step: int) -> float:
        """Seconds of the reference's forward pass over the step's rows, which a run makes once."""
        before = run.source.state_dict()
        batch = run.source.next(step).batch.replace(ref_logprobs=None)
        run.source.load_state_dict(before)
        run.models.reference = run.policy
        start = now()
        with torch.no_grad():
            run.models.reference_logprobs(batch)
        seconds = now() - start
        run.models.reference = None
        return seconds


_train = loop.train


def _count(run: Any) -> int:
    return sum(p.numel() for p in run.made.parameters())


def _last_line(path: Path) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return json.loads(file.readlines()[-1])


def _described(metrics: dict[str, Any]) -> dict[str, Any]:
    """A step's record in the words that all contenders share."""
    names = {
        "generate_seconds": "seconds/generate",
        "train_seconds": "seconds/update",
        "tokens_generated": "tokens/generated",
        "tokens_trained": "tokens/trained",
        "reward": "reward/total",
        "grad_norm": "grad_norm/policy",
    }
    found = {name: metrics[key] for name, key in names.items() if key in metrics}
    losses = [value for key, value in metrics.items() if key.startswith("loss/")]
    return {**found, "loss": losses[0] if losses else None}


def main() -> None:
    spec = json.loads(sys.argv[1])
    turns = Turns()
    loop.train = Stepping(turns, spec).train
    from zoo.train.run import run

    torch.set_num_threads(spec["threads"])
    run(structured(compose(overrides(spec))))


if __name__ == "__main__":
    main()
