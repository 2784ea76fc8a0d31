"""The classes of this model for transformers, with trust_remote_code: pip install 'trifocal[hf]'"""

from trifocal.hf import TrifocalConfig, TrifocalForCausalLM, TrifocalForSequenceClassification, TrifocalModel

__all__ = ["TrifocalConfig", "TrifocalForCausalLM", "TrifocalForSequenceClassification", "TrifocalModel"]
