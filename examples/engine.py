"""The engine from Python: many requests at a time, each token as it comes.

python examples/engine.py              # a model with random weights
python examples/engine.py runs/demo    # a run of yours
"""

import sys

from trifocal import load_model, load_tokenizer
from trifocal.data import make_tokenizer
from trifocal.inference import CachedModel, Engine, Request, Sampling
from trifocal.models import DecoderLM, ModelConfig

if len(sys.argv) > 1:
    model, tokenizer = load_model(sys.argv[1]), load_tokenizer(sys.argv[1])
else:
    model = DecoderLM(ModelConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=128))
    model.init_weights(0)
    tokenizer = make_tokenizer("bytes")

# Room for two sequences of 256 tokens: the third request waits until one of the others ends.
engine = Engine(CachedModel(model.eval(), max_sequences=2, max_length=256), tokenizer)
requests = [
    Request(
        prompt=tokenizer.encode_prompt(prompt),
        max_new_tokens=20,
        sampling=Sampling(temperature=0.8, seed=seed),
        stop_tokens=tokenizer.ends,
        name=prompt,
    )
    for seed, prompt in enumerate(["import ", "def main(", "class "])
]
# `run` yields each token as it comes; `submit` and `step` let requests in at any time.
for update in engine.run(requests):
    if update.completion is not None:
        print(f"{update.request.name!r} + {update.completion.text!r}")
