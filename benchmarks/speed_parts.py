"""What the fast paths gain over the plain ones, part by part, in one process.

    python -m benchmarks.speed_parts [--workload w1] [--parts generate train memory] [--repeats 3]
        [--variants NAME …] [--new-tokens N] [--groups N] [--model FOLDER]
        [--threads N] [--clock cpu]

Generation: transformers' `generate`, the plain engine, the fast one over blocks, the fast one by
hand. Training: forward and backward of the policy's log-probs, padded and packed, in float32 and
in bfloat16 on float32 masters (and in float32 with products of medium precision), by whole groups
as a run cuts them. Memory: the peak of live tensor
bytes of one such pass. Variants take turns and the fastest of the repeats counts, so that a busy
machine slows all of them; a line is `part, variant, seconds, times as fast as the first one`.

W1: 4.07 M parameters from scratch, 16 prompts of about 29 tokens × 8 completions of 64. W2: a
SmolLM2-135M-Instruct folder (`--model`), 4 prompts of about 90 tokens × 8 completions of 96.
Completions do not stop early. With other work on the machine use `--threads 1 --clock cpu`.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from zoo.batch import Batch, collate
from zoo.measure.meter import TensorMeter
from zoo.models.loading import cache_folder
from zoo.models.policy import Policy
from zoo.models.twin import Casts, Twin
from zoo.rollout.decoding import BlockDecoding
from zoo.rollout.engine import Sampling
from zoo.rollout.torch_engine import TorchEngine

HALF = torch.bfloat16
W1 = LlamaConfig(
    vocab_size=512, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
    intermediate_size=512, tie_word_embeddings=True,
)  # fmt: skip
SIZES = {"w1": (16, 29, 8, 64), "w2": (4, 92, 8, 96)}  # prompts, tokens, G, new tokens
TRAINED = {"w1": 4, "w2": 1}  # groups of a micro-batch


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"threads {options.threads}, clock {options.clock}, load before {load}")
    for name in options.workload:
        model = _model(name, options.model)
        prompts, size, group, new = SIZES[name]
        prompts, new = options.groups or prompts, options.new_tokens or new
        print(f"{name}: {prompts} prompts of about {size} tokens × {group} × {new} new")
        ids = _ids(model, prompts, size)
        if "generate" in options.parts:
            _report(
                "generate", _chosen(_generation(model, ids, group, new), options), clock, options
            )
        count = min(options.groups or TRAINED[name], TRAINED[name])
        batch = _batch(model, ids[:count], group, new)
        if "train" in options.parts:
            _report("train", _chosen(_training(model, batch), options), clock, options)
        if "memory" in options.parts:
            for variant, bytes_ in _memory(model, batch).items():
                print(f"memory,{variant},{bytes_ / 2**20:.0f} MiB")
    print("load after", ", ".join(f"{x:.1f}" for x in os.getloadavg()))


def _generation(
    model: PreTrainedModel, ids: list[list[int]], group: int, new: int
) -> dict[str, Callable[[], Any]]:
    policy = Policy(model)
    half = Twin(model, None, Casts(model, HALF), trains=False)()
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in ids])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids])
    settings = {
        "max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "top_p": 1.0,
        "temperature": 1.0, "num_return_sequences": group, "pad_token_id": 0,
    }  # fmt: skip
    keys = [str(i) for i in range(len(ids))]
    sampling = Sampling(1.0, new, ())

    def engine(way: type | None = None, **options: Any) -> Callable[[], Any]:
        made: Any = TorchEngine(**options).engine(lambda ids: "", 0)
        made.sync(policy)
        if way is not None:
            made._kinds = {id(made._model): way}
        return lambda: made.generate(ids, keys, group, sampling)

    return {
        "generate bf16": lambda: half.generate(padded, attention_mask=mask, **settings),
        "plain float32": engine(fast=False),
        "plain bf16": engine(fast=False, dtype="bfloat16"),
        "fast float32": engine(),
        "blocks bf16": engine(BlockDecoding, dtype="bfloat16"),
        "fast bf16": engine(dtype="bfloat16"),
    }


def _training(model: PreTrainedModel, batch: Batch) -> dict[str, Callable[[], Any]]:
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))

    def once(policy: Policy) -> None:
        model.zero_grad()
        (policy(batch).logprobs * weights).sum().backward()

    made = {name: lambda p=policy: once(p) for name, policy in _policies(model).items()}

    def medium() -> None:
        torch.set_float32_matmul_precision("medium")
        try:
            made["packed float32"]()
        finally:
            torch.set_float32_matmul_precision("highest")

    return {**made, "packed float32 medium": medium}


def _policies(model: PreTrainedModel) -> dict[str, Policy]:
    made = {
        "padded float32": Policy(model),
        "packed float32": Policy(model, packed=True),
        "padded bf16": Policy(model, compute_dtype=HALF),
        "packed bf16": Policy(model, packed=True, compute_dtype=HALF),
    }
    for policy in made.values():
        policy.with_entropy = False
    return made


def _memory(model: PreTrainedModel, batch: Batch) -> dict[str, int]:
    """Peak of live tensor bytes of a pass, weights, casts and gradients included."""
    peaks = {}
    for name, policy in _policies(model).items():
        row = batch.select_rows(torch.tensor([0]), 1).trim()
        policy(row).logprobs.sum().backward()  # casts exist
        model.zero_grad()
        gc.collect()
        meter = TensorMeter({"policy": policy})
        with meter.phase(name):
            policy(batch).logprobs.sum().backward()
        peaks[name] = meter.peaks[name]["total"]
    return peaks


def _timed(
    variants: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Fastest of the repeats after a warm-up, the variants taking turns."""
    best = {name: float("inf") for name in variants}
    for turn in range(repeats + 1):
        for name, run in variants.items():
            start = clock()
            run()
            if turn or repeats == 0:
                best[name] = min(best[name], clock() - start)
    return best


