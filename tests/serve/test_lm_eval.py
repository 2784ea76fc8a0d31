"""lm-eval asks the server, and gets the figures of the model in this process."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.hf.test_lm_eval import DATA, ROWS, TASKS, TOKENIZER, log_likelihood
from tests.serve.servers import serving
from trifocal.inference import Sampling
from trifocal.testing.small_models import make_model, small_config

# datasets' and lm-eval's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_figures_are_those_in_process(tmp_path: Path) -> None:
    # In float64: see tests/hf/test_lm_eval.py.
    decoder = make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float64).eval()
    data, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks.mkdir()
    for name, task in TASKS.items():
        text = f"task: {name}\n" + DATA.format(data=data, cache=tmp_path / "cache") + task
        (tasks / f"{name}.yaml").write_text(text)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    TOKENIZER.save(tmp_path)
    with serving(decoder) as served:
        arguments = f"model=tiny,base_url={served.url}/v1/completions,tokenizer={tmp_path},max_length=96"
        results = simple_evaluate(
            "local-completions", f"{arguments},tokenizer_backend=huggingface", list(TASKS), batch_size=3,
            task_manager=manager, bootstrap_iters=0,
        )  # fmt: skip
        samples = {name: sorted(results["samples"][name], key=lambda sample: sample["doc_id"]) for name in TASKS}
        for index, row in enumerate(ROWS):
            expected = [log_likelihood(decoder, row["context"], choice) for choice in row["choices"]]
            chosen, continued, written = (samples[name][index] for name in TASKS)
            assert [value for [[value, _]] in chosen["resps"]] == pytest.approx(expected, rel=1e-6)
            assert chosen["acc"] == (expected.index(max(expected)) == row["answer"])
            assert continued["resps"][0][0][0] == pytest.approx(expected[row["answer"]], rel=1e-6)
            text = served.alone(list(row["context"].encode()), 8, sampling=Sampling(temperature=0))
            assert written["resps"] == [[text]]
