"""Queries whose selected branch is dropped in training, so that the compressed branch learns to find what they ask for.

The compressed branch's scores choose the blocks, but its loss asks only that its own output helps. Where the selected
branch has found the answer, a blurred copy of it does not: the scores drift away from the block, and the choice is
lost. Of a query without its selected branch the loss asks for the right block.
"""

from torch import Tensor

from trifocal.ops.choice_loss import hash_numbers


def drop_selected(tokens: Tensor, positions: Tensor, share: float, layer: int) -> Tensor:
    """Draw the queries of a layer whose selected branch is dropped.

    A hash of token, position and layer draws, so that the same batch gives the same queries: in a forward pass that is
    made again, after a resume, in any number of processes.

    Args:
        tokens: [B, T], an integer type.
        positions: Position of each token in its document, [T].
        share: Share of the queries, from 0 to 1.
        layer: Number of the layer.

    Returns:
        [B, T], True where the branch is dropped.
    """
    places = hash_numbers(positions.long() + (layer + 1) * 0x9E3779B9)
    return hash_numbers(tokens.long() + places) < int(share * 2**32)
