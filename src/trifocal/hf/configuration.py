"""The configuration as transformers keeps it."""

import os
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from trifocal.hf.layer_cache import LAYER_TYPE
from trifocal.models import ModelConfig
from trifocal.models.io import AUTO_MAP, MODEL_TYPE, STANDARD_NAMES, check_standard_names, write_modeling_file

_MODEL_KEYS = {key.name for key in fields(ModelConfig)} - {"from_"}


def _key_of_model(name: str) -> Any:
    """A key of `TrifocalConfig.model` as an attribute of the configuration."""

    def read(config: "TrifocalConfig") -> Any:
        return config.model[name]

    def write(config: "TrifocalConfig", value: Any) -> None:
        config.model[name] = value

    return property(read, write, doc=f"`model[{name!r}]`")


@strict
class TrifocalConfig(PreTrainedConfig):
    """Configuration of a Trifocal model in transformers.

    `model` has the keys of the section `[model]` in a run's `config.toml`, with the same meaning. They may be given
    here one by one, and all but `layer_types` be set, also under transformers' own names, which `config.json` has too:
    `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`,
    `rms_norm_eps`, `tie_word_embeddings`.

    Args:
        model: Nested plain values, as `ModelConfig.to_dict` gives them; missing keys take their defaults.
        use_cache: Whether a forward pass without gradients returns a cache; False in a model that cannot keep one.
        values: Keys of `model`, and any key of transformers' configurations.

    Raises:
        ValueError: If a value does not fit; the message names the key.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    model: dict[str, Any] = field(default_factory=dict)
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **values: Any) -> None:
        given = dict(self.model)
        check_standard_names(values, given)
        for key in list(values):
            name = STANDARD_NAMES.get(key, key)
            if name in _MODEL_KEYS:
                given[name] = values.pop(key)
        config = ModelConfig.from_dict(given)
        self.model = config.to_dict()
        self.use_cache = self.use_cache and not config.undecodable
        super().__post_init__(**values)
        self.auto_map = dict(AUTO_MAP)

    @classmethod
    def from_model_config(cls, config: ModelConfig, **values: Any) -> "TrifocalConfig":
        """The configuration of a model of ours; `values` as for the class."""
        return cls(model=config.to_dict(), **values)

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`, with the sizes under transformers' names too."""
        return super().to_dict() | {name: self.model[key] for name, key in STANDARD_NAMES.items()}

    def to_model_config(self) -> ModelConfig:
        """The configuration that `DecoderLM` takes."""
        return ModelConfig.from_dict(self.model)

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer's cache, as transformers looks it up."""
        return [LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """transformers knows other kinds of layers."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: a saved folder imports this package, and needs no copy of this file."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json`, and the file by which `trust_remote_code` finds the classes."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_modeling_file(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


# What is set is the model's at once, not only once it is saved; layer_types is what transformers' caches read.
for _name, _key in {**STANDARD_NAMES, **{key: key for key in _MODEL_KEYS - {"layer_types"}}}.items():
    setattr(TrifocalConfig, _name, _key_of_model(_key))
