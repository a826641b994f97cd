"""Instructions that a program can check: every id by hand, the shared cases, and hostile texts."""

import json
import time

import pytest

from zoo.rewards.constraints import (
    CHECKS,
    Constraints,
    Mode,
    check_instruction,
    count_sentences,
    occurrences,
    words_of,
)
from zoo.rewards.language import KNOWN, written_in
from zoo.types import Completion, Prompt

AT_LEAST, LESS = "at least", "less than"

# id → arguments, texts that follow it, texts that do not
CASES = [
    (
        "keywords:existence",
        {"keywords": ["cat", "ice cream"]},
        ["The Cat likes ice\ncream.", "ICE CREAM for the cat!"],
        ["The cats like ice cream.", "A cat without."],
    ),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": AT_LEAST},
        ["War, war!", "war war war"],
        ["war and warmth", "No wars; post-war."],
    ),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": LESS},
        ["peace", "war is warm"],
        ["War or war"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["rock", "C++"]},
        ["Rocket science in C."],
        ["We rock.", "In C++, too."],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "A", "let_frequency": 3, "let_relation": AT_LEAST},
        ["banana", "Aa a"],
        ["apple pie"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 2, "let_relation": LESS},
        ["Hello!", "Hello"],
        ["Hello!!"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Die Katze saß auf dem Tisch und sah in den Garten, aber sie hatte keine Lust."],
        [
            "The cat was on the table and it looked at the birds that were in the garden.",
            "Кошка сидела на столе.",
        ],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": AT_LEAST},
        ["One! Two? Three.", "Eins. Zwei. Und drei"],
        ["One. Two.", "Dr. A. Smith paid 3.50 e.g. for tea... and left. He did."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": LESS},
        ["Just one, said Mr. Brown."],
        ["One. Two."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n\n***\n\nb", "***\na\n***\nb\n***"],
        ["a\n\nb", "a\n***\n***\nb", "a *** b *** c", "a **** b"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": AT_LEAST},
        ["one two three four", "one—two three, four!", "don't do well-known things"],
        ["a - b * c", "don't do it"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": LESS},
        ["two words"],
        ["now three words"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
        ["Trees.\n \nElm, oak", 'a\nb\n\n\n"Elm" it is'],
        ["Elm\n\nOak", "a\n\nElms grow", "a\n\nelm\n\nb", "Elm"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["Dear [name], on [the date]", "[a][b][c]"],
        ["Dear [name]", "[] and [ ]", "[name] and [date"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. I owe you.", "Bye. **p. s.** Really."],
        ["Bye", "Bye\nP.S.", "Bye\nP.P.S. more", "PS: no points"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Bye\nP.P.S. again", "Bye P.P.S again"],
        ["Bye\nP.S. once"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "List:\n- a\n  - b", "**Bold**\n* a\n---\n* b\n* * *"],
        ["* a", "* a\n* b\n* c", "*a*\n*b*", "a * b\nc - d"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is maybe.", "Well. My answer is yes. Sure."],
        ["Yes.", "My answer is yes. My answer is no.", "my answer is no"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and **two**", "* item with *x*\n* ***y***"],
        ["*one*", "* one\n* two", "** ** and * *", "*one\ntwo*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "**SECTION 1**\n## SECTION 2"],
        [
            "SECTION 1\na",
            "SECTION 1\nSECTION 01",
            "Section 1\nSection 2",
            "see SECTION 1, SECTION 2",
        ],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, null]}', '```json\n{"a": 1}\n```', " [1, 2] "],
        ['Here: {"a": 1}', '"text"', "5", "{'a': 1}", "[NaN]", "```", '{"a": 1'],
    ),
    (
        "detectable_format:title",
        {},
        ["<<A poem>>\nof joy", "x <<y>>"],
        ["<A poem>", "<<>>", "<< >>", "<<a\nb>>"],
    ),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******\na ****** b"],
        ["a", "a ****** a", "a ****** b ****** c", "a ***** b", "a ******* b", "******"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["Write a  poem.\nRoses are red", "write a poem. Here"],
        ["Roses are red", "Write a poem.", "Please write a poem. Roses"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "The end"},
        ["Bye. The end ", 'Bye. "the   END"', "**The end**"],
        ["The end. Bye", "Bye. The end.", "Breathe end"],
    ),
    (
        "startend:quotation",
        {},
        ['"quoted"', "“quoted”", ' "a" or "b" '],
        ["quoted", '"', '""', '"half', '" "'],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        ["NASA and I", "A1 B2"],
        ["Nasa and I", "none"],
    ),
    (
        "change_case:english_capital",
        {},
        ["THE CAT IS HERE, 9 LIVES", "A1 B2"],
        [
            "THE CAT is here",
            "123",
            "DIE KATZE SASS AUF DEM TISCH UND SAH IN DEN GARTEN, ABER SIE HATTE KEINE LUST.",
        ],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["the cat is here", "x"],
        ["The cat is here", "кошка сидела на столе"],
    ),
    ("punctuation:no_comma", {}, ["a; b", "1.000"], ["a, b", "1,000", "你好，世界"]),
]


def completion(text, truncated=False):
    return Completion(text, tuple(range(3)), (), truncated)


def prompt(*instructions):
    ids, kwargs = zip(*instructions, strict=True)
    return Prompt("p", columns={"instruction_id_list": list(ids), "kwargs": list(kwargs)})


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES, ids=[c[0] for c in CASES])
def test_instruction_by_hand(name, arguments, right, wrong):
    for text in right:
        assert check_instruction(text, name, arguments).followed is True, text
    for text in wrong:
        assert check_instruction(text, name, arguments).followed is False, text


def test_every_id_has_cases_by_hand():
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 25  # Table 1 of the paper


def test_every_id_is_refused_by_an_empty_text():
    for name, arguments, _, _ in CASES:
        assert check_instruction(" \n", name, arguments).followed is False


@pytest.mark.parametrize(("name", "arguments"), [c[:2] for c in CASES if c[1]])
def test_missing_argument_is_no_verdict(name, arguments):
    for missing in arguments:
        given = {**arguments, missing: None}
        verdict = check_instruction("A text.", name, given)
        assert verdict.followed is None
        assert missing in verdict.reason


def test_unknown_instruction_is_no_verdict_and_names_the_nearest():
    verdict = check_instruction("A text.", "punctuation:no_commas", {})
    assert verdict.followed is None
    assert "Did you mean punctuation:no_comma?" in verdict.reason


def test_numbers_that_a_table_turned_into_floats_are_read():
    arguments = {"num_bullets": 1.0}
    assert check_instruction("* a", "detectable_format:number_bullet_lists", arguments).followed


# against the shared cases ------------------------------------------------------------------------

RULES = {
    "has_keyword": ("keywords:existence", lambda p: {"keywords": [p["word"]]}),
    "lacks_keyword": ("keywords:forbidden_words", lambda p: {"forbidden_words": [p["word"]]}),
    "keyword_at_least": (
        "keywords:frequency",
        lambda p: {"keyword": p["word"], "frequency": p["n"], "relation": AT_LEAST},
    ),
    "letter_at_least": (
        "keywords:letter_frequency",
        lambda p: {"letter": p["letter"], "let_frequency": p["n"], "let_relation": AT_LEAST},
    ),
    "min_sentences": (
        "length_constraints:number_sentences",
        lambda p: {"num_sentences": p["n"], "relation": AT_LEAST},
    ),
    "min_words": (
        "length_constraints:number_words",
        lambda p: {"num_words": p["n"], "relation": AT_LEAST},
    ),
    "max_words": (
        "length_constraints:number_words",
        lambda p: {"num_words": p["n"] + 1, "relation": LESS},
    ),
    "paragraphs_by_stars": (
        "length_constraints:number_paragraphs",
        lambda p: {"num_paragraphs": p["n"]},
    ),
    "placeholders_at_least": (
        "detectable_content:number_placeholders",
        lambda p: {"num_placeholders": p["n"]},
    ),
    "postscript": (
        "detectable_content:postscript",
        lambda p: {"postscript_marker": p["marker"]},
    ),
    "bullets_exact": (
        "detectable_format:number_bullet_lists",
        lambda p: {"num_bullets": p["n"]},
    ),
    "title": ("detectable_format:title", dict),
    "json": ("detectable_format:json_format", dict),
    "two_responses": ("combination:two_responses", dict),
    "wrapped_in_quotes": ("startend:quotation", dict),
    "ends_with": ("startend:end_checker", lambda p: {"end_phrase": p["phrase"]}),
    "all_uppercase": ("change_case:english_capital", dict),
    "all_lowercase": ("change_case:english_lowercase", dict),
    "no_comma": ("punctuation:no_comma", dict),
}
# Formats of answers, not instructions of IFEval: zoo.rewards.shaping.Format, tested there.
OTHERS = {"one_hash_answer", "one_box", "think_tags", "think_answer_tags", "starts_with"}


def test_shared_cases_all_agree(shared):
    lines = (shared / "data/verifier/format.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["rule"] for row in rows} <= set(RULES) | OTHERS
    judged = [row for row in rows if row["rule"] in RULES and not row["ambiguous"]]
    wrong = []
    for row in judged:
        name, arguments = RULES[row["rule"]]
        verdict = check_instruction(row["completion"], name, arguments(row["params"]))
        if verdict.followed is not row["expected"]:
            wrong.append((row["rule"], row["completion"][:60], verdict))
    assert len(judged) > 30 and not wrong


def test_every_instruction_of_the_published_prompts_can_be_judged(shared):
    file = shared / "data/ifeval/input_data.jsonl"
    text = (
        "The cat was on the table and it looked at the birds that were in the garden, but it did "
        "not want to go out in the rain."
    )
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            assert check_instruction(text, name, arguments).followed is not None, (name, arguments)


# parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ('He said "Stop!" and left. (Really.) Then…', 3),
        ("It costs 3.50 at example.com today.", 1),
        ("Mr. J. Smith met Dr. No. They spoke.", 2),
        ("1. Wash it.\n2. Dry it.", 2),
        ("all small. as asked. fine.", 3),
        ("今日は。元気ですか？", 2),
        ("यह एक है। यह दो है।", 2),
        ("no mark at all", 1),
        ("... ! ?", 0),
    ],
)
def test_sentences_are_counted(text, count):
    assert count_sentences(text) == count


def test_words_are_what_people_count():
    assert words_of("don't — well-known, 1,000 * (x)…and/or") == [
        "don't",
        "well-known,",
        "1,000",
        "(x)",
        "and",
        "or",
    ]


@pytest.mark.parametrize(
    ("text", "phrase", "count"),
    [
        ("cat Cat, cats concat cat's", "cat", 3),  # cat, Cat and cat's
        ("aa aaa aa", "aa", 2),
        ("हिन्दी में", "हिन", 0),  # a vowel sign goes on with the word
        ("我喜欢北京", "北京", 1),  # no spaces in Chinese
        ("Straße", "STRASSE", 1),
    ],
)
def test_phrase_is_found_as_whole_words(text, phrase, count):
    assert occurrences(text, phrase) == count


SENTENCES = {  # "The cat sat on the table and looked at the birds in the garden", or thereabouts
    "en": "The cat was on the table and it looked at the birds that were in the garden.",
    "de": "Die Katze saß auf dem Tisch und sah in den Garten, aber sie hatte keine Lust.",
    "fr": "Le chat était assis sur la table et il regardait les oiseaux qui sont dans le jardin.",
    "es": "El gato estaba sentado en la mesa y miraba los pájaros que estaban en el jardín.",
    "pt": "O gato estava sentado na mesa e olhava para os pássaros que estavam no jardim.",
    "it": "Il gatto era seduto sul tavolo e guardava gli uccelli che erano nel giardino.",
    "ru": "Кошка сидела на столе и смотрела на птиц, которые были в саду, но она не хотела встать.",
    "uk": "Кішка сиділа на столі і дивилася на птахів, які були в саду, але вона не хотіла встати.",
    "bg": "Котката седеше на масата и гледаше птиците, които бяха в градината, но не искаше да се "
    "движи.",
    "hi": "बिल्ली मेज पर बैठी थी और बगीचे में पक्षियों को देख रही थी, लेकिन वह हिलना नहीं चाहती थी।",
    "mr": "मांजर टेबलावर बसली होती आणि बागेत असलेल्या पक्ष्यांकडे पाहत होती, पण ती हलत नाही आहे.",
    "ne": "बिरालो टेबलमा बसेको थियो र बगैंचामा भएको चराहरूलाई हेरिरहेको थियो तर यो चल्न चाहँदैन थियो।",
    "ar": "كانت القطة تجلس على الطاولة وتنظر إلى الطيور التي كانت في الحديقة لكنها لم تتحرك من "
    "مكانها.",
    "fa": "گربه روی میز نشسته بود و به پرندگانی که در باغ بودند نگاه می کرد اما از جای خود تکان "
    "نمی خورد.",
    "ur": "بلی میز پر بیٹھی تھی اور باغ میں پرندوں کو دیکھ رہی تھی لیکن وہ اپنی جگہ سے نہیں ہلی۔",
    "ko": "고양이가 탁자 위에 앉아 정원에 있는 새들을 보고 있었다.",
    "ja": "猫はテーブルの上に座って、庭にいる鳥を見ていた。",
    "zh": "那只猫坐在桌子上看着花园里的鸟儿但是它一点也不想动弹因为它很懒惰。",
    "th": "แมวนั่งอยู่บนโต๊ะและมองดูนกในสวน",
    "vi": "Con mèo đã ngồi trên bàn và nhìn những con chim trong vườn, nhưng nó không muốn đi ra.",
    "sw": "Paka alikuwa ameketi juu ya meza na kutazama ndege katika bustani lakini hakutaka kwa "
    "sababu ya jua.",
    "fi": "Kissa istui pöydällä ja katseli lintuja, jotka olivat siellä, mutta se ei ole nyt niin "
    "iloinen kuin hän oli.",
    "kn": "ಬೆಕ್ಕು ಮೇಜಿನ ಮೇಲೆ ಕುಳಿತಿತ್ತು.",
    "pa": "ਬਿੱਲੀ ਮੇਜ਼ ਉੱਤੇ ਬੈਠੀ ਸੀ।",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_language_is_told_from_all_others_or_not_at_all(language):
    text = SENTENCES[language]
    assert written_in(text, language) is True
    assert not [other for other in SENTENCES if other != language and written_in(text, other)]


def test_language_is_left_open_where_it_cannot_be_told():
    assert written_in("Taxi, hotel, radio!", "en") is None  # nobody's little words
    assert written_in("123 + 4 = 127", "en") is None
    assert written_in("Guten Tag", "de") is None
    assert written_in(SENTENCES["en"], "xx") is None
    assert written_in(SENTENCES["hi"] + SENTENCES["en"], "hi") is not True  # half and half
    assert written_in(SENTENCES["pt"], "pt-BR") is True
    assert {"kn", "pa", "sw", "ne"} <= KNOWN


# reward ------------------------------------------------------------------------------------------

NO_COMMA = ("punctuation:no_comma", {})
TITLE = ("detectable_format:title", {})
LANGUAGE = ("language:response_language", {"language": "en"})


def test_all_or_nothing_and_share():
    rows = [prompt(NO_COMMA, TITLE)] * 3
    texts = [completion("<<a>> b"), completion("a b"), completion("a, b")]
    output = Constraints()(rows, texts)
    assert output.total == [1.0, 0.0, 0.0]
    assert output.reasons == ["matched", TITLE[0], NO_COMMA[0]]
    assert output.components == {
        "constraints": [1.0, 0.0, 0.0],
        NO_COMMA[0]: [1.0, 1.0, 0.0],
        TITLE[0]: [1.0, 0.0, 0.0],
    }
    assert Constraints(mode=Mode.share)(rows, texts).total == [1.0, 0.5, 0.0]


def test_unjudged_instruction_abstains_unless_another_one_decides():
    rows = [prompt(LANGUAGE, NO_COMMA)] * 2
    texts = [completion("Taxi"), completion("Taxi, hotel")]
    output = Constraints()(rows, texts)
    assert output.total == [None, 0.0]
    assert output.reasons == [f"unjudged {LANGUAGE[0]}", NO_COMMA[0]]
    assert output.components[LANGUAGE[0]] == [None, None]
    assert Constraints(mode=Mode.share)(rows, texts).total == [None, None]


def test_instruction_that_stands_twice_must_be_followed_twice():
    twice = [("keywords:existence", {"keywords": [word]}) for word in ("cat", "dog")]
    output = Constraints()([prompt(*twice)] * 2, [completion("cat"), completion("dog cat")])
    assert output.total == [0.0, 1.0]
    assert output.components["keywords:existence"] == [0.0, 1.0]


def test_rows_have_components_of_their_own_instructions_only():
    output = Constraints()([prompt(TITLE), prompt(NO_COMMA)], [completion("a")] * 2)
    assert output.components[TITLE[0]] == [0.0, None]
    assert output.components[NO_COMMA[0]] == [None, 1.0]


def test_cut_off_completion_counts_unless_the_end_is_required():
    rows, texts = [prompt(NO_COMMA)], [completion("fine", truncated=True)]
    assert Constraints()(rows, texts).total == [1.0]
    output = Constraints(require_end=True)(rows, texts)
    assert (output.total, output.reasons) == ([0.0], ["truncated"])


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, "has no instructions"),
        ({"instruction_id_list": []}, "has no instructions"),
        ({"instruction_id_list": ["a", "b"], "kwargs": [{}]}, "has 2 instructions"),
        ({"instruction_id_list": ["a"], "kwargs": "x"}, "has 1 instructions"),
    ],
)
def test_prompt_without_usable_columns_is_named(columns, says):
    with pytest.raises(ValueError, match=rf"prompt 'p' .*{says}|prompt 'p' {says}"):
        Constraints()([Prompt("p", columns=columns)], [completion("a")])


# hostile -----------------------------------------------------------------------------------------

N = 100_000
HOSTILE = {
    "stars": "*" * N,
    "open stars": "*a " * (N // 3),
    "bullets": "* " * (N // 2),
    "brackets": "[" * N,
    "angles": "<" * N + "a",
    "dots": "." * N + "x",
    "spaced dots": ". " * (N // 2),
    "abbreviations": "Dr. " * (N // 4),
    "closers": "a." + ")" * N + "x",
    "spaces": "a" + " " * N + "b",
    "blank lines": "a" + "\n" * N + "b",
    "one word": "a" * N,
    "sections": "SECTION " * (N // 8) + "1",
    "long number": "SECTION " + "1" * N,
    "deep json": "[" * N + "]" * N,
    "keyword overlaps": "warwar" * (N // 6),
    "postscripts": "P." * (N // 2),
    "marks": "a" + "́̀" * (N // 2),
    "commas": "," * N,
    "quotes": '"' * N,
    "scripts": "aбगक한" * (N // 5),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_read_in_linear_time(name):
    # A quadratic pass over 100,000 characters takes tens of seconds; a linear one milliseconds.
    # All thirty checks together: half a second where this was written.
    started = time.perf_counter()
    for instruction, arguments, _, _ in CASES:
        check_instruction(HOSTILE[name], instruction, arguments)
    assert time.perf_counter() - started < 4.0
