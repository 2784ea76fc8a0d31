"""Trifocal's models as models of transformers: `AutoModelForCausalLM` knows them once this package is imported."""

try:
    import transformers as _transformers
    from transformers.models.auto import modeling_auto as _modeling_auto
except ImportError:
    raise ImportError("trifocal.hf needs an extra: pip install 'trifocal[hf]'") from None

from trifocal.hf.configuration import TrifocalConfig
from trifocal.hf.modeling import ChoiceRecall, TrifocalForCausalLM, TrifocalForSequenceClassification, TrifocalModel

__all__ = [
    "ChoiceRecall",
    "TrifocalConfig",
    "TrifocalForCausalLM",
    "TrifocalForSequenceClassification",
    "TrifocalModel",
]

# Pipelines, trainers and lm-eval find the classes through these.
_transformers.AutoConfig.register(TrifocalConfig.model_type, TrifocalConfig, exist_ok=True)
_transformers.AutoModel.register(TrifocalConfig, TrifocalModel, exist_ok=True)
_transformers.AutoModelForCausalLM.register(TrifocalConfig, TrifocalForCausalLM, exist_ok=True)
# The trainer shifts labels for its label smoothing only where it finds the class's name here.
_modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TrifocalConfig.model_type] = TrifocalForCausalLM.__name__
_transformers.AutoModelForSequenceClassification.register(
    TrifocalConfig, TrifocalForSequenceClassification, exist_ok=True
)
