"""Between text and token ids: prompts, completions to imitate, stop tokens, truncation.

The boundary of prompt and completion is a position in a list of ids, never a place in a text: a
prompt is rendered once, and a completion to imitate is accepted only if the ids of the whole begin
with the ids of the prompt.

Only chat templates and raw prompts write special tokens. Where one is spelled out in a turn or in a
completion it is text: it closes no turn, opens none, and hides nothing that comes after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from zoo.config import ConfigError, member
from zoo.types import Prompt

T = TypeVar("T")
U = TypeVar("U")
Row = tuple[list[int], list[int]]  # ids of the prompt, ids of the completion
BREAK = "\ufdd0"  # where a text is tokenized in two: a noncharacter, which data do not have


class Truncation(StrEnum):
    """Which end of prompt + completion survives when a row is too long."""

    keep_start = "keep_start"
    keep_end = "keep_end"


# prompts -----------------------------------------------------------------------------------------


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """The token ids of a prompt, ready to be continued.

    Turns go through the tokenizer's chat template with its generation prompt, so that exactly one
    assistant header stands at the end; without a template their texts are joined by blank lines.
    A raw text gets what the tokenizer puts in front of texts (one BOS at most).

    Raises:
        ConfigError: nothing to read (no text, no turns, no tokens), a prompt that ends with an
            assistant's turn, or a template that writes the assistant's header twice.
    """
    return _render(tokenizer, [prompt])[0]


def tokenize_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts with `token_ids` filled in, by `render_prompt`; all at once, so it is fast.

    A prompt that is there several times (a mixture's small parts) stays one object.
    """

    def rendered(different: list[Prompt]) -> list[Prompt]:
        ids = _render(tokenizer, different)
        return [replace(p, token_ids=tuple(i)) for p, i in zip(different, ids, strict=True)]

    return _each_once(list(prompts), id, rendered)


def _each_once(
    items: list[T], key: Callable[[T], Hashable], make: Callable[[list[T]], list[U]]
) -> list[U]:
    """What `make` gives for the different items, at every place that holds one."""
    places: dict[Hashable, int] = {}
    different: list[T] = []
    found: list[int] = []
    for item in items:
        place = places.setdefault(key(item), len(different))
        if place == len(different):
            different.append(item)
        found.append(place)
    made = make(different)
    return [made[place] for place in found]


def _render(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in prompts]
    chats, texts = [], []
    for index, prompt in enumerate(prompts):
        turns = prompt.messages
        if not any(turn.get("content") for turn in turns) and not prompt.text:
            raise ConfigError(
                f"prompt {prompt.id!r} is empty: the model would have nothing to continue. "
                "Give it a text or a user's turn."
            )
        if turns and turns[-1].get("role") == "assistant":
            raise ConfigError(
                f"prompt {prompt.id!r} ends with an assistant's turn, so the reply would be a "
                "second one. End it with a user's turn, or make that turn the completion."
            )
        (chats if turns and tokenizer.chat_template else texts).append(index)
    if chats:
        rendered = _chat(tokenizer, [prompts[i].messages for i in chats], generation=True)
        _check_header(tokenizer, prompts[chats[0]])
        for index, ids in zip(chats, rendered, strict=True):
            result[index] = ids
    if texts:
        spelled = _spelled(tokenizer)
        encoded = _encode(tokenizer, [_continuable(prompts[i], spelled) for i in texts])
        for index, ids in zip(texts, encoded, strict=True):
            result[index] = ids
    for prompt, ids in zip(prompts, result, strict=True):
        if not ids:
            told = f"prompt {prompt.id!r} has no tokens: nothing would predict its first completion"
            if prompt.messages and tokenizer.chat_template:
                raise ConfigError(
                    f"{told} token. The chat template of the tokenizer{_named(tokenizer)} writes "
                    f"nothing of {plain_text(prompt)!r:.80}. Set model.chat_template to one that "
                    "writes each message's content."
                )
            raise ConfigError(f"{told} token. Give it more text, or a tokenizer with a BOS token.")
    if (
        len({tuple(ids) for ids in result}) == 1
        and len({plain_text(p).strip() for p in prompts}) > 1
    ):
        raise ConfigError(
            f"all {len(prompts)} prompts become the same {len(result[0])} tokens "
            f"({tokenizer.decode(result[0])!r:.80}), though their texts differ: the chat template "
            f"or the vocabulary of the tokenizer{_named(tokenizer)} loses what they say. Set "
            "model.chat_template, or another model.tokenizer."
        )
    return result


