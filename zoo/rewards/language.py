"""Whether a text is written in a language: by its script, and then by its commonest words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

# Letters by script, as ranges of code points.
_SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "latin": (
        (0x41, 0x5A),
        (0x61, 0x7A),
        (0xAA, 0xAA),
        (0xBA, 0xBA),
        (0xC0, 0x24F),
        (0x1E00, 0x1EFF),
    ),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "cyrillic": ((0x400, 0x52F),),
    "hebrew": ((0x590, 0x5FF),),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0xFB50, 0xFDFF), (0xFE70, 0xFEFF)),
    "devanagari": ((0x900, 0x97F),),
    "bengali": ((0x980, 0x9FF),),
    "gurmukhi": ((0xA00, 0xA7F),),
    "gujarati": ((0xA80, 0xAFF),),
    "tamil": ((0xB80, 0xBFF),),
    "telugu": ((0xC00, 0xC7F),),
    "kannada": ((0xC80, 0xCFF),),
    "malayalam": ((0xD00, 0xD7F),),
    "thai": ((0xE00, 0xE7F),),
    "hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7AF)),
    "kana": ((0x3040, 0x30FF), (0x31F0, 0x31FF)),
    "han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x2FA1F)),
}
# Languages that are alone in their script, as far as we know languages.
_ALONE = {
    "el": "greek",
    "he": "hebrew",
    "bn": "bengali",
    "pa": "gurmukhi",
    "gu": "gujarati",
    "ta": "tamil",
    "te": "telugu",
    "kn": "kannada",
    "ml": "malayalam",
    "th": "thai",
    "ko": "hangul",
}
# The commonest little words of languages that share a script. A word may stand in several rows.
_WORDS: dict[str, dict[str, str]] = {
    "latin": {
        "en": "the of and to in is that it was for you with on are as be this have at by not from "
        "or but they his her we can will your my an all there which",
        "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als "
        "auch es an werden aus er hat dass sie nach wird bei ich wir wie oder",
        "fr": "le la les de des et en un une du est que dans qui pour pas sur au il elle vous nous "
        "ce cette avec sont mais plus ne je aux ou être",
        "es": "el la los las de y en que un una del se por con no para su es al lo como más pero "
        "sus este esta son fue o muy también hay",
        "pt": "o a os as de e do da em um uma que não para com por dos das se na no mais como mas "
        "foi ao você são é também seu sua ou",
        "it": "il lo la i gli le di e che un una in per non con del della è sono si da come più ma "
        "anche nel alla dei ho questo questa o",
        "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als maar bij ze "
        "die door hij wordt naar uit wat",
        "sv": "och i att det som en på är av för med den till inte ett om han de har jag var från "
        "vi kan men så också",
        "pl": "i w na z do się nie to że jest o jak ale po co dla przez tego są od czy za być może "
        "które oraz jego lub",
        "fi": "ja on ei se että hän oli joka mutta kun niin myös ovat tai kuin jos olen voi ole "
        "hänen minä sinä me he tämä sen sitä",
        "sw": "na ya wa kwa ni katika la za kuwa hii cha kama yake hiyo huo lakini pia au si yao "
        "watu sana hivyo kila ambayo vya",
        "vi": "và của là có trong được cho không một những các với đã để người này khi về đến như "
        "cũng từ ra thì tôi bạn rất nhiều",
        "tr": "ve bir bu için ile da de çok ne daha gibi olarak olan kadar en ama var değil ben o "
        "sonra her mi ya",
        "id": "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga ke karena adalah "
        "ada saya oleh atau bisa mereka",
    },
    "cyrillic": {
        "ru": "и в не на что с это как по но для он она они был было мы вы из у же от так бы или "
        "все его я к только если",
        "uk": "і в не на що з це як та до для він вона вони був було ми ви із у же від так або всі "
        "його я й тільки якщо є",
        "bg": "и в не на че с това като по но за той тя те беше са от до се да е ще или всички "
        "аз към само ако съм което",
    },
    "arabic": {
        "ar": "في من على إلى أن هذا هذه التي الذي عن مع كان كانت ما لا هو هي و أو كل ذلك بعد قد لم",
        "fa": "و در به از که این را است با برای آن می یک خود تا شد بود های هم نیز اما شما ما من",
        "ur": "کے میں ہے کی اور سے کا کو نے یہ پر ہیں کہ اس ایک بھی تھا لیے نہیں جو ہو کر آپ تو",
    },
    "devanagari": {
        "hi": "है में के की का और को से नहीं यह पर एक भी हैं कि ने लिए था इस जो हो तो कर या वह",
        "mr": "आहे आणि या हे होते नाही तो ते एक च्या मध्ये आहेत साठी पण की हा ही असे केले काही होता",
        "ne": "छ र को मा हो छन् लागि पनि गर्न यो भएको एक तथा गर्ने हुन् ले थियो छैन तर गरेको हुन्छ",
    },
}
# Letters that a language of the script does not write.
_FOREIGN = {
    "ru": "іїєґ",
    "uk": "ыэёъ",
    "bg": "ыэёіїєґ",
    "ar": "پچژگےٹڈڑں",
    "fa": "ےٹڈڑں",
}
_TABLE = {
    code: (script, frozenset(words.split()))
    for script, languages in _WORDS.items()
    for code, words in languages.items()
}
KNOWN = frozenset(_TABLE) | frozenset(_ALONE) | {"ja", "zh"}
_APOSTROPHE = re.compile("['’`ʼ]")
_MANY_LETTERS = 20  # Han characters alone; fewer may be Japanese
_MANY_WORDS = 8  # fewer do not show that a text is in another language


def written_in(text: str, language: str) -> bool | None:
    """Whether a text is in a language; None when it cannot be told.

    First the script: below half of the letters it is another language. Then, where languages share
    a script, the share of words that are among the commonest of each; a short text, a mixture and
    a close call are not decided. A language that is not in the
    tables is asked about in vain (None), and a text in one is rarely taken for another's, because
    it has few of anybody's common words.

    Args:
        text: of any length; read once.
        language: ISO 639-1 code, such as `hi`; region and case do not matter (`pt-BR`).
    """
    code = known_language(language)
    if code is None:
        return None
    letters = _letters(text)
    total = sum(letters.values())
    if not total:
        return None
    if code in ("ja", "zh"):
        return _east_asian(letters, total, code)
    if code in _ALONE:
        script, words = _ALONE[code], None
    else:
        script, words = _TABLE[code]
    share = letters[script] / total
    if share < 0.5:
        return False
    if share < 0.8:
        return None
    return True if words is None else _by_words(text, code, script)


def known_language(language: str) -> str | None:
    """The code without region and case, if its texts can be told from others'."""
    code = language.lower().replace("_", "-").split("-")[0]
    return code if code in KNOWN else None


