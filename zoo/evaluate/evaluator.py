"""How good a policy is on problems and texts that it was not trained on."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.batch import Batch, collate
from zoo.distributed import gathered, rank, world_size
from zoo.functional import pass_at_k
from zoo.models.policy import Policy
from zoo.rewards.check import REASONS, reason_name
from zoo.rewards.score import FAILED, PATIENCE, Patience, failures, score
from zoo.rollout.engine import Engine, Sampling
from zoo.train.inputs import problem_hash, prompts_hash
from zoo.types import Completion, EvaluationSet, Prompt

Progress = Callable[[int], None]


@dataclass(frozen=True)
class TokenizedSet:
    """An evaluation set with token ids: prompts to answer, or texts to score."""

    name: str
    kind: str
    prompts: tuple[Prompt, ...] = ()
    verifier: Any = None
    texts: tuple[tuple[int, ...], ...] = ()

    @property
    def content_hash(self) -> str:
        """Of the problems and texts in their order, of which each process takes a share."""
        return f"{prompts_hash(self.prompts)}-{texts_hash(self.texts)}"


def texts_hash(texts: Sequence[Sequence[int]]) -> str:
    """Of tokenized texts in their order."""
    return hashlib.blake2b(repr(texts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Evaluated:
    """One set's scores (a line of evals.jsonl) and outputs to read."""

    record: dict[str, Any]
    samples: list[dict[str, Any]]
    unscored: str = ""  # a warning of answers without a score


