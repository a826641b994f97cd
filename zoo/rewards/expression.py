"""A small LaTeX and plain-text formula grammar: text to tokens to a tree of tuples.

Nothing is evaluated here and nothing is ever passed to `eval`. Length and depth are capped, so
parsing is linear in a bounded input. A tree is a nested tuple whose first entry names the node:

    ("q", Fraction)  ("sym", name, subscript tree | None)  ("const", "pi"|"e"|"i"|"inf"|"dots")
    ("+", a, b, …)  ("*", a, b)  ("/", a, b)  ("^", a, b)  ("neg", a)  ("pm", sign, a)
    ("fn", name, argument, …)  ("bound", operator, index, low, high, body)
"""

import re
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]
Token = tuple[str, str]

MAX_TOKENS = 500
MAX_DEPTH = 45
MAX_EXPONENT = 4000


class ParseError(ValueError):
    """The text is not a formula of the grammar."""


class TooComplex(ParseError):
    """The formula is longer or deeper than the caps."""


FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec",
    "arccsc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "coth", "sech", "csch", "arcsinh",
    "arccosh", "arctanh", "log", "ln", "lg", "exp", "sqrt", "cbrt", "abs", "floor", "ceil", "max",
    "min", "gcd", "lcm", "det", "Re", "Im", "arg",
))  # fmt: skip
_TRIG = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc",
))  # fmt: skip
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_GREEK = frozenset((
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta",
    "vartheta", "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "varrho", "sigma", "tau",
    "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi",
    "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar", "aleph",
))  # fmt: skip
_BOUND = frozenset((
    "sum", "prod", "int", "lim", "oint", "iint", "iiint", "bigcup", "bigcap",
))  # fmt: skip
# Formatting commands that change nothing in the value.
_SKIP = frozenset((
    "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl",
    "biggr", "Biggl", "Biggr", "displaystyle", "textstyle", "scriptstyle", "limits", "nolimits",
    "quad", "qquad", "hspace", "vspace", "thinspace", "medspace", "thickspace", "negthinspace",
    "rm", "bf", "it", "sf", "tt", "mathstrut", "middle", "boldmath", "ensuremath", "hfill",
    "noindent", "large", "Large", "LARGE", "huge", "Huge", "normalsize", "small", "tiny", "null",
    "strut", "blacksquare", "qed",
))  # fmt: skip
_TRANSPARENT = frozenset((
    "mathbf", "mathit", "mathsf", "mathtt", "boldsymbol", "bm", "mathcal", "mathscr", "mathfrak",
    "mathnormal", "operatorname", "boxed", "fbox", "vec", "hat", "tilde", "bar", "overrightarrow",
    "overline", "underline", "dot", "mathop",
))  # fmt: skip
_MULTIPLY = frozenset(["cdot", "times", "ast", "cdotp", "star"])
_RELATIONS = {
    "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=",
    "lt": "<", "gt": ">", "ne": "!=", "neq": "!=", "in": "in", "approx": "~", "approxeq": "~",
    "simeq": "~", "sim": "~", "equiv": "=", "to": "->", "rightarrow": "->", "Rightarrow": "->",
    "implies": "->", "iff": "<->", "mapsto": "->", "mid": "mid", "parallel": "parallel",
    "perp": "perp",
    "cong": "cong", "propto": "propto", "subset": "subset", "subseteq": "subset", "notin": "notin",
    "colon": ":",
}  # fmt: skip
_SYMBOL_COMMANDS = {
    "cup": "cup", "cap": "cap", "setminus": "setminus", "smallsetminus": "setminus",
    "backslash": "setminus", "lor": "or", "vee": "or", "land": "and", "wedge": "and", "pm": "pm",
    "mp": "mp", "div": "/", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]",
    "lparen": "(", "rparen": ")", "lvert": "|", "rvert": "|", "vert": "|", "lfloor": "lfloor",
    "rfloor": "rfloor", "lceil": "lceil", "rceil": "rceil", "circ": "circ", "degree": "deg",
    "prime": "'", "over": "over", "choose": "choose", "infty": "infty", "langle": "(",
    "rangle": ")", "angle": "angle", "measuredangle": "angle",
    "emptyset": "empty", "varnothing": "empty",
}  # fmt: skip
_DOTS = frozenset((
    "ldots", "dots", "cdots", "dotsc", "dotsb", "vdots", "ddots", "dotso",
))  # fmt: skip
_FRACTIONS = frozenset(["frac", "dfrac", "tfrac", "cfrac"])
_BINOMIALS = frozenset(["binom", "dbinom", "tbinom"])
# Every command of the grammar, for those who want to know whether a text uses others.
FORMULA_COMMANDS = (
    FUNCTIONS | _GREEK | _BOUND | _SKIP | _TRANSPARENT | _MULTIPLY | _DOTS | _FRACTIONS | _BINOMIALS
    | frozenset(_RELATIONS) | frozenset(_SYMBOL_COMMANDS)
    | {"pi", "triangle", "mathbb", "begin", "end"}
)  # fmt: skip
_WORD_SEPARATORS = frozenset((
    "and", "or", "&", ", and", ",and", ", or", ",or",
))  # fmt: skip

