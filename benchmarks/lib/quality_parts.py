"""The trainings of `quality.py`: seven questions, each with its data, model and evaluation."""

from dataclasses import dataclass, field

from trifocal.ops import Geometry

# The preset has an index and a learned compressor.
_SPARSE = {"model.chooser": "compressed", "model.compressor": "mean"}
_INDEX = {"model.chooser": "index"}
_LEARNED = {"model.compressor": "mlp"}
# How each model differs from the sparse one; "window" also gets its size, and the models of LAYERS their layers, which
# depend on the part.
_CHANGES: dict[str, dict[str, str]] = {
    "sparse": {},
    "dense": {"model.attention": "dense"},
    "window": {"model.attention": "window"},
    "hybrid": {},
    "random": {"model.selection": "random"},
    "learned": _LEARNED,
    "exact": {"model.selection": "exact"},
    "learned-exact": _LEARNED | {"model.selection": "exact"},
    "index": _LEARNED | _INDEX,
    "index-mean": _INDEX,
    "index-s256": _LEARNED | _INDEX | {"train.choice_loss_sample": str(1 / 256)},
    "index-l1": _LEARNED | _INDEX | {"optimizer.index_lr_factor": "1"},
    "selected-index": {"model.attention": "selected"} | _INDEX,
    "mix": _INDEX,
    "mix-dense": {},
    "shared": {"model.shared_kv": "true"},
    "shared-random": {"model.shared_kv": "true", "model.selection": "random"},
}
VARIANTS = {name: _SPARSE | changes for name, changes in _CHANGES.items()}
LAYERS = {
    "hybrid": ("nsa", "nsa", "nsa", "dense"),
    "mix": ("window", "window", "window", "selected"),
    "mix-dense": ("window", "window", "window", "dense"),
}
"""The attention of four layers, which repeats."""
HELD_OUT = 0.1
"""Share of the packages that is held out."""
LONG_SHARE = 0.2
"""Share of the bytes of the other packages that is for rows of 32,768."""
CONTROLS = ("sparse", "dense", "window", "random")


@dataclass(frozen=True)
class Part:
    """The trainings of one question: of each variant with each seed, on top of the production preset.

    `evaluate` has the flags of each call of `trifocal evaluate`. With one job at a time a GPU has one training, so
    that tokens/s can be compared. The size of the variant `window` follows from the geometry. `short` has the flags of
    trainings on shorter rows that come first, each of which starts from the weights of the one before; or the first
    weights are those of the part `start`. `packages` takes whole packages as text: "long" for those of long rows, with
    "short" for those of `short`; "short" for the others.
    """

    question: str
    flags: dict[str, str]
    evaluate: tuple[tuple[str, ...], ...]
    seeds: tuple[int, ...] = (1337,)
    variants: tuple[str, ...] = CONTROLS
    jobs: int = 1
    geometry: Geometry = field(default_factory=Geometry)
    short: tuple[dict[str, str], ...] = ()
    start: str = ""
    packages: str = ""


def _model(layers: int, dim: int, heads: int) -> dict[str, str]:
    sizes = {
        "num_layers": layers,
        "dim": dim,
        "num_heads": heads,
        "num_kv_heads": 1,
        "mlp_dim": dim * 8 // 3 // 64 * 64,
    }
    return {f"model.{name}": str(size) for name, size in sizes.items()}


def _batch(sequences: int, tokens: int, steps: int, learning_rate: float) -> dict[str, str]:
    return {
        "train.global_batch_size": str(sequences),
        "train.micro_batch_size": str(sequences),
        "train.sequence_length": str(tokens),
        "train.steps": str(steps),
        "optimizer.learning_rate": str(learning_rate),
    }


_TEXT = {"data.source": "builtin", "data.include_site_packages": "true", "data.streams": "1"}
_SMALL = {"train.activation_checkpointing": "none", "checkpoint.asynchronous": "false"}
_UNSEEN = {"log.telemetry_interval_steps": "0"}
# A quarter of the paper's block sizes and an eighth of its window: a query reads 320 of 1,024 tokens. A block
# has few pairs: keys that are random have nothing in common that a mean could show.
_SMALL_BLOCKS = Geometry(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=16,
    num_selected_blocks=16,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=64,
)
_LONG_ROWS = {
    "train.activation_checkpointing": "none",
    "model.rope_theta": "5e5",
    "data.validation_fraction": str(HELD_OUT),
}
_HAYSTACKS = ("--only", "needle", "--lengths", "4096", "16384", "65536", "--depths", "6", "--samples", "16")

