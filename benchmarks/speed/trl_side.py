"""TRL's worker, in an environment of its own: a trainer that waits for its turn before each step.

    python trl_side.py SPEC

TRL runs as its users run it, with what is fastest for it: no gradient checkpointing, its own
generation, gradients accumulated over micro-batches. `precision` is `bf16` (weights and Adam in
bfloat16) or `amp` (float32 weights, bfloat16 autocast: TRL's default).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from protocol import Turns, forget_peak, now, on_gpu, peak_bytes, score


class Rewards(torch.nn.Module):
    """`score` of the completions' texts, in the form of the reward model that TRL's PPO asks for.

    Its backbone gives one value a token, all of a row alike, since TRL reads the last one's. Texts
    are cut and decoded as zoo's are: up to the first end, without special tokens.
    """

    base_model_prefix = "model"

    def __init__(self, tokenizer: Any, context: int) -> None:
        super().__init__()
        self.tokenizer, self.context = tokenizer, context
        self.end, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.kept = self.decoded = 0

    @property
    def model(self) -> Any:
        return self._backbone

    def score(self, hidden: Any) -> Any:
        return hidden

    def counted(self) -> dict[str, int]:
        """Tokens since the last call: up to the end of each text, and all that were sampled."""
        found = {"tokens_generated": self.kept, "tokens_decoded": self.decoded}
        self.kept = self.decoded = 0
        return found

    def _backbone(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        completions, real = input_ids[:, self.context :], attention_mask[:, self.context :].bool()
        columns = torch.arange(1, real.shape[1] + 1, device=real.device)
        lengths = (real * columns).amax(1)  # up to the last token that is no padding
        if self.pad == self.end:  # and the end after it, which looks like padding
            lengths = (lengths + 1).clamp(max=real.shape[1])
        self.kept += int(lengths.sum())
        self.decoded += real.numel()
        # TRL masks every padding token, and so an end too where the tokenizer pads with it.
        texts = [self._text(ids) for ids in completions.masked_fill(~real, self.pad).tolist()]
        rewards = torch.tensor(score([], texts), device=input_ids.device)
        hidden = rewards[:, None, None].expand(*input_ids.shape, 1)
        return type("Output", (), {"hidden_states": (hidden,)})()

    def _text(self, ids: list[int]) -> str:
        kept = ids[: ids.index(self.end)] if self.end in ids else ids
        return self.tokenizer.decode(
            kept, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def main() -> None:
    spec = json.loads(sys.argv[1])
    turns = Turns()
    for folder in spec.get("before", ()):  # an older TRL, over the same torch
        sys.path.insert(0, folder)
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    half = spec["precision"] == "bf16"
    dtype = torch.bfloat16 if half else torch.float32

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype)

    class Step(TrainerCallback):
        """From the end of one step to the end of the next, less the waiting between them."""

        def __init__(self) -> None:
            self.start = 0.0
            self.logged: dict[str, Any] = {}
            self.generated = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.reply({"ready": True, "versions": _versions()})
            self._next()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = now() - self.start
            kept = getattr(self.trainer, "_metrics", {}).get("train", {})
            self.logged |= {key: values[-1] for key, values in kept.items() if values}
            turns.reply({"seconds": seconds, "peak": peak_bytes(), **self._described()})
            self._next()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.logged |= logs or {}

        def _next(self) -> None:
            turns.await_go()
            self.generated = 0.0
            forget_peak()
            self.start = now()

        def _described(self) -> dict[str, Any]:
            names = {
                "reward": ("reward", "objective/scores"),
                "loss": ("loss", "loss/policy_avg"),
                "grad_norm": ("grad_norm",),
            }
            found: dict[str, Any] = {"generate_seconds": self.generated}
            for name, keys in names.items():
                values = [self.logged[key] for key in keys if key in self.logged]
                found[name] = float(values[0]) if values else None
            length = self.logged.get("completions/mean_length")
            if isinstance(rewards := getattr(self.trainer, "reward_model", None), Rewards):
                found |= rewards.counted()
            elif length is not None:
                found["tokens_generated"] = round(float(length) * spec["rows_a_step"])
            return found

    step = Step()
    trainer = _trainer(spec, tokenizer, load, half, step)
    step.trainer = trainer
    if hasattr(trainer, "_generate"):
        inner = trainer._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return inner(*args, **kwargs)
            finally:
                step.generated += now() - start

        trainer._generate = timed
    trainer.train()


def _versions() -> dict[str, str]:
    import transformers
    import trl

    return {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _trainer(spec: dict[str, Any], tokenizer: Any, load: Any, half: bool, step: Any) -> Any:
    from datasets import Dataset

    lines = Path(spec["rows"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    micro = min(spec["micro_batch"], spec["rows_a_step"])
    if spec["algorithm"] == "dpo":  # a row of TRL's is a pair
        micro = max(micro // 2, 1)
    per_step = spec["groups"] if spec["algorithm"] in ("dpo", "sft") else spec["rows_a_step"]
    common = {
        "output_dir": spec["output"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(per_step // micro, 1),
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not on_gpu(),
        "bf16": not half,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "disable_tqdm": True,
        "max_grad_norm": 1.0,
        "seed": 0,
    }
    kind = spec["algorithm"]
    if kind == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        suppressed = {"min_new_tokens": spec["new_tokens"]} if spec.get("endless") else {}
        config = GRPOConfig(
            **common,
            max_steps=1000,
            num_generations=spec["group_size"],
            max_completion_length=spec["new_tokens"],
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            scale_rewards="group",
            shuffle_dataset=False,
            generation_kwargs=suppressed or None,
        )
        return GRPOTrainer(
            model=load(), reward_funcs=score, args=config, processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows), callbacks=[step],
        )  # fmt: skip
    if kind == "dpo":
        from trl import DPOConfig, DPOTrainer

        config = DPOConfig(
            **common,
            max_steps=1000,
            beta=0.1,
            max_length=1024,
            precompute_ref_log_probs=bool(spec.get("cached")),
            precompute_ref_batch_size=micro,
        )
        reference = None if spec.get("cached") else load()
        return DPOTrainer(
            model=load(), ref_model=reference, args=config, processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows), callbacks=[step],
        )  # fmt: skip
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(
            **common, max_steps=1000, max_length=1024, completion_only_loss=True, packing=False
        )
        return SFTTrainer(
            model=load(), args=config, processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows), callbacks=[step],
        )  # fmt: skip
    return _ppo(spec, tokenizer, load, half, step, rows, common)


def _ppo(
    spec: dict[str, Any],
    tokenizer: Any,
    load: Any,
    half: bool,
    step: Any,
    rows: list[dict[str, str]],
    common: dict[str, Any],
) -> Any:
    """TRL 1.12's PPO. It goes on until every row has ended, to the limit as good as always."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    value = AutoModelForSequenceClassification.from_pretrained(
        spec["model"], num_labels=1, dtype=torch.bfloat16 if half else torch.float32
    )
    ids = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    context = max(map(len, ids))  # a step holds all prompts, padded on the left
    repeated = [{"input_ids": each} for each in ids for _ in range(spec["group_size"])]
    config = PPOConfig(
        **common,
        total_episodes=1000 * spec["rows_a_step"],
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=spec["new_tokens"],
        local_rollout_forward_batch_size=64,  # TRL's own default: rollouts need no small ones
        temperature=1.0,
        kl_coef=0.05,
        stop_token=None if spec.get("endless") else "eos",
        num_sample_generations=0,
    )
    return PPOTrainer(
        args=config, processing_class=tokenizer, model=load(), ref_model=load(),
        reward_model=Rewards(tokenizer, context), value_model=value,
        train_dataset=Dataset.from_list(repeated), eval_dataset=Dataset.from_list(repeated[:2]),
        callbacks=[step],
    )  # fmt: skip


if __name__ == "__main__":
    main()
