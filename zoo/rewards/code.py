"""Rewards for code: run what the model wrote against tests, in a sandbox, by value.

The sandbox receives the code and the call expressions, and returns values as plain data; expected
values stay in this process, which compares. Exit statuses, patched comparisons, forged reports and
early exits can therefore earn nothing: the code can do no better than to state the right values.

Four kinds of tests: pairs of call and expected value (`run_tests`), assertions as in MBPP
(`run_asserts`), a `check(candidate)` function as in HumanEval (`run_check`), programs from standard
input to output (`run_stdio`). `CodeReward` picks the kind from the columns of a data row and runs a
batch in parallel.
"""

import ast
import functools
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from zoo.rewards._asserts import CannotSplit, Check, Rejected, literal, split_assert, unroll
from zoo.rewards._plain import Malformed, TooLarge, decode, same
from zoo.rewards.sandbox import Limits, Outcome, run_program

JUDGING_SECONDS = 2.0  # of processor time, to decode and compare what one program sent
REASONS = (
    "passed",  # every test
    "wrong",  # a value differs
    "error",  # the code raised, on loading or in a call
    "syntax",  # the code does not compile
    "no_code",  # the completion holds none
    "not_plain",  # a returned value is not plain data, or too large to compare
    "timeout",
    "memory",
    "output_limit",
    "crashed",  # ended by a signal
    "exited",  # ended without a result
    "forged",  # wrote on the runner's own channel
    "sandbox",  # could not be run: score None
)


@dataclass(frozen=True)
class CodeVerdict:
    """What a program earned, and why.

    Attributes:
        score: 1.0 where every test passed, else 0.0; None where the sandbox failed, so that it is
            not
            trained on as a wrong answer.
        reason: one of `REASONS`; of the first test that failed.
        passed: a claim for each test; tests after a timeout or crash did not pass.
        detail: for people, at most a few hundred characters; partly the program's own words.
        cheatable: number of tests whose verdict the program's own process made.
        seconds: wall clock of the program.
        backend: what isolated it, see `zoo.rewards.sandbox`.
    """

    score: float | None
    reason: str
    passed: tuple[bool, ...] = ()
    detail: str = ""
    cheatable: int = 0
    seconds: float = 0.0
    backend: str = ""

    def __post_init__(self) -> None:
        # A lone surrogate would fail whoever writes the text, an escape sequence colour their
        # terminal.
        shown = (
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in self.detail
        )
        object.__setattr__(self, "detail", "".join(shown))

    @property
    def fraction(self) -> float:
        """Share of the tests passed, in [0, 1]: partial credit, for those who ask for it."""
        return sum(self.passed) / len(self.passed) if self.passed else 0.0


@dataclass(frozen=True)
class _Test:
    """Steps to run beside the code, and what is asked of the values of those that are evaluated."""

    steps: tuple[tuple[str, str], ...]
    holds: Callable[[list[Any]], bool]
    cheatable: bool = False
    counts: bool = True  # False: set-up, which must not fail but earns nothing


# ------------------------------------------------------------------ the four kinds of tests