@dataclass
class Evaluator:
    """T = 1 accuracy, greedy accuracy, unbiased pass@k, perplexity, and drift from the start.

    An answer that the verifier cannot score counts as not right, and in the share `unscored`. Of a
    set of which it can score none there is no accuracy: null, not 0.

    Problems are dealt to processes and each is counted once. The draws depend on (seed, set,
    problem) and not on the step, so two evaluations differ by the policy alone, and evaluating
    more often changes nothing in training.
    """

    sets: Sequence[TokenizedSet]
    engine: Engine
    samples: int
    pass_k: Sequence[int]
    greedy: bool
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    pad_token_id: int
    texts_written: int = 16
    micro_batch_tokens: int = 8192
    # a fresh copy of the start for the drift, or None not to measure it
    load_start: Callable[[], Policy] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    patience: Patience = PATIENCE  # how long a verifier may take, and what its failure means

    def evaluate(
        self, policy: Policy, *, progress: Callable[[str, int], Progress] | None = None
    ) -> list[Evaluated]:
        """Every set once; the engine must hold the policy's weights."""
        results = []
        for item in self.sets:
            started = time.perf_counter()
            count = len(item.prompts) or len(item.texts)
            advance = progress(item.name, count) if progress else lambda n: None
            unscored = ""
            if item.kind == "perplexity":
                record, samples = self._perplexity(policy, item), []
                advance(count)
            else:
                record, samples, unscored = self._accuracy(policy, item, advance)
            record = {"set": item.name, "kind": item.kind, **record}
            record["seconds"] = time.perf_counter() - started
            results.append(Evaluated(record, samples, unscored))
        return results

    def greedy_accuracy(self, item: TokenizedSet, problems: int) -> tuple[float | None, str]:
        """A quick check: the share of the first `problems` answered rightly at T = 0, None where
        none could be scored; and a warning of those that could not."""
        mine = list(range(min(problems, len(item.prompts))))[rank() :: world_size()]
        prompts = [item.prompts[i] for i in mine]
        completions = self._generate(item.name, prompts, mine, 1, temperature=0.0)
        scores = score(item.verifier, prompts, [c[0] for c in completions], self.patience)
        outcomes = [_right(value) for value in scores.total]
        parts = gathered((outcomes, failures(scores)))
        outcomes = [outcome for part, _ in parts for outcome in part]
        return _share(outcomes), _told(item.name, outcomes, sum(failed for _, failed in parts))

    # accuracy --------------------------------------------------------------------------------

    def _accuracy(
        self, policy: Policy, item: TokenizedSet, advance: Progress
    ) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        mine = list(range(len(item.prompts)))[rank() :: world_size()]
        rows: list[dict[str, Any]] = []
        drift = (0.0, 0.0, 0)
        chunk = 64
        kept: list[tuple[Prompt, Completion]] = []
        for start in range(0, len(mine), chunk):
            indices = mine[start : start + chunk]
            prompts = [item.prompts[i] for i in indices]
            rows += self._answer(item, prompts, indices, kept)
            advance(len(indices) * world_size())
        if item.name == "heldout" and self.load_start is not None:
            drift = self._drift(policy, kept)
        total = [row for part in gathered(rows) for row in part]
        total.sort(key=lambda row: row["index"])
        record = _summary(total, self.pass_k, self.samples)
        record["prompts_hash"] = prompts_hash(item.prompts)
        record["temperature"] = 1.0
        record["max_new_tokens"] = self.max_new_tokens
        if item.name == "heldout" and self.load_start is not None:
            nats, tokens, sequences = (sum(column) for column in zip(*gathered(drift), strict=True))
            # nats a token, and nats a completion; nothing sampled says nothing
            record["kl_to_start"] = nats / tokens if tokens else None
            record["kl_to_start_sequence"] = nats / sequences if sequences else None
        samples = [text for row in total[: self.texts_written] for text in row["texts"]]
        answers = [x for row in total for x in (*row["outcomes"], *row["greedy"])]
        told = _told(item.name, answers, sum(row["failed"] for row in total))
        return record, samples, told

    def _answer(
        self,
        item: TokenizedSet,
        prompts: list[Prompt],
        indices: list[int],
        kept: list[tuple[Prompt, Completion]],
    ) -> list[dict[str, Any]]:
        rows = [
            {
                "index": i,
                "problem_id": p.id,
                "problem_hash": problem_hash(p),
                "source": p.columns.get("source"),
                "outcomes": [],
                "greedy": [],  # of the one greedy answer, where it is asked for
                "reasons": [],
                "failed": 0,  # answers on which the verifier failed
                "texts": [],
            }
            for i, p in zip(indices, prompts, strict=True)
        ]
        modes = [(self.samples, 1.0)] if self.samples else []
        modes += [(1, 0.0)] if self.greedy else []
        for n, temperature in modes:
            groups = self._generate(item.name, prompts, indices, n, temperature)
            flat = [c for group in groups for c in group]
            repeated = [p for p in prompts for _ in range(n)]
            scores = score(item.verifier, repeated, flat, self.patience)
            reasons = scores.reasons or [""] * len(flat)
            for k, row in enumerate(rows):
                own = range(k * n, (k + 1) * n)
                right = [_right(scores.total[j]) for j in own]
                row["failed"] += sum(reasons[j] is FAILED for j in own)
                if temperature == 0:
                    row["greedy"] = right
                else:
                    row["outcomes"] = right
                    row["reasons"] = [reasons[j] for j in own]
                    row["lengths"] = [len(flat[j].token_ids) for j in own]
                    row["truncated"] = [flat[j].truncated for j in own]
                    kept += [(prompts[k], flat[j]) for j in own]
                first = own[0]
                row["texts"].append(
                    {
                        "set": item.name,
                        "prompt_id": prompts[k].id,
                        "prompt": prompt_text(prompts[k]),
                        "answer": prompts[k].columns.get("answer"),
                        "temperature": temperature,
                        "text": flat[first].text,
                        "score": scores.total[first],
                        "reason": reasons[first],
                    }
                )
        return rows

    def _generate(
        self,
        name: str,
        prompts: list[Prompt],
        indices: list[int],
        n: int,
        temperature: float,
    ) -> list[list[Completion]]:
        sampling = Sampling(
            temperature=temperature,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            seed=(self.seed, "evaluate", name),
        )
        return self.engine.generate(
            [p.token_ids for p in prompts], [str(i) for i in indices], n, sampling
        )

    # log-probs -------------------------------------------------------------------------------

    def _drift(
        self, policy: Policy, rows: list[tuple[Prompt, Completion]]
    ) -> tuple[float, float, int]:
        """Σ (log π − log π_start) over sampled tokens, their number, and that of completions.

        k1 on samples of π: unbiased for KL(π‖start).
        """
        assert self.load_start is not None
        start = self.load_start()
        nats, tokens = 0.0, 0
        for batch in self._batches([(p.token_ids, c.token_ids) for p, c in rows]):
            mask = batch.completion_mask
            gap = self._logprobs(policy, batch) - self._logprobs(start, batch)
            nats += float(torch.where(mask, gap, 0.0).double().sum())
            tokens += int(mask.sum())
        return nats, float(tokens), len(rows)

    def _perplexity(self, policy: Policy, item: TokenizedSet) -> dict[str, Any]:
        mine = item.texts[rank() :: world_size()]
        nll, tokens = 0.0, 0
        for batch in self._batches([(text[:1], text[1:]) for text in mine]):
            mask = batch.completion_mask
            logprobs = self._logprobs(policy, batch)
            nll -= float(torch.where(mask, logprobs, 0.0).double().sum())
            tokens += int(mask.sum())
        nll, tokens = (sum(column) for column in zip(*gathered((nll, tokens)), strict=True))
        mean = nll / max(tokens, 1)
        return {
            "nll": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "n_texts": len(item.texts),
            "content_hash": texts_hash(item.texts),
            "n_tokens": tokens,
        }

    @torch.no_grad()
    def _logprobs(self, policy: Policy, batch: Batch) -> torch.Tensor:
        before, policy.temperature = policy.temperature, 1.0
        try:
            return policy(batch.to(self.device)).logprobs.cpu()
        finally:
            policy.temperature = before

    def _batches(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Batch]:
        """(prompt, completion) rows, by length, in micro-batches."""
        rows = sorted((r for r in rows if r[1]), key=lambda r: len(r[0]) + len(r[1]))
        batches, current, width = [], [], 0
        for row in rows:
            width = max(width, len(row[0]) + len(row[1]))
            if current and width * (len(current) + 1) > self.micro_batch_tokens:
                batches.append(current)
                current, width = [], len(row[0]) + len(row[1])
            current.append(row)
        batches += [current] if current else []
        return [
            collate(
                [p for p, _ in piece],
                [c for _, c in piece],
                group_size=1,
                prompt_ids=[str(i) for i in range(len(piece))],
                pad_token_id=self.pad_token_id,
            )
            for piece in batches
        ]


