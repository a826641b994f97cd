"""Prompts, completions and their boundary, over templates of several model families."""

import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.generation import GenerationConfig

from zoo.config import ConfigError
from zoo.data.arithmetic import Arithmetic
from zoo.data.tokenize import (
    Truncation,
    assistant_header,
    cut_at_stop,
    decode_completion,
    encode_completion,
    encode_completions,
    encode_text,
    render_prompt,
    stop_token_ids,
    tokenize_prompts,
    truncate_row,
    truncate_rows,
    turn_end_id,
)
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.types import Prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
BRACKETS = (  # the header is part of the user's turn: nothing is added for generation
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}"
    "[/INST]{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ALWAYS_HEADER = CHATML.split("{% if add")[0] + "<|im_start|>assistant\n"
DOUBLED = ALWAYS_HEADER + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def byte_tokenizer(template=None, merges=(), bos=True, eos="<eos>"):
    """A byte-level tokenizer with exactly the given merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>"]
    words = [*specials, "[INST]", "[/INST]", *alphabet, *("".join(pair) for pair in merges)]
    inner = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges))
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*specials, "[INST]", "[/INST]"])
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token=eos, pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def ask(text="What is 2 + 2?"):
    return Prompt("p", ({"role": "user", "content": text},))


TEMPLATES = {
    "chatml": byte_tokenizer(CHATML, eos="<|im_end|>"),
    "chatml on a base model": byte_tokenizer(CHATML),  # EOS is not what ends a turn
    "headers": byte_tokenizer(HEADERS),
    "brackets": byte_tokenizer(BRACKETS),
    "no end of turn": byte_tokenizer(NO_END),
    "arithmetic": arithmetic_tokenizer(),
}
every_template = pytest.mark.parametrize("tokenizer", TEMPLATES.values(), ids=TEMPLATES)


@every_template
def test_b70_prompt_ends_with_the_header_once(tokenizer):
    ids = render_prompt(tokenizer, ask())
    header = assistant_header(tokenizer)
    if header:
        assert ids[-len(header) :] == header
        assert ids[-2 * len(header) : -len(header)] != header
    # One BOS where the template writes one: the tokenizer adds no second.
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(ids) == expected
    assert ids.count(tokenizer.bos_token_id) == expected.count("<bos>")


def test_b70_headers_are_those_of_the_templates():
    texts = {name: t.decode(assistant_header(t)) for name, t in TEMPLATES.items()}
    assert texts["chatml"] == "<|im_start|>assistant\n"
    assert texts["headers"] == "<|start|>assistant<|end|>\n\n"
    assert texts["brackets"] == ""
    assert texts["arithmetic"] == "<sep>"


def test_b70_doubled_header_is_refused():
    with pytest.raises(ValueError, match=r"writes the assistant's header .* even without"):
        render_prompt(byte_tokenizer(DOUBLED), ask())


@every_template
def test_b70_b71_completion_continues_the_prompt_and_ends_with_a_stop_token(tokenizer):
    stops = stop_token_ids(tokenizer, None)
    prompt = ask()
    start = render_prompt(tokenizer, prompt)
    ids = encode_completion(tokenizer, prompt, "It is 4.", stops)
    assert ids[-1] in stops
    assert not set(ids[:-1]) & set(stops)
    assert decode_completion(tokenizer, ids, stops).removesuffix("\n") == "It is 4."
    whole = tokenizer.apply_chat_template(
        [*prompt.messages, {"role": "assistant", "content": "It is 4."}], tokenize=False
    )
    rendered = tokenizer.decode(start + ids)
    if tokenizer is TEMPLATES["no end of turn"]:  # it names no end, so EOS is added
        assert rendered.replace("It is 4.\n", "It is 4.").startswith(whole.rstrip("\n"))
    else:
        assert whole.startswith(rendered)


def test_b71_turn_end_is_a_stop_token_though_it_is_not_eos():
    tokenizer = TEMPLATES["chatml on a base model"]
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_end != tokenizer.eos_token_id
    assert turn_end_id(tokenizer) == turn_end
    stops = stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[2, 0]))
    assert stops == (turn_end, 2, 0)
    assert encode_completion(tokenizer, ask(), "4", stops)[-1] == turn_end


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, (2,)), (2, (2,)), (4, (2, 4)), ([4, 2], (2, 4))]
)
def test_all_eos_ids_of_the_model_stop(configured, expected):
    class Config:
        eos_token_id = configured

    assert stop_token_ids(TEMPLATES["brackets"], Config()) == expected
    assert stop_token_ids(byte_tokenizer(), Config()) == expected


def test_no_stop_token_at_all_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no completion could end"):
        stop_token_ids(tokenizer, None)


def test_b61_a_merge_across_the_boundary_does_not_move_it():
    # "a" and "b" merge into one token: tokenized together, the prompt's own token would vanish.
    tokenizer = byte_tokenizer(merges=[("a", "b")], bos=False)
    a, b, ab = tokenizer.convert_tokens_to_ids(["a", "b", "ab"])
    assert tokenizer("ab")["input_ids"] == [ab]
    prompt = Prompt("p", text="a")
    assert render_prompt(tokenizer, prompt) == [a]
    assert encode_completion(tokenizer, prompt, "b", (2,)) == [b, 2]
    # Where nothing merges across, the two are tokenized together.
    assert encode_completion(tokenizer, prompt, "ab", (2,)) == [ab, 2]


def test_template_that_rewrites_replies_is_not_followed():
    shouting = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
    tokenizer = byte_tokenizer(shouting, eos="<|im_end|>")
    stops = stop_token_ids(tokenizer, None)
    ids = encode_completion(tokenizer, ask(), "four", stops)
    assert decode_completion(tokenizer, ids, stops) == "four"


def test_b68_nothing_after_the_first_stop_token():
    # [a, E, x, y]: up to and including the first E.
    assert cut_at_stop([7, 2, 8, 9], (2,)) == ([7, 2], True)
    assert cut_at_stop([7, 8], (2,)) == ([7, 8], False)
    tokenizer = byte_tokenizer()
    ids = encode_completion(tokenizer, Prompt("p", text="x"), "yes<eos><eos>", (2,))
    assert decode_completion(tokenizer, ids, (2,)) == "yes"
    assert ids.count(2) == 1


def piece_tokenizer(eos="<eos>", prepend="always"):
    """SentencePiece's kind: begins a text with a space, and has the special tokens as pieces."""
    signs = ["▁", "\n", *map(chr, range(33, 127))]
    pieces = [("<unk>", -9.0), ("<pad>", 0.0), (eos, 0.0), *((sign, -5.0) for sign in signs)]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, unk_token="<unk>", pad_token="<pad>"
    )


