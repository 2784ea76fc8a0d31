"""Decoding from paged caches gives what one pass over the whole sequence gives, whatever else the caches hold."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.attentions import OPTIONS
from trifocal.errors import UserError
from trifocal.inference import cached_attention, cached_model, paged_cache, prompts
from trifocal.inference.cached_model import CachedModel, OutOfRows
from trifocal.inference.paged_cache import cache_bytes, longest_that_fits, memory_for_caches, plan_cache
from trifocal.inference.pages import OutOfPages
from trifocal.inference.prefill import Chunk
from trifocal.ops import Geometry, nsa_attention
from trifocal.train import load_config

# l, d, l', n, first, last, w: blocks that do not overlap with a window of one; a window wider than everything; no
# forced last block.
GEOMETRIES = [
    Geometry(4, 4, 4, 2, 1, 1, 1),
    Geometry(6, 2, 6, 2, 0, 2, 2**31 - 1),
    Geometry(2, 1, 4, 3, 2, 0, 5),
]


def cached(model, max_sequences=1, max_length=60, **options):
    """With caches full of NaN: what nobody wrote must reach nobody."""
    made = CachedModel(model, max_sequences=max_sequences, max_length=max_length, page_size=8, **options)
    with torch.inference_mode():
        for tensor in (*made.cache._pages, *made.cache._rings):
            tensor.fill_(torch.nan)
    return made


def bytes_of(cache):
    return sum(tensor.nbytes for tensor in (*cache._pages, *cache._rings))


def draw_tokens(*shape):
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def one_pass(model, tokens):
    """Logits of all positions, without a cache."""
    return model(tokens[None])[0]


def in_pieces(model, sequence, tokens, sizes):
    """Logits of all positions: the first piece and long ones by prefill, the others by decoding."""
    found = []
    for piece in tokens.split(list(sizes)):
        if sequence.length and len(piece) <= 8:
            found.append(model.decode([sequence], piece[None])[0])
        else:
            found.append(model.prefill(sequence, piece, all_logits=True))
    return torch.cat(found)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_chunks_and_several_new_tokens_equal_one_pass(make_model, geometry):
    for options in (*OPTIONS[:3], *OPTIONS[4:]):
        model, tokens = make_model(geometry=geometry, **options), draw_tokens(60)
        expected = one_pass(model, tokens)
        for chunk, sizes in ((13, [52, 8]), (11, [2, 30, 1, 1, 26]), (60, [1, *[8] * 7, 3])):
            decoder = cached(model, prefill_chunk_size=chunk)
            given = in_pieces(decoder, decoder.admit(), tokens, sizes)
            torch.testing.assert_close(given, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padding_of_recorded_chunks_reaches_nobody(make_model, options, monkeypatch):
    """Prompts of every length, chunks and their padding of several; neighbours in the caches keep their bits."""
    monkeypatch.setattr(cached_model, "_MIN_RECORDED_TOKENS", 4)
    model, tokens = make_model(**options), draw_tokens(77)
    expected = one_pass(model, tokens)
    decoder = cached(model, 2, 77, prefill_chunk_size=32, record_chunks=True)
    kinds = set()
    healthy = Chunk.__init__

    def watched(chunk, place, first, length):
        kinds.add((first, length))
        healthy(chunk, place, first, length)

    monkeypatch.setattr(Chunk, "__init__", watched)
    neighbour = decoder.admit()
    decoder.prefill(neighbour, tokens[:21])
    pages = neighbour.table.pages
    kept = [x[pages].clone() for x in decoder.cache._pages] + [x[neighbour.row].clone() for x in decoder.cache._rings]
    # Padding ends in the last page of the prompt, in that of the padding, and with the chunk.
    for length in (1, 4, 5, 13, 17, 24, 32, 33, 38, 44, 49, 64, 65, 70, 75):
        sequence = decoder.admit()
        given = decoder.prefill(sequence, tokens[:length])
        torch.testing.assert_close(given, expected[length - 1], rtol=0, atol=1e-11)
        more = in_pieces(decoder, sequence, tokens[length : length + 2], [1, 1])
        torch.testing.assert_close(more, expected[length : length + 2], rtol=0, atol=1e-11)
        decoder.free(sequence)
    # The longest sequence has 77 tokens, 13 of them behind the second chunk.
    expected_kinds = {(first, length) for first in (0, 32) for length in (4, 8, 16, 32)}
    assert kinds == expected_kinds | {(64, 4), (64, 8), (64, 13)}
    now = [x[pages] for x in decoder.cache._pages] + [x[neighbour.row] for x in decoder.cache._rings]
    torch.testing.assert_close(now, kept, rtol=0, atol=0, equal_nan=True)
    assert decoder.cache._pages[0].shape[0] == decoder.pages.num_pages + 1


class Replays:
    """In place of `RecordedWork`: from the second time on, the operations of the first run on the same tensors."""

    def __init__(self, *_, **__):
        self.graphs = {}
        self.count = 0

    def run(self, key, work):
        """Do work."""
        if key not in self.graphs:
            operations = self.graphs[key] = []

            class Recorder(TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    assert func is not torch.ops.aten._local_scalar_dense.default, "a look at the device"
                    out = func(*args, **kwargs or {})
                    operations.append((func, args, kwargs or {}, out))
                    return out

            with Recorder():
                work()
            return
        self.count += 1
        for func, args, kwargs, out in self.graphs[key]:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # Neither views nor what was changed in place, nor memory that nobody has written yet.
                fresh = isinstance(old, Tensor) and old.data_ptr() != new.data_ptr()
                if fresh and not func.overloadpacket.__name__.startswith("empty"):
                    old.copy_(new)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_recorded_chunk_is_that_of_any_sequence(make_model, options, monkeypatch):
    """What was recorded for one prompt, row and pages runs again for others, as a CUDA graph does."""
    monkeypatch.setattr(cached_model, "_MIN_RECORDED_TOKENS", 4)
    monkeypatch.setattr(cached_model, "RecordedWork", Replays)
    model = make_model(**options)
    decoder = cached(model, 4, 45, prefill_chunk_size=16, record_chunks=True)
    for number, length in enumerate((45, 29, 38, 45, 30, 7)):
        tokens = draw_tokens(6, 45)[number]
        expected = one_pass(model, tokens)
        sequence = decoder.admit()
        given = decoder.prefill(sequence, tokens[: length - 1])
        torch.testing.assert_close(given, expected[length - 2], rtol=0, atol=1e-11)
        given = decoder.decode([sequence], tokens[None, length - 1 : length])[0, 0]
        torch.testing.assert_close(given, expected[length - 1], rtol=0, atol=1e-11)
        if number in (1, 4):
            # The next one gets another row and other pages.
            decoder.free(sequence)
    assert decoder._recorded is not None and isinstance(decoder._recorded.graphs, Replays)
    assert decoder._recorded.graphs.count == 9


def test_every_chunk_is_recorded_before_prompts_come(make_model, monkeypatch):
    """Twice each, those of most memory first; the caches are as before. Chunks may have one token."""
    cached(make_model(), 1, 3, prefill_chunk_size=1, record_chunks=True).warm_up_chunks()
    decoder = cached(make_model(), 1, 1000, prefill_chunk_size=600, record_chunks=True)
    ran = []
    monkeypatch.setattr(decoder._recorded.graphs, "run", lambda key, work: ran.append(key))
    decoder.warm_up_chunks()
    kinds = [(600, 400), (600, 256), (0, 600), (0, 512), (0, 256)]
    assert ran == [kind for kind in kinds for _ in range(2)]
    ran.clear()
    monkeypatch.setattr(cached_model, "_MAX_RECORDED_CHUNKS", 3)
    decoder.warm_up_chunks()
    assert ran[::2] == [(600, 400), (0, 600), (0, 512)]
    assert decoder.num_free_rows == 1 and decoder.pages.num_free == decoder.pages.num_pages
    ran.clear()
    sequence = decoder.admit()
    for count in (600, 257, 1, 3):
        decoder.prefill(sequence, [1] * count)
    # The last two begin where no chunk does.
    assert ran == [(0, 600), (600, 400)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_later_changes_of_the_model_are_not_seen(make_model, options):
    """Also where weights have the type of the products already, and a conversion would copy nothing."""
    model, tokens = make_model(**options), draw_tokens(20)
    expected, decoder = one_pass(model, tokens), cached(model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    given = in_pieces(decoder, decoder.admit(), tokens, [12, 1, 7])
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("first", [0, 20])
def test_prefill_gives_attention_rows_that_a_copy_engine_reads(make_model, monkeypatch, first):
    """At 16 bytes all strides and beginnings, also where the gates make the joined projection's rows odd."""
    geometry = Geometry(32, 16, 64, 4, 1, 1, 16)
    model = make_model(geometry=geometry, num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16, shared_kv=False)
    decoder = cached(model.bfloat16(), max_length=200)
    given = []

    def watched(*inputs, **options):
        given.extend(inputs[:7])
        return nsa_attention(*inputs, **options)

    sequence = decoder.admit()
    if first:
        decoder.prefill(sequence, draw_tokens(first))
    monkeypatch.setattr(cached_attention, "nsa_attention", watched)
    decoder.prefill(sequence, draw_tokens(70))
    assert len(given) == 14
    for x in given:
        assert x.data_ptr() % 16 == 0 and all(stride * 2 % 16 == 0 for stride in x.stride()[:-1]), x.stride()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ragged_batches_and_forks_equal_one_pass(make_model, options):
    """Sequences of other lengths, with fewer new tokens than others, and forks at every kind of border."""
    model, tokens = make_model(**options), draw_tokens(3, 60)
    # Forks share the full pages of 16 and of 23 tokens.
    decoder = cached(model, 6, num_pages=6 * 8 - 4)
    sequences = [decoder.admit() for _ in range(3)]
    # After a fork, the texts differ.
    texts = [row.tolist() for row in tokens]
    for sequence, text, length in zip(sequences, texts, (5, 16, 23), strict=True):
        decoder.prefill(sequence, text[:length])
    for parent, changed in ((0, 30), (1, 29), (2, 28)):
        sequences.append(decoder.fork(sequences[parent]))
        length = sequences[parent].length
        texts.append([*texts[parent][:length], *[(t + changed) % 31 for t in texts[parent][length:]]])
    with torch.no_grad():
        expected = model(torch.tensor(texts))
    rng = random.Random(0)
    while True:
        batch = [i for i in range(6) if sequences[i].length < 57 and rng.random() < 0.7]
        if not batch:
            break
        counts = [rng.randint(1, 3) for _ in batch]
        starts = [sequences[i].length for i in batch]
        new = [texts[i][start : start + 3] for i, start in zip(batch, starts, strict=True)]
        logits = decoder.decode([sequences[i] for i in batch], new, counts)
        for row, (i, start, count) in enumerate(zip(batch, starts, counts, strict=True)):
            torch.testing.assert_close(logits[row, :count], expected[i, start : start + count], rtol=0, atol=1e-11)
    for sequence in sequences:
        decoder.free(sequence)
    assert decoder.pages.num_free == 44


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_failure_leaves_every_sequence_as_it_was(make_model, options, monkeypatch):
    model, tokens = make_model(**options), draw_tokens(40)
    expected = one_pass(model, tokens)
    decoder = cached(model, prefill_chunk_size=30)
    sequence = decoder.admit()
    decoder.prefill(sequence, tokens[:9])
    last = decoder._layers[-1]

    def fail(*_):
        raise MemoryError("no room")

    free = decoder.pages.num_free
    for kind, work in (
        ("prefill", lambda: decoder.prefill(sequence, tokens[20:])),
        ("decode", lambda: decoder.decode([sequence], tokens[None, 20:28])),
    ):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(last, kind, fail)
            work()
        assert sequence.length == 9 and decoder.pages.num_free == free
    given = in_pieces(decoder, sequence, tokens[9:], [1, 20, 10])
    torch.testing.assert_close(given, expected[9:], rtol=0, atol=1e-11)


