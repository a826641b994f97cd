"""The spelling of an answer: characters and marks that never change its value."""

import re
import unicodedata

_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5),
    "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8),
    "⅝": (5, 8), "⅞": (7, 8), "⅑": (1, 9), "⅒": (1, 10), "↉": (0, 3),
}  # fmt: skip
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿⁱ", "0123456789-+ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙₖ", "0123456789nk", strict=True))
_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
    "Ø": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "±": r"\pm ", "∓": r"\mp ", "°": r"\degree ",
    "º": r"\degree ", "˚": r"\degree ", "∠": r"\angle ", "′": "'", "’": "'", "‘": "'", "“": '"',
    "”": '"', "∨": r"\lor ", "∧": r"\land ", "⟨": "(", "⟩": ")", "⌊": r"\lfloor ",
    "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∖": r"\setminus ", "∑": r"\sum ",
    "∫": r"\int ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ",
    "ε": r"\epsilon ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ",
    "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "ω": r"\omega ", "Δ": r"\Delta ", "€": r"\$",
    "£": r"\$", "¥": r"\$", "₹": r"\$", "₩": r"\$", "￥": r"\$", "¢": r"\text{ cents}",
    "‰": r"\cdot 10^{-3}", "…": r"\ldots ",
    "\u00a0": r"\,", "\u2009": r"\,", "\u202f": r"\,", "\u2007": r"\,", "\u2002": " ",
    "\u2003": " ", "\u3000": " ", "，": ",", "。": ".", "：": ":", "；": ";", "⋯": r"\cdots ",
}  # fmt: skip
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z])?")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_SMALL_FRACTION = re.compile(r"([⁰¹²³⁴-⁹]+)[⁄∕/]([₀-₉]+)")
_POWER = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_INDEX = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_MATH_BRACKET = re.compile(r"(?<!\\)\\[()\[\]]")
_SIGN = r"\\?\$|\\(?:pounds?|euro|EUR|yen|rupee|textdollar|texteuro)(?![A-Za-z])"
# A sign between two digits (5€60) is no decoration: it is left, and makes the text unreadable.
_CURRENCY = re.compile(rf"(?<=\d)\s*(?:{_SIGN})\s*(?=\d)|({_SIGN})")

_MERIDIEM = re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE)

# Commands whose argument is not part of the value, and layout around it.
_DECORATION = re.compile(
    r"\\(?:[hv]?phantom|[hv]space\*?|textcolor|color|colorbox|tag\*?|label)\s*\{[^{}]*\}"
    r"|\\[hv]?phantom\s*[-+=\d]|\\(?:left|right)\s*\."
    r"|\b(?:US|AU|CA|HK|NZ)\s*(?=\\?\$\s?\d)|^Rs\.?\s*(?:\\,)?\s*(?=\d)"
)
_ORDINAL = re.compile(
    r"(?<=\d)(?:\s*\^\s*\{\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\}|\s*\^\s*\{(?:st|nd|rd|th)\}"
    r"|\s*\^?\s*\\(?:text|mathrm)\{(?:st|nd|rd|th)\}|(?:st|nd|rd|th)\b)"
)
_DEGREE = re.compile(
    r"(?<=[\d}])\s*\^\s*(?:o(?![A-Za-z])|\{o\}|\{\\(?:text|mathrm)\{o\}\}|\\(?:text|mathrm)\{o\})"
)
# `6x10^3`: a letter for the sign.
_LETTER_TIMES = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\^)")
_NOT = re.compile(r"\\not\s*(=|\\in\b)")
_DIGITS = r"(?<![\d.])\d{1,3}(?:%s\d{3})+(?!\d)"
_LATEX_GROUPS = re.compile(_DIGITS % r"\s*(?:,\s*\\!|\{,\}|\\[,!:;]|')\s*")
_LATEX_SEPARATOR = re.compile(r"[^\d]+")
_COMMA_GROUPS = re.compile(r"(?<![\d.,])(?<!\d,\s)\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_SPACE_GROUPS = re.compile(
    r"(?<![\d.,)}^/])(?<![\d.,)}^/]\s)\d{1,3}(?:\s\d{3})+(?!\d|\s*\d|\s*/|,\d|\s*\\[dtc]?frac)"
)