def _chosen(
    variants: dict[str, Callable[[], Any]], options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    wanted = options.variants
    return {n: run for n, run in variants.items() if not wanted or n.replace(" ", "_") in wanted}


def _report(
    part: str,
    variants: dict[str, Callable[[], Any]],
    clock: Callable[[], float],
    options: argparse.Namespace,
) -> None:
    seconds = _timed(variants, options.repeats, clock)
    first = next(iter(seconds.values()), 0.0)
    for name, value in seconds.items():
        print(f"{part},{name},{value:.3f} s,{first / value:.2f}x", flush=True)


def _model(name: str, folder: Path | None) -> PreTrainedModel:
    if name == "w1":
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(W1)
    folder = folder or cache_folder() / "models" / "smollm2_135m"
    if not folder.is_dir():
        raise SystemExit(f"no model in {folder}: run `zoo fetch smollm2_135m`, or give --model.")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _ids(model: PreTrainedModel, count: int, size: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    lengths = [size - (i * 3) % 7 for i in range(count)]
    return [torch.randint(3, vocabulary, (n,), generator=draw).tolist() for n in lengths]


def _batch(model: PreTrainedModel, prompts: list[list[int]], group: int, new: int) -> Batch:
    rows = [prompt for prompt in prompts for _ in range(group)]
    completions = _ids(model, len(rows), new)
    names = [str(i) for i in range(len(prompts))]
    return collate(rows, completions, group_size=group, prompt_ids=names)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", nargs="+", default=["w1"], choices=["w1", "w2"])
    parser.add_argument("--parts", nargs="+", default=["generate", "train", "memory"])
    parser.add_argument("--variants", nargs="+", help="some of them, for example packed_bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, help="fewer, for a quick look")
    parser.add_argument("--groups", type=int, help="prompts; fewer, for a quick look")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
