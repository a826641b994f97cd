"""What a data set must give, checked before any weight loads; a stranger's above all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from zoo.config import ConfigError, check_method, place_in
from zoo.data.rows import Ranking, half_character_within, reading_of
from zoo.rewards.verifiable import LastNumber, Verifier, gold_answer
from zoo.types import EvaluationSet, Example, LabelledCompletion, PreferencePair, Prompt

ROWS = {
    "prompts": Prompt,
    "examples": Example,
    "pairs": PreferencePair,
    "rankings": Ranking,
    "labelled": LabelledCompletion,
}
SETS = ("accuracy", "perplexity")


def check_offers(data: Any) -> set[str]:
    """The kinds that a data set offers.

    Raises:
        ConfigError: something else than a set of the known kinds, or a method that is missing.
    """
    name = f"data {type(data).__name__}"
    try:
        offers = data.offers
    except Exception as error:
        _tell(error, data, "offers")
    named = isinstance(offers, Iterable) and not isinstance(offers, str | Mapping)
    kinds = list(offers) if named else []
    if not named or not kinds or not all(isinstance(k, str) and k in ROWS for k in kinds):
        shown = "a method: make it a property" if callable(offers) else f"{offers!r:.80}"
        raise ConfigError(
            f"{name}: offers must be a set of {', '.join(ROWS)}, got {shown}. Write, for example, "
            'offers = frozenset({"prompts"}).'
        )
    verifier = ["verifier"] if "prompts" in kinds else []
    for verb in (*sorted(kinds), *verifier, "evaluation_sets"):
        if not hasattr(type(data), verb) and not hasattr(data, verb):
            raise ConfigError(
                f"{name} offers {', '.join(sorted(kinds))} and has no method {verb}(). Write one, "
                "as zoo.types.Data says."
            )
        check_method(data, verb, (), name)
    return set(kinds)


def rows_of(data: Any, kind: str) -> list[Any]:
    """The rows of a kind.

    Raises:
        ConfigError: no list of the type of that kind, a prompt that is none, or two prompts of one
            id.
    """
    name, wanted = f"data {type(data).__name__}", ROWS[kind]
    rows = _asked(data, kind)
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise ConfigError(
            f"{name}: {kind}() must return a list of {wanted.__name__}, got {rows!r:.80}."
        )
    rows = list(rows)
    # One that is given again, as a mixture's small parts are, is no other row.
    different = {id(row): (place, row) for place, row in reversed([*enumerate(rows)])}
    for place, row in reversed(different.values()):
        if not isinstance(row, wanted):
            raise ConfigError(
                f"{name}: {kind}() must return a list of {wanted.__name__}, got "
                f"{type(row).__name__} at place {place}: {row!r:.80}. Import it from "
                f"{wanted.__module__}."
            )
        _check_prompt(row if isinstance(row, Prompt) else row.prompt, f"{name}: {kind}()", place)
    if kind == "prompts":
        _check_ids([row for _, row in different.values()], f"{name}: {kind}()")
    return rows


def verifier_of(data: Any) -> Any:
    """The reward that judges its prompts; None where there is none.

    Raises:
        ConfigError: something that cannot be asked.
    """
    made = _asked(data, "verifier")
    if made is None or (callable(made) and not isinstance(made, type)):
        return made
    shown = f"the class {made.__name__}" if isinstance(made, type) else f"{made!r:.80}"
    raise ConfigError(
        f"data {type(data).__name__}: verifier() must return a reward (zoo.types.Reward) or None, "
        f"got {shown}.{f' Return {made.__name__}().' if isinstance(made, type) else ''}"
    )


def check_golds(prompts: Iterable[Prompt], reward: Any) -> None:
    """Refuse golds that a verifier would stop at, before anything is sampled for it.

    Raises:
        ConfigError: the first prompt without one, or with one that is no text or number.
    """
    if type(reward) not in (Verifier, LastNumber):  # a class of its own may read others
        return
    for prompt in prompts:
        try:
            gold_answer(prompt)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def sets_of(data: Any) -> list[EvaluationSet]:
    """The evaluation sets.

    Raises:
        ConfigError: no list of them, two of one name, an unknown kind, or one that cannot be
            judged.
    """
    name = f"data {type(data).__name__}"
    sets = _asked(data, "evaluation_sets")
    if not isinstance(sets, Sequence) or not all(isinstance(s, EvaluationSet) for s in sets):
        raise ConfigError(
            f"{name}: evaluation_sets() must return a list of EvaluationSet, got {sets!r:.80}. "
            "Return [] where there is none."
        )
    names = Counter(item.name for item in sets)
    for item in sets:
        where = f"{name}: the evaluation set {item.name!r}"
        if not isinstance(item.name, str) or not item.name or "/" in item.name:
            raise ConfigError(f"{where} must have a word without / as its name: it begins metrics.")
        if names[item.name] > 1:
            raise ConfigError(f"{where} is there {names[item.name]} times. Name each otherwise.")
        if item.kind not in SETS:
            raise ConfigError(
                f"{where} must be of the kind {' or '.join(SETS)}, got {item.kind!r}."
            )
        if item.kind == "accuracy" and not callable(item.verifier):
            raise ConfigError(
                f"{where} has no verifier that could be called ({item.verifier!r:.40}), so no "
                "answer could be right. Give it one, as in Verifier()."
            )
        for place, prompt in enumerate(item.prompts):
            if not isinstance(prompt, Prompt):
                raise ConfigError(f"{where} must hold prompts, got {prompt!r:.80} at {place}.")
            _check_prompt(prompt, where, place)
        _check_ids(item.prompts, where)
    return list(sets)


def overlap(rows: Sequence[Any], sets: Sequence[EvaluationSet]) -> str:
    """What to say of training prompts that a policy is judged by as well, if there are any."""
    trained = {reading_of(row if isinstance(row, Prompt) else row.prompt) for row in rows}
    told = []
    for item in sets:
        both = [prompt for prompt in item.prompts if reading_of(prompt) in trained]
        if both:
            told.append(f"{len(both)} of the {len(item.prompts)} prompts of the set {item.name}")
    if not told:
        return ""
    return (
        f"{', '.join(told)} are trained on too, so the score is of what was seen. Take them out of "
        "the training data."
    )


def _asked(data: Any, verb: str) -> Any:
    """What a method returns; one that leaves the program would end the run as if all were well.

    Raises:
        ConfigError: it left the program.
        RuntimeError: it raised something, of a class that is not zoo's.
    """
    try:
        return getattr(data, verb)()
    except SystemExit as error:
        raise ConfigError(
            f"data {type(data).__name__}: {verb}() called exit({error.code}). Let it return, or "
            "raise an exception that says what is wrong."
        ) from error
    except Exception as error:
        _tell(error, data, f"{verb}()")


def _tell(error: Exception, data: Any, what: str) -> NoReturn:
    """Raise an error of a stranger's class with its place; another as it is."""
    if isinstance(error, ConfigError) or type(data).__module__.startswith("zoo."):
        raise error
    # No ConfigError: a sweep's other jobs may run, and the traceback is kept.
    raise RuntimeError(
        f"data {type(data).__name__}: {what} raised {type(error).__name__}: {error!s:.200}"
        f"{place_in(type(data).__module__, error)}. Correct it."
    ) from error


