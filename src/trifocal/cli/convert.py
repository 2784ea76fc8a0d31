"""`trifocal convert`: a sparse model from a dense one, or the dense one in our form."""

import importlib.util
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor

from trifocal.cli.flags import parse_arguments
from trifocal.cli.output import try_next
from trifocal.data import make_tokenizer
from trifocal.data.tokenizers import TOKENIZER_FILE, TOKENIZER_FILES
from trifocal.errors import UserError
from trifocal.models import ModelConfig, parameter_count, save_weights
from trifocal.models.conversion import Target, convert_tensors, converted_config
from trifocal.models.decoder import meta_model
from trifocal.models.hf_reader import hf_name, is_hf_folder, read_hf_model, read_hf_settings
from trifocal.models.io import exported_name
from trifocal.ops import Geometry
from trifocal.paths import shell_path, user_path
from trifocal.train.checkpoint.export import new_model_folder, write_tokenizer
from trifocal.train.checkpoint.pretrained import find_gguf, open_pretrained


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Make a sparse model of a dense one: a Llama, Mistral, Qwen, SmolLM3 or OLMo, or a dense run."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The Hugging Face folder, with safetensors; or a run, a checkpoint, a folder of weights, or a GGUF."""
    output: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to write: weights, configuration and tokenizer, for `trifocal train --model.from` and `generate`."""
    to: Target
    """"mix": three layers with a sliding window, then one of "selected", and so on; "selected": one softmax over first,
    local and selected blocks, keys and values as they are; "nsa": compressed, selected and window branches with gates,
    each with a copy of the keys and values; "dense": the model as it is."""
    dense_layers: tuple[int, ...] = ()
    """Layers that stay dense, by number, like 0,1,2."""
    shared_kv: bool = False
    """With "nsa": one projection of keys and values for all branches."""
    chooser: Literal["auto", "compressed", "index"] = "auto"
    """What scores the blocks: "compressed" keys; or an "index", which a short training teaches first. "auto" takes an
    index in a mix, else compressed keys."""
    geometry: Geometry = field(default_factory=Geometry)
    """Block sizes of the sparse attention."""

    def __post_init__(self) -> None:
        unused = {"shared-kv": False, "chooser": "auto", "geometry": Geometry()}
        for name, default in unused.items():
            if self.to == "dense" and getattr(self, name.replace("-", "_")) != default:
                raise UserError(f"--{name} goes with another --to: with dense all layers stay as they are")


def run(args: Sequence[str], *, advise: bool = True) -> int:
    """Convert, and say what to do next unless told not to; nothing is written if the source cannot be converted."""
    options: ConvertArguments = parse_arguments(ConvertArguments, args, prog="trifocal convert")
    source, output = user_path(options.source, "DIR"), user_path(options.output, "OUT")
    check_source(source)
    with new_model_folder(output) as partial:
        config, tensors, settings = _read(source, partial)
        chooser = options.chooser
        if chooser == "auto":
            chooser = "index" if options.to == "mix" else "compressed"
        wanted = converted_config(
            config,
            options.to,
            options.geometry,
            dense_layers=options.dense_layers,
            shared_kv=options.shared_kv,
            chooser=chooser,
        )
        model = meta_model(wanted)
        model.load_state_dict(convert_tensors(tensors, wanted), assign=True)
        note = _check_tokenizer(partial, wanted.vocab_size)
        save_weights(model, partial, **settings)
    print(_summary(wanted, output, note))
    if advise:
        # A frozen model is read from whole weights.
        followed = options.to != "dense" and find_gguf(source) is None
        print(_advice(wanted, output, f" --distill.from {shell_path(source)}" if followed else ""))
    return 0


def check_source(source: Path) -> None:
    """UserError if there is no such folder, nor a GGUF."""
    if not source.is_dir() and find_gguf(source) is None:
        raise UserError(
            f"{source}: no such folder; a model of the hub is downloaded first: hf download OWNER/NAME --local-dir DIR"
        )


def _read(source: Path, partial: Path) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Any]]:
    """The dense model, and further keys of its configuration; its tokenizer goes into the new folder."""
    if file := find_gguf(source):
        try:
            from trifocal.hf.gguf import write_folder_of_gguf
        except ImportError as error:
            raise UserError(f"{file}: a GGUF needs an extra: pip install 'trifocal[hf]' gguf accelerate") from error
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=partial) as unpacked:
            write_folder_of_gguf(file, Path(unpacked))
            try:
                return _read(Path(unpacked), partial)
            except UserError as error:
                raise UserError(str(error).replace(unpacked, str(file))) from error
    if is_hf_folder(source):
        config, tensors = read_hf_model(source)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        settings, file_name = read_hf_settings(source), lambda name: hf_name(name, config.norm_after)
    else:
        found = open_pretrained(source)
        config, file_name = found.config(), exported_name
        settings = write_tokenizer(found.tokenizer(), config.vocab_size, partial, found.sequence_length())
        tensors = found.model().state_dict()
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{source}: the tensor {file_name(name)} has values that are NaN or infinite")
    return config, tensors, settings


def _check_tokenizer(folder: Path, vocab_size: int) -> str:
    """A note about a tokenizer that is not there or does not fit; empty: nothing. UserError if it is broken."""
    advice = "name one for training with --data.tokenizer"
    if not (folder / TOKENIZER_FILE).exists() or not importlib.util.find_spec("tokenizers"):
        return f"no tokenizer was checked ({TOKENIZER_FILE}, pip install 'trifocal[data]'); {advice}"
    try:
        tokenizer = make_tokenizer(str(folder))
    except UserError as error:
        message = str(error).replace(str(folder), "DIR")
        raise UserError(f"{message}; or take {TOKENIZER_FILE} out of DIR, and {advice}") from error
    if tokenizer.vocab_size > vocab_size:
        return f"the tokenizer has ids up to {tokenizer.vocab_size - 1:,}, the model {vocab_size:,} tokens; {advice}"
    return ""


def _summary(config: ModelConfig, output: Path, note: str) -> str:
    layers = ", ".join(f"{count} {kind}" for kind, count in Counter(config.attention_of_layers).items())
    return "\n".join(
        [f"wrote {output}: {parameter_count(config):,} parameters, layers: {layers}", *filter(None, [note])]
    )


def _advice(config: ModelConfig, output: Path, follow: str) -> str:
    path, text, advice = shell_path(output), "--data.source text:PATH", {}
    if config.chooses_blocks:
        # Shorter rows teach no choice: their blocks cover most of the past.
        text += f" --train.sequence_length {4 * config.geometry.selected_tokens}"
    if config.has_index:
        advice["teach the index, with everything else frozen"] = (
            f"trifocal train --model.from {path} --train.only chooser --train.choice_loss_sample 1 {text} "
            "--run.directory runs/index"
        )
        path = "runs/index"
    return try_next(advice | {"train on": f"trifocal train --model.from {path}{follow} {text}"})