_TOKEN = re.compile(
    r"(?P<space>[\s~]+)"
    r"|(?P<number>\d+\.(?=\s*\\(?:overline|bar|dot)\s*\{)"
    r"|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z\d]))?)"
    r"|(?P<text>\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|mathrm|emph|operatorname\*?)\s*\{)"
    r"|(?P<env>\\(?:begin|end)\s*\{[a-zA-Z*]+\})"
    r"|(?P<blackboard>\\(?:mathbb|Bbb)\s*(?:\{\s*[A-Z]\s*\}|[A-Z]))"
    r"|(?P<command>\\[a-zA-Z]+)"
    r"|(?P<row>\\\\(?:\[[^\]]{0,10}\])?)"
    r"|(?P<spacing>\\[,;:!\s>])"
    r"|(?P<escaped>\\[{}%$&#_|])"
    r"|(?P<relation><=|>=|!=|=<|=>|==|:=|->|<>)"
    r"|(?P<dots>\.{3,4}|…)"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<power>\*\*)"
    r"|(?P<char>[-+*/^_=<>()\[\]{}|,;:!'%&.])"
)

_CHOICES = re.compile(r"[A-H](?:\s*,?\s+and\s+[A-H]|\s*,\s*[A-H])+")

_UNIT_WORDS = frozenset((
    "cm", "mm", "km", "kg", "mg", "ml", "mL", "lb", "lbs", "oz", "ft", "in", "inch", "inches",
    "foot", "feet", "yd", "mi", "mph", "kph", "hr", "hrs", "sec", "secs", "min", "mins", "day",
    "days", "cup", "cups", "USD", "usd", "EUR", "GBP", "CNY", "RMB", "AM", "PM", "am", "pm",
    "men", "pts", "rad", "rads", "deg", "degs", "kmh", "Hz", "kHz", "Wh", "kWh", "kJ", "kN", "Pa",
    "kPa",
))  # fmt: skip
_SHORT_WORDS = frozenset((
    "no", "yes", "odd", "all", "any", "not", "None", "none", "nan", "NaN", "the", "is", "are",
    "an", "of", "to", "per", "old", "ago",
))  # fmt: skip


def tokenize(text: str, *, limit: int = MAX_TOKENS) -> list[Token]:
    """Tokens (kind, value) of a cleaned answer; white space only survives between two numbers.

    Raises:
        TooComplex: more than `limit` tokens.
        ParseError: a character outside the grammar.
    """
    tokens: list[Token] = []
    position, size, spaced = 0, len(text), False
    while position < size:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ParseError(f"character {text[position]!r} has no meaning in a formula")
        kind, value = match.lastgroup, match.group()
        position = match.end()
        if len(tokens) > limit:
            raise TooComplex(f"more than {limit} tokens")
        if kind == "space" or kind == "spacing":
            spaced = True
            continue
        if kind == "number":
            if spaced and tokens and tokens[-1][0] in ("num", "word", "sym"):
                tokens.append(("gap", ""))
            tokens.append(("num", value))
        elif kind == "char":
            tokens.append(("op", value))
        elif kind == "command":
            _command(value[1:], tokens)
        elif kind == "word":
            _word(value, tokens, spaced)
        elif kind == "text":
            end = _closing_brace(text, position)
            _text(text[position:end], tokens, limit)
            position = end + 1
        elif kind == "relation":
            tokens.append(
                (
                    "rel",
                    {"=<": "<=", "=>": "->", "==": "=", ":=": "=", "<>": "!="}.get(value, value),
                )
            )
        elif kind == "escaped":
            if value in ("\\{", "\\}", "\\%", "\\|"):
                tokens.append(("op", value if value in ("\\{", "\\}") else value[1]))
            elif value == "\\&":
                tokens.append(("sep", "and"))
            elif value == "\\_":
                tokens.append(("op", "_"))
        elif kind == "env":
            tokens.append(("env", "".join(value[1:].split())))
        elif kind == "blackboard":
            tokens.append(("set", value.replace("{", "").replace("}", "").strip()[-1]))
        elif kind == "row":
            tokens.append(("op", "\\\\"))
        elif kind == "dots":
            tokens.append(("dots", ""))
        else:
            tokens.append(("op", "^"))
        spaced = False
    return tokens


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return at
    raise ParseError("a brace is not closed")


