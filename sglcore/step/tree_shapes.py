"""The shape of draft trees, for any tensor library, and which shapes a configuration may ask for.

EAGLE-2, arXiv 2406.16858. A tree of N nodes has the root, the last sampled token, as node 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglcore.config.draft_kinds import IN_TREES
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError

MOST_NODES = 32
"""Maximum nodes of a tree, and maximum KV slots of beams: the bits of a word."""
MOST_RECORDS = 2048
"""Maximum candidate tokens of a tree: the capacity of one program of a kernel."""
TREE_TOKENS, TREE_DEPTH = 7, 5
"""Default draft tokens and depth of a tree.

The default depth is at most the number of draft tokens, and at most MOST_NODES // width + 1.
"""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """For each request `width` beams grow to `depth` tokens.

    `nodes` - 1 draft tokens are kept, plus the root.
    """

    width: int
    depth: int
    nodes: int

    @property
    def steps(self) -> int:
        """Maximum tokens that a step yields."""
        return self.depth + 1

    @property
    def cells(self) -> int:
        """Number of KV slots, after those of the text, that beams write."""
        return self.width * (self.depth - 1)

    @property
    def records(self) -> tuple[int, ...]:
        """Number of candidate tokens of a request at each depth, from 1: `width` tokens after each
        beam, and one beam, the root, at depth 1.
        """
        return self.width, *[self.width**2] * (self.depth - 1)

    def depths_of_records(self) -> NDArray[np.int32]:
        """Return int32[M]: the depth, from 1, of each of a request's M candidates, ascending."""
        return np.repeat(np.arange(1, self.depth + 1, dtype=np.int32), self.records)


def tree_shape(config: EngineConfig, kind: str, against_rule: str, *, writes_cells: bool) -> TreeShape | None:
    """Return the configured tree; None: chains.

    `against_rule`: why the configured acceptance rule takes no trees; empty: it does.
    `writes_cells`: drafts of this kind have KV slots of their own. Raises ConfigError for an
    impossible shape.
    """
    width, tokens = config.draft_width, config.draft_tokens or TREE_TOKENS
    depth = config.draft_depth or min(TREE_DEPTH, tokens, MOST_NODES // width + 1)
    if width == 1:
        if config.draft_depth is not None:
            raise ConfigError("draft_depth applies to trees, and draft_width is 1", remedy="--draft-tokens alone")
        return None
    shape = TreeShape(width, depth, tokens + 1)
    reason, remedy = "", "--draft-width 1"
    if kind not in IN_TREES:
        reason = f"drafts of {kind!r} are chains; drafts of {', '.join(IN_TREES)} may be trees"
    elif against_rule:
        reason = f"the rule is {config.speculative_verify!r}, and {against_rule}"
    elif not depth <= tokens < MOST_NODES:
        reason = f"a tree that is {depth} deep has {depth} to {MOST_NODES - 1} tokens, and {tokens} are requested"
        remedy = "--draft-tokens or --draft-depth"
    elif tokens > sum(shape.records):
        reason = f"{width} beams that are {depth} deep record {sum(shape.records)} tokens, and {tokens} are requested"
        remedy = "lower --draft-tokens, or raise --draft-width"
    elif sum(shape.records) > MOST_RECORDS:
        reason = (
            f"{width} beams that are {depth} deep record {sum(shape.records)} tokens; at most {MOST_RECORDS} are "
            "supported"
        )
        remedy = "lower --draft-width or --draft-depth"
    elif shape.cells > MOST_NODES and writes_cells:
        reason = (
            f"{width} beams that are {depth} deep write {shape.cells} KV slots, and at most {MOST_NODES} can be masked"
        )
        remedy = "lower --draft-width or --draft-depth"
    if reason:
        raise ConfigError(f"draft_width is {width}, and {reason}", remedy=remedy)
    return shape