PARTS = {
    "production": Part(
        "Does the production model learn text as well with sparse attention?",
        _TEXT | _batch(16, 2048, 1000, 6e-4) | {"train.activation_checkpointing": "none"},
        (("--only", "loss", "position"),),
        variants=("sparse", "dense", "window"),
    ),
    "production_8192": Part(
        "Does the production model learn rows of 8,192 as well with sparse attention?",
        _batch(4, 8192, 4000, 6e-4) | _LONG_ROWS,
        (("--only", "loss", "position", "choice"),),
        variants=("dense", "mix-dense", "mix"),
        packages="short",
    ),
    "production_32768": Part(
        "Does it learn rows of 32,768 as well, behind those of 8,192?",
        _batch(1, 32768, 1000, 3e-4) | _LONG_ROWS
        | {"evaluate.sequences": "48", "evaluate.interval_steps": "250", "data.shuffle_sequences": "128"},
        (("--only", "loss", "position", "choice"),),
        variants=("dense", "mix-dense", "mix"),
        start="production_8192",
        packages="long",
    ),
    "seeds": Part(
        "How far apart are seeds, and how far the variants?",
        _TEXT | _SMALL | _model(6, 384, 6) | _batch(32, 2048, 1000, 1e-3) | {"data.shuffle_sequences": "1024"},
        (("--only", "loss", "position"),),
        seeds=(1337, 1338, 1339),
        variants=("sparse", "shared", "learned", "dense"),
        jobs=6,
    ),
    "long": Part(
        "Does it use a long past?",
        # The rotary frequencies of needles, which tell distances of a whole row apart.
        _SMALL | _UNSEEN | _model(6, 384, 6) | _batch(2, 32768, 300, 5e-4)
        | {"data.shuffle_sequences": "64", "model.rope_theta": "5e5", "data.validation_fraction": str(HELD_OUT),
           "evaluate.interval_steps": "50", "train.compile": "false"},
        (("--only", "loss", "position", "choice", "--sequences", "32"),),
        seeds=(1337, 1338, 1339),
        variants=("sparse", "dense", "exact", "index"),
        jobs=3,
        packages="long",
        # From only long rows, 400 steps teach nobody more than the last few hundred bytes.
        short=(_batch(32, 2048, 800, 1e-3) | {"data.shuffle_sequences": "1024", "evaluate.interval_steps": "200"},),
    ),
    "recall": Part(
        "Does it recall the value of any key?",
        {"data.source": "recall:64", "model.vocab_size": "512"}
        | _SMALL | _model(2, 256, 4) | _batch(64, 1024, 1500, 2e-3),
        (("--only", "recall", "choice", "--samples", "64", "--pairs", "16", "32", "64"),),
        jobs=4,
        geometry=_SMALL_BLOCKS,
    ),
    "needle": Part(
        "Does it find a needle at any depth of a long haystack?",
        # With the usual base of 10,000 the slowest of the rotary frequencies turns once in 47,000 tokens: then no
        # dimension tells a token apart wherever it stands.
        # Eight needles give four times as many questions a row as two.
        {"data.source": "needle:8", "model.vocab_size": "256", "model.rope_theta": "1e6"}
        | _SMALL | _UNSEEN | _model(2, 256, 4) | _batch(1, 65536, 2000, 2e-3),
        (("--source", "needle:1", *_HAYSTACKS), ("--source", "needle:8", *_HAYSTACKS)),
        variants=("index", "shared-random", "dense", "window"),
        jobs=4,
        # A small dense model learned the task on short haystacks, and nothing on all lengths at once. The window of the
        # mix holds those whole, so that its fourth layer learns nothing: it needs some that are longer.
        short=(
            _batch(128, 64, 2000, 2e-3) | {"data.source": "needle:2", "train.compile": "false"},
            _batch(32, 2048, 1200, 2e-3),
        ),
    ),
}  # fmt: skip
