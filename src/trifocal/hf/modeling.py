"""The decoder as a model of transformers.

Modules and parameters have the names of `DecoderLM`, with transformers' `model.` in front of all but the output
projection.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, TrainerCallback
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from trifocal.hf.cached_forward import cached_tokens
from trifocal.hf.configuration import TrifocalConfig
from trifocal.hf.layer_cache import NO_GRADIENTS, NoCache
from trifocal.hf.row_layout import RowLayout, row_layout
from trifocal.models import DecoderLM
from trifocal.models.choice_teaching import ChoiceSamples
from trifocal.models.decoder import IGNORED_TARGET
from trifocal.models.io import exported_name
from trifocal.models.layers import draw_weights, make_blocks, run_block, run_blocks, wrap_blocks
from trifocal.nn import RMSNorm
from trifocal.nn.attention_base import KVCache
from trifocal.nn.chooser import ChoosingAttention, attach_loss, choice_recall

# Collators for FlashAttention add these; they say no more than position_ids.
_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
# `generate` passes those of stop_strings along.
_TOKENIZERS = {"tokenizer", "assistant_tokenizer"}
# transformers 5.24 gave past_key_values another name: in what `generate` passes, and in outputs.
_CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class TrifocalPreTrainedModel(PreTrainedModel):
    """The base of all models: it draws weights, checkpoints layers, and tells transformers their abilities."""

    config_class = TrifocalConfig
    config: TrifocalConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers' own, as the next and the tied keys)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    # Dense layers run SDPA, also under the name "eager". FlashAttention and FlexAttention are refused.
    _supports_sdpa = True
    _supports_context_parallel = False

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the weights that were not loaded, by the rules of `DecoderLM.init_weights`."""
        config = self.config.to_model_config()
        for name, parameter in self.named_parameters():
            if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
                draw_weights(parameter, name.removeprefix("model."), config, None)
        for module in self.modules():
            if isinstance(module, ChoosingAttention) and module.index is not None:
                index = [*module.index.parameters()]
                if not any(one.is_meta or getattr(one, "_is_hf_initialized", False) for one in index):
                    module.begin_index()

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Checkpoint the layers as `DecoderLM` does, which keeps their choice of blocks."""
        options = getattr(gradient_checkpointing_func, "keywords", {})
        function = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)
        if enable and (function is not checkpoint or options.get("use_reentrant") or every_n_layers != 1):
            raise ValueError(
                "Trifocal checkpoints all layers without reentrance: leave offload, every_n_layers and "
                "use_reentrant=True out"
            )
        decoder = self.base_model
        assert isinstance(decoder, TrifocalModel)
        decoder.gradient_checkpointing = enable
        wrap_blocks(decoder.blocks, range(len(decoder.blocks) if enable else 0), run_block)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: a saved folder imports this package, and needs no copy of this file."""


@dataclass
class OutputWithChoiceLoss(BaseModelOutputWithPast):
    """The result of `TrifocalModel`; `choice_loss` teaches the indexes, a scalar, where it is not attached."""

    choice_loss: Tensor | None = None


