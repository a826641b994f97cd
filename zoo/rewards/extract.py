"""Which part of a completion is its answer: markers found by linear scans, no backtracking.

The order, first in what follows the last `</think>`, then in the whole text:

1. the last complete `\\boxed{}` or `\\fbox{}`; an empty box is no answer, and the outermost box of
a nest counts;
2. what follows the last `####`;
3. the last `<answer>` tag;
4. the last explicit "answer is" (or "answer:");
5. under style gsm8k, the last line that begins with `A:`, as OpenAI's published solutions end;
6. the whole completion, if it is one short line without any marker.

Everything is searched, however long the text (FAULTS B80): a fixed window of last characters loses
answers.
"""

import re
from dataclasses import dataclass

_SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|</?s>|<eos>|<bos>|<pad>|<(?:start|end)_of_turn>|\[/?INST\]|<<[^<>\n]{1,200}>>"
)
_BRACE = re.compile(r"[{}]")
_BOX_OPEN = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s{1,3}(-?\d[\d,.]*|[A-Za-z])(?![A-Za-z\d])")
_SPELLINGS = ("answer", "Answer", "ANSWER")
_PHRASE = re.compile(
    r"(?<![A-Za-z])answer(?![A-Za-z])[*_`\"']{0,4}(?:\s(?:to|for|of)\s[^.:=\n]{1,60}?)?\s{0,4}"
    r"(?:(?::|=|\b(?:is|are|was|equals|would\s{1,2}be|will\s{1,2}be|must\s{1,2}be|should\s{1,2}be)\b)"
    r"[*_`]{0,4}\s{0,4}){1,3}",
    re.IGNORECASE,
)
# "#### The answer is 42", and a heading "#### Answer" above the answer.
_LEAD = re.compile(
    r"[*_]{0,3}(?:so |thus |therefore |hence |the |final |correct |my ){0,4}" + _PHRASE.pattern,
    re.IGNORECASE,
)
_SO = re.compile(r"(?:so|thus|hence|therefore),?\s+(?=[-$\\]?\d)", re.IGNORECASE)
_HEADING = re.compile(
    r"[*_]{0,3}(?:the )?(?:final |correct )?answer\s?[:.]?[*_]{0,3}:?", re.IGNORECASE
)
_SENTENCE_END = re.compile(
    r"(?<!\\)(?<!\bsq)(?<!\bcu)(?<!\bft)(?<!\bin)[.!](?=\s|$|[*_\"'`]{1,3}(?:\s|$))"
)
# What explains an answer is not part of it: "5 because 2 + 3 = 5", "72, altogether", "42 and that
# is all there is to say".
_CLAUSE = re.compile(
    r"[,;(]?\s{1,3}\b(?:because|since|which|where|hence|thus|therefore|given|after)\b",
    re.IGNORECASE,
)
# What follows a formula in dollars after a comma or in brackets, if it offers nothing else.
_REMARK = re.compile(r"\s*[,;(](?!\s*(?:or|and|but|not)\b)[^\d$\\]*", re.IGNORECASE)
_TALK = re.compile(
    r"([^\s,;:]*\d[^\s,;:]*)(?:[,;:]\s+(?!(?:or|and|but|not|no|maybe|perhaps|possibly)\b)"
    r"[A-Za-z][A-Za-z' ]*|\s+"
    r"(?!or\b|million|billion|thousand|hundred)[A-Za-z][A-Za-z',;-]*(?:\s+[A-Za-z',;-]+){4,})"
)
_PROSE = re.compile(r"[A-Za-z]{2,}\s{1,4}[A-Za-z]{2,}\s{1,4}[A-Za-z]{2,}")
_TWO_WORDS = re.compile(r"[A-Za-z]{2,}\s{1,4}[A-Za-z]{2,}")
_OPENERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_WHOLE_LIMIT = 200
_PHRASE_LIMIT = 4000
# After so many mentions of the word that introduce nothing, there is no answer.
_MAX_PHRASES = 1000


@dataclass(frozen=True, slots=True)
class Extracted:
    """An answer as the model wrote it, and the marker it was read from.

    Attributes:
        text: the answer, outer white space removed; "" where the marker holds nothing.
        source: "boxed", "hash", "tag", "phrase" or "whole".
        at_end: nothing follows the answer, so a cut-off completion may have lost part of it.
    """

    text: str
    source: str
    at_end: bool = False


def extract(completion: str, style: str = "math") -> Extracted | None:
    """The answer of a completion by the order in this module's docstring; None without an answer.

    Args:
        completion: what the model wrote, of any length.
        style: "gsm8k" also reads a line that begins with `A:`.
    Returns:
        the answer and its marker, or None if there is no marker and the text is not an answer by
        itself.
    """
    think = completion.rfind("</think>")
    if think >= 0:
        found = _by_marker(completion[think + 8 :], style)
        if found is not None:
            return found
    found = _by_marker(completion, style)
    if found is not None or think >= 0 or "<think>" in completion:
        return found
    if len(completion) > 4 * _WHOLE_LIMIT or "boxed{" in completion or "fbox{" in completion:
        # A box without an end is a cut-off answer, not an answer.
        return None
    whole = _SPECIAL.sub("", completion).strip()
    if not whole or len(whole) > _WHOLE_LIMIT or "\n" in whole or _PROSE.search(whole):
        return None
    if _TWO_WORDS.search(whole) and any(mark.isdigit() for mark in whole):
        # "42 is mentioned" is talk; "no solution" and "12 inches" are answers.
        return None
    return Extracted(whole, "whole", at_end=True)


