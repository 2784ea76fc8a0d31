"""Text as batches of tokens: sources, tokenizers, packing, a loader whose state is exact."""

from trifocal.data.data_config import DataConfig
from trifocal.data.loader import Batch, Loader
from trifocal.data.tokenizers import Tokenizer, make_tokenizer

__all__ = ["Batch", "DataConfig", "Loader", "Tokenizer", "make_tokenizer"]
