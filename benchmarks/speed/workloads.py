"""What both sides work on: a model folder, prompts, pairs and examples, written once.

W1: Llama of 4.07 M weights (hidden 256, 6 layers, 4 heads, ffn 512, vocabulary 512, tied), 16
prompts of about 29 tokens × 8 completions of 64. It is taught in a few seconds to end a text with
p ≈ 0.03 a token, so that "natural" lengths exist. W2: SmolLM2-135M-Instruct, 4 grade-school
prompts of 79–106 tokens × 8 completions of 96. A file holds exactly one step's rows, so every
step of every contender sees the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

END = 0.03  # W1's chance of an end at each token


@dataclass(frozen=True)
class Workload:
    """Sizes of one step."""

    name: str
    prompts: int  # distinct prompts a step
    prompt_tokens: tuple[int, int]
    group_size: int
    new_tokens: int
    pairs: int  # of a DPO step
    examples: int  # of an SFT step
    micro_batch_tokens: int  # zoo's budget: rows × padded length

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size


W1 = Workload("W1", 16, (26, 32), 8, 64, 64, 64, 3200)
W2 = Workload("W2", 4, (79, 106), 8, 96, 8, 32, 1700)
WORKLOADS = {w.name: w for w in (W1, W2)}


def prepare(workload: Workload, folder: Path, smollm2: Path | None, gsm8k: Path | None) -> Path:
    """Model, tokenizer and rows of a workload below `folder`; what is there stays.

    Raises:
        FileNotFoundError: W2 without its model or its prompts.
        ValueError: its prompts are not what they should be.
    """
    place = folder / workload.name
    made_of = asdict(workload)
    if workload.name == "W2":
        smollm2, gsm8k = _given(smollm2, gsm8k)
        made_of["model"] = str(smollm2)
        made_of["prompts"] = hashlib.sha256(gsm8k.read_bytes()).hexdigest()
    described = json.dumps(made_of, sort_keys=True)
    done = place / "workload.json"
    if done.is_file() and done.read_text() == described:
        return place
    place.mkdir(parents=True, exist_ok=True)
    if workload.name == "W1":
        tokenizer = _words(place / "model")
        _model(place / "model")
        texts = _word_texts(workload)
    else:
        assert smollm2 is not None and gsm8k is not None
        _link(place / "model", smollm2)
        tokenizer, texts = _grade_school(workload, place / "model", gsm8k)
    _write_rows(place, workload, tokenizer, texts)
    done.write_text(described)
    return place


def variant(workload: Workload, place: Path, **changes: Any) -> Path:
    """The same model with other sizes of a step: more completions, longer ones."""
    from dataclasses import replace

    changed = replace(workload, **changes)
    name = "-".join(f"{key}{value}" for key, value in sorted(changes.items()))
    other = place.parent / f"{workload.name}-{name}"
    other.mkdir(exist_ok=True)
    rows = (place / "prompts.jsonl").read_text().splitlines()
    wanted = [rows[i % len(rows)] for i in range(changed.prompts)]
    (other / "prompts.jsonl").write_text("\n".join(wanted) + "\n")
    _link(other / "model", (place / "model").resolve())
    return other


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink() or link.resolve() != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)


# the texts ---------------------------------------------------------------------------------------


def _word_texts(workload: Workload) -> dict[str, list[tuple[str, ...]]]:
    draw = random.Random(0)

    def words(n: int) -> str:
        return " ".join(f"w{draw.randrange(500)}" for _ in range(n))

    def reply(n: int) -> str:
        return f" {words(n)}"  # a text goes on where its prompt ends

    def natural() -> int:
        return max(4, min(workload.new_tokens - 1, round(draw.expovariate(END))))

    low, high = workload.prompt_tokens
    fixed = workload.new_tokens - 1  # and the end
    prompts = [(words(draw.randint(low, high)),) for _ in range(workload.prompts)]
    starts = [words(draw.randint(low, high)) for _ in range(max(workload.pairs, workload.examples))]
    return {
        "prompts": prompts,
        "pairs-fixed": [(p, reply(fixed), reply(fixed)) for p in starts[: workload.pairs]],
        "pairs-natural": [
            (p, reply(natural()), reply(natural())) for p in starts[: workload.pairs]
        ],
        "examples-fixed": [(p, reply(fixed)) for p in starts[: workload.examples]],
        "examples-natural": [(p, reply(natural())) for p in starts[: workload.examples]],
    }


def _given(smollm2: Path | None, gsm8k: Path | None) -> tuple[Path, Path]:
    if smollm2 is None or not smollm2.is_dir():
        raise FileNotFoundError(
            f"no SmolLM2-135M-Instruct in {smollm2}: run `zoo fetch smollm2_135m`, or name its "
            "folder with --model."
        )
    if gsm8k is None or not gsm8k.is_file():
        raise FileNotFoundError(f"no grade-school problems at {gsm8k}: name a file with --prompts.")
    return smollm2.resolve(), gsm8k.resolve()


def _grade_school(
    workload: Workload, place: Path, gsm8k: Path
) -> tuple[Any, dict[str, list[tuple[str, ...]]]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(place)
    rows = []
    for number, line in enumerate(gsm8k.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({key: str(row[key]) for key in ("question", "answer")})
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{gsm8k}:{number} is no JSON object with question and answer "
                f"({type(error).__name__}: {error}). Give another file with --prompts."
            ) from error
    wanted = max(workload.examples, 2 * workload.pairs)
    low, high = workload.prompt_tokens
    chosen = []
    for row in rows:
        turn = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        if low <= len(tokenizer(text)["input_ids"]) <= high:
            chosen.append((text, row["answer"]))
        if len(chosen) == wanted:
            break
    if len(chosen) < wanted:
        raise ValueError(
            f"{gsm8k} has {len(chosen)} problems of {low} to {high} tokens, and {wanted} are "
            "needed. Give another file with --prompts."
        )
    # A solution of exactly that many tokens, made from as many solutions as it takes
    joined = " ".join(answer for _, answer in chosen)
    everything = tokenizer(joined)["input_ids"]

    def cut(index: int) -> str:
        start, text = index * 31 % (len(everything) - 2 * workload.new_tokens), ""
        for extra in range(workload.new_tokens):
            text = tokenizer.decode(everything[start : start + workload.new_tokens - 1 - extra])
            if len(tokenizer(text)["input_ids"]) <= workload.new_tokens - 1:
                return text
        return text

    def short(answer: str) -> str:
        ids = tokenizer(answer)["input_ids"][: workload.new_tokens - 1]
        return tokenizer.decode(ids)

    pairs = range(workload.pairs)
    last = len(chosen) - 1
    return tokenizer, {
        "prompts": [(text,) for text, _ in chosen[: workload.prompts]],
        "pairs-fixed": [(chosen[i][0], cut(2 * i), cut(2 * i + 1)) for i in pairs],
        "pairs-natural": [
            (chosen[i][0], short(chosen[i][1]), short(chosen[last - i][1])) for i in pairs
        ],
        "examples-fixed": [(chosen[i][0], cut(i)) for i in range(workload.examples)],
        "examples-natural": [(chosen[i][0], short(chosen[i][1])) for i in range(workload.examples)],
    }


def _write_rows(
    place: Path, workload: Workload, tokenizer: Any, texts: dict[str, list[tuple[str, ...]]]
) -> None:
    names = {1: ("prompt",), 2: ("prompt", "completion"), 3: ("prompt", "chosen", "rejected")}
    for kind, rows in texts.items():
        lines = [json.dumps(dict(zip(names[len(row)], row, strict=True))) for row in rows]
        (place / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# W1's model --------------------------------------------------------------------------------------


def _words(place: Path) -> Any:
    """A tokenizer of 512 whole words, so that texts and ids say the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary |= {f"w{i}": i + 3 for i in range(509)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(place)
    return tokenizer


def _model(place: Path) -> None:
    """From scratch, then taught words at random with an end at p = END."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=512, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        ids = torch.randint(3, 512, (16, 64))
        ids[torch.rand(ids.shape) < END] = 1
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    bound = -(END * math.log(END) + (1 - END) * math.log((1 - END) / 509))
    if loss.item() > bound + 0.5:
        raise RuntimeError(
            f"W1's model did not learn to end: loss {float(loss.detach()):.2f} ({bound:.2f})"
        )
    model.save_pretrained(place)