class TrifocalModel(TrifocalPreTrainedModel):
    """The decoder without its output projection."""

    def __init__(self, config: TrifocalConfig) -> None:
        super().__init__(config)
        model_config = config.to_model_config()
        self.embedding = nn.Embedding(model_config.vocab_size, model_config.dim)
        self.blocks = make_blocks(model_config)
        self._model_config = model_config
        self.norm = RMSNorm(model_config.dim, model_config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Any | None = None,
        attach_choice_loss: bool = True,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states.

        Args:
            input_ids: Tokens, [B, T].
            attention_mask: 1 for tokens, 0 for padding before or after them, [B, T].
            position_ids: Positions, [B, T]; those that restart at 0 begin another document, which sees nothing of the
                one before.
            past_key_values: A `DynamicCache(config=model.config)` with earlier tokens; under `torch.no_grad()`.
            inputs_embeds: Embedded tokens, [B, T, E], instead of `input_ids`.
            use_cache: Return a cache with the tokens, under `torch.no_grad()`; None: the configuration's.
            output_attentions: Must not be True: sparse attention makes no matrix of weights.
            output_hidden_states: Return the residual stream: before the first layer, after each but the last, and the
                last after the norm.
            cache: Newer name of `past_key_values`.
            attach_choice_loss: In training, attach the loss that teaches the indexes to the result; or else return it
                as `choice_loss`.
            kwargs: Boundaries of packed documents, which collators add for FlashAttention; they need `cu_seq_lens_q` or
                `position_ids`, and `use_cache=False` without gradients. Anything else must be None. With
                `cu_seq_lens_q` on a GPU, `position_ids` are not read, and the host need not wait for the GPU.

        Returns:
            The normed output of the last layer, [B, T, E]; zero at padding.

        Raises:
            ValueError: If an argument asks for what the model cannot do; the message names it.
        """
        if output_attentions or self.config.output_attentions:
            raise ValueError("output_attentions=True is not possible: sparse attention makes no matrix of weights")
        for name, value in kwargs.items():
            if value is not None and name not in _PACKING | _TOKENIZERS:
                raise ValueError(f"Trifocal's models do not know the argument {name}")
        x = self._embed(input_ids, inputs_embeds)
        shape = x.shape[:2]
        if position_ids is not None and position_ids.shape not in (shape, (1, shape[1])):
            raise ValueError(f"position_ids must have the shape [B, T] = {[*shape]}, got {[*position_ids.shape]}")
        choice_loss = None
        cache = past_key_values if cache is None else cache
        if cache is None:
            cache = self._new_cache(use_cache)
        elif isinstance(cache, NoCache):
            raise ValueError(NO_GRADIENTS)
        keep_all = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        boundaries = kwargs.get("cu_seq_lens_q")
        if position_ids is None and boundaries is None and any(kwargs.get(name) is not None for name in _PACKING):
            raise ValueError("packed documents need cu_seq_lens_q, or position_ids that restart at 0")
        if cache is not None and not isinstance(cache, NoCache):
            if boundaries is not None:
                raise ValueError("packed documents cannot go into past_key_values: give use_cache=False")
            with cached_tokens(cache, self._model_config, x, attention_mask, position_ids) as (new_tokens, caches):
                states = self._run(x, new_tokens, caches, keep_all)
        else:
            layout = self._layout(x, attention_mask, position_ids, kwargs)
            layers = [block.attention for block in self.blocks]
            documents = None if layout is None else layout.documents
            samples = ChoiceSamples.of_call(layers, x, documents)  # type: ignore[arg-type]
            states = self._run(x, layout, [], keep_all, samples)
            choice_loss = None if samples is None else samples.call_loss()
            if choice_loss is not None and attach_choice_loss:
                states[-1], choice_loss = attach_loss(states[-1], choice_loss), None
        return OutputWithChoiceLoss(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if keep_all else None,
            choice_loss=choice_loss,
            **{_CACHE: cache},
        )

    def _new_cache(self, use_cache: bool | None) -> Any | None:
        """An empty cache where one is asked for, or what stands in for it."""
        if torch.compiler.is_exporting() or not (self.config.use_cache if use_cache is None else use_cache):
            return None
        if not torch.is_grad_enabled():
            return DynamicCache(config=self.config)
        if use_cache:
            raise ValueError(f"use_cache=True: {NO_GRADIENTS}")
        return None if self.training else NoCache()

    def _layout(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, packing: dict[str, Any]
    ) -> RowLayout | None:
        """Padding and documents of embedded tokens [B, T, E]; arguments as of `forward`."""
        if torch.compiler.is_exporting():
            if any(given is not None for given in (attention_mask, position_ids, *packing.values())):
                raise ValueError(
                    "torch.export takes input_ids or inputs_embeds only: a graph has no padding, no documents"
                )
            return None
        longest, boundaries = packing.get("max_length_q"), packing.get("cu_seq_lens_q")
        of_keys = packing.get("cu_seq_lens_k")
        if not (boundaries is None or of_keys is None or boundaries.is_cuda or torch.equal(boundaries, of_keys)):
            raise ValueError("cu_seq_lens_k must be equal to cu_seq_lens_q: a document's queries see its own keys")
        return row_layout(
            (x.shape[0], x.shape[1]),
            x.device,
            attention_mask,
            position_ids,
            boundaries,
            longest if isinstance(longest, int) else None,
        )

    def _run(
        self,
        x: Tensor,
        layout: RowLayout | None,
        caches: Sequence[KVCache],
        keep_all: bool,
        choice_samples: ChoiceSamples | None = None,
    ) -> list[Tensor]:
        """The normed output of the last layer, [B, T, E]; with `keep_all`, the input of each layer before it."""
        documents = None
        if layout is not None:
            x, documents = layout.pack(x), layout.documents
        kept = [x] if keep_all else []
        for residual in run_blocks(self.blocks, self._model_config, x, documents, caches, choice_samples):
            x = residual
            if keep_all:
                kept.append(x)
        states = [*kept[:-1], self.norm(x)]
        return states if layout is None else [layout.unpack(state) for state in states]

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = inputs_embeds
        if input_ids is not None:
            if input_ids.ndim != 2:
                raise ValueError(f"input_ids must have the shape [B, T], got {list(input_ids.shape)}")
            x = self.embedding(input_ids)
        assert x is not None
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(f"there must be a token in each row, got embedded tokens of shape {list(x.shape)}")
        return x


class TrifocalForCausalLM(TrifocalPreTrainedModel, GenerationMixin):
    """A language model with sparse or dense attention, as transformers' trainers and pipelines use it."""

    _tied_weights_keys = {"head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TrifocalConfig) -> None:
        super().__init__(config)
        self.model = TrifocalModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_decoder(cls, decoder: DecoderLM, **settings: Any) -> "TrifocalForCausalLM":
        """The same model for transformers; it shares the weights.

        Args:
            decoder: The model, without wrappers.
            settings: Further keys of the configuration, such as `eos_token_id`.
        """
        config = TrifocalConfig.from_model_config(decoder.config, dtype=decoder.embedding.weight.dtype, **settings)
        with torch.device("meta"):
            model = cls(config)
        weights = decoder.state_dict(keep_vars=True)
        weights.setdefault("head.weight", weights["embedding.weight"])
        model.load_state_dict({exported_name(name): weight for name, weight in weights.items()}, assign=True)
        return model

    def to_decoder(self) -> DecoderLM:
        """The same model of ours; it shares the weights."""
        with torch.device("meta"):
            decoder = DecoderLM(self.config.to_model_config())
        weights = {name.removeprefix("model."): weight for name, weight in self.state_dict(keep_vars=True).items()}
        decoder.load_state_dict({name: weights[name] for name in decoder.state_dict()}, assign=True)
        return decoder

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens; a model that cannot keep a cache reads the whole text again for each."""
        if self.config.to_model_config().undecodable:
            kwargs["use_cache"] = False
        settings = kwargs.get("generation_config") or self.generation_config
        implementation = kwargs.get("cache_implementation") or getattr(settings, "cache_implementation", None)
        if implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"the cache_implementation {implementation!r} is not possible for Trifocal's models: leave it out"
            )
        if kwargs.get("assistant_early_exit") or getattr(settings, "assistant_early_exit", None):
            # transformers would shorten the model, and leave it so after an error.
            raise ValueError("assistant_early_exit is not possible for Trifocal's models: give an assistant_model")
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse: it keeps only keys and values, in its own pages."""
        raise ValueError(
            "continuous batching (generate_batch, transformers paged) is not possible for Trifocal's models: use "
            "generate, or trifocal.inference, which batches continuously"
        )

    def get_output_embeddings(self) -> nn.Module:
        """The output projection."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output projection."""
        self.head = new_embeddings  # type: ignore[assignment]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: Any | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss of given labels.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, cache: See `TrifocalModel.forward`.
            labels: The tokens themselves, [B, T]; -100 where the loss leaves them out. They are shifted here.
            logits_to_keep: Logits of the last n tokens, or of these places; 0: of all.
            num_items_in_batch: The loss is divided by it instead of the number of labels.
            kwargs: See `TrifocalModel.forward`; and `shift_labels`, labels that are shifted already.

        Returns:
            Logits, [B, T, vocab_size], and the loss of given labels.

        Raises:
            ValueError: See `TrifocalModel.forward`.
        """
        # Not an argument by name: the trainer would look for it in every batch.
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cache=cache,
            attach_choice_loss=labels is None and shift_labels is None,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.head(outputs.last_hidden_state[:, kept]), None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
            if outputs.choice_loss is not None:
                # As the loss itself, this call's share of all accumulated ones; scaled and divided as the loss is.
                choice_loss = outputs.choice_loss
                if num_items_in_batch is not None:
                    counted = shift_labels if labels is None or shift_labels is not None else labels[:, 1:]
                    choice_loss = choice_loss * ((counted != IGNORED_TARGET).sum() / num_items_in_batch)
                loss = loss + (choice_loss - choice_loss.detach())
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{_CACHE: getattr(outputs, _CACHE)}
        )


class TrifocalForSequenceClassification(GenericForSequenceClassification, TrifocalPreTrainedModel):  # type: ignore[misc]
    """The decoder with a score for each label at the last token that is not padding: a reward model has one label."""

    # Its loss is a mean over the rows: the trainer divides it by the number of accumulated batches.
    accepts_loss_kwargs = False


class ChoiceRecall(TrainerCallback):
    """Adds `choice_recall` to what a trainer logs: the mean over the layers of `trifocal.nn.choice_recall`.

    Example:
        `Trainer(model, ..., callbacks=[ChoiceRecall()])`
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Warn of a model whose indexes all learn nothing: frozen, as by LoRA on other layers, or of weight 0."""
        layers = [layer for layer in given["model"].modules() if isinstance(layer, ChoosingAttention)]
        layers = [layer for layer in layers if layer.index is not None]
        if not layers or any(layer.trains_index and layer.choice_loss_weight > 0 for layer in layers):
            return
        why, remedy = "are frozen", '; LoRA trains them with target_modules="all-linear" or modules_to_save=["index"]'
        if any(layer.trains_index for layer in layers):
            why, remedy = "have a choice_loss_weight of 0", ""
        warnings.warn(
            f"the indexes of this model {why}: they learn nothing and have no choice_recall{remedy}", stacklevel=2
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
        """Add the recall to a row of training figures, also where the trainer has kept it."""
        recalls = choice_recall(given["model"]).values()
        if recalls and logs is not None and "loss" in logs:
            logs["choice_recall"] = state.log_history[-1]["choice_recall"] = sum(recalls) / len(recalls)