def plain_text(prompt: Prompt) -> str:
    """The prompt's text without any template: for base models and for reading."""
    if prompt.text is not None:
        return prompt.text
    return "\n\n".join(turn["content"] for turn in prompt.messages)


def _continuable(prompt: Prompt, spelled: Callable[[str], str]) -> str:
    """`plain_text`; a raw text may be a rendered chat, so only there special tokens are ones."""
    return prompt.text if prompt.text is not None else spelled(plain_text(prompt))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a raw text, with the tokenizer's own BOS, once, also where the text begins with it."""
    return _encode(tokenizer, [text])[0]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    bos: Any = tokenizer.bos_token
    if bos:
        texts = [text.removeprefix(bos) for text in texts]
    firsts = [text.split(BREAK, 1)[0] for text in texts]
    # verbose=False: what is longer than the context is refused or cut later, by name.
    encoded = [list(ids) for ids in tokenizer(firsts, verbose=False)["input_ids"]]
    # Some tokenizers (T5's, BERT's kind) close a text with EOS; after it nothing is continued.
    eos = tokenizer.eos_token_id
    encoded = [ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids for ids in encoded]
    return _with_rest(tokenizer, encoded, texts)


def _encode_bare(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts to which the tokenizer adds nothing."""
    firsts = [text.split(BREAK, 1)[0] for text in texts]
    encoded: Any = tokenizer(firsts, add_special_tokens=False, verbose=False)["input_ids"]
    return _with_rest(tokenizer, [list(ids) for ids in encoded], texts)


def _with_rest(
    tokenizer: PreTrainedTokenizerBase, encoded: list[list[int]], texts: Sequence[str]
) -> list[list[int]]:
    """The ids of what comes before each text's first `BREAK`, and of the rest after them."""
    for ids, text in zip(encoded, texts, strict=True):
        for part in text.split(BREAK)[1:]:
            # After a newline: SentencePiece would begin a text of its own with a space.
            newline, both = (
                list(tokenizer(one, add_special_tokens=False)["input_ids"])  # pyright: ignore
                for one in ("\n", "\n" + part)
            )
            joined = both[: len(newline)] == newline
            alone: Any = None if joined else tokenizer(part, add_special_tokens=False)["input_ids"]
            ids += both[len(newline) :] if joined else alone
    return encoded


def _spelled(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    """What breaks the special tokens in a text in two, so that they are tokenized as text.

    Not by `split_special_tokens`: some tokenizers have none, it is a state of those that do, and
    vocabularies of words or pieces hold the special tokens too.
    """
    added = tokenizer.added_tokens_decoder.values()
    found = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    words = sorted((word for word in found if len(word) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, words)) or "(?!)")
    return lambda text: pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)


def _chat(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[dict[str, str]]], generation: bool
) -> list[list[int]]:
    spelled = _spelled(tokenizer)
    conversations = [
        [
            {k: spelled(v) if k == "content" and isinstance(v, str) else v for k, v in turn.items()}
            for turn in chat
        ]
        for chat in chats
    ]
    try:
        texts: Any = tokenizer.apply_chat_template(
            conversations, add_generation_prompt=generation, tokenize=False
        )
    except Exception as error:  # a template raises what it likes
        raise ConfigError(
            f"the chat template of the tokenizer{_named(tokenizer)} cannot write "
            f"{'prompts' if generation else 'turns and replies'}: {type(error).__name__}: "
            f"{str(error)[:200]}. Set model.chat_template to one that can, or leave out of the "
            "data what it refuses."
        ) from error
    # The template writes BOS where the model wants one; the tokenizer must not add another.
    return _encode_bare(tokenizer, texts)


def _named(tokenizer: PreTrainedTokenizerBase) -> str:
    return f" {tokenizer.name_or_path}" if tokenizer.name_or_path else ""