def _check_prompt(prompt: Any, where: str, place: int) -> None:
    def refuse(what: str, found: Any) -> None:
        raise ConfigError(f"{where}, place {place}: {what}, got {found!r:.80}.")

    if not isinstance(prompt, Prompt):
        refuse("the prompt must be a Prompt", prompt)
    if not isinstance(prompt.id, str) or not prompt.id:
        refuse("the prompt's id must be a text", prompt.id)
    if not isinstance(prompt.columns, Mapping):
        refuse(f"the columns of prompt {prompt.id!r} must be a mapping", prompt.columns)
    if prompt.text is not None and not isinstance(prompt.text, str):
        refuse(f"the text of prompt {prompt.id!r} must be a text", prompt.text)
    turns = prompt.messages
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        refuse(f"the messages of prompt {prompt.id!r} must be a tuple of turns", turns)
    for turn in turns:
        texts = isinstance(turn, Mapping) and [turn.get("role"), turn.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            refuse(f"a turn of prompt {prompt.id!r} must be {{role: text, content: text}}", turn)
    for what in ("id", "columns", "text", "messages"):
        if fault := half_character_within(getattr(prompt, what)):
            refuse(f"the {what} of prompt {prompt.id!r} must be whole characters", fault)
    if bool(turns) == bool(prompt.text):
        found = "both" if turns else "neither"
        refuse(f"prompt {prompt.id!r} must have either messages or a text", found)


def _check_ids(prompts: Sequence[Prompt], where: str) -> None:
    twice = [name for name, count in Counter(p.id for p in prompts).items() if count > 1]
    if twice:
        raise ConfigError(
            f"{where}: {len(twice)} ids are of several prompts ({', '.join(twice[:3])}), so their "
            "rows could not be told apart. Number them."
        )