def _summary(rows: list[dict[str, Any]], pass_k: Sequence[int], samples: int) -> dict[str, Any]:
    drawn = [x for row in rows for x in row["outcomes"]]
    decoded = [x for row in rows for x in row["greedy"]]
    accuracy, greedy = _share(drawn), _share(decoded)
    outcomes = [[x or 0 for x in row["outcomes"] if accuracy is not None] for row in rows]
    lengths = [x for row in rows for x in row.get("lengths", [])]
    cut = [x for row in rows for x in row.get("truncated", [])]
    named = (reason_name(reason) for row in rows for reason in row["reasons"] if reason)
    found = Counter(name for name in named if name)
    reasons = dict(found.most_common(REASONS))
    if other := found.total() - sum(reasons.values()):
        reasons["other"] = reasons.get("other", 0) + other
    return {
        "accuracy": accuracy,
        "greedy": greedy,
        "pass@k": {
            str(k): sum(pass_at_k(samples, sum(o), k) for o in outcomes) / max(len(outcomes), 1)
            for k in pass_k
            if k <= samples and accuracy is not None
        },
        "unscored": [*drawn, *decoded].count(None) / max(len(drawn) + len(decoded), 1),
        "n_problems": len(rows),
        "samples": samples,
        "length": sum(lengths) / len(lengths) if lengths else None,
        "truncated": sum(cut) / len(cut) if cut else None,
        "reasons": {name: n / max(len(drawn), 1) for name, n in sorted(reasons.items())},
        **_by_source(rows),
        "problem_ids": [row["problem_id"] for row in rows],
        "problem_hashes": [row["problem_hash"] for row in rows],
        "outcomes": outcomes,
        "greedy_outcomes": [None if greedy is None else row["greedy"][0] or 0 for row in rows],
    }


def _right(score: float | None) -> int | None:
    return None if score is None else int(score >= 1)


def _share(outcomes: Sequence[int | None]) -> float | None:
    """Of right answers; those without a score are not right. None where none has one."""
    if all(outcome is None for outcome in outcomes):
        return None
    return sum(outcome or 0 for outcome in outcomes) / len(outcomes)


def _told(name: str, outcomes: Sequence[int | None], failed: int) -> str:
    """A warning of the answers of a set that could not be scored; "" where all could."""
    missing, asked = outcomes.count(None), len(outcomes)
    if not missing:
        return ""
    means = "count as not right" if missing < asked else "leave the set without an accuracy"
    why = f" It failed on {failed} of them (train.reward_on_error=abstain)." if failed else ""
    return (
        f"the verifier of the set {name} could not score {missing} of {asked} answers, which "
        f"{means}.{why} Correct it, or leave out the problems that it cannot judge; "
        "eval_samples.jsonl has its reasons."
    )


def _by_source(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Accuracy (and greedy accuracy) of each source, where a set has problems of several."""
    sources = {row["source"] for row in rows if isinstance(row["source"], str)}
    # More are no sources of a mixture, but a column of the data that happens to have the name.
    if not 2 <= len(sources) <= 32:
        return {}
    drawn: dict[str, list[int | None]] = {}
    greedy: dict[str, list[int | None]] = {}
    for row in rows:
        if row["source"] in sources:
            drawn.setdefault(row["source"], []).extend(row["outcomes"])
            greedy.setdefault(row["source"], []).extend(row["greedy"])
    return {
        key: {s: share for s, x in sorted(outcomes.items()) if (share := _share(x)) is not None}
        for key, outcomes in (("by_source", drawn), ("greedy_by_source", greedy))
    }


def prompt_text(prompt: Prompt) -> str:
    """What a person reads of a prompt: the raw text, or the last user turn."""
    if prompt.text is not None:
        return prompt.text
    return prompt.messages[-1]["content"] if prompt.messages else ""


def tokenized_sets(
    tokenizer: Any, sets: Sequence[EvaluationSet], problems: int
) -> list[TokenizedSet]:
    """Evaluation sets with token ids, at most `problems` items of each."""
    from zoo.data.tokenize import encode_text, tokenize_prompts

    result = []
    for item in sets:
        prompts = tuple(tokenize_prompts(tokenizer, item.prompts[:problems]))
        texts = tuple(tuple(encode_text(tokenizer, text)) for text in item.texts[:problems])
        result.append(
            TokenizedSet(
                item.name,
                item.kind,
                prompts,
                item.verifier,
                tuple(text for text in texts if len(text) > 1),
            )
        )
    return result