def run_tests(
    code: str,
    tests: Sequence[Mapping[str, str]],
    timeout: float = 5.0,
    *,
    limits: Limits | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> CodeVerdict:
    """Score 1 where every call returns its expected value, of the same type.

    Args:
        code: Python source, untrusted.
        tests: [{"call": "add(1, 2)", "expected": "3"}], both Python source; expected is a literal.
        timeout: seconds for all calls together.
        limits: memory, output, processes; see `zoo.rewards.sandbox.Limits`.
        strict: refuse to run without namespaces.
        backend: for tests of the sandbox; None takes the best.
    Raises:
        ValueError: no tests, one without its texts, a call that does not parse, an expected value
            that is not a literal.
        TypeError: code is no str.
        SandboxError: strict, and no isolation on this machine.
    """
    prepared = []
    for row in _rows(tests, "call", "expected"):
        call, expected = row["call"], _literal(row["expected"])
        _expression(call)
        prepared.append(_Test((("eval", call.strip()),), functools.partial(_equals, expected)))
    return _judge(code, prepared, timeout, limits, strict, backend)


def run_asserts(
    code: str,
    asserts: Sequence[str],
    setup: str = "",
    timeout: float = 5.0,
    *,
    limits: Limits | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> CodeVerdict:
    """Score 1 where every assertion holds (MBPP: `test_list`, and `test_setup_code` as setup).

    The comparison is the assertion's own: `==` lets 4 equal 4.0, as in the data set. What cannot be
    split into calls and a comparison runs beside the code and is counted as cheatable.

    Raises:
        ValueError: no assertions, or one that does not parse.
        SandboxError: strict, and no isolation on this machine.
    """
    if isinstance(asserts, str) or not all(isinstance(a, str) for a in asserts):
        raise ValueError(f"asserts must be a list of Python source, got {asserts!r:.200}.")
    prepared = [_setup(setup)] if setup.strip() else []
    for source in asserts:
        prepared += _assertions(source)
    return _judge(code, prepared, timeout, limits, strict, backend)


def run_check(
    code: str,
    test: str,
    entry_point: str,
    timeout: float = 5.0,
    *,
    limits: Limits | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> CodeVerdict:
    """Score 1 where `check(entry_point)` of a HumanEval test passes.

    Args:
        code: the whole program: the prompt and what the model wrote.
        test: source that defines `check(candidate)`; taken apart into assertions where possible.
        entry_point: name of the function under test.
    Raises:
        ValueError: test defines no `check`, or entry_point is no name.
        SandboxError: strict, and no isolation on this machine.
    """
    if not entry_point.isidentifier():
        raise ValueError(f"entry_point must be the name of a function, got {entry_point!r}.")
    prepared = _check_function(test, entry_point)
    return _judge(code, prepared, timeout, limits, strict, backend)


def run_stdio(
    code: str,
    tests: Sequence[Mapping[str, str]],
    timeout: float = 5.0,
    *,
    limits: Limits | None = None,
    strict: bool = False,
    backend: str | None = None,
    every: bool = False,
) -> CodeVerdict:
    """Score 1 where, run as a script, the program prints the expected output for every input.

    Outputs are compared line by line without trailing white space. A non-zero exit status fails the
    test.

    Args:
        tests: [{"stdin": text, "stdout": text}]; each runs in a sandbox of its own.
        timeout: seconds for each test.
        every: run all tests, for `fraction`; otherwise stop at the first that fails.
    Raises:
        ValueError: no tests.
        SandboxError: strict, and no isolation on this machine.
    """
    rows = _rows(tests, "stdin", "stdout")
    passed: list[bool] = []
    first: tuple[str, str] | None = None
    seconds, name = 0.0, ""
    for row in rows:
        outcome = run_program(
            code,
            stdin=row["stdin"],
            timeout=timeout,
            limits=limits,
            strict=strict,
            backend=backend,
        )
        seconds, name = seconds + outcome.seconds, outcome.backend
        reason, detail = _script_reason(outcome, row["stdout"])
        if reason == "sandbox":
            return CodeVerdict(None, reason, detail=detail, seconds=seconds, backend=name)
        passed.append(reason == "passed")
        if reason != "passed":
            first = first or (reason, detail)
            if not every:
                break
    passed += [False] * (len(rows) - len(passed))
    reason, detail = first or ("passed", "")
    score = float(first is None)
    return CodeVerdict(score, reason, tuple(passed), detail, 0, seconds, name)


@dataclass(frozen=True)
class CodeReward:
    """Scores completions against the tests in their data rows, in parallel."""

    timeout: float = 5.0  # seconds for one program
    workers: int = 0  # programs at once; 0: one for each core
    strict: bool = False  # True: refuse to run without namespaces
    limits: Limits = field(default_factory=Limits)  # memory, output, processes of one program

    def verdict(self, completion: str, row: Mapping[str, Any]) -> CodeVerdict:
        """The verdict on one completion; the row's columns say the kind of tests.

        Columns: `test_list` (MBPP), `test` and `entry_point` (HumanEval; where `prompt` begins the
        program it is put before the code), `tests` with `call` and `expected`, or `tests` with
        `stdin` and `stdout`.

        Raises:
            ValueError: the row has none of these.
        """
        code = extract_code(completion)
        if not code.strip():
            return CodeVerdict(0.0, "no_code")
        options = {"timeout": self.timeout, "strict": self.strict, "limits": self.limits}
        if row.get("test_list"):
            setup = row.get("test_setup_code") or ""
            return run_asserts(code, row["test_list"], setup, **options)
        if row.get("test") and row.get("entry_point"):
            for program in _begun_programs(row.get("prompt"), code, row["entry_point"]):
                verdict = run_check(program, row["test"], row["entry_point"], **options)
                if verdict.reason != "syntax":
                    return verdict
            return run_check(code, row["test"], row["entry_point"], **options)
        tests = row.get("tests")
        if tests and "call" in tests[0]:
            return run_tests(code, tests, **options)
        if tests and "stdin" in tests[0]:
            return run_stdio(code, tests, **options)
        raise ValueError(
            f"a row with columns {', '.join(sorted(row))} has no tests for code; it needs "
            "test_list, or test with entry_point, or tests with call and expected (or with stdin "
            "and stdout)."
        )

    def verdicts(
        self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[CodeVerdict]:
        """Verdicts in order, `workers` programs at a time."""
        pairs = zip(completions, rows, strict=True)
        return run_many([functools.partial(self.verdict, c, r) for c, r in pairs], self.workers)


def run_many(jobs: Iterable[Callable[[], CodeVerdict]], workers: int = 0) -> list[CodeVerdict]:
    """Run jobs in a pool of threads that wait on their programs; results in order; no thread is
    left.

    Args:
        jobs: callables, such as `partial(run_tests, code, tests)`.
        workers: programs at once; 0 takes one for each core this process may use. With more, they
            compete for the cores, and their timeouts with them.
    """
    with ThreadPoolExecutor(workers or cores(), thread_name_prefix="zoo-code") as pool:
        return list(pool.map(lambda job: job(), jobs))


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def extract_code(completion: str) -> str:
    """The last closed fenced block, else the rest of an open one, else the completion as it is."""
    lines = completion.splitlines(keepends=True)
    block: list[str] | None = None
    last: str | None = None
    for line in lines:
        if line.lstrip().startswith("```"):
            if block is None:
                block = []
            else:
                last, block = "".join(block), None
        elif block is not None:
            block.append(line)
    if last is not None:
        return last
    return "".join(block) if block is not None else completion


# ------------------------------------------------------------------ prompts that begin a program

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LENT = (*_DEFINITIONS, ast.Import, ast.ImportFrom)  # from beside an answer that is left out
_PARSING = threading.Lock()


def _begun_programs(prompt: Any, code: str, entry_point: str) -> list[str]:
    """The programs that the code may end, likeliest first; none where the prompt begins none.

    Only the sandbox parses what a model wrote, so which of these is Python is found there.
    """
    prompt = prompt if isinstance(prompt, str) else ""
    begun, ending = _opening(prompt, entry_point)
    if re.search(rf"^(async\s+)?def\s+{re.escape(entry_point)}\b", code, re.MULTILINE):
        return [f"{begun}{ending}\n{code}"] if begun.strip() else []  # its imports and helpers
    programs = [begun + code, f"{begun}\n{code}"] if begun.strip() else []
    blank = begun[-1:].isspace() or code[:1].isspace()
    if "#" in begun.rpartition("\n")[2] or not blank:  # a comment would swallow what follows
        programs.reverse()
    if _body(prompt) is None:  # cut off within a statement, perhaps
        programs = [prompt + code, f"{prompt}\n{code}", *programs]
    return list(dict.fromkeys(programs))


@functools.lru_cache(maxsize=4096)
def _opening(prompt: str, entry_point: str) -> tuple[str, str]:
    """The Python with which a prompt begins the program, and what would make it whole.

    Both are empty where the prompt is an instruction in words. The Python may stand in a fence, or
    before paragraphs of words. What the prompt itself does to define the entry point is left out
    (an answer to be rewritten, say), unless it is a stub: it would pass for the completion's.
    """
    heads = [prompt]
    while len(heads) < 50 and (head := heads[-1].rpartition("\n\n")[0]):
        heads.append(head)
    for text in (extract_code(prompt), *heads):
        last = text.rstrip().rpartition("\n")[2]
        indent = last[: len(last) - len(last.lstrip())]
        for ending in ("", f"\n{indent}    pass\n"):
            body = _body(text + ending)
            if body is None:
                continue
            given = [s for s in body if entry_point in _bound(s)]
            if not given and (text not in heads or not _is_program(body)):
                continue
            if ending or all(map(_is_stub, given)):
                return text, ending
            rest: list[ast.stmt] = [s for s in body if s not in given and isinstance(s, _LENT)]
            return ast.unparse(ast.Module(rest, [])), ""
    return "", ""


def _body(source: str) -> list[ast.stmt] | None:
    # Python 3.12 and later warn of a backslash that escapes nothing; filters are all threads'
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _bound(statement: ast.stmt) -> set[str]:
    """The names of its module that a statement may bind."""
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, _DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _is_stub(statement: ast.stmt) -> bool:
    """Whether a function is only announced: a docstring, `pass`, `...`, NotImplementedError."""
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and all(
        isinstance(s, ast.Pass | ast.Raise)
        or (isinstance(s, ast.Return) and s.value is None)
        or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in statement.body
    )


def _is_program(body: list[ast.stmt]) -> bool:
    """Whether this is no words: `Square`, `Task: sums` and `f(x)` are Python, too."""
    if not any(isinstance(s, (*_LENT, ast.Assign)) for s in body):
        return False
    return not any(
        (isinstance(s, ast.Expr) and not isinstance(s.value, ast.Constant | ast.Call))
        or (isinstance(s, ast.AnnAssign) and s.value is None)
        for s in body
    )


# ------------------------------------------------------------------ tests taken apart


def _rows(tests: Sequence[Mapping[str, str]], *columns: str) -> list[Mapping[str, str]]:
    """The tests, each with its columns as text."""
    wanted = f"[{{{', '.join(f'{c!r}: text' for c in columns)}}}, …]"
    if not isinstance(tests, Sequence) or isinstance(tests, str):
        raise ValueError(f"tests must be {wanted}, got {tests!r:.200}.")
    if not tests:
        raise ValueError("code without tests cannot be scored: tests is empty.")
    for number, row in enumerate(tests):
        if not isinstance(row, Mapping) or not all(isinstance(row.get(c), str) for c in columns):
            raise ValueError(f"tests must be {wanted}, got tests[{number}] = {row!r:.200}.")
    return list(tests)


@functools.lru_cache(maxsize=4096)
def _literal(source: str) -> Any:
    return literal(source)


@functools.lru_cache(maxsize=4096)
def _expression(source: str) -> ast.expr:
    try:
        return ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"call {source[:200]!r} is not a Python expression ({error}).") from None


def _equals(expected: Any, values: list[Any]) -> bool:
    return same(values[0], expected)


def _setup(source: str) -> _Test:
    return _Test((("exec", source),), lambda values: True, counts=False)


def _from_check(check: Check) -> _Test:
    kinds = ["items" if i else "eval" for i in check.iterated] or ["eval"] * len(check.calls)
    return _Test(tuple(zip(kinds, check.calls, strict=True)), check.holds, check.cheatable)


def _whole(source: str) -> _Test:
    """Run beside the code, for what it raises: cheatable."""
    return _Test((("exec", source),), lambda values: True, cheatable=True)


@functools.lru_cache(maxsize=4096)
def _assertions(source: str) -> list[_Test]:
    body = _parse(source)
    asserts = [s for s in body if isinstance(s, ast.Assert)]
    if len(asserts) == len(body):
        return [_from_check(split_assert(s.test)) for s in asserts]
    return [_whole(source)]


@functools.lru_cache(maxsize=1024)
def _check_function(test: str, entry_point: str) -> list[_Test]:
    body = _parse(test)
    check = next((s for s in body if isinstance(s, ast.FunctionDef) and s.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        raise ValueError("a HumanEval test must define check(candidate); this one does not.")
    try:
        if any(not isinstance(s, ast.Assign) for s in body if s is not check):
            raise CannotSplit("statements beside check")
        renamed = [_Rename(check.args.args[0].arg, entry_point).visit(s) for s in check.body]
        return [_from_check(c) for c in unroll(renamed)]
    except CannotSplit:
        return [_whole(f"{test}\ncheck({entry_point})\n")]


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.new, node.ctx) if node.id == self.old else node


def _parse(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"test {source[:200]!r} is not Python ({error}).") from None


# ------------------------------------------------------------------ outcomes judged


def _judge(
    code: str,
    tests: Sequence[_Test],
    timeout: float,
    limits: Limits | None,
    strict: bool,
    backend: str | None,
) -> CodeVerdict:
    if not any(t.counts for t in tests):
        raise ValueError("code without tests cannot be scored: tests is empty.")
    steps = [step for test in tests for step in test.steps]
    outcome = run_program(
        code, steps, timeout=timeout, limits=limits, strict=strict, backend=backend
    )
    common = {
        "seconds": outcome.seconds,
        "backend": outcome.backend,
        "cheatable": sum(t.cheatable for t in tests),
    }
    enough = time.thread_time() + JUDGING_SECONDS
    ending = _ending(outcome)
    if ending and ending[0] in ("sandbox", "forged"):
        score = None if ending[0] == "sandbox" else 0.0
        passed = () if score is None else (False,) * sum(t.counts for t in tests)
        return CodeVerdict(score, ending[0], passed, ending[1], **common)
    results, order = _results(outcome, len(steps), enough)
    if not order:
        passed = (False,) * sum(t.counts for t in tests)
        return CodeVerdict(0.0, "forged", passed, "results out of order", **common)
    if isinstance(results, tuple):  # the code did not load
        passed = (False,) * sum(t.counts for t in tests)
        reason, detail = _reason(results)
        return CodeVerdict(0.0, reason, passed, detail, **common)
    passed, reasons = [], []
    position = 0
    for test in tests:
        here = results[position : position + len(test.steps)]
        position += len(test.steps)
        reason = _test_reason(test, here, ending, enough)
        if test.counts or reason[0] != "passed":
            reasons.append(reason)
        if test.counts:
            passed.append(reason[0] == "passed")
    # A program that ended any other way than by finishing its calls is not rewarded, whatever it
    # said first.
    if ending:
        reasons.append(ending)
    first = next((r for r in reasons if r[0] != "passed"), ("passed", ""))
    score = 1.0 if first[0] == "passed" else 0.0
    return CodeVerdict(score, first[0], tuple(passed), first[1], **common)


def _results(
    outcome: Outcome, count: int, enough: float
) -> tuple[list[Any] | tuple[str, str], bool]:
    """Decoded messages, or the error of loading; and whether they came in order, each once."""
    results: list[Any] = []
    messages = list(outcome.messages)
    if messages and messages[-1] == ("done", "0"):
        messages.pop()
        if len(messages) != count:
            return results, False
    elif outcome.status == "done":
        return results, False
    if messages and messages[0][0] == "load":
        decoded = _decoded(messages[0][1], enough)
        return decoded if isinstance(decoded, tuple) else ("error", ""), len(messages) == 1
    if [index for index, _ in messages] != [str(i) for i in range(len(messages))]:
        return results, False
    return [_decoded(payload, enough) for _, payload in messages], len(messages) <= count


def _decoded(payload: str, enough: float) -> dict[str, Any] | tuple[str, str]:
    """{"v": value}, or (name, text) of an exception."""
    if time.thread_time() > enough:
        return "NotPlain", "values that take too long to decode"
    try:
        tagged = decode(payload)
    except TooLarge as error:
        return "NotPlain", str(error)
    except Malformed as error:
        return "Malformed", str(error)
    if isinstance(tagged, dict) and list(tagged) == ["v"]:
        return tagged
    if isinstance(tagged, dict) and list(tagged) == ["e"]:
        parts = tagged["e"]
        if isinstance(parts, list) and len(parts) == 2 and all(isinstance(p, str) for p in parts):
            return parts[0][:100], parts[1][:200]
    return "Malformed", "neither a value nor an error"


def _test_reason(
    test: _Test, results: list[Any], ending: tuple[str, str] | None, enough: float
) -> tuple[str, str]:
    if time.thread_time() > enough:
        return "not_plain", "values that take too long to compare"
    for result in results:
        if isinstance(result, tuple):
            return _reason(result)
    if len(results) < len(test.steps):
        return ending or ("exited", "no result")
    try:
        values = [r["v"] for r in results]
        if test.holds(values):
            return "passed", ""
    except Rejected as error:
        return "wrong", str(error)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        return "wrong", f"{type(error).__name__}: {error}"[:200]
    calls = ", ".join(source for _, source in test.steps)[:150]
    return "wrong", f"{calls} gave {_shown(values)}"


def _shown(values: list[Any]) -> str:
    try:
        return ", ".join(repr(v)[:100] for v in values)[:200]
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits
        return "a value too large to show"


def _reason(error: tuple[str, str]) -> tuple[str, str]:
    name, text = error
    detail = f"{name}: {text}" if text else name
    if name == "NotPlain":
        return "not_plain", detail
    if name == "Malformed":
        return "forged", detail
    if name == "MemoryError":
        return "memory", detail
    if name in ("SyntaxError", "IndentationError", "TabError"):
        return "syntax", detail
    if name == "SystemExit":
        return "exited", detail
    return ("wrong" if name == "AssertionError" else "error"), detail


def _ending(outcome: Outcome) -> tuple[str, str] | None:
    """Why a program that did not finish its calls ended; None where it did."""
    status, code = outcome.status, outcome.exit_status
    if status == "done":
        return None
    if status == "failed":
        return "sandbox", outcome.detail
    if status == "result_limit":
        return "not_plain", "results too large"
    if status != "exited":
        return status, outcome.detail
    if code is not None and code > 128:
        number = code - 128
        if number == signal.SIGXCPU:
            return "timeout", "CPU time"
        names = {s.value: s.name for s in signal.Signals}
        return "crashed", names.get(number, f"signal {number}")
    return "exited", f"exit status {code}, before its results"


def _script_reason(outcome: Outcome, expected: str) -> tuple[str, str]:
    if outcome.status == "exited" and outcome.exit_status == 0:
        output = outcome.stdout.decode("utf-8", "replace")
        if _lines(output) == _lines(expected):
            return "passed", ""
        return "wrong", f"printed {output[:200]!r}"
    if outcome.status == "exited" and outcome.exit_status is not None and outcome.exit_status < 128:
        text = outcome.stderr[-300:].decode("utf-8", "replace").strip()
        return ("syntax" if "SyntaxError" in text else "error"), text
    return _ending(outcome) or ("exited", "")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