def assistant_header(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the template adds as generation prompt; empty where it adds nothing."""
    turn = [{"role": "user", "content": "a"}]
    bare, full = (_chat(tokenizer, [turn], generation)[0] for generation in (False, True))
    return full[len(bare) :] if full[: len(bare)] == bare else []


def _check_header(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    header = assistant_header(tokenizer)
    bare = _chat(tokenizer, [prompt.messages], generation=False)[0]
    if header and bare[-len(header) :] == header:
        raise ConfigError(
            f"the chat template writes the assistant's header {tokenizer.decode(header)!r} even "
            "without a generation prompt, so prompts would end with two. Set model.chat_template "
            "to one that leaves it out when add_generation_prompt is false."
        )


# where a completion ends -------------------------------------------------------------------------


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which the chat template closes an assistant's turn, if it is a special one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = _chat(tokenizer, [turns], generation=False)[0]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    tail: list[int] = []  # what comes after the last ordinary text
    for token in reversed(ids):
        decoded: Any = tokenizer.decode([token])
        if token not in special and decoded.strip():
            break
        tail.insert(0, token)
    return next((token for token in tail if token in special), None)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any) -> tuple[int, ...]:
    """Every token that ends a completion, the one to train on first.

    They are: the token that ends an assistant's turn in the chat template, the tokenizer's EOS, and
    all EOS ids of the model's generation config. Turn end and document end differ in many models;
    a sampler that knew only one of them would run on after the other.

    Args:
        tokenizer: of the policy.
        generation_config: the model's, or None.
    Raises:
        ConfigError: there is none, so no completion could ever end.
    """
    found: list[int] = []
    configured: Any = getattr(generation_config, "eos_token_id", None)
    if configured is None or isinstance(configured, int):
        configured = [configured]
    own: Any = tokenizer.eos_token_id
    for token in (turn_end_id(tokenizer), own, *configured):
        if token is not None and int(token) not in found:
            found.append(int(token))
    if not found:
        raise ConfigError(
            "the tokenizer has no EOS token and the model's generation config names none, so no "
            "completion could end by itself. Set the tokenizer's eos_token."
        )
    return tuple(found)


def cut_at_stop(ids: Sequence[int], stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """The ids up to and including the first stop token, and whether there was one."""
    for index, token in enumerate(ids):
        if token in stop_ids:
            return list(ids[: index + 1]), True
    return list(ids), False


# completions -------------------------------------------------------------------------------------


def encode_completion(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str, stop_ids: Sequence[int]
) -> list[int]:
    """The token ids of a completion to imitate; they end with the one stop token they hold.

    A stop token that the text ends with is that one; every other special token in it is text.

    The prompt and its completion are tokenized together, and the ids after the prompt's are the
    completion, provided the whole begins with exactly the prompt's ids. Where it does not (a merge
    across the boundary, a template that rewrites replies), the completion is tokenized apart.

    Args:
        tokenizer: of the policy.
        prompt: with or without `token_ids`.
        text: the completion.
        stop_ids: from `stop_token_ids`.
    Returns:
        ids of the completion alone, at least the stop token; none where this tokenizer has no
        other way to write the text than with a stop token before its end.
    """
    return encode_completions(tokenizer, [prompt], [text], stop_ids)[0]


def encode_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    stop_ids: Sequence[int],
) -> list[list[int]]:
    """`encode_completion` for many at once; one of the same prompt and text is encoded once."""

    def encoded(rows: list[tuple[Prompt, str]]) -> list[list[int]]:
        return _encode_rows(tokenizer, [p for p, _ in rows], [text for _, text in rows], stop_ids)

    rows = [*zip(prompts, texts, strict=True)]
    return _each_once(rows, lambda row: (id(row[0]), row[1]), encoded)


def _encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    stop_ids: Sequence[int],
) -> list[list[int]]:
    missing = [prompt for prompt in prompts if not prompt.token_ids]
    rendered = iter(_render(tokenizer, missing))
    prompt_ids = [list(p.token_ids) if p.token_ids else next(rendered) for p in prompts]
    whole: list[list[int]] = [[] for _ in prompts]
    bare, ends = (
        zip(*_without_stops(tokenizer, texts, stop_ids), strict=True) if texts else ((), ())
    )
    spelled = _spelled(tokenizer)
    chats = [i for i, p in enumerate(prompts) if p.messages and tokenizer.chat_template]
    if chats:
        replies = [[*prompts[i].messages, {"role": "assistant", "content": bare[i]}] for i in chats]
        for index, ids in zip(chats, _chat(tokenizer, replies, generation=False), strict=True):
            whole[index] = ids
    plain = sorted(set(range(len(prompts))) - set(chats))
    if plain:
        joined = [_continuable(prompts[i], spelled) + spelled(bare[i]) for i in plain]
        for index, ids in zip(plain, _encode(tokenizer, joined), strict=True):
            whole[index] = ids
    return [
        _completion(tokenizer, start, full, spelled(text), end, stop_ids)
        for start, full, text, end in zip(prompt_ids, whole, bare, ends, strict=True)
    ]


def _without_stops(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], stop_ids: Sequence[int]
) -> list[tuple[str, int | None]]:
    """The texts without the stop tokens at their ends, and the first of those."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    stops: dict[Any, int] = {
        tokenizer.convert_ids_to_tokens(token): token for token in stop_ids if token in special
    }
    result = []
    for text in texts:
        end = None
        while found := next((word for word in stops if text.rstrip().endswith(word)), None):
            text, end = text.rstrip().removesuffix(found), stops[found]
        result.append((text, end))
    return result