SPELLING = {
    **TEMPLATES,
    "raw": byte_tokenizer(),
    "pieces": piece_tokenizer(),
    "pieces, first": piece_tokenizer(prepend="first"),
    "python": ByT5Tokenizer(eos_token="<eos>"),
}


@pytest.mark.parametrize("prompt", [Prompt("p", text="x"), ask()], ids=["raw", "turns"])
@pytest.mark.parametrize("tokenizer", SPELLING.values(), ids=SPELLING)
def test_special_tokens_that_a_completion_spells_are_text(tokenizer, prompt):
    eos = tokenizer.eos_token
    stops = stop_token_ids(tokenizer, None)
    special = set(tokenizer.all_special_ids)
    for text in (f"In HTML{eos} 3 <pad>more", f"{eos}b", f"a{eos}b", f"a{eos}c"):
        ids = encode_completion(tokenizer, prompt, text, stops)
        end = next(i for i, token in enumerate(ids) if token in stops)
        assert tokenizer.decode(ids[:end]).strip() == text and end == len(ids) - 1
        assert not special & set(ids[:end])
    # The one that a text ends with is the one that ends it, whichever the template has.
    for text in (f"It is 4.{eos}", f"It is 4.{eos}{eos}\n"):
        ids = encode_completion(tokenizer, prompt, text, stops)
        plain = encode_completion(tokenizer, prompt, "It is 4.", stops)
        assert ids == [*plain[:-1], tokenizer.eos_token_id]


