"""Which blocks the tokens of recent answers read, for the page."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from trifocal.data import Tokenizer
from trifocal.inference.text_stream import TextStream
from trifocal.models import DecoderLM
from trifocal.serve.answers import Answer
from trifocal.serve.errors import ApiError
from trifocal.telemetry.attention_telemetry import AttentionTelemetry
from trifocal.telemetry.maps import evenly_spaced

_KEPT = 16
_MAX_QUERIES = 128
# The forward pass has all logits; on a CPU, the reference has all scores too.
_MAX_LOGITS = 2**29
_MAX_CPU_TOKENS = 2048


class Pictures:
    """Remembers the tokens of the last answers; loads the model and computes what they read when it is asked for."""

    def __init__(self, load: Callable[[], DecoderLM], tokenizer: Tokenizer, dtype: torch.dtype) -> None:
        self._load, self._tokenizer, self._dtype = load, tokenizer, dtype
        self._loaded: AttentionTelemetry | None = None
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def remember(self, answer: Answer) -> None:
        """Keep an answer, in place of the oldest."""
        self._answers[answer.id] = answer
        if len(self._answers) > _KEPT:
            self._answers.popitem(last=False)

    def picture(self, name: str) -> dict[str, Any]:
        """The picture of an answer's first choice; without layers where none chooses blocks, or the text is long."""
        answer = self._answers.get(name)
        if answer is None:
            raise ApiError(404, "there is no picture of this answer")
        with self._one_at_a_time:
            self._loaded = telemetry = self._loaded or AttentionTelemetry(self._load().eval())
        config, device = telemetry.model.config, telemetry.model.embedding.weight.device
        prompt = answer.first_prompt
        tokens = [*prompt, *answer.tokens.get(0, [])]
        too_long = len(tokens) * config.vocab_size > _MAX_LOGITS
        too_long |= device.type == "cpu" and len(tokens) > _MAX_CPU_TOKENS
        if not telemetry.layers or len(tokens) == len(prompt) or too_long:
            return {"layers": []}
        # The last token was drawn, and read nothing.
        row = torch.tensor([tokens[:-1]], device=device)
        reading = evenly_spaced(len(tokens) - len(prompt), _MAX_QUERIES, row.device) + len(prompt) - 1
        with self._one_at_a_time, torch.autocast(row.device.type, self._dtype, enabled=self._dtype == torch.bfloat16):
            chosen = telemetry.choices(row, reading).tolist()
        stream = TextStream(self._tokenizer, [])
        texts = [stream.add(token) for token in tokens[:-1]]
        texts[-1] += stream.end()
        layers, geometry = list(telemetry.layers), config.geometry
        # Layers of type "selected" have no window.
        windows = [geometry.window_size if config.attention_of_layers[layer] == "nsa" else 0 for layer in layers]
        return {
            "layers": layers,
            "block": geometry.selection_block_size,
            "windows": windows,
            "texts": texts,
            "queries": reading.tolist(),
            "selected": chosen,
        }
