"""A model with caches for several sequences: admit, prefill, decode, fork, free, and a way to the host and back.

```python
cached = CachedModel(model, max_sequences=2, max_length=100)
sequence = cached.admit()
logits = cached.prefill(sequence, [1, 2, 3])
logits = cached.decode([sequence], [[4]])
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from trifocal.errors import UserError
from trifocal.inference.cached_attention import tables_of_layers
from trifocal.inference.cached_layers import CachedLayer, check_plain, copied, normed, normed_by_row
from trifocal.inference.paged_cache import PAGE_SIZE, PagedCache, decode_geometry, page_size_of
from trifocal.inference.pages import OutOfPages, PageAllocator, PageTable
from trifocal.inference.prefill import Chunk
from trifocal.inference.recorded_work import RecordedWork
from trifocal.inference.request import token_tensor
from trifocal.models.decoder import DecoderLM
from trifocal.models.model_config import ModelConfig
from trifocal.nn.norm import product_dtype
from trifocal.ops import DecodeBatch
from trifocal.ops.decode import linear as products
from trifocal.ops.decode.caches import MAX_NEW_TOKENS, Place
from trifocal.ops.decode.linear import Norm, Residual
from trifocal.ops.devices import to_device
from trifocal.ops.reference import full_precision
from trifocal.ops.validation import check_whole_number

_MAX_PREFILL_TOKENS = {"cuda": 65536, "cpu": 8192}
# For the widest activations of a chunk.
_PREFILL_BYTES = 2**30
# Tokens of the shortest chunk that is recorded: starting its kernels takes as long as running them.
_MIN_RECORDED_TOKENS = 256
# Chunks that are recorded at most; a graph takes a few MB.
_MAX_RECORDED_CHUNKS = 128


def _default_prefill_chunk(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """A power of two up to 65,536, on a CPU up to 8,192, of tokens whose widest activations take at most 1 GiB."""
    most = _PREFILL_BYTES // (2 * max(config.mlp_dim, config.dim) * dtype.itemsize)
    return min(1 << max(0, most.bit_length() - 1), _MAX_PREFILL_TOKENS[device.type])


GONE = -1


class OutOfRows(Exception):
    """As many sequences as there is room for are admitted."""


@dataclass
class CachedSequence:
    """One sequence in the caches: its pages, and its row of the rings, `GONE` once it was freed."""

    table: PageTable
    row: int

    @property
    def length(self) -> int:
        """Tokens in the caches."""
        return self.table.length


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence on the host: its tokens, and copies of its pages and of its row of the rings."""

    length: int
    copies: tuple[list[Tensor], list[Tensor]]


