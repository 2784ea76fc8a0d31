"""The trainers that people have, each in a short training of a tiny model, with the real packages."""

import multiprocessing
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

import datasets
import numpy as np
import transformers
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl import SFTConfig, SFTTrainer

from tests.chat_data import make_chats, write_tokenizer
from tests.children import free_port
from tests.hf.fsdp_worker import PROCESSES, tiny_model, train, train_sharded
from trifocal import load_model
from trifocal.cli import main
from trifocal.data import make_tokenizer
from trifocal.hf import (
    ChoiceRecall,
    TrifocalConfig,
    TrifocalForCausalLM,
    TrifocalForSequenceClassification,
    TrifocalModel,
)
from trifocal.models import save_weights
from trifocal.nn import SelectedAttention, choice_recall
from trifocal.nn.chooser import ChoosingAttention
from trifocal.testing.small_models import make_model, small_config
from trifocal.train.checkpoint.export import export_folder

WORDS = 60
QUIET = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
}
# transformers' and TRL's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def fresh_model(**changes):
    torch.manual_seed(0)
    config = TrifocalConfig.from_model_config(small_config(**changes), pad_token_id=60, eos_token_id=61)
    return TrifocalForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def texts():
    """Each text counts on from one of two words, so that the next word is soon learned."""
    lengths = [5 + i % 9 for i in range(48)]
    return datasets.Dataset.from_dict(
        {"text": [" ".join(f"w{30 * (i % 2) + k}" for k in range(length)) for i, length in enumerate(lengths)]}
    )


def losses_of(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainer(tokenizer, texts, tmp_path):
    rows = texts.map(lambda row: tokenizer(row["text"]), remove_columns="text")
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    losses = []
    for checkpointing in (False, True):
        model = fresh_model()
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            save_steps=6, gradient_checkpointing=checkpointing, learning_rate=1e-2, **QUIET,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert losses[1] == losses[0]
    assert trainer.evaluate()["eval_loss"] < 0.8 * losses[0][0]
    # What it saved is read by transformers and by us.
    folder = tmp_path / "out" / "checkpoint-6"
    tokens = torch.arange(20)[None]
    for loaded in (TrifocalForCausalLM.from_pretrained(folder), TrifocalForCausalLM.from_decoder(load_model(folder))):
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("task", ["smoothed labels", "classes of rows"])
def test_accumulated_batches_give_the_loss_of_one_batch(tokenizer, tmp_path, task):
    """And smoothed labels are those of the next tokens."""
    rows = [{"input_ids": [2 + 7 * k % 50 for k in range(i, i + 9)]} for i in range(4)]
    collator, options, model = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), {}, fresh_model()
    tokens = torch.tensor([row["input_ids"] for row in rows])
    if task == "smoothed labels":
        options = {"label_smoothing_factor": 0.1}
        logits, labels = model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        expected = 0.9 * functional.cross_entropy(logits, labels) - 0.1 * logits.log_softmax(-1).mean()
    else:
        model = TrifocalForSequenceClassification(TrifocalConfig(**model.config.to_dict() | {"num_labels": 3}))
        rows = [row | {"label": place % 3} for place, row in enumerate(rows)]
        collator = transformers.DataCollatorWithPadding(tokenizer)
        expected = functional.cross_entropy(model(tokens).logits, torch.tensor([0, 1, 2, 0]))
    for size in (4, 1):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size,
            learning_rate=0.0, save_strategy="no", **options, **QUIET,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator)
        trainer.train()
        assert losses_of(trainer) == [pytest.approx(expected.item(), rel=1e-5)]


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "LoRA"])
def test_packed_fine_tuning_by_trl(tokenizer, texts, tmp_path, monkeypatch, adapter):
    model = fresh_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    documents = []
    original = TrifocalModel.forward

    def forward(self, *args, **kwargs):
        documents.append(int((kwargs["position_ids"] == 0).sum()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TrifocalModel, "forward", forward)
    arguments = SFTConfig(
        str(tmp_path / "out"), max_steps=8, per_device_train_batch_size=2, packing=True, max_length=32,
        save_strategy="no", bf16=False, learning_rate=3e-2 if adapter else 1e-2, **QUIET,
    )  # fmt: skip
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8) if adapter else None
    trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer, peft_config=lora)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        first = float(trainer.model(**batch).loss)
    # Document by document, by our own model.
    decoder = make_model(small_config(), torch.device("cpu"))
    decoder.load_state_dict({name.removeprefix("model."): weight for name, weight in before.items()})
    total, count = 0.0, 0
    [boundaries] = (batch["position_ids"][0] == 0).nonzero(as_tuple=True)
    for tokens in batch["input_ids"][0].tensor_split(boundaries[1:]):
        targets = len(tokens) - 1
        total += float(decoder(tokens[None, :-1], tokens[None, 1:]).detach()) * targets
        count += targets
    assert first == pytest.approx(total / count, rel=1e-5)
    documents.clear()
    trainer.train()
    assert min(documents) >= 4
    monkeypatch.undo()
    with torch.no_grad():
        assert float(trainer.model(**batch).loss) < 0.8 * first
    if adapter:
        adapted = {
            name.partition(".lora_B")[0]
            for name, weight in trainer.model.named_parameters()
            if "lora_B" in name and weight.any()
        }
        # Eight maps in each of two layers; not the output projection.
        assert len(adapted) == 16
        tokens = torch.arange(20)[None]
        trainer.model.eval()
        expected = trainer.model(tokens).logits
        merged = trainer.model.merge_and_unload()
        assert isinstance(merged, TrifocalForCausalLM)
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(merged.head.weight, before["head.weight"])