def clean(text: str) -> str:
    """The answer without delimiters, currency signs, emphasis and end marks; characters in ASCII
    and LaTeX.

    Thousands separators are left alone: whether a comma is one depends on the gold
    (`join_thousands`).
    """
    if not text.isascii():
        text = _to_latex(text)
    text = text.strip()
    if text[:2] in ("**", "__"):
        text = text.replace(text[:2], "").strip()
    if text[-2:] in ("**", "__"):
        # The emphasis began before the answer: `**Answer: 5**`.
        text = text[:-2].rstrip()
    if text[:1] in ("*", "_") and text[-1:] == text[:1]:
        text = text[1:-1].strip()
    if "\\" in text or "$" in text or text.startswith("Rs"):
        text = _DECORATION.sub(" ", text)
        text = _NOT.sub(lambda match: "\\ne " if match[1] == "=" else "\\notin ", text)
    if "^" in text or "t" in text or "d" in text:
        text = _DEGREE.sub(r"^\\circ ", _ORDINAL.sub("", text))
    if "$" in text or "\\" in text:
        text = _CURRENCY.sub(lambda match: " " if match[1] else "$", text)
        text = _MATH_BRACKET.sub(" ", text)
    text = text.strip(' \t\r\n`"')
    if "10^" in text:
        text = _LETTER_TIMES.sub(r"\\times ", text)
    if ".m" in text or ". m" in text:
        text = _MERIDIEM.sub(r"\1m", text)
    while text:
        if text[-1] in ",;:" or text.endswith("\\\\"):
            # `\,` and friends are spaces, not punctuation.
            cut = 2 if text.endswith("\\\\") or text[-2:-1] == "\\" else 1
            text = text[:-cut].rstrip()
        elif (text[-1] == "." and text[-2:] != "..") or text[-1] == "\\":
            # A lone backslash is what stripping leaves of `\\ `.
            text = text[:-1].rstrip()
        else:
            break
    return text


def join_thousands(text: str, *, commas: bool = True) -> str:
    """Digits grouped in threes become one number: `1{,}000`, `10,\\!080`, `1'000`, `2 125`,
    `1,000`.

    A comma groups only outside brackets, so `(1,200)` stays a pair; with `commas=False` it never
    groups.
    """
    if not any(mark in text for mark in ", '\\"):
        return text
    if "\\" in text or "{,}" in text or "'" in text:
        text = _LATEX_GROUPS.sub(lambda match: _LATEX_SEPARATOR.sub("", match.group()), text)
    if commas and "," in text:
        text = _COMMA_GROUPS.sub(lambda match: _joined(match, text), text)
    if " " in text:
        text = _SPACE_GROUPS.sub(lambda match: _joined(match, text), text)
    return text


def _joined(match: re.Match[str], text: str) -> str:
    before = text[: match.start()]
    depth = sum(before.count(mark) for mark in ("(", "[", "\\{")) - sum(
        before.count(mark) for mark in (")", "]", "\\}")
    )
    return match.group() if depth > 0 else _LATEX_SEPARATOR.sub("", match.group())


def word_key(text: str) -> str:
    """Letters-only form of a worded answer: `\\text{(C)}` and `C` agree, `\\text{Even}.` and
    `even` agree.

    "" when the answer holds anything but words.
    """
    if "\\" in text:
        text = _WRAPPER.sub(" ", text)
    words = " ".join(text.replace("{", " ").replace("}", " ").replace("~", " ").split())
    words = words.strip(' .,;:!?"`*').removeprefix("'")
    if text.startswith("'"):
        # A quotation mark is closed; a prime (`a'`) belongs to the name.
        words = words.removesuffix("'")
    if len(words) >= 3 and words[0] == "(" and words[-1] == ")":
        words = words[1:-1].strip()
    elif len(words) == 2 and words[1] in ").:":
        words = words[0]
    if (
        not words
        or not words.replace(" ", "").replace("-", "").replace("'", "").replace(",", "").isalpha()
    ):
        return ""
    if len(words) == 1:
        return words
    return words.casefold()


_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|math(?:rm|bf|it|sf)|emph|boldsymbol|[ ,;:!])\s*"
)


def _to_latex(text: str) -> str:
    for character, (upper, lower) in _FRACTIONS.items():
        if character in text:
            text = text.replace(character, rf" \frac{{{upper}}}{{{lower}}}")
    text = _SMALL_FRACTION.sub(
        lambda match: unicodedata.normalize("NFKC", rf" \frac{{{match[1]}}}{{{match[2]}}}"), text
    )
    text = _ROOT.sub(
        lambda match: _ROOTS[match[1]] + (f"{{{match[2]}}}" if match[2] else " "), text
    )
    text = _POWER.sub(
        lambda match: "^{" + "".join(_SUPERSCRIPTS[c] for c in match.group()) + "}", text
    )
    text = _INDEX.sub(
        lambda match: "_{" + "".join(_SUBSCRIPTS[c] for c in match.group()) + "}", text
    )
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = "".join(
            _CHARACTERS.get(character, character)
            for character in text
            if unicodedata.category(character) not in ("Cf", "Mn")
        )
    return text