def _by_words(text: str, code: str, script: str) -> bool | None:
    tokens = [word for word in map(_bare, _APOSTROPHE.sub(" ", text.casefold()).split()) if word]
    counts = Counter(tokens)
    hits = {
        name: sum(counts[word] for word in words)
        for name, (its, words) in _TABLE.items()
        if its == script
    }
    for name in hits:
        # One such letter may be a typing error.
        if sum(map(text.count, _FOREIGN.get(name, ""))) >= 2:
            hits[name] = 0
    own = hits.pop(code)
    best = max(hits.values())
    few = len(tokens) < _MANY_WORDS
    if own >= 2 and own >= 1.3 * best and own >= 0.08 * len(tokens):
        return True
    if not few and best >= 3 and best >= 2 * own and best >= 0.12 * len(tokens):
        return False
    return None


def _east_asian(letters: Counter[str], total: int, code: str) -> bool | None:
    """Kana are Japanese; Han characters without any, and enough of them, are Chinese."""
    share = (letters["han"] + letters["kana"]) / total
    if share < 0.5:
        return False
    kana = letters["kana"] / total
    if share < 0.8 or (total < _MANY_LETTERS and not kana):
        return None
    if 0 < kana < 0.1:
        return None
    return (kana > 0) == (code == "ja")


def _letters(text: str) -> Counter[str]:
    """How many letters (and the marks that make them) each script has."""
    found: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            found[_script(ord(character))] += count
        elif unicodedata.category(character).startswith("M"):
            script = _script(ord(character))
            found[script] += count * (script != "other")  # accents belong to any script
    return found


def _script(point: int) -> str:
    for name, ranges in _SCRIPTS.items():
        if any(low <= point <= high for low, high in ranges):
            return name
    return "other"


def _bare(word: str) -> str:
    """A word without what stands around it; combining marks belong to it."""
    start, end = 0, len(word)
    while start < end and not word[start].isalpha():
        start += 1
    while end > start and not (
        word[end - 1].isalpha() or unicodedata.category(word[end - 1]).startswith("M")
    ):
        end -= 1
    return word[start:end]