@pytest.mark.parametrize("tokenizer", SPELLING.values(), ids=SPELLING)
def test_special_tokens_that_a_turn_spells_are_text_and_the_templates_own_are_not(tokenizer):
    eos = tokenizer.eos_token
    clean, hostile = (render_prompt(tokenizer, ask(f"a{word}b")) for word in ("", eos))
    special = set(tokenizer.all_special_ids)
    assert [i for i in hostile if i in special] == [i for i in clean if i in special]
    assert tokenizer.decode(hostile) == tokenizer.decode(clean).replace("ab", f"a{eos}b")
    # Nothing of it is left in the tokenizer.
    assert render_prompt(tokenizer, ask("ab")) == clean


def test_special_tokens_of_a_raw_prompt_are_its_own():
    rendered = Prompt("p", text="<|im_start|>user\na<|im_end|>")
    ids = render_prompt(byte_tokenizer(bos=False), rendered)
    assert (ids[0], ids[-1], len(ids)) == (3, 4, 8)  # between them: u s e r, a newline, a


def test_stop_token_that_cannot_be_text_leaves_the_completion_unwritten():
    tokenizer = piece_tokenizer(eos="~")  # one character: nowhere to break it
    prompts = [Prompt("p", text="x")] * 3
    a, b, stop = tokenizer.convert_tokens_to_ids(["a", "b", "~"])
    found = encode_completions(tokenizer, prompts, ["a~b", "ab~", "ab"], (stop,))
    assert found[0] == [] and found[1] == found[2] and found[1][-3:] == [a, b, stop]


def test_b66_eos_is_kept_once_though_it_is_the_padding_token():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    ids = encode_completion(tokenizer, Prompt("p", text="x"), "ab", (2,))
    assert len(ids) == 3 and ids[-1] == tokenizer.pad_token_id == 2


def test_empty_completion_is_its_stop_token_alone():
    for tokenizer in TEMPLATES.values():
        stops = stop_token_ids(tokenizer, None)
        ids = encode_completion(tokenizer, ask(), "", stops)
        assert ids[-1] == stops[0] and decode_completion(tokenizer, ids, stops).strip() == ""


def test_a_long_text_is_not_told_of_before_what_is_done_with_it(caplog):
    tokenizer = arithmetic_tokenizer()  # model_max_length is 1024
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        for prompt in (ask("12 " * 2000), Prompt("p", text="12 " * 2000)):
            assert len(encode_completions(tokenizer, [prompt], ["34 " * 2000], [2])[0]) > 1024
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.text == ""


def test_many_at_once_equal_one_by_one():
    tokenizer = TEMPLATES["arithmetic"]
    examples = Arithmetic(n_examples=60).examples()  # turns and raw texts, mixed
    prompts = [e.prompt for e in examples]
    texts = [e.completion for e in examples]
    together = encode_completions(tokenizer, prompts, texts, (2,))
    assert together == [
        encode_completion(tokenizer, p, t, (2,)) for p, t in zip(prompts, texts, strict=True)
    ]
    tokenized = tokenize_prompts(tokenizer, prompts)
    assert [list(p.token_ids) for p in tokenized] == [render_prompt(tokenizer, p) for p in prompts]
    assert encode_completions(tokenizer, tokenized, texts, (2,)) == together
    assert [p.columns for p in tokenized] == [p.columns for p in prompts]
    for text, ids in zip(texts, together, strict=True):
        assert decode_completion(tokenizer, ids, (2,)) == text


def test_turns_without_a_template_are_plain_text():
    tokenizer = byte_tokenizer(bos=False)
    prompt = Prompt("p", ({"role": "system", "content": "S"}, {"role": "user", "content": "U"}))
    assert tokenizer.decode(render_prompt(tokenizer, prompt)) == "S\n\nU"


def test_text_with_a_bos_of_its_own_gets_no_second_one():
    tokenizer = byte_tokenizer()
    assert encode_text(tokenizer, "<bos>ab") == encode_text(tokenizer, "ab")
    assert encode_text(tokenizer, "ab").count(1) == 1


