"""A reward model as reward: fed with texts, in any batch, whatever the policy's tokenizer is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import llama
from zoo.config import ConfigError
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.models.reward_model import from_policy, load_reward_model
from zoo.rewards.composite import Weighted
from zoo.rewards.learned import Learned
from zoo.types import Completion, Prompt

WORDS = ["one", "two", "three", "four", "plus", "is", "and"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word, 0 … 9; no chat template."""
    vocabulary = {"<unk>": 0, "<pad>": 1, "</s>": 2}
    vocabulary |= {word: i for i, word in enumerate(WORDS, 3)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of ten words."""
    folder = tmp_path_factory.mktemp("words")
    model = from_policy(llama(vocab_size=10, max_position_embeddings=16), 0)
    model.remember(0.5, 2.0)
    model.save(folder, word_tokenizer())
    return folder


def asked(text: str, *replies: str, truncated: bool = False) -> tuple[list[Prompt], Any]:
    """Ids that only the policy knows: far beyond ten."""
    prompt = Prompt("p", text=text, token_ids=(150, 151))
    completions = [Completion(reply, (152, 153), (), truncated) for reply in replies]
    return [prompt] * len(replies), completions


def direct(folder: Path, *rows: list[int]) -> list[float]:
    """Each row alone through the saved model."""
    from zoo.config import ModelConfig

    model = load_reward_model(ModelConfig(path=str(folder)))
    with torch.no_grad():
        return [
            float(model.scores(torch.tensor([row]), torch.ones(1, len(row)).bool())) for row in rows
        ]


def test_B41_texts_are_tokenized_anew_for_the_reward_model(words: Path) -> None:
    reward = Learned(path=str(words))
    prompts, completions = asked("one plus one is ", "two", "three and four")
    rows = reward.rows(prompts, completions)
    # one plus one is | two </s>;  … | three and four </s>
    assert rows == [(3, 7, 3, 8, 4, 2), (3, 7, 3, 8, 5, 9, 6, 2)]
    found = reward(prompts, completions)
    assert found.total == pytest.approx(direct(words, *map(list, rows)), abs=1e-5)
    assert found.components == {"learned": found.total}


def test_B41_chat_goes_through_the_reward_models_own_template(tmp_path: Path) -> None:
    tokenizer = arithmetic_tokenizer()
    from_policy(llama(vocab_size=512), 0).save(tmp_path, tokenizer)
    turns = ({"role": "user", "content": "What is 1 + 1?"},)
    prompt = Prompt("p", messages=turns, token_ids=(150_000,))
    (row,) = Learned(path=str(tmp_path)).rows([prompt], [Completion("It is 2.", (7,), (), False)])
    whole = [*turns, {"role": "assistant", "content": "It is 2."}]
    text = tokenizer.apply_chat_template([dict(t) for t in whole], tokenize=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(row) == expected[: len(row)] and tokenizer.decode(row).count("It is 2.") == 1


def test_completion_that_was_cut_has_no_stop_token(words: Path) -> None:
    reward = Learned(path=str(words))
    (ended,) = reward.rows(*asked("one", " two"))
    (cut,) = reward.rows(*asked("one", " two", truncated=True))
    assert ended == (3, 4, 2) and cut == (3, 4)


@pytest.mark.parametrize("batch_tokens", [1, 12, 1000])
def test_score_does_not_depend_on_its_batch_or_place(words: Path, batch_tokens: int) -> None:
    replies = ["two", "three and four and one", "", "four and two", "two"]
    prompts, completions = asked("one plus ", *replies)
    reward = Learned(path=str(words), batch_tokens=batch_tokens)
    found = reward(prompts, completions).total
    rows = [list(row) for row in reward.rows(prompts, completions)]
    assert found == pytest.approx(direct(words, *rows), abs=1e-5)
    assert len({round(value or 0, 4) for value in found}) == 4  # "two" twice


def test_scores_are_counted_in_deviations_from_their_mean(words: Path) -> None:
    prompts, completions = asked("one plus ", "two", "three")
    raw = Learned(path=str(words))(prompts, completions).total
    normal = Learned(path=str(words), normalise=True)(prompts, completions).total
    assert normal == pytest.approx([((r or 0) - 0.5) / 2.0 for r in raw], abs=1e-6)
    given = Learned(path=str(words), normalise=True, mean=1.0, std=4.0)(prompts, completions).total
    assert given == pytest.approx([((r or 0) - 1.0) / 4.0 for r in raw], abs=1e-6)


def test_row_too_long_is_unscored_and_says_so(words: Path) -> None:
    prompts, completions = asked("one plus ", "two", "two and " * 8)  # 16 words and more
    found = Learned(path=str(words))(prompts, completions)
    assert found.total[0] is not None and found.total[1] is None
    assert found.reasons == ["", "too_long"]
    short = Learned(path=str(words), max_length=3)(prompts, completions)
    assert short.total == [None, None]


@pytest.mark.parametrize("stop", ["</s>", "."])  # the second is one character: never text
def test_what_stands_after_a_spelled_stop_token_is_seen_or_the_row_unscored(
    stop: str, tmp_path: Path
) -> None:
    tokenizer = word_tokenizer()
    if stop == ".":
        vocabulary = {"<unk>": 0, "<pad>": 1, stop: 2} | {w: i for i, w in enumerate(WORDS, 3)}
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token=stop
        )
    from_policy(llama(vocab_size=10), 0).save(tmp_path, tokenizer)
    reward = Learned(path=str(tmp_path))
    prompts, completions = asked("one", " two", f" two {stop} four", f" two{stop}")
    rows = reward.rows(prompts, completions)
    assert rows[0] == rows[2] == (3, 4, 2)
    found = reward(prompts, completions)
    if stop == ".":
        assert found.total[1] is None and found.reasons == ["", "special_token", ""]
    else:
        assert rows[1] == (3, 4, 0, 0, 6, 2)  # two unknown words: < and /s>
        assert found.total[1] not in (None, found.total[0]) and found.reasons == [""] * 3


def test_scorer_is_frozen_and_loaded_once(words: Path) -> None:
    reward = Learned(path=str(words))
    reward.load("cpu")
    model = reward._parts[0]
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    reward(*asked("one", "two"))
    assert reward._parts[0] is model
    assert replace(reward) == reward  # what is loaded is no setting


def test_sum_of_rewards_loads_its_components(words: Path) -> None:
    reward = Learned(path=str(words))
    Weighted({"style": {"weight": 0.5, "reward": reward}}).load("cpu")
    assert "_parts" in vars(reward)


def test_what_is_no_reward_model_is_refused_by_name(words: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.path is not set"):
        Learned()
    with pytest.raises(ConfigError, match=r"/nowhere does not exist"):
        Learned(path=str(tmp_path / "nowhere"))
    run = tmp_path / "run"
    (run / "reward_model").mkdir(parents=True)
    (run / "reward_model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"Try reward\.path=.*run/reward_model\."):
        Learned(path=str(run))
    llama().save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"holds a LlamaForCausalLM, which gives no score"):
        Learned(path=str(tmp_path / "policy"))


def test_hub_that_is_absent_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'nobody/nothing' could not be loaded(.|\n)*reward\.p"):
        Learned(path="nobody/nothing").load("cpu")


def test_settings_out_of_range_are_refused(words: Path) -> None:
    infinite = float("inf")
    for settings in (
        {"batch_tokens": 0}, {"max_length": 1}, {"std": 0.0}, {"std": infinite}, {"mean": infinite}
    ):  # fmt: skip
        (name,) = settings
        with pytest.raises(ConfigError, match=rf"reward\.{name}"):
            Learned(path=str(words), **settings)


@pytest.mark.parametrize("given", [{}, {"mean": 1.0}, {"std": 2.0}])
def test_scores_of_a_model_that_was_never_judged_have_no_spread(
    given: dict[str, float], tmp_path: Path
) -> None:
    model = from_policy(llama(vocab_size=10, max_position_embeddings=16), 0)
    model.save(tmp_path, word_tokenizer())
    with pytest.raises(ConfigError, match=r"was not judged .* evaluate\.last=true"):
        Learned(path=str(tmp_path), normalise=True, **given).load("cpu")
    prompts, completions = asked("one plus ", "two", "three")
    raw = Learned(path=str(tmp_path))(prompts, completions).total
    whole = Learned(path=str(tmp_path), normalise=True, mean=1.0, std=2.0)
    assert whole(prompts, completions).total == pytest.approx([((r or 0) - 1) / 2 for r in raw])


@pytest.mark.parametrize("std", ["-1", "0", "NaN", "Infinity", '"x"', "null"])
def test_deviation_that_is_none_is_refused_with_the_folder(
    std: str, words: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "scorer"
    shutil.copytree(words, folder)
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps({**config, "zoo_score_std": "HERE"}).replace('"HERE"', std)
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"scorer(.|\n)*reward\.std"):
        Learned(path=str(folder), normalise=True).load("cpu")