def _command(name: str, tokens: list[Token]) -> None:
    if name in _SKIP:
        # `\left.` and `\right.` have an empty delimiter: handled by the parser as a lone dot.
        return
    if name in _RELATIONS:
        tokens.append(("rel", _RELATIONS[name]))
    elif name in _SYMBOL_COMMANDS:
        value = _SYMBOL_COMMANDS[name]
        tokens.append(("sep", value) if value in ("or", "and") else ("op", value))
    elif name in _MULTIPLY:
        tokens.append(("op", "*"))
    elif name in _DOTS:
        tokens.append(("dots", ""))
    elif name in _FRACTIONS:
        tokens.append(("cmd", "frac"))
    elif name in _BINOMIALS:
        tokens.append(("cmd", "binom"))
    elif name == "sqrt" or name in FUNCTIONS or name in _BOUND:
        tokens.append(("cmd", name))
    elif name == "pi":
        tokens.append(("const", "pi"))
    elif name in _GREEK:
        tokens.append(("sym", "\\" + name))
    elif name in _TRANSPARENT:
        if name in ("overline", "bar", "dot"):
            tokens.append(("cmd", "overline"))
    elif name in ("bmod", "pmod", "mod"):
        tokens.append(("rel", "mod"))
    elif name == "triangle":
        tokens.append(("sym", "\\triangle"))
    elif name == "R":
        tokens.append(("set", "R"))
    else:
        raise ParseError(f"unknown command \\{name}")


def _word(word: str, tokens: list[Token], spaced: bool) -> None:
    if word in FUNCTIONS and not (
        word in _UNIT_WORDS and spaced and tokens and tokens[-1][0] == "num"
    ):
        tokens.append(("cmd", word))
    elif word == "pi" or word == "Pi":
        tokens.append(("const", "pi"))
    elif word in ("and", "or", "AND", "OR", "And", "Or"):
        tokens.append(("sep", word.lower()))
    elif word in ("infinity", "Infinity", "inf"):
        tokens.append(("op", "infty"))
    elif word in ("C", "F") and _after_degree(tokens):
        tokens.append(("text", word))
    elif (
        len(word) >= 4
        or word in _UNIT_WORDS
        or word in _SHORT_WORDS
        or _continues_words(word, tokens, spaced)
    ):
        if tokens and tokens[-1][0] == "text":
            tokens[-1] = ("text", tokens[-1][1] + " " + word)
        else:
            tokens.append(("text", word))
    else:
        if len(word) == 1 and spaced and tokens and tokens[-1][0] == "num" and word in "mgshLVWJN":
            tokens.append(("gap", ""))
        for letter in word:
            tokens.append(("const", letter) if letter in "ei" else ("sym", letter))


def _ends_value(tokens: list[Token]) -> bool:
    """Whether a number, a closed group or π stands last: what a unit follows."""
    return bool(tokens) and (
        tokens[-1][0] == "num" or tokens[-1] in (("op", "}"), ("op", ")"), ("const", "pi"))
    )


def _after_degree(tokens: list[Token]) -> bool:
    last = [value for _, value in tokens[-2:]]
    return bool(last) and (
        last[-1] in ("circ", "deg") or (last[-1] == "}" and last[0] in ("circ", "deg"))
    )


def _continues_words(word: str, tokens: list[Token], spaced: bool) -> bool:
    """Whether a short word stands where only a word makes sense: `3 men`, `12 miles an hour`."""
    if not spaced or not tokens or len(word) < 2:
        return False
    return tokens[-1][0] == "text" or (tokens[-1][0] == "num" and len(word) == 3)


