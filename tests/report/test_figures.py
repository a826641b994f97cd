"""What the figures draw: the lines' data against arithmetic, and files that are pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from tests.report.synthetic import evaluation, write_lines, write_run
from zoo.report.figures import (
    PALETTE,
    accuracy_figure,
    colours,
    memory_figure,
    png,
    smooth,
    training_figure,
)
from zoo.report.runs import Arm, arms_of, read_runs

MEMORY = {
    "components": {
        "policy": {"parameters": 2_000_000, "gradients": 2_000_000, "optimizer": 4_000_000},
        "reference": {"parameters": 2_000_000},
    },
    "phases": {"generate": 5_000_000, "update": 20_000_000},
    "rss_peak": 9e8,
    "instrument": "live tensors",
}


def line(step: int, right: int, tokens: int, seconds: float) -> dict[str, object]:
    """An evaluation with `right` of four problems, after so many tokens and seconds."""
    outcomes = [[1]] * right + [[0]] * (4 - right)
    spent = {"tokens/sampled_total": tokens, "seconds/total": seconds}
    return evaluation(step, outcomes, [0] * 4, **spent)


def arms(root: Path) -> list[Arm]:
    """grpo with two seeds: 1/4 → 2/4 after 1,000 tokens, and 1/4 → 4/4 after 3,000."""
    folders = [
        write_run(
            root, "grpo", seed, steps=4, rewards=[0.0, 1.0, 0.0, 1.0], memory=MEMORY,
            evaluations=[line(0, 1, 0, 0.0), line(4, right, tokens, seconds)],
        )
        for seed, right, tokens, seconds in ((0, 2, 1000, 5.0), (1, 4, 3000, 7.0))
    ]  # fmt: skip
    folders.append(write_run(root, "start", steps=0, evaluations=[line(0, 1, 0, 0.0)]))
    return arms_of(read_runs(folders))


def test_the_thick_line_is_the_mean_over_seeds_of_accuracy_and_budget(tmp_path: Path):
    figure = accuracy_figure(arms(tmp_path))
    # end: accuracy (50 + 100)/2 = 75 % at step 4, 2 thousand tokens, 6 seconds
    for ax, end in zip(figure.axes, (4.0, 2.0, 6.0), strict=True):
        thick = max(ax.lines, key=lambda drawn: drawn.get_linewidth())
        assert np.allclose(thick.get_xydata(), [[0, 25], [end, 75]])
        thin = [drawn for drawn in ax.lines if drawn.get_linewidth() < 1]
        assert sorted(drawn.get_ydata()[-1] for drawn in thin) == [50, 100]


def test_the_start_is_a_horizontal_line_and_every_line_is_named(tmp_path: Path):
    figure = accuracy_figure(arms(tmp_path))
    dashed = [drawn for drawn in figure.axes[0].lines if drawn.get_linestyle() == "--"]
    assert [set(drawn.get_ydata()) for drawn in dashed] == [{25.0}]
    assert {text.get_text() for text in figure.axes[-1].texts} == {"grpo", "start"}


def test_names_at_the_ends_of_lines_do_not_overlap(tmp_path: Path):
    folders = [
        write_run(tmp_path, name, evaluations=[line(0, 1, 0, 0.0), line(2, 2, 10, 1.0)])
        for name in ("ppo", "dpo", "grpo", "rloo")  # all end at the same place
    ]
    figure = accuracy_figure(arms_of(read_runs(folders)))
    heights = sorted(text.xy[1] for text in figure.axes[-1].texts)
    low, high = figure.axes[-1].get_ylim()
    assert min(np.diff(heights)) >= 0.06 * (high - low)


def test_an_algorithm_keeps_its_colour_and_no_two_arms_share_one(tmp_path: Path):
    names = ("rloo", "grpo", "dapo", "ppo")
    found = colours(arms_of(read_runs([write_run(tmp_path, name) for name in names])))
    assert (found["ppo"], found["grpo"]) == (PALETTE[0], PALETTE[2])
    assert len(set(found.values())) == len(names)


def test_smoothing_is_a_centred_mean_and_shorter_at_the_ends():
    # width 5: (0+1+2)/3, (0+1+2+3)/4, (0+1+2+3+9)/5, (1+2+3+9)/4, (2+3+9)/3
    assert smooth([0, 1, 2, 3, 9]) == pytest.approx([1, 1.5, 3, 3.75, 14 / 3])


def test_memory_bars_are_stacked_to_the_sum(tmp_path: Path):
    left, right = memory_figure(arms(tmp_path)).axes
    tops = [bar.get_y() + bar.get_height() for bar in left.patches]
    assert max(tops) == pytest.approx(10.0)  # 2 + 2 + 4 + 2 MB
    assert sorted(bar.get_height() for bar in right.patches) == [5.0, 20.0]
    assert len({to_hex(bar.get_facecolor()) for bar in left.patches}) == 4


@pytest.mark.parametrize(("with_sampled", "drawn"), [((), 0.5), ((1,), 0.5), ((0, 1), 0.7)])
def test_the_entropy_of_what_was_sampled_is_drawn_where_every_seed_has_it(
    with_sampled: tuple[int, ...], drawn: float, tmp_path: Path
):
    folders = [write_run(tmp_path, "grpo", seed, rewards=[0.1, 0.2]) for seed in (0, 1)]
    for seed in with_sampled:  # the others are of before it was recorded; `entropy` is 0.5
        file = folders[seed] / "metrics.jsonl"
        lines = [
            json.loads(line) | {"entropy/sampled": 0.7} for line in file.read_text().splitlines()
        ]
        write_lines(file, lines)
    panel = training_figure(arms_of(read_runs(folders))).axes[1]
    assert [list(line.get_ydata()) for line in panel.lines] == [[drawn] * 2] * 3  # two and a mean


@pytest.mark.parametrize("draw", [accuracy_figure, training_figure, memory_figure])
@pytest.mark.parametrize("runs", ["whole", "none"])
def test_every_figure_is_a_png_even_with_nothing_to_show(tmp_path: Path, draw, runs):
    shown = arms(tmp_path) if runs == "whole" else []
    data = png(draw(shown))
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 3000