@pytest.mark.parametrize("packing", [True, False])
def test_trl_ends_the_texts_of_a_byte_model_with_its_separator(tmp_path, packing):
    """TRL writes the end behind a text by its name."""
    export_folder(
        make_model(small_config(vocab_size=257), torch.device("cpu")), make_tokenizer("bytes"), tmp_path / "m"
    )
    model = TrifocalForCausalLM.from_pretrained(tmp_path / "m")
    rows = {"text": ["ab", "c"]} if packing else {"prompt": ["a", ""], "completion": ["b", "c"]}
    arguments = SFTConfig(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, packing=packing, max_length=8, bf16=False,
        **QUIET,
    )  # fmt: skip
    byte_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    trainer = SFTTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_dict(rows), processing_class=byte_tokenizer
    )
    tokens = [token for row in trainer.train_dataset["input_ids"] for token in row]
    assert sorted(tokens) == [97, 98, 99, 256, 256]
    batch = next(iter(trainer.get_train_dataloader()))
    # Ends are learned, though they are the tokens of padding too.
    assert int((batch["labels"] == 256).sum()) == 2


def test_trl_reads_chats_as_our_trainer_does(tmp_path):
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path / "from")))
    decoder = make_model(small_config(vocab_size=tokenizer.vocab_size), torch.device("cpu"))
    export_folder(decoder, tokenizer, tmp_path / "m")
    chats = make_chats(4)
    arguments = SFTConfig(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, assistant_only_loss=True, bf16=False, **QUIET
    )
    trainer = SFTTrainer(
        TrifocalForCausalLM.from_pretrained(tmp_path / "m"), arguments,
        train_dataset=datasets.Dataset.from_dict({"messages": chats}),
        processing_class=transformers.AutoTokenizer.from_pretrained(tmp_path / "m"),
    )  # fmt: skip
    for chat, row in zip(chats, trainer.train_dataset, strict=True):
        tokens, answers = tokenizer.encode_chat(chat)
        assert row["input_ids"] == tokens.tolist() and row["labels"] == np.where(answers, tokens, -100).tolist()


@pytest.fixture(scope="module")
def converted(tokenizer, tmp_path_factory):
    """A dense model in blocks with an index."""
    dense, sparse = (str(tmp_path_factory.mktemp("converted") / name) for name in ("dense", "sparse"))
    save_weights(make_model(small_config(attention="dense", num_heads=2), torch.device("cpu")), dense)
    tokenizer.save_pretrained(dense)
    sizes = {"compression-block-size": 4, "compression-stride": 2, "selection-block-size": 8}
    sizes |= {"num-selected-blocks": 4, "num-local-blocks": 1}
    words = [word for name, value in sizes.items() for word in (f"--geometry.{name}", str(value))]
    assert main(["convert", dense, sparse, "--to", "selected", "--chooser", "index", *words]) == 0
    return Path(sparse)