def test_text_that_a_tokenizer_would_close_stays_open():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert 2 not in render_prompt(tokenizer, Prompt("p", text="ab"))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (Prompt("p7"), "prompt 'p7' is empty"),
        (Prompt("p7", text=""), "prompt 'p7' is empty"),
        (Prompt("p7", ({"role": "user", "content": ""},)), "prompt 'p7' is empty"),
        (
            Prompt("p7", (*ask().messages, {"role": "assistant", "content": "4"})),
            "ends with an assistant's turn",
        ),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(prompt, says):
    with pytest.raises(ValueError, match=says):
        render_prompt(TEMPLATES["arithmetic"], prompt)


@pytest.mark.parametrize(
    "template", ["hello", "{{ bos_token }}{% for m in messages %}x{% endfor %}"]
)
def test_template_that_writes_no_prompt_is_refused(template):
    tokenizer = byte_tokenizer(template)
    with pytest.raises(ConfigError, match=r"all 3 prompts become the same . tokens"):
        tokenize_prompts(tokenizer, [ask("a"), ask("b"), ask("a")])
    assert len({p.token_ids for p in tokenize_prompts(tokenizer, [ask("a"), ask(" a")])}) == 1


def test_tokenizer_that_knows_no_word_is_refused():
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    tokenizer.name_or_path = "my/folder"
    assert len(tokenize_prompts(tokenizer, [Prompt("p", text="a"), Prompt("q", text="b")])) == 2
    with pytest.raises(ConfigError, match=r"'<unk>'.* of the tokenizer my/folder loses"):
        tokenize_prompts(tokenizer, [Prompt("p", text="b"), Prompt("q", text="c")])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system') }}", "TemplateError: no system"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError: "),
        ("{% if %}", "TemplateSyntaxError: "),
    ],
)
def test_template_that_raises_is_named_with_its_tokenizer(template, says):
    tokenizer = byte_tokenizer(template)
    tokenizer.name_or_path = "my/folder"
    with pytest.raises(ConfigError, match=f"template of the tokenizer my/folder .*{says}"):
        tokenize_prompts(tokenizer, [ask()])


def test_decoding_changes_nothing_but_the_specials():
    tokenizer = TEMPLATES["arithmetic"]
    text = " 1 , 2 . it 's  a\ttab\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert decode_completion(tokenizer, [*ids, 3, 2, 7], (2,)) == text


# FAULTS B63: prompt of 6, completion of 6, room for 8.
PROMPT, COMPLETION = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]


def test_b63_keep_start_keeps_the_first_eight():
    row = truncate_row(PROMPT, COMPLETION, 8, Truncation.keep_start)
    assert row == ([1, 2, 3, 4, 5, 6], [11, 12])


def test_b63_keep_end_keeps_the_last_eight():
    row = truncate_row(PROMPT, COMPLETION, 8, Truncation.keep_end)
    assert row == ([5, 6], [11, 12, 13, 14, 15, 16])


def test_b63_prompt_that_fills_the_row_leaves_nothing_to_train():
    assert truncate_row([*PROMPT, 7, 8], COMPLETION, 8, Truncation.keep_start) is None


def test_b63_keep_end_always_leaves_a_token_of_context():
    row = truncate_row(PROMPT, COMPLETION, 4, Truncation.keep_end)
    assert row == ([13], [14, 15, 16])


def test_b63_rows_without_completion_are_dropped_and_counted():
    rows = [(PROMPT, COMPLETION), ([*PROMPT, 7, 8], COMPLETION), ([1], [2])]
    kept, dropped = truncate_rows(rows, 8, Truncation.keep_start)
    assert dropped == 1
    assert kept == [(0, (PROMPT, [11, 12])), (2, ([1], [2]))]
    assert truncate_rows([rows[1]] * 3, 8, Truncation.keep_start) == ([], 3)


def test_rows_that_fit_are_untouched():
    for how in Truncation:
        assert truncate_row(PROMPT, COMPLETION, 12, how) == (PROMPT, COMPLETION)
