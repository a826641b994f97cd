"""The order of prompts: each once an epoch, resumed by its place alone."""

from __future__ import annotations

import pytest

from zoo.rollout.order import Order


def items(order: Order, count: int) -> list[int]:
    return [item for _, item in order.take(count)]


def test_B88_unshuffled_order_is_that_of_the_data() -> None:
    order = Order(9, seed=0, shuffle=False)
    assert [items(order, 3) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert order.take(2) == [(9, 0), (10, 1)]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_B88_each_item_comes_once_an_epoch_however_it_is_taken(count: int) -> None:
    order = Order(10, seed=3)
    taken: list[int] = []
    while len(taken) < 70:
        taken += items(order, count)
    epochs = [tuple(taken[i : i + 10]) for i in range(0, 70, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 7


def test_the_place_is_the_only_state() -> None:
    whole = Order(7, seed=5)
    taken = items(whole, 30)
    for place in (0, 6, 7, 13, 29):
        resumed = Order(7, seed=5)
        resumed.position = place
        assert items(resumed, 30 - place) == taken[place:]


def test_other_seeds_give_other_orders_and_an_empty_set_is_refused() -> None:
    assert items(Order(20, seed=1), 20) != items(Order(20, seed=2), 20)
    with pytest.raises(ValueError, match="empty"):
        Order(0, seed=0)