def _completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    whole: list[int],
    text: str,
    end: int | None,
    stop_ids: Sequence[int],
) -> list[int]:
    if whole[: len(prompt_ids)] == prompt_ids:
        ids, ended = cut_at_stop(whole[len(prompt_ids) :], stop_ids)
        # Templates may strip or rewrite a reply; what is trained on must say what was given.
        said = decode_completion(tokenizer, ids, stop_ids)
        if said.strip() == text.replace(BREAK, "").strip():
            stop = ids.pop() if ended else stop_ids[0]
            return [*ids, stop if end is None else end]
    (apart,) = _encode_bare(tokenizer, [text])
    ids, ended = cut_at_stop(apart, stop_ids)
    if ended:
        return ids if len(ids) == len(apart) else []
    return [*ids, stop_ids[0] if end is None else end]


def decode_completion(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_ids: Collection[int]
) -> str:
    """The text before the first stop token, without special tokens, otherwise unchanged."""
    kept, ended = cut_at_stop(ids, stop_ids)
    text = tokenizer.decode(
        kept[:-1] if ended else kept, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text if isinstance(text, str) else "".join(text)


# rows that are too long --------------------------------------------------------------------------


def truncate_row(
    prompt: Sequence[int], completion: Sequence[int], max_length: int, how: Truncation | str
) -> Row | None:
    """A row of at most `max_length` tokens; None when no completion token would be left to train.

    keep_start drops the end of prompt + completion, keep_end its beginning. With keep_end at least
    one token stays in front as context, because nothing predicts the first token of a row.

    Raises:
        ValueError: `max_length` below 2, or an unknown `how`.
    """
    how = member("how", how, Truncation)
    if max_length < 2:
        raise ValueError(
            f"a row needs room for one prompt and one completion token, got max_length="
            f"{max_length}. Try 512."
        )
    row = [*prompt, *completion]
    start = len(prompt)
    if len(row) > max_length:
        if how is Truncation.keep_start:
            row = row[:max_length]
        else:
            start = max(start - (len(row) - max_length), 1)
            row = row[-max_length:]
    return (row[:start], row[start:]) if len(row) > start >= 1 else None


def truncate_rows(
    rows: Iterable[Row], max_length: int, how: Truncation | str
) -> tuple[list[tuple[int, Row]], int]:
    """All rows that keep something to train on, with their old index, and how many were dropped."""
    kept = []
    dropped = 0
    for index, (prompt, completion) in enumerate(rows):
        row = truncate_row(prompt, completion, max_length, how)
        if row is None:
            dropped += 1
        else:
            kept.append((index, row))
    return kept, dropped
