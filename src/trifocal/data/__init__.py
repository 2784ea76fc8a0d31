"""Text as batches of tokens: sources, tokenizers, packing, a loader whose state is exact."""

from trifocal.data.config import DataConfig
from trifocal.data.loader import DATA_KEYS, Batch, Latency, Loader, OtherDataError, make_loader, merge_states
from trifocal.data.retry import DataError
from trifocal.data.sources import is_local
from trifocal.data.tokenizers import Tokenizer, make_tokenizer

__all__ = [
    "DATA_KEYS",
    "Batch",
    "DataConfig",
    "DataError",
    "Latency",
    "Loader",
    "OtherDataError",
    "Tokenizer",
    "is_local",
    "make_loader",
    "make_tokenizer",
    "merge_states",
]
