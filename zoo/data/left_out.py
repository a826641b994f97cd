"""What data says of the rows that it leaves out."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
MOST_FILES = 10_000  # of a folder, that are looked at


class LeftOut(UserWarning):
    """Rows of the data are not used."""


@contextmanager
def heard() -> Iterator[dict[str, None]]:
    """The warnings `LeftOut` of what is done within, each once, instead of printing them.

    Where it fails they are given after all: they may say why.
    """
    said: dict[str, None] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", LeftOut)
            show = warnings.showwarning

            def hear(message: Any, category: Any, *rest: Any, **options: Any) -> None:
                if issubclass(category, LeftOut):
                    said[str(message)] = None
                else:
                    show(message, category, *rest, **options)

            warnings.showwarning = hear
            yield said
    except BaseException:
        _say(said)
        raise


def remembered(
    make: Callable[P, T], places: Callable[[], Sequence[Any]] | None = None
) -> Callable[P, T]:
    """`lru_cache` of the last eight results, whose warnings `LeftOut` come with each use.

    Data is read once and used by several: a run that found it read would else know of none.

    Args:
        places: where the data are, default: in the first argument. What lies there, as far as
            these are paths, is read anew once it has changed.
    """

    @lru_cache(maxsize=8)
    def kept(_stamp: Any, *args: Any) -> tuple[T, tuple[str, ...]]:
        with heard() as said:
            made: Any = make(*args)  # pyright: ignore
        return made, tuple(said)

    @wraps(make)
    def used(*args: Any) -> T:
        made, said = kept(tuple(map(_stamp, places() if places else args[:1])), *args)
        _say(said)
        return made

    return used  # pyright: ignore


def _stamp(value: Any) -> Any:
    """When the files at a path were written, and their sizes; None for what is no path."""
    if not isinstance(value, str) or not value:
        return None
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # such as a text that is too long
        path = Path(value).expanduser()
        if path.is_file():
            files = [path]
        else:
            walked = (Path(top) / name for top, _, names in os.walk(path) for name in names)
            files = list(islice(walked, MOST_FILES))
        found = [(str(file), file.stat()) for file in files if file.exists()]
        return tuple(sorted((name, at.st_mtime_ns, at.st_size) for name, at in found))
    return None


def _say(messages: Any) -> None:
    for message in messages:
        warnings.warn(message, LeftOut, stacklevel=3)
