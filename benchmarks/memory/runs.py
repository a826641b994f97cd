"""The runs that are compared: one model shape, one budget, and what differs between algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from zoo.algorithms.base import Needs
from zoo.algorithms.dpo import DPO
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO
from zoo.algorithms.ppo_shared import SharedPPO
from zoo.config import (
    EvaluateConfig,
    LoraConfig,
    MeasureConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    Wandb,
)
from zoo.rollout.torch_engine import TorchEngine
from zoo.train.probe import Peaks, probe
from zoo.types import Completion, PreferencePair, Prompt, RewardOutput

RANK = 16  # of the adapters in the LoRA rows


@dataclass(frozen=True)
class Budget:
    """What a step reads and writes."""

    groups: int
    group_size: int
    prompt: int  # tokens
    completion: int
    micro_batch_tokens: int

    @property
    def words(self) -> str:
        return (
            f"{self.groups} prompts of {self.prompt} tokens × {self.group_size} completions of "
            f"{self.completion} (DPO: {self.pairs} pairs), micro-batches of "
            f"{self.micro_batch_tokens:,} tokens"
        )

    @property
    def pairs(self) -> int:
        """As many rows as the completions of the others."""
        return self.groups * self.group_size // 2


@dataclass(frozen=True)
class Lengths:
    """Prompts and pairs of exactly so many tokens."""

    budget: Budget
    offers: tuple[str, ...] = ("prompts", "pairs")

    @property
    def max_new_tokens(self) -> int:
        return self.budget.completion

    def prompts(self) -> list[Prompt]:
        # The arithmetic tokenizer makes one token of a digit and puts one in front.
        digits = self.budget.prompt - 1
        count = max(self.budget.groups, self.budget.pairs)
        return [Prompt(id=str(i), text=f"{i:0{digits}d}") for i in range(count)]

    def pairs(self) -> list[PreferencePair]:
        ids = [tuple([token] * self.budget.completion) for token in (5, 6)]
        prompts = self.prompts()[: self.budget.pairs]
        return [PreferencePair(p, "", "", chosen_ids=ids[0], rejected_ids=ids[1]) for p in prompts]

    def evaluation_sets(self) -> list[Any]:
        return []

    def verifier(self) -> Callable[..., RewardOutput]:
        def none(prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
            return RewardOutput([0.0] * len(completions))

        return none


@dataclass(frozen=True)
class LiveDPO(DPO):
    """DPO as it is mostly run: the reference stays loaded and reads every batch."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, reference_live=True)


@dataclass(frozen=True)
class Arm:
    name: str
    algorithm: Any
    lora: bool = False


ARMS = (
    Arm("PPO", PPO()),
    Arm("PPO, shared trunk", SharedPPO()),
    Arm("PPO + LoRA", PPO(), lora=True),
    Arm("DPO, reference loaded", LiveDPO()),
    Arm("DPO, cached reference", DPO()),
    Arm("GRPO, β > 0", GRPO(kl_coef=0.04)),
    Arm("GRPO, β = 0", GRPO()),
    Arm("GRPO + LoRA", GRPO(), lora=True),
)


@dataclass(frozen=True)
class Shape:
    """A model by the numbers of its configuration, and what a step of it reads and writes."""

    name: str
    architecture: dict[str, Any]
    budget: Budget
    bf16: bool = True  # arithmetic and decoding in bfloat16 on float32 weights
    checkpointing: bool = False  # activations are computed anew in the backward pass

    @property
    def layers(self) -> int:
        return self.architecture["num_hidden_layers"]

    def with_layers(self, layers: int) -> Shape:
        return replace(self, architecture={**self.architecture, "num_hidden_layers": layers})


def _shape(
    kind: str, hidden: int, layers: int, heads: int, shared: int, inner: int, vocabulary: int,
    tied: bool,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
    }


SMALL = Budget(groups=4, group_size=4, prompt=40, completion=56, micro_batch_tokens=768)
LARGE = Budget(groups=2, group_size=8, prompt=512, completion=1024, micro_batch_tokens=12288)

MEASURED = (
    Shape("tiny", _shape("llama", 128, 3, 4, 4, 384, 512, True), SMALL, bf16=False),
    Shape("SmolLM2-135M", _shape("llama", 576, 30, 9, 3, 1536, 49152, True), SMALL),
)

# Qwen2.5's published configurations
QWEN = {
    "0.5B": _shape("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "1.5B": _shape("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
    "7B": _shape("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    "32B": _shape("qwen2", 5120, 64, 40, 8, 27648, 152064, False),
    "72B": _shape("qwen2", 8192, 80, 64, 8, 29568, 152064, False),
}
PREDICTED = (
    *(Shape(name, values, LARGE, checkpointing=True) for name, values in QWEN.items()),
    Shape("7B without checkpointing", QWEN["7B"], LARGE),
)


def configuration(arm: Arm, shape: Shape) -> RunConfig:
    """The run of an arm."""
    budget = shape.budget
    pairs = "DPO" in arm.name
    return RunConfig(
        algorithm=arm.algorithm,
        data=Lengths(budget),
        rollout=TorchEngine(group_size=budget.group_size),
        model=ModelConfig(
            architecture=shape.architecture,
            tokenizer="arithmetic",
            compute_dtype="bfloat16" if shape.bf16 else None,
            activation_checkpointing=shape.checkpointing,
            lora=LoraConfig(rank=RANK) if arm.lora else None,
        ),
        train=TrainConfig(
            steps=1,
            groups=budget.pairs if pairs else budget.groups,
            micro_batch_tokens=budget.micro_batch_tokens,
        ),
        evaluate=EvaluateConfig(first=False, last=False, kl_to_start=False),
        measure=MeasureConfig(wandb=Wandb.disabled, progress=False),
    )


def peaks(arm: Arm, shape: Shape) -> Peaks:
    """Builds a run and meters one of its steps, which finds the optimizers' states made."""
    from accelerate import Accelerator

    from zoo.build import build
    from zoo.measure.progress import Silent

    # Without the checks of a configuration, which refuse to adapt weights that nobody trained
    run = build(configuration(arm, shape), Accelerator(cpu=True), Silent().task)
    for trainable in run.trainables.values():
        for weight in trainable.module.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        trainable.optimizer.step()
        trainable.optimizer.zero_grad(set_to_none=True)
    return probe(run, steps=1, fresh=False)[-1]
