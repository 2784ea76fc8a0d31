"""An exported model in lm-eval, on tasks made of local files, as `--model hf --model_args pretrained=DIR` loads it."""

import json
import sys

import pytest
import torch

pytest.importorskip("lm_eval")

import transformers
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from trifocal import generate
from trifocal.data import make_tokenizer
from trifocal.hf import TrifocalConfig
from trifocal.testing.small_models import make_model, small_config
from trifocal.train.checkpoint.export import export_folder

# Contexts of several lengths, so that a batch has padding.
ROWS = [
    {"context": "The first letters of the alphabet are a, b,", "choices": [" c", " seven"], "answer": 0},
    {"context": "One, two,", "choices": [" blue and green", " three"], "answer": 1},
    {"context": "It", "choices": [" is", " xylophone"], "answer": 0},
]
DATA = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}\ntest_split: test\n"
TASKS = {
    "choose": """output_type: multiple_choice
doc_to_text: context
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "continue": """output_type: loglikelihood
doc_to_text: context
doc_to_target: "{{choices[answer]}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "write": """output_type: generate_until
doc_to_text: context
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["<never>"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
TOKENIZER = make_tokenizer("bytes")
# datasets' and lm-eval's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def decoder():
    """In float64: in fp32 two blocks may be so nearly as important that rounding decides which one is chosen."""
    return make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float64).eval()


@pytest.fixture
def folder(decoder, tmp_path, monkeypatch):
    """An exported model, where transformers does not know its class: the command lm_eval does not import it."""
    monkeypatch.delitem(transformers.CONFIG_MAPPING._extra_content, "trifocal")
    monkeypatch.delitem(transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, TrifocalConfig)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    export_folder(decoder, TOKENIZER, tmp_path / "model", sequence_length=256)
    return tmp_path / "model"


def test_tasks_give_the_figures_of_our_own_model(decoder, folder, tmp_path):
    # lm-eval stops at the token that ends a text too.
    arguments = f"pretrained={folder},trust_remote_code=True"
    check_figures(decoder, tmp_path, "hf", arguments, device="cpu")
    assert list((tmp_path / "modules").rglob("modeling_trifocal.py"))


def check_figures(decoder, folder, *model, **options):
    """Compare what lm-eval measures with our own model's figures, row by row, without padding."""
    data, tasks = folder / "rows.jsonl", folder / "tasks"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks.mkdir()
    for name, task in TASKS.items():
        text = f"task: {name}\n" + DATA.format(data=data, cache=folder / "cache") + task
        (tasks / f"{name}.yaml").write_text(text)
    # The command reads 14,000 files of its own tasks first.
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    options |= {"batch_size": 3, "task_manager": manager, "bootstrap_iters": 0}
    results = simple_evaluate(*model, list(TASKS), **options)
    samples = {name: sorted(results["samples"][name], key=lambda sample: sample["doc_id"]) for name in TASKS}
    for index, row in enumerate(ROWS):
        expected = [log_likelihood(decoder, row["context"], choice) for choice in row["choices"]]
        chosen, continued, written = (samples[name][index] for name in TASKS)
        assert [value for [[value, _]] in chosen["resps"]] == pytest.approx(expected, rel=1e-6)
        assert chosen["acc"] == (expected.index(max(expected)) == row["answer"])
        assert continued["resps"][0][0][0] == pytest.approx(expected[row["answer"]], rel=1e-6)
        assert written["resps"] == [[generate(decoder, row["context"], 8, tokenizer=TOKENIZER, temperature=0)]]


def log_likelihood(decoder, context, continuation):
    tokens = torch.from_numpy(TOKENIZER.encode(context + continuation)).long()[None]
    with torch.no_grad():
        log_p = decoder(tokens)[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
    return float(log_p[-len(continuation) :].sum())


def test_a_folder_that_is_not_trusted_says_how(folder):
    with pytest.raises(ValueError, match="pass the argument `trust_remote_code=True`"):
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Its tokenizer needs no code.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert tokenizer("a<|endoftext|>")["input_ids"] == [97, 256] and tokenizer.model_max_length == 256
