"""`model.path`: every fault ends before any work, in one line with the value and the fix."""

import json
import shutil

import pytest
import torch

from sidestep.errors import UsageError
from sidestep.models.loading import (
    check_model,
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    stop_token_ids,
)
from sidestep.models.packaged import packaged_model_path


@pytest.fixture
def folder(tmp_path):
    """A copy of the packaged model that a test may spoil."""
    return shutil.copytree(packaged_model_path(), tmp_path / "my-model")


def refused(path, call=check_model) -> str:
    with pytest.raises(UsageError) as caught:
        call(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"model.path {str(path)!r}: ")
    return message


def edit(file, **changes):
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_a_missing_folder_is_refused_with_the_nearest_model_beside_it(folder):
    message = refused(folder.parent / "my-modle")
    assert message.endswith(f"no such folder; did you mean {str(folder)!r}?")
    message = refused("/nowhere/at/all")
    assert "give a Hugging Face model folder, or 'packaged' for the model that ships" in message
    assert "did you mean 'packaged'?" in refused("./pakaged")


def test_a_hub_name_that_cannot_be_fetched_suggests_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("some-team/some-model-that-is-not-cached")
    assert "no such folder, and the Hugging Face hub did not give it (" in message
    assert message.endswith(
        "give a Hugging Face model folder, or 'packaged' for the model that ships here"
    )
    assert "did you mean 'packaged'?" in refused("packged")


def test_a_file_is_refused_with_its_folder(folder):
    message = refused(folder / "model.safetensors")
    assert message.endswith(f"is a file, not a folder; give its folder, {str(folder)!r}")


def test_a_folder_without_config_is_refused_with_the_one_inside_that_has_one(folder):
    assert f"did you mean {str(folder)!r}?" in refused(folder.parent)
    (folder / "config.json").unlink()
    assert "the folder has no config.json; give a folder written by" in refused(folder)


def test_a_config_that_transformers_does_not_know_is_refused(folder):
    edit(folder / "config.json", model_type="no_such_architecture")
    assert "config.json cannot be used (ValueError: " in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be used (" in refused(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert refused(folder).endswith(
        "the folder has no weights (model.safetensors or model.safetensors.index.json); "
        "save them with model.save_pretrained(folder)"
    )


def test_pickled_weights_are_refused_with_the_way_to_convert_them(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refused(folder)
    assert "its weights are pickled (pytorch_model.bin)" in message
    assert "save them as safetensors with model.save_pretrained(folder)" in message


def test_weights_cut_short_and_git_lfs_pointers_are_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors is cut short or no safetensors file" in refused(folder)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in refused(folder)


def test_sharded_weights_are_fine_unless_one_is_missing(folder):
    model = load_model(str(folder), "float32", "cpu")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert check_model(str(folder)) == folder
    again = load_model(str(folder), "float32", "cpu").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    shards[1].unlink()
    message = refused(folder)
    assert f"1 of its {len(shards)} weight files are missing ({shards[1].name})" in message
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json is not an index of weights" in refused(folder)


def test_weights_of_another_model_are_refused_instead_of_filled_with_random_numbers(folder):
    edit(folder / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    message = refused(folder, lambda path: load_model(path, "float32", "cpu"))
    assert "its weights lack 11 tensors of the model (model.layers.2." in message
    edit(
        folder / "config.json",
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        vocab_size=300,
    )
    message = refused(folder, lambda path: load_model(path, "float32", "cpu"))
    assert "the model does not load (" in message


def test_a_model_that_is_no_causal_language_model_is_refused(folder):
    edit(folder / "config.json", model_type="t5")
    assert "'t5' is not a causal language model" in refused(folder)


def test_a_folder_without_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    assert "the folder has no tokenizer that loads (" in refused(folder)
    (folder / "tokenizer_config.json").unlink()
    assert "the folder has no tokenizer with a vocabulary; save the" in refused(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_both_numbers(folder):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    message = refused(folder)
    assert (
        "the tokenizer has 259 ids, the model only 258 embeddings; use the model's own" in message
    )


def test_a_tokenizer_smaller_than_the_vocabulary_is_fine(tmp_path):
    """Embeddings are often padded to a multiple of 64."""
    folder = shutil.copytree(packaged_model_path(), tmp_path / "padded")
    model = load_model(str(folder), "float32", "cpu")
    model.resize_token_embeddings(320)
    model.save_pretrained(folder)
    assert check_model(str(folder)) == folder


def test_a_model_without_end_of_sequence_is_refused(folder):
    edit(folder / "tokenizer_config.json", eos_token=...)
    assert check_model(str(folder)) == folder, "the generation configuration still names one"
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=...)
    assert "neither tokenizer nor generation_config has an end-of-sequence token" in refused(folder)


def test_stop_tokens_are_those_of_the_tokenizer_and_of_the_generation_config(folder):
    edit(folder / "generation_config.json", eos_token_id=[61, 10])
    model, tokenizer = load_model(str(folder), "float32", "cpu"), load_tokenizer(str(folder))
    assert stop_token_ids(tokenizer, model.generation_config) == (10, 61, 256)
    assert stop_token_ids(tokenizer, None) == (256,)


def test_code_in_a_model_folder_is_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    assert "config.json cannot be used (" in refused(folder)


def test_a_loaded_model_has_no_dropout_the_asked_type_and_the_fast_attention(folder):
    edit(folder / "config.json", attention_dropout=0.5)
    model = load_model(str(folder), "bfloat16", resolve_device("cpu"))
    assert not any(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match=r"^model\.device 'cuda': torch finds no such device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")


def test_the_context_length_is_the_models_own():
    assert context_length(load_config("packaged")) == 512


def test_a_model_file_rewritten_after_loading_changes_no_weight(tiny_model_dir, tmp_path):
    """Loading maps the file; an engine of a run died by SIGBUS when the file was written anew."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    model = load_model(str(folder), "float32", "cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(8)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "{", ""])
def test_files_that_hold_something_else_are_refused_in_one_line(folder, name, text):
    (folder / name).write_text(text)
    refused(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"vocab_size": "a"}),
        ("config.json", {"model_type": 3}),
        ("config.json", {"layer_types": 3}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": [["a"]]}),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"tokenizer_class": 3}),
        ("tokenizer.json", {"model": 3}),
        ("tokenizer.json", {"added_tokens": 3}),
    ],
)
def test_values_of_a_wrong_kind_are_refused_in_one_line(folder, name, changes):
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    edit(folder / name, **changes)
    refused(folder)