def _text(content: str, tokens: list[Token], limit: int) -> None:
    words = content.replace("~", " ").replace("\\ ", " ").strip().strip("$").strip()
    lowered = words.lower()
    if not words:
        return
    if lowered in _WORD_SEPARATORS:
        tokens.append(("sep", "or" if "or" in lowered else "and"))
    elif words[0].isdigit() or (words[0] in "-.(" and words[1:2].isdigit()):
        tokens.extend(tokenize(words, limit=limit))
    elif len(words) == 1 and words.isalpha() and words.isascii():
        # A lone letter is a variable, a unit after a value, or a constant (`\mathrm{e}`).
        if words not in "eid" and (_ends_value(tokens) or _after_degree(tokens)):
            tokens.append(("text", words))
        else:
            tokens.append(("const", words) if words in "ei" else ("sym", words))
    elif words[0] == "\\" or _CHOICES.fullmatch(words):
        # `\text{A, C}`: letters of a list, in any order.
        tokens.extend(tokenize(words, limit=limit))
    elif words in FUNCTIONS and not (words in _UNIT_WORDS and tokens and tokens[-1][0] == "num"):
        tokens.append(("cmd", words))
    elif tokens and tokens[-1][0] == "text":
        tokens[-1] = ("text", tokens[-1][1] + " " + words)
    else:
        tokens.append(("text", words))


_ARGUMENT_BRACKETS = (("(", ")"), ("{", "}"), ("[", "]"), ("\\{", "\\}"))


