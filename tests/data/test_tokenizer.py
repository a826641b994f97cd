"""The made tokenizer: the same on every build, exact on any text, one digit a token."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from zoo.data.arithmetic import Arithmetic
from zoo.data.tokenizer import VOCABULARY, arithmetic_tokenizer

TOKENIZER = arithmetic_tokenizer()


def test_two_processes_build_the_same_tokenizer():
    script = (
        "import hashlib; from zoo.data.tokenizer import arithmetic_tokenizer;"
        "t = arithmetic_tokenizer();"
        "print(hashlib.sha256((t.backend_tokenizer.to_str() + t.chat_template).encode())"
        ".hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_vocabulary_is_full_and_the_specials_come_first():
    assert len(TOKENIZER) == VOCABULARY == 512
    assert TOKENIZER.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<sep>"]) == [0, 1, 2, 3]
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (0, 1, 2)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60).filter(lambda text: "<" not in text))
def test_any_text_survives(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_every_digit_is_a_token():
    ids = TOKENIZER("10 * 8 = 80. #### 1234", add_special_tokens=False)["input_ids"]
    tokens = [TOKENIZER.decode([token]) for token in ids]
    digits = [token for token in tokens if any(c.isdigit() for c in token)]
    assert digits == list("108801234")


def test_user_turn_renders_as_documented():
    user = [{"role": "user", "content": "Hi"}]
    render = TOKENIZER.apply_chat_template
    assert render(user, tokenize=False, add_generation_prompt=True) == "<bos>Hi<sep>"
    both = [*user, {"role": "assistant", "content": "#### 5"}]
    assert render(both, tokenize=False) == "<bos>Hi<sep>#### 5<eos>"


def test_problems_are_short():
    # What makes the tiny model fast: about 28 tokens of prompt, at most 23 of a right answer.
    data = Arithmetic(n_problems=1000, n_examples=2000)
    prompts = [len(TOKENIZER(p.messages[0]["content"])["input_ids"]) for p in data.prompts()]
    replies = [
        len(TOKENIZER(e.completion, add_special_tokens=False)["input_ids"]) + 1
        for e in data.examples()
        if e.prompt.text is None
    ]
    assert sum(prompts) / len(prompts) < 32
    assert max(replies) < data.max_new_tokens


def test_saved_folder_loads_as_an_ordinary_tokenizer(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "Anna has 12 pens."}]
    ours, theirs = (
        t.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        for t in (TOKENIZER, loaded)
    )
    assert ours == theirs
    assert loaded("Anna")["input_ids"] == TOKENIZER("Anna")["input_ids"]
    assert loaded.decode(ours, skip_special_tokens=True) == "Anna has 12 pens."


@pytest.mark.parametrize("text", ["Anna has", "", "<bos>"])
def test_raw_text_gets_one_bos_from_the_tokenizer(text):
    from zoo.data.tokenize import encode_text

    assert encode_text(TOKENIZER, text).count(1) == 1