def last_box(text: str) -> str | None:
    """Contents of the last complete `\\boxed{}` or `\\fbox{}`, found in one pass; None without one.

    Braces escaped as `\\{` do not count. Of nested boxes the outermost complete one is returned.
    """
    first = _BOX_OPEN.search(text)
    if first is None:
        # TeX also boxes one bare token; MATH has solutions that end in `\\boxed 2`.
        bare = _BARE_BOX.findall(text)
        return bare[-1] if bare else None
    # Escaped characters are masked, two by two, so that places stay.
    masked = text.replace("\\\\", "__").replace("\\{", "__").replace("\\}", "__")
    opened = {match.end() - 1 for match in _BOX_OPEN.finditer(text)}
    stack: list[int] = []
    best: tuple[int, int] | None = None
    for match in _BRACE.finditer(masked, first.end() - 1):
        at = match.start()
        if masked[at] == "{":
            stack.append(at)
        elif stack:
            start = stack.pop()
            # A later close is either a later box or one around the best so far.
            if start in opened:
                best = start + 1, at
    return None if best is None else text[best[0] : best[1]]


def _by_marker(text: str, style: str) -> Extracted | None:
    if "boxed" in text or "fbox" in text:
        box = last_box(text)
        if box is not None:
            return Extracted(_SPECIAL.sub("", box).strip(), "boxed")
    hash_at = text.rfind("####")
    if hash_at >= 0:
        return _after_hash(text, hash_at + 4)
    tag = _last_tag(text)
    if tag is not None:
        return tag
    phrase = _after_phrase(text)
    if phrase is None and style == "gsm8k":
        line = text.rfind("\nA:")
        if line >= 0 or text.startswith("A:"):
            return _after_hash(text, line + 3 if line >= 0 else 2, "phrase")
    return phrase


def _after_hash(text: str, start: int, source: str = "hash") -> Extracted:
    while start < len(text) and text[start] == "#":
        start += 1
    rest = text[start : start + _PHRASE_LIMIT].lstrip()
    line, newline, after = rest.partition("\n")
    if _HEADING.fullmatch(line.strip()):
        line, newline, _ = after.lstrip().partition("\n")
    answer = first_sentence(_SPECIAL.sub("", line).strip())
    phrase = _PHRASE.match(answer) or _LEAD.match(answer) or _SO.match(answer)
    if phrase is not None:
        answer = answer[phrase.end() :]
    return Extracted(answer, source, at_end=not newline)


def _last_tag(text: str) -> Extracted | None:
    best = None
    for name in _SPELLINGS:
        end = text.rfind(f"</{name}>")
        start = text.rfind(f"<{name}>", 0, end) if end > 0 else -1
        if start >= 0 and (best is None or end > best[1]):
            best = start + len(name) + 2, end
    if best is None:
        return None
    inside = text[best[0] : best[1]].strip()
    if len(inside) <= _PHRASE_LIMIT:
        phrase = _after_phrase(inside)
        if phrase is not None:
            return Extracted(phrase.text, "tag")
    return Extracted(inside, "tag")


def _after_phrase(text: str) -> Extracted | None:
    last = _last_phrase(text)
    if last is None:
        return None
    rest = text[last.end() : last.end() + _PHRASE_LIMIT].lstrip()
    if rest.startswith(("\\[", "$$")):
        paragraph, newline, _ = rest, "", ""
    else:
        paragraph, newline, _ = rest.partition("\n")
    paragraph = _SPECIAL.sub("", paragraph).strip()
    return Extracted(first_sentence(paragraph), "phrase", at_end=not newline)


def _last_phrase(text: str) -> re.Match[str] | None:
    """The last "answer is", looked for backwards: most of a long text is never read."""
    ends = {name: text.rfind(name) for name in _SPELLINGS}
    for _ in range(_MAX_PHRASES):
        name = max(ends, key=lambda spelling: ends[spelling])
        at = ends[name]
        if at < 0:
            return None
        match = _PHRASE.match(text, at)
        if match is not None:
            return match
        ends[name] = text.rfind(name, 0, at)
    return None


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, so that talk after an answer does not count.

    A display or inline formula at the start is kept whole, so `$1.5$. Then …` is `$1.5$`.
    """
    start = 0
    for opening, closing in _OPENERS:
        if text.startswith(opening):
            end = text.find(closing, len(opening))
            if end > 0:
                start = end + len(closing)
            break
    if start and _REMARK.fullmatch(text, start):
        return text[:start]
    end = _SENTENCE_END.search(text, start)
    if end is not None and not (
        end.group() == "!" and end.start() > 0 and text[end.start() - 1].isdigit()
    ):
        text = text[: end.start()].rstrip()
    if len(text) < 8 or text.isdigit():
        return text
    clause = _CLAUSE.search(text, 1)
    if clause is not None:
        text = text[: clause.start()].rstrip()
    talk = _TALK.fullmatch(text) if len(text) <= 2000 else None
    return text if talk is None else talk[1]
