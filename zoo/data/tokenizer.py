"""The tokenizer of `model=tiny`: trained on the generated problems, the same on every build."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from zoo.data.arithmetic import Arithmetic

SPECIALS = ("<pad>", "<bos>", "<eos>", "<sep>")
VOCABULARY = 512

# `<sep>` is the assistant's header: once as the generation prompt, once before each reply.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<sep>' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}{{ message['content'] }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<sep>' }}{% endif %}"
)

# Every digit by itself (place values stay visible to a small model); a word with the space before
# it; and what stands between two numbers, such as " + " or ". ", as one piece.
_PIECES = Regex(
    r"\p{N}| ?\p{L}+|[^\p{L}\p{N}]+(?=\p{N}|$)|[^\p{L}\p{N}]+?(?= ?\p{L})|[^\p{L}\p{N}]+"
)


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens; any text survives encoding and decoding unchanged.

    A user turn renders as `<bos>text<sep>` with the generation prompt, the reply as `reply<eos>`.
    Raw text gets `<bos>` in front. Built in memory in about a second; the result depends on nothing
    but this package.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<sep>"],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@lru_cache(maxsize=1)
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
    )
    return tokenizer.to_str()


def _corpus() -> list[str]:
    # The default settings, whatever a run changes: a run's data never changes its tokenizer.
    texts = []
    for example in Arithmetic(n_examples=6000).examples():
        prompt = example.prompt
        if prompt.text is None:
            texts += [prompt.messages[0]["content"], example.completion]
        else:
            texts.append(prompt.text + example.completion)
    return texts
