"""The order in which items are visited: each once an epoch, whole groups to each process."""

from __future__ import annotations

from zoo.seeds import torch_generator


class Order:
    """An endless sequence of item indices: a new permutation of `size` items each epoch.

    The place in the sequence is the only state, so that a resumed run goes on where it was.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError("the data set is empty: there is nothing to train on")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._epoch = -1
        self._items: list[int] = []

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            import torch

            generator = torch_generator(self.seed, "order", epoch)
            items = torch.randperm(self.size, generator=generator).tolist()
            self._items = items if self.shuffle else list(range(self.size))
            self._epoch = epoch
        return self._items

    def at(self, position: int) -> int:
        """The item at a place of the sequence."""
        return self._permutation(position // self.size)[position % self.size]

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` (position, item), the same on every process."""
        places = range(self.position, self.position + count)
        self.position += count
        return [(place, self.at(place)) for place in places]