class CachedModel:
    """A model with caches for several sequences.

    Weights are copied in the type of the products; later changes of the model's are not seen. Results of a sequence do
    not depend on other sequences, bit for bit.

    Args:
        model: The model; its device is that of the caches.
        max_sequences: Sequences at a time.
        max_length: Tokens of the longest sequence.
        num_pages: Pages that the sequences share; enough for all at their longest unless given.
        page_size: Tokens of a page, rounded up to whole selection blocks; 256 unless given.
        dtype: Type of the products and of the caches; autocast's where it is on, else that of the weights.
        prefill_chunk_size: Tokens of a prompt that go through the model at a time; 0: as activations of 1 GiB allow.
        spare_rows: Rows of the rings beyond those of the sequences, for prefixes of prompts that an engine keeps.
        record_chunks: Whether chunks of prompts are recorded as CUDA graphs, each place and length for itself. Lengths
            are padded to powers of two from 256, up to the chunk size, on every device; the padding takes one page.

    Attributes:
        pages: The allocator of pages.
        cache: The tensors.

    Raises:
        UserError: If the model's choice of blocks is a control of training, random or exact; or a layer computes more
            than a product with its weight, as adapters do. Other hooks of the model are not run.
        ValueError: If a number is none, or too low.
    """

    # Not inference mode, in which sharded parameters cannot be gathered.
    @torch.no_grad()
    def __init__(
        self,
        model: DecoderLM,
        *,
        max_sequences: int,
        max_length: int,
        num_pages: int = 0,
        page_size: int = 0,
        dtype: torch.dtype | None = None,
        prefill_chunk_size: int = 0,
        spare_rows: int = 0,
        record_chunks: bool = False,
    ) -> None:
        for name, value, lowest in (
            ("max_sequences", max_sequences, 1),
            ("max_length", max_length, 1),
            ("num_pages", num_pages, 0),
            ("page_size", page_size, 0),
            ("prefill_chunk_size", prefill_chunk_size, 0),
            ("spare_rows", spare_rows, 0),
        ):
            check_whole_number(name, value, lowest)
        config = model.config
        if config.undecodable:
            raise UserError(config.undecodable)
        check_plain(model)
        self.config, self.max_sequences, self.max_length = config, max_sequences, max_length
        self.device = model.embedding.weight.device
        self.dtype = dtype or product_dtype(model.embedding.weight)
        self.prefill_chunk_size = prefill_chunk_size or _default_prefill_chunk(config, self.dtype, self.device)
        page_size = page_size_of(config, page_size or PAGE_SIZE)
        self.most_pages = -(-max_length // page_size)
        self.pages = PageAllocator(num_pages or max_sequences * self.most_pages, page_size)
        self.spare_rows = spare_rows
        num_rows = max_sequences + spare_rows
        self._rows = list(range(num_rows - 1, -1, -1))
        self.cache = PagedCache(
            config,
            # Padding lies in one after the others.
            num_pages=self.pages.num_pages + record_chunks,
            num_rows=num_rows,
            page_size=page_size,
            max_length=max_length,
            dtype=self.dtype,
            device=self.device,
        )
        exact = torch.promote_types(self.dtype, torch.float32)
        tables = tables_of_layers(config, max_length, self.dtype, self.device)
        geometry = decode_geometry(config, max_length)
        self._embedding = copied(model.embedding.weight, exact)
        self._layers = [
            CachedLayer(block, geometry, self.dtype, own) for block, own in zip(model.blocks, tables, strict=True)
        ]
        self._norm = Norm(copied(model.norm.weight, exact), model.norm.eps)
        for layer, following in pairwise(self._layers):
            layer.next_norm = following.norm
        self._layers[-1].next_norm = None if config.norm_after else self._norm
        output = model.embedding if model.head is None else model.head
        self._output = copied(output.weight, self.dtype)
        self._recorded = _ChunkBuffers(self, exact) if record_chunks else None

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be admitted."""
        return len(self._rows)

    def admit(self) -> CachedSequence:
        """A new sequence without tokens.

        Raises:
            OutOfRows: If `max_sequences` are admitted.
        """
        if not self._rows:
            raise OutOfRows(f"{self.max_sequences} sequences are admitted, which is as many as there is room for")
        return CachedSequence(PageTable(self.pages), self._rows.pop())

    def free(self, sequence: CachedSequence) -> None:
        """Give pages and row back; the sequence is gone.

        Raises:
            ValueError: If it is gone already.
        """
        self._check(sequence, 0)
        sequence.table.free()
        self._rows.append(sequence.row)
        sequence.row = GONE

    @torch.inference_mode()
    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Another sequence with the same tokens. They share full pages; the last one is copied when one of them writes.

        Raises:
            OutOfRows: If `max_sequences` are admitted.
            ValueError: If the sequence is gone.
        """
        self._check(sequence, 0)
        other = self.admit()
        try:
            self.cache.copy_row(sequence.row, other.row)
        except BaseException:
            self.free(other)
            raise
        other.table = sequence.table.fork()
        return other

    def prefill(self, sequence: CachedSequence, tokens: Tensor | Sequence[int], *, all_logits: bool = False) -> Tensor:
        """Append a prompt, or more of one, in chunks.

        Its bits depend on the sequence and on where chunks begin, never on other sequences.

        Args:
            sequence: The sequence.
            tokens: At least one, [T].
            all_logits: Logits of all tokens instead of the last one.

        Returns:
            Logits in fp32 (fp64 for fp64), [vocab_size]; of all tokens, [T, vocab_size].

        Raises:
            OutOfPages: If there are too few pages; nothing was appended.
            ValueError: If there is no token, too many for `max_length` or one outside of the vocabulary, or the
                sequence is gone.
        """
        tokens = token_tensor("tokens", tokens, "[T]", self.config.vocab_size)
        tokens = tokens if tokens.device == self.device else tokens.cpu()
        self._check(sequence, len(tokens))
        missing = sequence.table.missing(len(tokens))
        if missing > self.pages.num_free:
            raise OutOfPages(missing, self.pages.num_free)
        chunks = tokens.split(self.prefill_chunk_size)
        logits = [self.prefill_chunk(sequence, chunk, all_logits=all_logits) for chunk in chunks]
        return torch.cat(logits) if all_logits else logits[-1][0]

    @torch.inference_mode()
    def prefill_chunk(self, sequence: CachedSequence, tokens: Tensor, *, all_logits: bool = False) -> Tensor:
        """Append tokens of one sequence, [T], in one pass; logits of the last one, [1, vocab_size].

        Tokens may be on the host; then it does not wait for the device. If it fails, the sequence is as before.
        """
        first, count = sequence.length, len(tokens)
        copies = sequence.table.grow(count)
        try:
            self.cache.copy_pages(copies)
            numbers = torch.tensor([sequence.row, count, *sequence.table.pages], dtype=torch.int64)
            most = self.prefill_chunk_size
            # At other places nearly every chunk would be the first of its kind.
            if self._recorded is None or all_logits or first % most or count > most:
                numbers = to_device(numbers, self.device)
                chunk = Chunk(Place(numbers[:1], numbers[1:2], numbers[2:]), first, count)
                return self._pass(to_device(tokens, self.device), chunk, all_logits=all_logits)
            self._recorded.fill(tokens, numbers)
            return self._run_recorded(self._recorded, first, self._padded(first, count))
        except BaseException:
            sequence.table.shrink(count)
            raise

    @torch.inference_mode()
    def warm_up_chunks(self) -> None:
        """Run chunks of all places and lengths that are recorded, so that a GPU has recorded them.

        Where there are too many, those of full length come before others, and near places before far ones.
        """
        if self._recorded is None:
            return
        sequence = self.admit()
        self._recorded.fill(torch.zeros(1, dtype=torch.int64), torch.tensor([sequence.row, 1]))
        most = self.prefill_chunk_size
        starts = range(0, self.max_length, most)
        shorter = (1 << exponent for exponent in reversed(range(most.bit_length())))
        sizes = [most, *(size for size in shorter if _MIN_RECORDED_TOKENS <= size < most)]
        kinds = dict.fromkeys((first, self._padded(first, size)) for size in sizes for first in starts)
        chosen = islice(kinds, _MAX_RECORDED_CHUNKS)
        # Those that see the most first: graphs keep their memory, and a later one finds room only in larger pieces.
        for first, length in sorted(chosen, key=sum, reverse=True):
            for _ in range(2):
                self._run_recorded(self._recorded, first, length)
        self.free(sequence)

    def _padded(self, first: int, count: int) -> int:
        """Tokens of a recorded chunk that begins at `first`."""
        length = max(1 << (count - 1).bit_length(), _MIN_RECORDED_TOKENS)
        return min(length, self.prefill_chunk_size, self.max_length - first)

    def _run_recorded(self, buffers: "_ChunkBuffers", first: int, length: int) -> Tensor:
        def work() -> None:
            chunk = Chunk(buffers.place, first, length)
            buffers.logits.copy_(self._pass(buffers.tokens[:length], chunk, all_logits=False))

        buffers.graphs.run((first, length), work)
        return buffers.logits.clone()

    def _pass(self, tokens: Tensor, chunk: Chunk, *, all_logits: bool) -> Tensor:
        """A chunk through the model, with everything on the device."""
        # Everything has its type already.
        with full_precision(self._embedding):
            x = functional.embedding(tokens, self._embedding)
            for layer, cache in zip(self._layers, self.cache.layers, strict=True):
                x = layer.prefill(x, cache, chunk)
            x = normed(x if all_logits else chunk.last(x), self._norm)
            logits = functional.linear(x.to(self.dtype), self._output).to(x.dtype)
        chunk.write_rings()
        return logits

    @torch.inference_mode()
    def decode(
        self, sequences: Sequence[CachedSequence], tokens: Tensor | Sequence[Sequence[int]], num_new: Sequence[int] = ()
    ) -> Tensor:
        """Append new tokens to several sequences.

        Args:
            sequences: Each once.
            tokens: One to eight for each, [B, T].
            num_new: How many of them count, 1 to T each; all unless given.

        Returns:
            Logits in fp32 (fp64 for fp64), [B, T, vocab_size]; without meaning behind `num_new`.

        Raises:
            OutOfPages: If there are too few pages; nothing was appended.
            ValueError: If the tokens do not fit.
        """
        tokens = token_tensor("tokens", tokens, "[B, T]", self.config.vocab_size).to(self.device)
        if tokens.shape[0] != len(sequences) or tokens.shape[1] > MAX_NEW_TOKENS:
            raise ValueError(
                f"tokens must be [B, T] with B = {len(sequences)} and T from 1 to {MAX_NEW_TOKENS}, "
                f"got {list(tokens.shape)}"
            )
        counts = list(num_new) or [tokens.shape[1]] * len(sequences)
        if len(counts) != len(sequences) or not all(1 <= count <= tokens.shape[1] for count in counts):
            raise ValueError(f"num_new must be 1 to {tokens.shape[1]} for each of {len(sequences)}, got {counts}")
        if len({sequence.row for sequence in sequences}) < len(sequences):
            raise ValueError("a sequence may occur once in a batch")
        lengths = [sequence.length for sequence in sequences]
        grown: list[tuple[CachedSequence, int]] = []
        try:
            for sequence, count in zip(sequences, counts, strict=True):
                self._check(sequence, count)
                self.cache.copy_pages(sequence.table.grow(count))
                grown.append((sequence, count))
            tables = torch.zeros(len(sequences), self.most_pages, dtype=torch.int32)
            for table, sequence in zip(tables, sequences, strict=True):
                table[: len(sequence.table.pages)] = torch.tensor(sequence.table.pages)
            numbers = torch.tensor([[sequence.row for sequence in sequences], lengths, counts], dtype=torch.int32)
            rows, past, new = numbers.to(self.device)
            batch = DecodeBatch(rows, past, new, tables.to(self.device))
            return self.step(tokens, batch)
        except BaseException:
            for sequence, count in grown:
                sequence.table.shrink(count)
            raise

    def step(self, tokens: Tensor, batch: DecodeBatch) -> Tensor:
        """The model's part of `decode`, with everything on the device: tokens [B, T] -> logits [B, T, vocab_size].

        No host look at the device, no shape that depends on data: it can be recorded as a CUDA graph.
        """
        # Kernels run on the current device, which need not be the model's.
        with torch.cuda.device_of(self._embedding), full_precision(self._embedding):
            first = self._layers[0].norm
            residual = products.embedding(tokens.flatten(), self._embedding, next_norm=first, dtype=self.dtype)
            for layer, cache in zip(self._layers, self.cache.layers, strict=True):
                residual = layer.decode(residual, cache, batch)
            norm: Norm | None = self._norm
            if self.config.norm_after:
                # No kernel has summed the squares of the stream.
                residual, norm = Residual(normed_by_row(residual.x, norm), residual.sum_of_squares), None
            logits, _ = products.normed_linear(residual, norm, self._output, out_dtype=self._embedding.dtype)
            return logits.unflatten(0, tokens.shape)

    @torch.inference_mode()
    def swap_out(self, sequence: CachedSequence) -> SwappedSequence:
        """Move a sequence to the host; its pages and its row are free, and `sequence` is gone."""
        self._check(sequence, 0)
        swapped = SwappedSequence(sequence.length, self.cache.to_host(sequence.table.pages, sequence.row))
        self.free(sequence)
        return swapped

    @torch.inference_mode()
    def swap_in(self, swapped: SwappedSequence) -> CachedSequence:
        """Move a sequence back, bit for bit.

        Raises:
            OutOfPages: If there are too few pages.
            OutOfRows: If `max_sequences` are admitted.
        """
        sequence = self.admit()
        try:
            sequence.table.grow(swapped.length)
            self.cache.from_host(swapped.copies, sequence.table.pages, sequence.row)
        except BaseException:
            self.free(sequence)
            raise
        return sequence

    def _check(self, sequence: CachedSequence, num_new: int) -> None:
        if sequence.row == GONE:
            raise ValueError("this sequence was freed or swapped out; it has no place in the caches")
        if sequence.length + num_new > self.max_length:
            raise ValueError(f"a sequence may have {self.max_length} tokens, got {sequence.length} and {num_new} more")


class _ChunkBuffers:
    """What recorded chunks read and write: tokens, place and logits; a chunk's are filled in before it runs."""

    def __init__(self, model: CachedModel, exact: torch.dtype) -> None:
        size, device = model.prefill_chunk_size, model.device
        numbers = torch.zeros(size + 2 + model.most_pages, dtype=torch.int64, device=device)
        self._padding_page = model.pages.num_pages
        self._numbers = numbers
        self.tokens = numbers[:size]
        self.place = Place(numbers[size : size + 1], numbers[size + 1 : size + 2], numbers[size + 2 :])
        self.logits = torch.zeros(1, model.config.vocab_size, dtype=exact, device=device)
        self.graphs = RecordedWork(device, most=_MAX_RECORDED_CHUNKS)

    def fill(self, tokens: Tensor, numbers: Tensor) -> None:
        """Set tokens [n], row, count and pages [2 + pages] of the next chunk; padding lies in the page for it."""
        filled = torch.zeros(self._numbers.shape, dtype=torch.int64)
        size = len(self.tokens)
        filled[: len(tokens)] = tokens
        filled[size : size + len(numbers)] = numbers
        filled[size + len(numbers) :] = self._padding_page
        self._numbers.copy_(to_device(filled, self._numbers.device))