class Parser:
    """Recursive descent over one list of tokens; `formula` is the tree of all of them."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.degrees_are_angles = 0
        self.bars = 0

    def formula(self) -> Node:
        """The tree of the whole token list; ParseError if anything is left over."""
        node = self._sum()
        if self.at != len(self.tokens):
            raise ParseError(f"unexpected {self.tokens[self.at][1]!r}")
        return node

    def _peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def _is(self, value: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at] == ("op", value)

    def _accept(self, value: str) -> bool:
        if self._is(value):
            self.at += 1
            return True
        return False

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            raise ParseError(f"expected {value!r}, got {self._peek()[1]!r}")

    def _sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooComplex(f"nested deeper than {MAX_DEPTH}")
        terms: list[Node] = [self._signed_product()]
        while self.at < len(self.tokens):
            kind, value = self.tokens[self.at]
            if kind != "op":
                break
            if value == "+":
                self.at += 1
                terms.append(self._signed_product())
            elif value == "-":
                self.at += 1
                terms.append(("neg", self._signed_product()))
            elif value == "pm" or value == "mp":
                self.at += 1
                terms.append(("pm", 1 if value == "pm" else -1, self._signed_product()))
            elif value == "over" or value == "choose":
                self.at += 1
                upper = terms[0] if len(terms) == 1 else ("+", *terms)
                lower = self._sum()
                terms = [("/", upper, lower) if value == "over" else ("fn", "binom", upper, lower)]
            else:
                break
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ("+", *terms)

    def _signed_product(self) -> Node:
        negative, plus_minus = False, 0
        while self.at < len(self.tokens):
            kind, value = self.tokens[self.at]
            if kind != "op":
                break
            if value == "-":
                negative = not negative
            elif value == "pm" or value == "mp":
                if plus_minus:
                    raise ParseError("two ± in a row")
                plus_minus = 1 if value == "pm" else -1
            elif value != "+":
                break
            self.at += 1
        node = self._product()
        if negative:
            node = ("neg", node)
        return ("pm", plus_minus, node) if plus_minus else node

    def _product(self) -> Node:
        node = self._implicit_product()
        while self.at < len(self.tokens):
            kind, value = self.tokens[self.at]
            if kind == "op" and (value == "*" or value == "/"):
                self.at += 1
                right = self._signed_factor()
                node = (value, node, right)
            elif self._starts_factor(kind, value):
                node = ("*", node, self._power())
            else:
                break
        return node

    def _signed_factor(self) -> Node:
        if self._accept("-"):
            return ("neg", self._signed_factor())
        if self._accept("+"):
            return self._signed_factor()
        return self._power()

    def _implicit_product(self) -> Node:
        node = self._mixed_number()
        return node if node is not None else self._power()

    def _mixed_number(self) -> Node | None:
        """`1\\frac{4}{5}` and `1 4/5`: a whole number followed by a proper fraction."""
        tokens, at = self.tokens, self.at
        if at + 1 >= len(tokens) or tokens[at][0] != "num" or not tokens[at][1].isdigit():
            return None
        whole = int(tokens[at][1])
        if tokens[at + 1] == ("cmd", "frac"):
            self.at += 1
            node = self._power()
            if (
                node[0] == "/"
                and node[1][0] == "q"
                and node[2][0] == "q"
                and node[1][1] < node[2][1]
            ):
                if self._is("^"):
                    raise ParseError("a power of a mixed number")
                return ("q", whole + node[1][1] / node[2][1])
            return ("*", ("q", Fraction(whole)), node)
        if (
            at + 4 < len(tokens) + 0
            and tokens[at + 1][0] == "gap"
            and tokens[at + 2][0] == "num"
            and tokens[at + 3] == ("op", "/")
            and tokens[at + 4][0] == "num"
            and tokens[at + 2][1].isdigit()
            and tokens[at + 4][1].isdigit()
            and 0 < int(tokens[at + 2][1]) < int(tokens[at + 4][1])
        ):
            self.at += 5
            return ("q", whole + Fraction(int(tokens[at + 2][1]), int(tokens[at + 4][1])))
        return None

    def _starts_factor(self, kind: str, value: str) -> bool:
        if kind in ("sym", "const", "cmd", "dots"):
            return True
        if kind == "num":
            before = self.tokens[self.at - 1]
            return before[0] == "op" and before[1] in (")", "}", "!")
        if kind != "op":
            return False
        if value == "|":
            return not self.bars
        return value in ("(", "{", "lfloor", "lceil")

    def _power(self) -> Node:
        base = self._postfix(self._primary())
        if not self._accept("^"):
            return base
        if self._accept("circ") or self._accept("deg"):
            return self._degree(base)
        if self._is("{") and self.tokens[self.at + 1 : self.at + 3] in (
            [("op", "circ"), ("op", "}")],
            [("op", "deg"), ("op", "}")],
        ):
            self.at += 3
            return self._postfix(self._degree(base))
        exponent = self._exponent()
        node = ("^", base, exponent)
        if self._is("^"):
            raise ParseError("a double superscript")
        return self._postfix(node)

    def _exponent(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooComplex(f"nested deeper than {MAX_DEPTH}")
        if self._accept("-"):
            node: Node = ("neg", self._exponent())
        elif self._accept("+"):
            node = self._exponent()
        elif self._is("{"):
            node = self._group()
        else:
            node = self._primary()
            if self._is("^"):
                self.at += 1
                node = ("^", node, self._exponent())
        self.depth -= 1
        return node

    def _degree(self, node: Node) -> Node:
        if self.degrees_are_angles:
            return ("/", ("*", node, ("const", "pi")), ("q", Fraction(180)))
        return node

    def _postfix(self, node: Node) -> Node:
        while self.at < len(self.tokens):
            kind, value = self.tokens[self.at]
            if kind != "op":
                break
            if value == "!":
                self.at += 1
                node = ("fn", "factorial", node)
            elif value == "%":
                self.at += 1
                node = ("/", node, ("q", Fraction(100)))
            elif value == "deg":
                self.at += 1
                node = self._degree(node)
            else:
                break
        return node

    def _group(self) -> Node:
        self._expect("{")
        bars, self.bars = self.bars, 0
        node = self._sum()
        self.bars = bars
        self._expect("}")
        return node

    def _skip_gap(self) -> None:
        if self._peek()[0] == "gap":
            self.at += 1

    def _argument(self) -> Node:
        """A LaTeX argument: a group, one digit of a number, or one factor."""
        self._skip_gap()
        if self._is("{"):
            return self._group()
        kind, value = self._peek()
        if kind == "num" and value.isdigit() and len(value) > 1:
            digits = ("num", value[0]), ("num", value[1:])
            self.tokens = [*self.tokens[: self.at], *digits, *self.tokens[self.at + 1 :]]
            self.at += 1
            return ("q", Fraction(int(value[0])))
        return self._primary()

    def _primary(self) -> Node:
        if self.at >= len(self.tokens):
            raise ParseError("the formula ends too early")
        kind, value = self.tokens[self.at]
        self.at += 1
        if kind == "num":
            if self._peek() == ("cmd", "overline"):
                return self._repeating(value)
            return ("q", number(value))
        if kind == "sym":
            return self._subscripted(value)
        if kind == "const":
            if value in "ei" and self._is("_"):
                return self._subscripted(value)
            return ("const", value)
        if kind == "cmd":
            return self._function(value)
        if kind == "dots":
            return ("const", "dots")
        if kind == "op":
            if value == "(" or value == "[":
                self.depth += 1
                bars, self.bars = self.bars, 0
                node = self._sum()
                self.bars = bars
                self.depth -= 1
                self._expect(")" if value == "(" else "]")
                return node
            if value == "{":
                self.at -= 1
                return self._group()
            if value == "infty":
                return ("const", "inf")
            if value == "|":
                self.bars += 1
                node = self._sum()
                self.bars -= 1
                self._expect("|")
                return ("fn", "abs", node)
            if value in ("lfloor", "lceil"):
                node = self._sum()
                self._expect("r" + value[1:])
                return ("fn", value[1:].replace("floor", "floor"), node)
        raise ParseError(f"unexpected {value!r}")

    def _repeating(self, start: str) -> Node:
        self.at += 1
        self._expect("{")
        kind, digits = self._peek()
        self.at += 1
        self._expect("}")
        if (
            kind != "num"
            or not digits.isdigit()
            or not start.replace(".", "", 1).isdigit()
            or "." not in start
        ):
            raise ParseError("an overline that is not a repeating decimal")
        places = len(start) - start.index(".") - 1
        value = number(start) + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
        return ("q", value)

    def _subscripted(self, name: str) -> Node:
        subscript: Node | None = None
        if self._accept("_"):
            if self._is("{"):
                subscript = self._subscript_group()
            else:
                kind, value = self._peek()
                self.at += 1
                if kind not in ("num", "sym", "const", "text"):
                    raise ParseError("an unreadable subscript")
                subscript = ("q", number(value)) if kind == "num" else ("sym", value, None)
        while self._accept("'"):
            name += "'"
        return ("sym", name, subscript)

    def _subscript_group(self) -> Node:
        start = self.at
        try:
            return self._group()
        except ParseError:
            # `x_{max, 1}` or `A_{\text{old}}`: any balanced group is a name.
            self.at = start + 1
            level, name = 1, ""
            while level:
                if self.at >= len(self.tokens):
                    raise
                kind, value = self.tokens[self.at]
                level += (value == "{") - (value == "}") if kind == "op" else 0
                name += value
                self.at += 1
            return ("sym", name[:-1], None)

    def _function(self, name: str) -> Node:
        if name == "frac":
            upper = self._argument()
            return ("/", upper, self._argument())
        if name == "binom":
            upper = self._argument()
            return ("fn", "binom", upper, self._argument())
        if name == "sqrt" or name == "cbrt":
            return self._root(Fraction(2 if name == "sqrt" else 3))
        if name == "overline":
            letters = []
            grouped = self._accept("{")
            while not (self._is("}") if grouped else letters):
                kind, value = self._peek()
                if kind not in ("sym", "const"):
                    raise ParseError("an overline over a formula")
                letters.append(value)
                self.at += 1
            if grouped:
                self._expect("}")
            return ("sym", "overline " + "".join(letters), None)
        if name in _BOUND:
            return self._bound(name)
        return self._call(name)

    def _root(self, degree: Fraction) -> Node:
        index: Node = ("q", degree)
        if self._is("["):
            self.at += 1
            index = self._sum()
            self._expect("]")
        if self._is("(") or self._is("{") or self._peek() == ("cmd", "frac"):
            inner = self._primary()
        else:
            inner = self._primary()
        return ("fn", "root", inner, index)

    def _call(self, name: str) -> Node:
        name = _ALIASES.get(name, name)
        base: Node | None = None
        power: Node | None = None
        while self._is("_") or self._is("^"):
            if self._accept("_"):
                base = self._group() if self._is("{") else self._argument()
            else:
                self.at += 1
                power = self._exponent()
        self._skip_gap()
        is_trig = name in _TRIG
        self.degrees_are_angles += is_trig
        arguments = self._call_arguments(name)
        self.degrees_are_angles -= is_trig
        if power == ("neg", ("q", Fraction(1))) and is_trig:
            name, power = "arc" + name, None
        if base is not None:
            if name not in ("log", "lg"):
                raise ParseError(f"a subscript on {name}")
            node: Node = ("/", ("fn", "ln", arguments[0]), ("fn", "ln", base))
        elif name == "log" or name == "lg":
            node = ("/", ("fn", "ln", arguments[0]), ("fn", "ln", ("q", Fraction(10))))
        elif name == "exp":
            node = ("^", ("const", "e"), arguments[0])
        else:
            node = ("fn", name, *arguments)
        return node if power is None else ("^", node, power)

    def _call_arguments(self, name: str) -> list[Node]:
        bracket = next((pair for pair in _ARGUMENT_BRACKETS if self._is(pair[0])), None)
        if bracket is not None:
            self.at += 1
            bars, self.bars = self.bars, 0
            arguments = [self._sum()]
            while self._accept(","):
                arguments.append(self._sum())
            self.bars = bars
            self._expect(bracket[1])
            if len(arguments) > 1 and name not in ("max", "min", "gcd", "lcm"):
                raise ParseError(f"{name} takes one argument")
            return [self._postfix(arguments[0])] if len(arguments) == 1 else arguments
        if self._accept("-"):
            return [("neg", node) for node in self._call_arguments(name)]
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooComplex(f"nested deeper than {MAX_DEPTH}")
        node = self._power()
        while self.at < len(self.tokens):
            kind, value = self.tokens[self.at]
            if (kind == "cmd" and value not in ("frac", "sqrt")) or not self._starts_factor(
                kind, value
            ):
                break
            if name in _TRIG and value == "(" and self.tokens[self.at - 1][0] == "sym":
                # `\cos x(2\sin x+1)` is a product.
                break
            node = ("*", node, self._power())
        # `\sin x/2` is read as sin(x)/2; `\sin \pi/6` is an angle, as everybody writes it.
        followed = [kind for kind, _ in self.tokens[self.at + 1 : self.at + 2]]
        if name in _TRIG and self._is("/") and followed == ["num"] and _is_constant(node):
            self.at += 1
            node = ("/", node, self._power())
        self.depth -= 1
        return [node]

    def _bound(self, operator: str) -> Node:
        """A sum, product, integral or limit: kept as a whole, its index renamed away."""
        low: Node | None = None
        high: Node | None = None
        index = ""
        while self._is("_") or self._is("^"):
            upper = self._accept("^")
            if not upper:
                self.at += 1
            if not self._is("{"):
                node = self._argument()
            else:
                self.at += 1
                node = self._sum()
                if self._peek()[0] == "rel" or self._is("="):
                    self.at += 1
                    if node == ("const", "i"):
                        node = ("sym", "i", None)
                    if node[0] != "sym":
                        raise ParseError("an index that is not a letter")
                    index = node[1]
                    node = self._sum()
                self._expect("}")
            if upper:
                high = node
            else:
                low = node
        body = self._product()
        if index == "i":
            # An index named i is no imaginary unit.
            body = _renamed(body, ("const", "i"), ("sym", "i", None))
        return ("bound", operator, index, low, high, body)


def _renamed(node: Node, old: Node, new: Node) -> Node:
    if node == old:
        return new
    return tuple(_renamed(part, old, new) if isinstance(part, tuple) else part for part in node)


def _is_constant(node: Node) -> bool:
    return node[0] != "sym" and all(
        _is_constant(part) for part in node[1:] if isinstance(part, tuple)
    )


def number(text: str) -> Fraction:
    """The exact value of a decimal literal, with or without an exponent.

    Raises:
        TooComplex: the exponent is beyond the cap, so that `1e999999999` costs nothing.
    """
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_EXPONENT or (exponent and abs(int(exponent)) > MAX_EXPONENT):
        raise TooComplex(f"a number of more than {MAX_EXPONENT} digits")
    if not exponent and mantissa.isdigit():
        return Fraction(int(mantissa))
    whole, _, decimals = mantissa.partition(".")
    value = Fraction(int((whole or "0") + decimals), 10 ** len(decimals))
    if exponent:
        shift = int(exponent)
        value = value * 10**shift if shift >= 0 else value / 10**-shift
    return value


def parse_formula(tokens: list[Token]) -> Node:
    """The tree of a token list; ParseError (or TooComplex) when it is not one formula."""
    return Parser(tokens).formula()
