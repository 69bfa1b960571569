"""Draft trees by drafters that know the texts, and the accepted path of a tree in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglcore.runtime.speculative.drafter import NONE, DraftRows
from sglcore.runtime.speculative.tree import DraftTree


class GrowingTrees:
    """Drafts trees of random shape, with a random number of nodes on the text's own path. `share`:
    how many of four nodes are chosen to be correct, if possible. Reads the known tokens of each
    request slot from the rows; waits for the device."""

    lookahead = 0
    reads_history = False
    share = 3

    def __init__(self, nodes: int, depth: int, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.tokens = nodes - 1
        self._depth, self._vocab_size = depth, vocab_size
        self._texts = [list(text) for text in texts]
        self._known: dict[int, dict[int, int]] = {}
        self._decoding = set[int]()
        self._random = torch.Generator().manual_seed(0)

    def grow(self, rows: DraftRows) -> DraftTree:
        """See `Growing.grow`."""
        self._learn(rows)
        found = torch.full((3, len(rows.slots), self.tokens), 0, dtype=torch.int32)
        found[0] = NONE
        for row, (slot, last) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            # A request with its last token already drawn may run one more step; the result is
            # discarded.
            if rows.batch.forward_mode.is_decode and last >= int(rows.limits[row]):
                continue
            following = self._following(slot, last)
            nodes = (
                [(token, n, n + 1) for n, token in enumerate(following)] if rows.is_chain else self._nodes(following)
            )
            for node, each in enumerate(nodes):
                found[:, row, node] = torch.tensor(each)
        if rows.is_chain:
            found[1:] = torch.stack([torch.arange(self.tokens), torch.arange(1, self.tokens + 1)])[:, None]
        return DraftTree(*found.to(rows.slots.device))

    def close(self) -> None:
        """Nothing to free."""

    def _learn(self, rows: DraftRows) -> None:
        batch, ids, ends = rows.batch, rows.ids.tolist(), rows.select.tolist()
        if not batch.forward_mode.is_decode:
            assert batch.extend_seq_lens is not None
            slots = batch.req_pool_indices.repeat_interleave(batch.extend_seq_lens).tolist()
            for slot in set(slots) & self._decoding:
                self._decoding.discard(slot)
                self._known.pop(slot)
            for slot, place, token in zip(slots, batch.positions.tolist(), batch.input_ids.tolist(), strict=False):
                self._known.setdefault(slot, {})[place] = token
        for row, (slot, last) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            first = row * rows.width if batch.forward_mode.is_decode else ends[row]
            for place in range(first, ends[row] + 1):
                self._known.setdefault(slot, {})[last - ends[row] + place] = ids[place]
            self._decoding.add(slot)

    def _following(self, slot: int, last: int) -> list[int]:
        """Return the next tokens of the text that matches the known ones; NONE past its end."""
        known = {place: token for place, token in self._known[slot].items() if place <= last}
        for text in self._texts:
            if all(text[place] == token for place, token in known.items() if place < len(text)):
                found = text[last + 1 : last + 1 + self._depth]
                return found + [NONE] * (self._depth - len(found))
        raise AssertionError(f"no text has {known}")

    def _nodes(self, following: list[int]) -> list[tuple[int, int, int]]:
        depths, right, children = [0], [True], [set[int]()]
        nodes = list[tuple[int, int, int]]()
        while len(nodes) < self.tokens:
            parent = self._drawn([n for n, depth in enumerate(depths) if depth < self._depth])
            wanted = following[depths[parent]]
            is_right = right[parent] and wanted != NONE and wanted not in children[parent] and self._tries()
            token = wanted if is_right else self._wrong(children[parent] | ({wanted} if right[parent] else set()))
            children[parent].add(token)
            nodes.append((token, parent, depths[parent] + 1))
            depths.append(depths[parent] + 1)
            right.append(is_right)
            children.append(set())
        return nodes

    def _tries(self) -> bool:
        return int(torch.randint(4, (), generator=self._random)) < self.share

    def _drawn(self, choices: Sequence[int]) -> int:
        return choices[int(torch.randint(len(choices), (), generator=self._random))]

    def _wrong(self, taken: set[int]) -> int:
        return self._drawn([token for token in range(self._vocab_size) if token not in taken])


class RightTrees(GrowingTrees):
    """Drafts the text's own path to the full depth, with wrong siblings before each node while
    nodes are left."""

    def _nodes(self, following: list[int]) -> list[tuple[int, int, int]]:
        nodes, parent = list[tuple[int, int, int]](), 0
        spare = self.tokens - self._depth
        for depth, token in enumerate(following, 1):
            if spare:
                nodes.append((self._wrong({token}), parent, depth))
                spare -= 1
            nodes.append((token, parent, depth))
            parent = len(nodes)
        return nodes + [(NONE, parent, self._depth)] * (self.tokens - len(nodes))


class WrongTrees(GrowingTrees):
    """Drafts only wrong nodes."""

    share = 0


TREES = {"guessing": GrowingTrees, "oracle": RightTrees, "adversary": WrongTrees}


def walked(drawn: Sequence[int], tokens: Sequence[int], parents: Sequence[int], usable: Sequence[bool]) -> list[int]:
    """Return the accepted nodes after the root, in order. `tokens` and `parents` leave out the
    root."""
    path, found = 0, list[int]()
    while True:
        children = [n for n, parent in enumerate(parents, 1) if parent == path and usable[n]]
        right = [n for n in children if tokens[n - 1] == drawn[path]]
        if not right:
            return found
        (path,) = right
        found.append(path)