@pytest.mark.parametrize("trainer_of", ["transformers, checkpointed", "TRL", "TRL, LoRA"])
def test_the_index_of_a_converted_model_learns_in_every_trainer(tokenizer, converted, tmp_path, trainer_of):
    """Nothing is asked of the user; a callback logs the recall."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(converted).train()
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(WORDS, (64,), generator=generator).tolist()} for _ in range(64)]
    for module in model.modules():
        if isinstance(module, SelectedAttention):
            module.choice_loss_stretch = 1
            for part in module.index.parameters():
                torch.nn.init.normal_(part, std=0.2)
    common = {"max_steps": 24, "per_device_train_batch_size": 4, "save_strategy": "no"}
    callbacks = [ChoiceRecall()]
    if not trainer_of.startswith("TRL"):
        arguments = transformers.TrainingArguments(
            str(tmp_path), gradient_checkpointing=True, learning_rate=0.03, **common, **QUIET
        )
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, data_collator=collator, callbacks=callbacks
        )
    else:
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8) if "LoRA" in trainer_of else None
        arguments = SFTConfig(
            str(tmp_path), packing=True, max_length=64, bf16=False, learning_rate=0.03, **common, **QUIET
        )
        trainer = SFTTrainer(
            model, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
            peft_config=lora, callbacks=callbacks,
        )  # fmt: skip
    trainer.train()
    recalls = [row["choice_recall"] for row in trainer.state.log_history if "loss" in row]
    # Not in rows of other figures.
    assert sum("choice_recall" in row for row in trainer.state.log_history) == 24
    assert len(recalls) == 24 and sum(recalls[-4:]) > sum(recalls[:4]) + 4 * 0.15
    of_layers = choice_recall(trainer.model).values()
    assert len(of_layers) == 2 and recalls[-1] == pytest.approx(sum(of_layers) / 2)


def test_who_asks_for_the_recall_of_indexes_that_learn_nothing_is_told():
    """LoRA on other layers freezes them."""
    model = fresh_model(chooser="index").eval()
    ChoiceRecall().on_train_begin(None, None, None, model=model)
    layers = [module for module in model.modules() if isinstance(module, ChoosingAttention)]
    for layer in layers:
        layer.choice_loss_weight = 0.0
    with pytest.warns(UserWarning, match="indexes of this model have a choice_loss_weight of 0: they learn nothing"):
        ChoiceRecall().on_train_begin(None, None, None, model=model)
    layers[0].choice_loss_weight = 1.0
    ChoiceRecall().on_train_begin(None, None, None, model=model)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match="indexes of this model are frozen: .* LoRA trains them with"):
        ChoiceRecall().on_train_begin(None, None, None, model=adapted)
    ChoiceRecall().on_train_begin(None, None, None, model=fresh_model())


def test_the_loss_of_the_choice_is_scaled_as_that_of_the_labels():
    """By the labels of all accumulated batches, and by what a loop does with the loss."""
    model = tiny_model().train()
    tokens = torch.arange(40).view(1, 40)
    shifted, few = functional.pad(tokens[:, 1:], (0, 1), value=-100), tokens.masked_fill(tokens < 20, -100)
    whole, half, found = {"labels": tokens}, {"num_items_in_batch": 78}, []
    # Where both are given, shifted labels count.
    by_shifted = [{"labels": labels, "shift_labels": shifted, **half} for labels in (None, few)]
    for given, factor in ((whole, 1.0), (whole | half, 1.0), (whole, 0.5), *((given, 1.0) for given in by_shifted)):
        model.zero_grad()
        loss = model(tokens, **given).loss
        # The loss that is shown is that of the labels.
        with torch.no_grad():
            untaught = model(tokens, **given, use_cache=False).loss
        assert loss.item() == untaught.item()
        (factor * loss).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for halves in found[1:]:
        torch.testing.assert_close(halves, [whole / 2 for whole in found[0]], rtol=1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompt_tuning():
    """PEFT reads the sizes of the model in its configuration, and gives embedded tokens."""
    tuned = get_peft_model(fresh_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).train()
    tokens = torch.arange(40).view(2, 20)
    mask = torch.ones_like(tokens)
    tuned(tokens, attention_mask=mask, labels=tokens).loss.backward()
    [prompt] = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    assert prompt.shape == (4, 32) and prompt.grad.any()
    # PEFT 0.21 looks for the cache under its old name: a Llama of transformers 5.24 gets its prompt at every token.
    if "cache" not in CausalLMOutputWithPast.__dataclass_fields__:
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        found = tuned.eval().generate(input_ids=tokens, attention_mask=mask, **options)[:, 20:]
        embedded = torch.cat((tuned.get_prompt(2), tuned.get_input_embeddings()(tokens)), dim=1)
        assert torch.equal(found, tuned.base_model.generate(inputs_embeds=embedded, **options))
    prefix = get_peft_model(fresh_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="prefix tuning"):
        prefix(tokens, attention_mask=mask, labels=tokens)


def test_two_processes_by_accelerates_fsdp(tmp_path):
    out = tmp_path / "out.pt"
    # Forked, which spares each of them the imports of this file.
    context, port = multiprocessing.get_context("fork"), free_port()
    workers = [context.Process(target=train_sharded, args=(rank, port, out)) for rank in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    found = torch.load(out)
    assert found["blocks"] == ["FSDPBlock"] * 2
    model, losses = train(tiny_model(), None)
    # transformers computes losses in float32.
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(found["weights"], dict(model.named_parameters()), rtol=1e-6, atol=1e-6)
    begun = dict(tiny_model().named_parameters())
    for name, weight in model.named_parameters():
        assert ".index." not in name or (weight - begun[name]).abs().max() > 1e-4
