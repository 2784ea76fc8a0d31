"""Where the tokens of a batch lie: padding, and documents packed into rows.

Rows with padding, and rows of several documents, are run as packed documents: real tokens one after the other, with
block grids that start at each document's first token. So padding changes nothing, on whichever side it is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.ops import Documents
from trifocal.ops.layout import check_boundaries


class RowLayout(NamedTuple):
    """The real tokens of a batch [B, T].

    Attributes:
        places: Places of the real tokens in the flattened batch, [N]; None: every token is packed.
        documents: The documents of the packed tokens; None with a cache, which knows the length of each row.
        shape: B and T.
    """

    places: Tensor | None
    documents: Documents | None
    shape: tuple[int, int]

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> the real tokens, [1, N, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self.places is None else flat[self.places])[None]

    def unpack(self, x: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...], zero at padding."""
        if self.places is None:
            return x.reshape(*self.shape, *x.shape[2:])
        batch, length = self.shape
        flat = x.new_zeros(batch * length, *x.shape[2:])
        return flat.index_copy(0, self.places, x[0]).view(batch, length, *x.shape[2:])


def masked_layout(mask: Tensor, device: torch.device) -> RowLayout:
    """The real tokens of a mask on the host, [B, T], without documents."""
    places = None if bool(mask.all()) else mask.flatten().nonzero()[:, 0].to(device)
    return RowLayout(places, None, (mask.shape[0], mask.shape[1]))


# Reads the arguments: compiled code stops here and continues behind it.
@torch.compiler.disable
def row_layout(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    boundaries: Tensor | None = None,
    longest: int | None = None,
) -> RowLayout | None:
    """Find padding and documents in a batch of shape B and T; None if every row is one document without padding.

    The arguments are transformers', `boundaries` are `cu_seq_lens_q`; ValueError if they contradict each other. They
    are read on the host, except boundaries on a GPU without a mask, which are trusted, as in FlashAttention: reading
    them would make the host wait for all work that it has started. No document between them has more than `longest`
    tokens.
    """
    if boundaries is not None and shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of one row, got {shape[0]} rows")
    if boundaries is not None and boundaries.is_cuda and attention_mask is None:
        documents = Documents.from_checked(boundaries, shape[1])._replace(max_length=longest)
        return RowLayout(None, documents, shape)
    mask = real_tokens(attention_mask, shape)
    # Each row's first real token.
    starts = torch.zeros_like(mask).scatter(1, mask.to(torch.uint8).argmax(1, keepdim=True), True)
    found = [] if position_ids is None else [starts | _document_starts(position_ids, mask, starts)]
    if boundaries is not None:
        boundaries = boundaries.cpu()
        check_boundaries(boundaries, shape[1], "cu_seq_lens_q")
        found.append(starts.index_fill(1, boundaries[:-1].long(), True) & mask)
    if found:
        starts = found[0]
        if not torch.equal(starts, found[-1]):
            raise ValueError("position_ids and cu_seq_lens_q begin documents at different tokens: give one of them")
    if bool(mask.all()) and int(starts.sum()) == shape[0]:
        return None
    places = mask.flatten().nonzero()[:, 0]
    first_tokens = starts.flatten()[places].nonzero()[:, 0]
    cu_seqlens = torch.cat((first_tokens, torch.tensor([len(places)]))).to(torch.int32)
    documents = Documents.from_cu_seqlens(cu_seqlens, len(places))
    return RowLayout(None if len(places) == mask.numel() else places.to(device), documents.to(device), shape)


def real_tokens(attention_mask: Tensor | None, shape: tuple[int, int], *, may_be_empty: bool = False) -> Tensor:
    """A checked mask of real tokens, [B, T], bool, on the host; `may_be_empty` allows rows without any."""
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool)
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask must have the shape [B, T] = {list(shape)}, got {list(attention_mask.shape)}: "
            "masks of single queries and keys are not possible"
        )
    given = attention_mask.cpu()
    mask = given != 0
    if not bool((given == mask).all()):
        raise ValueError(
            "attention_mask must hold only 0 and 1; packed documents are given by position_ids that restart at 0"
        )
    # One stretch of real tokens begins once.
    begins = mask & ~torch.nn.functional.pad(mask, (1, -1))
    counts = begins.sum(1)
    wrong = (counts > 1) if may_be_empty else (counts != 1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        if not int(counts[row]):
            raise ValueError(f"attention_mask hides every token of row {row}")
        raise ValueError(
            f"attention_mask has padding between the real tokens of row {row}: pad rows that are continued on the left "
            '(tokenizer.padding_side = "left"), and hide no token inside a row'
        )
    return mask


def _document_starts(position_ids: Tensor, mask: Tensor, row_starts: Tensor) -> Tensor:
    """Whether each place holds the first token of a document, [B, T]; checks that positions count from there."""
    positions = position_ids.cpu().expand(mask.shape)
    starts = mask & (positions == 0)
    follows = positions == torch.nn.functional.pad(positions, (1, -1)) + 1
    wrong = mask & ~starts & (row_starts | ~follows)
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids must count from 0 in each document, got {int(positions[row, place])} at token {place} of "
            f"row {row}"
        )
    return starts
