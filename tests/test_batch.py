"""The batch: masks from lengths, selection, splitting, and the identity of rows."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import ragged_batch
from zoo.batch import Batch, Scale, collate, row_key
from zoo.rollout.source import concatenate

EOS = 2


def with_fields(batch: Batch) -> Batch:
    """Every optional tensor filled with numbers that tell row and column."""
    rows, width = batch.input_ids.shape
    grid = torch.arange(rows)[:, None] * 100.0 + torch.arange(width)
    return batch.replace(
        rewards=torch.arange(rows).float(),
        scored=torch.arange(rows) % 3 != 0,
        sampling_logprobs=grid + 0.1,
        old_logprobs=grid + 0.2,
        ref_logprobs=grid + 0.3,
        values=grid + 0.4,
        advantages=grid + 0.5,
        returns=grid + 0.6,
    ).with_extra(row=torch.arange(rows), token=grid + 0.7)


def real_rows(batch: Batch) -> list[tuple]:
    """What each row says, padding left out."""
    result = []
    for i in range(batch.n_rows):
        n = int(batch.lengths[i])
        group = i // batch.group_size
        entry: list = [batch.prompt_ids[group], int(batch.prompt_lengths[i])]
        entry += [int(batch.row_keys[i]), bool(batch.truncated[i])]
        for _, value in batch._tensors():
            cell = value[i]
            entry.append(tuple(cell[:n].tolist()) if cell.dim() else cell.item())
        result.append(tuple(entry))
    return result


# --- collate --------------------------------------------------------------------------------------


def test_B43_pad_equal_to_eos_is_masked_by_length_and_not_by_id() -> None:
    # one row [a, E] whose E is real, beside a longer row that makes a column of padding
    batch = collate([[7], [7]], [[EOS], [5, 6]], group_size=2, prompt_ids=["p"], pad_token_id=EOS)
    assert batch.input_ids.tolist() == [[7, EOS, EOS], [7, 5, 6]]
    assert batch.attention_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.completion_mask.tolist() == [[False, True, False], [False, True, True]]


def test_B66_eos_is_trained_exactly_once_when_pad_is_eos() -> None:
    batch = collate(
        [[9], [9]], [[4, 5, EOS], [4, 5, 6, 7, 8]], group_size=2, prompt_ids=["p"], pad_token_id=EOS
    )
    # [a, b, E, E, E], of which three are real: m = [1, 1, 1, 0, 0]
    assert batch.completion_mask[0].tolist() == [False, True, True, True, False, False]
    assert int(batch.completion_mask[0].sum()) == 3


def test_collate_places_everything_by_hand() -> None:
    batch = collate(
        [[10, 11], [10, 11], [12], [12]],
        [[20], [21, 22, 23], [24, 25], []],
        group_size=2,
        prompt_ids=["a", "b"],
        pad_token_id=0,
        truncated=[False, True, False, False],
        completion_logprobs=[[-1.0], [-2.0, -3.0, -4.0], [-5.0, -6.0], []],
        trained=[[True], [True, False, True], [True, True], []],
    )
    assert batch.input_ids.tolist() == [
        [10, 11, 20, 0, 0],
        [10, 11, 21, 22, 23],
        [12, 24, 25, 0, 0],
        [12, 0, 0, 0, 0],
    ]
    assert batch.completion_mask.int().tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 1, 0, 1],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert batch.sampling_logprobs is not None
    assert batch.sampling_logprobs.tolist() == [
        [0, 0, -1, 0, 0],
        [0, 0, -2, -3, -4],
        [0, -5, -6, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert batch.lengths.tolist() == [3, 5, 3, 1]
    assert batch.completion_lengths.tolist() == [1, 3, 2, 0]
    assert batch.truncated.tolist() == [False, True, False, False]
    assert batch.n_groups == 2 and batch.n_rows == 4
    # 1 + 2 + 2 trained tokens; the last row has none, so 3 sequences
    assert batch.local_scale(9) == Scale(5, 3, 2, 9)


def test_empty_prompt_is_refused_with_its_row() -> None:
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        collate([[1], []], [[2], [3]], group_size=2, prompt_ids=["p"])


@pytest.mark.parametrize("lists", ["logprobs", "completions"])
def test_lists_of_different_lengths_are_refused(lists: str) -> None:
    given = {"completion_logprobs": [[-1.0, -2.0]]} if lists == "logprobs" else {}
    completions = [[5]] if lists == "logprobs" else [[5], [6]]
    with pytest.raises((ValueError, RuntimeError)):
        collate([[1]], completions, group_size=1, prompt_ids=["p"], **given)


# --- what every batch must be ---------------------------------------------------------------------


def made(**changes) -> Batch:
    values = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "attention_mask": torch.tensor([[True, True, False]]),
        "completion_mask": torch.tensor([[False, True, False]]),
        "prompt_lengths": torch.tensor([1]),
        "group_size": 1,
        "prompt_ids": ("p",),
        "row_keys": torch.tensor([0]),
        "truncated": torch.tensor([False]),
    }
    return Batch(**{**values, **changes})


def test_left_padding_is_refused() -> None:
    with pytest.raises(AssertionError, match="right-padded"):
        made(
            attention_mask=torch.tensor([[False, True, True]]),
            completion_mask=torch.tensor([[False, False, True]]),
        )


def test_training_on_column_0_or_on_padding_is_refused() -> None:
    with pytest.raises(AssertionError, match="column 0"):
        made(completion_mask=torch.tensor([[True, True, False]]))
    with pytest.raises(AssertionError, match="padding"):
        made(completion_mask=torch.tensor([[False, True, True]]))


def test_tensors_with_another_number_of_rows_are_refused() -> None:
    with pytest.raises(AssertionError, match="rewards has 2 rows, not 1"):
        made(rewards=torch.zeros(2))
    with pytest.raises(AssertionError, match=r"extra\['z'\] has 3 rows"):
        made(extra={"z": torch.zeros(3)})
    with pytest.raises(AssertionError, match="1 rows are not 1 groups of 2"):
        made(group_size=2)


# --- selection ------------------------------------------------------------------------------------


def test_select_groups_takes_whole_groups_by_index_and_by_mask() -> None:
    batch = with_fields(ragged_batch(4, 2))
    rows = real_rows(batch)
    picked = batch.select_groups([2, 0])
    assert picked.prompt_ids == ("p2", "p0")
    assert real_rows(picked) == [rows[4], rows[5], rows[0], rows[1]]
    masked = batch.select_groups(torch.tensor([False, True, False, True]))
    assert real_rows(masked) == [rows[2], rows[3], rows[6], rows[7]]
    assert batch.select_groups(torch.zeros(4, dtype=torch.bool)).n_rows == 0


def test_select_rows_regroups_and_keeps_each_rows_prompt() -> None:
    batch = with_fields(ragged_batch(2, 4))
    rows = real_rows(batch)
    pairs = batch.select_rows(torch.tensor([3, 0, 6, 5]), group_size=2)
    assert pairs.prompt_ids == ("p0", "p1") and pairs.group_size == 2
    assert real_rows(pairs) == [rows[3], rows[0], rows[6], rows[5]]
    single = batch.select_rows(torch.tensor([5, 1]), group_size=1)
    assert single.prompt_ids == ("p1", "p0")


def test_B20_a_group_that_mixes_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="would mix prompts"):
        ragged_batch(2, 2).select_rows(torch.tensor([0, 3]), group_size=2)


@pytest.mark.parametrize(
    ("parts", "coupled"), [(1, True), (3, True), (4, True), (1, False), (3, False), (4, False),
                           (5, False), (8, False)]
)  # fmt: skip
def test_split_loses_and_reorders_nothing(parts: int, coupled: bool) -> None:
    batch = with_fields(ragged_batch(4, 2))
    pieces = batch.split(parts, coupled)
    assert len(pieces) == parts
    assert [row for piece in pieces for row in real_rows(piece)] == real_rows(batch)
    for piece in pieces:
        assert piece.input_ids.shape[1] == int(piece.lengths.max())  # trimmed
        # whole groups as long as there are enough of them
        assert piece.group_size == (2 if parts <= 4 else 1)


def test_minibatches_are_a_partition_of_whole_groups_in_random_order() -> None:
    batch = with_fields(ragged_batch(8, 2))
    seen = set()
    for seed in range(3):
        pieces = batch.minibatches(4, torch.Generator().manual_seed(seed))
        assert [piece.n_groups for piece in pieces] == [2, 2, 2, 2]
        assert all(piece.group_size == 2 for piece in pieces)
        order = tuple(p for piece in pieces for p in piece.prompt_ids)
        assert sorted(order) == sorted(batch.prompt_ids)
        seen.add(order)
        again = sorted(row for piece in pieces for row in real_rows(piece))
        assert again == sorted(real_rows(batch))
    assert len(seen) == 3
    assert batch.minibatches(1, torch.Generator())[0] is batch


def test_more_minibatches_than_groups_makes_no_empty_one() -> None:
    pieces = ragged_batch(2, 2).minibatches(4, torch.Generator().manual_seed(0))
    assert [piece.n_groups for piece in pieces] == [1, 1]


@pytest.mark.parametrize(
    ("rows", "length", "budget", "parts"),
    [
        (8, 10, 80, 1),
        (8, 10, 79, 2),  # 7 rows fit, so two of 4
        (5, 10, 25, 3),  # 2 rows fit: ceil(5/2); two parts of 3 and 2 rows would hold 30 tokens
        (8, 10, 10, 8),
        (8, 10, 1, 8),  # nothing fits: a row at a time
    ],
)
def test_micro_batches_stay_within_the_token_budget(
    rows: int, length: int, budget: int, parts: int
) -> None:
    batch = collate(
        [[1]] * rows, [[5] * (length - 1)] * rows, group_size=1, prompt_ids=list("abcdefgh")[:rows]
    )
    assert batch.micro_batches_needed(budget, rows_coupled=False) == parts
    largest = max(piece.input_ids.numel() for piece in batch.split(parts, rows_coupled=False))
    assert largest <= max(budget, length)


def test_a_group_is_cut_only_where_it_exceeds_the_token_budget_by_itself() -> None:
    batch = collate([[1]] * 8, [[5] * 9] * 8, group_size=4, prompt_ids=["a", "b"])
    # a group holds 40 tokens, a row 10
    for budget, sizes in ((80, [8]), (79, [4, 4]), (40, [4, 4]), (39, [3, 3, 2]), (10, [1] * 8)):
        pieces = batch.split(batch.micro_batches_needed(budget, False), False)
        assert [piece.n_rows for piece in pieces] == sizes
        assert all(piece.group_size == (4 if budget >= 40 else 1) for piece in pieces)


def test_coupled_groups_count_whole_for_the_token_budget() -> None:
    batch = collate([[1]] * 6, [[5] * 9] * 6, group_size=2, prompt_ids=["a", "b", "c"])
    # a pair holds 20 tokens: a budget of 45 takes two pairs, so ceil(3/2) micro-batches
    assert batch.micro_batches_needed(45, rows_coupled=True) == 2
    assert batch.micro_batches_needed(5, rows_coupled=True) == 3


def test_trim_cuts_only_columns_that_are_padding_everywhere() -> None:
    batch = with_fields(ragged_batch(4, 2))
    short = batch.select_groups([3])  # prompt 4, completions 3 and 6
    trimmed = short.trim()
    assert short.input_ids.shape[1] > trimmed.input_ids.shape[1] == 10
    assert real_rows(trimmed) == real_rows(short)
    assert trimmed.extra["token"].shape == (2, 10) and trimmed.extra["row"].shape == (2,)


def test_extra_tensors_follow_the_rows_through_everything() -> None:
    batch = with_fields(ragged_batch(4, 2))
    keys = batch.row_keys
    for piece in [
        *batch.split(4, False),
        *batch.minibatches(2, torch.Generator().manual_seed(1)),
        batch.select_groups([1, 3]).trim(),
        batch.to("cpu"),
    ]:
        assert torch.equal(piece.row_keys, keys[piece.extra["row"]])
        assert torch.equal(piece.extra["token"][:, 0], piece.extra["row"] * 100.0 + 0.7)


def test_concatenate_joins_batches_of_different_width() -> None:
    first = with_fields(ragged_batch(2, 2, seed=1, completion_lengths=(2, 3)))
    second = with_fields(ragged_batch(3, 2, seed=2, completion_lengths=(9, 4, 7)))
    assert first.input_ids.shape[1] != second.input_ids.shape[1]
    joined = concatenate([first, second], pad_token_id=EOS)
    assert joined.n_groups == 5
    assert joined.prompt_ids == (*first.prompt_ids, *second.prompt_ids)
    assert real_rows(joined) == real_rows(first) + real_rows(second)


# --- row keys -------------------------------------------------------------------------------------


def test_row_key_changes_with_any_token_and_with_the_boundary() -> None:
    row = [5, 6, 7, 8]
    keys = {row_key(row, 2)}
    for i in range(4):
        keys.add(row_key([*row[:i], row[i] + 1, *row[i + 1 :]], 2))
    keys |= {row_key(row, 1), row_key(row, 3), row_key([*row, 9], 2), row_key([56, 7, 8], 2)}
    assert len(keys) == 9
    assert all(0 <= key < 2**63 for key in keys)


def test_row_key_is_a_function_of_content_alone() -> None:
    pair = collate([[3, 4]] * 2, [[5], [6, 7]], group_size=2, prompt_ids=["x"])
    alone = collate([[3, 4]], [[6, 7]], group_size=1, prompt_ids=["y"], pad_token_id=9)
    assert int(pair.row_keys[1]) == int(alone.row_keys[0]) == row_key([3, 4, 6, 7], 2)
    # blake2b of the text «2:3,4,6,7», by hashlib: the same on every machine and Python
    import hashlib

    digest = hashlib.blake2b(b"2:3,4,6,7", digest_size=8).digest()
    assert int(alone.row_keys[0]) == int.from_bytes(digest, "big") // 2