def test_pages_and_rows_run_out_with_a_number_and_nothing_is_taken(make_model):
    decoder = cached(make_model(), 2, num_pages=3)
    first, second = decoder.admit(), decoder.admit()
    with pytest.raises(OutOfRows, match="2 sequences are admitted"):
        decoder.admit()
    decoder.prefill(first, draw_tokens(16))
    with pytest.raises(OutOfPages, match="2 pages are needed and 1 are free"):
        decoder.prefill(second, draw_tokens(9))
    decoder.prefill(second, draw_tokens(8))
    with pytest.raises(OutOfPages):
        decoder.decode([second, first], [[1], [1]])
    assert (first.length, second.length, decoder.pages.num_free) == (16, 8, 0)
    swapped = decoder.swap_out(second)
    decoder.decode([first], [[1]])
    with pytest.raises(OutOfPages):
        decoder.swap_in(swapped)
    decoder.free(first)
    assert decoder.swap_in(swapped).length == 8


def test_misuse_is_refused(make_model):
    decoder = cached(make_model(), 2, max_length=20)
    sequence = decoder.admit()
    with pytest.raises(ValueError, match=r"at least one token, got \[0\]"):
        decoder.prefill(sequence, [])
    with pytest.raises(ValueError, match="may have 20 tokens, got 0 and 21 more"):
        decoder.prefill(sequence, draw_tokens(21))
    decoder.prefill(sequence, draw_tokens(19))
    for arguments, message in (
        (([sequence], draw_tokens(1, 9)), r"T from 1 to 8, got \[1, 9\]"),
        (([sequence, sequence], draw_tokens(2, 1)), "may occur once"),
        (([sequence], draw_tokens(1, 2), [3]), r"num_new must be 1 to 2 for each of 1, got \[3\]"),
        (([sequence], draw_tokens(1, 2)), "may have 20 tokens, got 19 and 2 more"),
        (([sequence], [[31]]), "tokens has tokens outside the vocabulary of 31"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.decode(*arguments)
    assert sequence.length == 19
    with pytest.raises(ValueError, match="max_sequences must be at least 1, got 0"):
        CachedModel(make_model(), max_sequences=0, max_length=5)
    with pytest.raises(ValueError, match="max_length must be an integer, got None"):
        CachedModel(make_model(), max_sequences=1, max_length=None)
    with pytest.raises(ValueError, match="spare_rows must be at least 0, got -1"):
        CachedModel(make_model(), max_sequences=1, max_length=5, spare_rows=-1)


def test_a_sequence_that_is_gone_is_refused(make_model):
    """Its row may be another's already."""
    decoder = cached(make_model(), 2)
    freed, swapped = decoder.admit(), decoder.admit()
    for sequence in (freed, swapped):
        decoder.prefill(sequence, [1, 2])
    decoder.free(freed)
    decoder.swap_out(swapped)
    for sequence in (freed, swapped):
        for work in (
            lambda: decoder.free(sequence),  # noqa: B023
            lambda: decoder.fork(sequence),  # noqa: B023
            lambda: decoder.swap_out(sequence),  # noqa: B023
            lambda: decoder.prefill(sequence, [1]),  # noqa: B023
            lambda: decoder.decode([sequence], [[1]]),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="was freed or swapped out"):
                work()
    assert decoder.num_free_rows == 2 and decoder.admit().row != decoder.admit().row


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_caches_weigh_what_the_formula_says(make_model, options):
    model = make_model(**options)
    decoder = CachedModel(model, max_sequences=3, max_length=100, page_size=10, num_pages=7, dtype=torch.bfloat16)
    # Whole selection blocks of 8 tokens; the dense baseline has none.
    page_size = 16 if model.config.chooses_blocks else 10
    weight = cache_bytes(model.config, torch.bfloat16, 100, page_size)
    assert decoder.pages.page_size == weight.page_size == page_size
    assert bytes_of(decoder.cache) == 7 * weight.page + 3 * weight.row
    assert weight.of_sequence(page_size + 1) == 2 * weight.page + weight.row
    per_token = 2 * 2 * (8 + 6) * 2  # bytes, layers, KV heads, K and V
    if not options:
        # Every token, and a compressed block for every second one.
        assert weight.page == 16 * per_token * 3 // 2
        # The window of 7 and the block of 4, less one, and room for 8 more.
        assert weight.row == (14 + 11) * per_token


def test_windows_keep_their_last_tokens_only():
    """Of 65,536 tokens the recommended layers keep a fourth, the keys of the indexes, and windows."""
    long, tokens = load_config("base_long").model, 65536
    for config, most in (
        (long, 0.32),
        (replace(long, num_kv_heads=8, num_heads=16, head_dim=128, value_dim=128), 0.28),
    ):
        mix, dense = (
            cache_bytes(each, torch.bfloat16, tokens).of_sequence(tokens)
            for each in (config, replace(config, attention="dense", layer_types=()))
        )
        layer = config.num_kv_heads * (config.head_dim + config.value_dim) * 2
        assert dense == 12 * layer * tokens
        # 64 numbers of an index, and the window of 512, less one, with room for 8 more.
        assert mix == 3 * (layer + 128) * tokens + 9 * layer * 519
        assert mix / dense < most


def test_a_model_of_windows_needs_no_pages(make_model):
    """As many sequences as their rings fit, at any length."""
    model = make_model(attention="window")
    row = cache_bytes(model.config, torch.float64, 60).row
    assert longest_that_fits(model.config, torch.float64, row) == 2**31 - 1
    assert longest_that_fits(model.config, torch.float64, row - 1) == 0
    assert plan_cache(model.config, torch.float64, 60, free_bytes=row - 1, sequences=9) is None
    plan = plan_cache(model.config, torch.float64, 60, free_bytes=5 * row, sequences=9)
    assert plan == (5, 5)
    decoder, tokens = cached(model, 5, prefill_chunk_size=16), draw_tokens(60)
    assert bytes_of(decoder.cache) == 5 * row
    expected = one_pass(model, tokens)
    given = in_pieces(decoder, decoder.admit(), tokens, [37, 8, 1, 14])
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-11)


def test_memory_that_holds_one_long_sequence_is_planned_for_it(make_model):
    """A window may be wider than that of the geometry, of 7, and pages lie beside the rings."""
    config = make_model(layer_types=("window", "dense"), sliding_window=40).config
    weight = cache_bytes(config, torch.float64, 2560)
    free = weight.of_sequence(2560)
    assert longest_that_fits(config, torch.float64, free) == 2560
    assert longest_that_fits(config, torch.float64, free - 1) == 2560 - 256
    assert plan_cache(config, torch.float64, 2560, free_bytes=free, sequences=9) == (1, 10)


def test_weights_take_their_memory_twice(make_model, monkeypatch):
    """As they are loaded, in fp32, and in the type of the products; on a CPU half of the memory is for others."""
    model = make_model()
    monkeypatch.setattr(paged_cache, "host_memory_bytes", lambda: 10**9)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    found = memory_for_caches(model.config, torch.bfloat16, torch.device("cpu"))
    assert found == 10**9 // 2 - numbers * (4 + 2)


def test_rows_of_prefixes_leave_room_for_sequences(make_model, monkeypatch):
    """A wide window has large rows: fewer prefixes are kept then, and the caches still fit."""
    model = make_model(attention="window")
    row = cache_bytes(model.config, torch.float64, 60).row
    monkeypatch.setattr(prompts, "memory_for_caches", lambda *_: 9 * row)

    def sizes(**limit):
        device, words = torch.device("cpu"), {"what": "", "remedy": ""}
        made = prompts.make_cached_model(
            lambda: model,
            model.config,
            torch.float64,
            device,
            **words,
            max_length=60,
            sequences=20,
            spare_rows=64,
            **limit,
        )
        return made.spare_rows, made.max_sequences

    assert sizes() == (2, 7) and sizes(max_bytes=4 * row) == (1, 4)


def test_random_choices_are_refused(make_model):
    with pytest.raises(UserError, match=r"model\.selection .random. is a control for training and evaluation"):
        cached(make_model(selection="random"))


def test_layers_that_compute_more_than_their_weights_are_refused(make_model):
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight = base, base.weight

    model = make_model()
    torch.nn.utils.parametrize.register_parametrization(model.blocks[0].mlp.up_proj, "weight", torch.nn.Tanh())
    tokens = draw_tokens(20)
    decoder = cached(model)
    expected = one_pass(model, tokens)
    torch.testing.assert_close(in_pieces(decoder, decoder.admit(), tokens, [12, 1, 7]), expected, rtol=0, atol=1e-11)
    prune.l1_unstructured(model.blocks[1].mlp.down_proj, "weight", amount=4)
    with pytest.raises(UserError, match=r"blocks.1.mlp.down_proj computes more .* merge adapters"):
        cached(model)
    prune.remove(model.blocks[1].mlp.down_proj, "weight")
    cached(model)
    model.blocks[1].attention.q_proj = Adapter(model.blocks[1].attention.q_proj)
    with pytest.raises(UserError, match=r"blocks.1.attention.q_proj computes more"):
        cached(model)
    # The weight of a map with dynamic int8 is a method.
    model.blocks[0].mlp.up_proj = torch.nn.Module()
    model.blocks[0].mlp.up_proj.weight = lambda: torch.zeros(1)
    with pytest.raises(UserError, match=r"blocks.0.mlp.up_proj computes more"):
        cached(model)


def test_an_outer_autocast_changes_nothing(make_model):
    """A sample in the middle of training, from caches of another type than autocast's."""
    model, tokens = make_model().float(), draw_tokens(24)
    decoder = cached(model)
    expected = in_pieces(decoder, decoder.admit(), tokens, [12] + [1] * 12)
    decoder = cached(model)
    with torch.autocast("cpu", torch.bfloat16):
        given = in_pieces(decoder, decoder.admit(), tokens, [12] + [1] * 12)
    assert torch.equal(given, expected)


def test_autocast_decides_the_type(make_model):
    model = make_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        decoder = CachedModel(model, max_sequences=1, max_length=40)
    assert decoder.dtype == torch.bfloat16
    tokens = draw_tokens(24)
    given = in_pieces(decoder, decoder.admit(), tokens, [12] + [1] * 12)
    exact = one_pass(model.double(), tokens)
    # bf16 keeps 8 bits; the logits are about 1.
    assert given.dtype == torch.float32 and (given - exact).abs().max() < 0.15 * exact.abs().max()
