"""What ships: the packaged model answers as it should, is small, and any transformers loads it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sidestep.models.addition import NUM_UNSEEN_PAIRS, addition_prompt, operand_pairs
from sidestep.models.loading import check_model, load_model, load_tokenizer
from sidestep.models.make_packaged import (
    NUM_ANSWER_TOKENS,
    answer_tokens,
    main,
    make_model,
    share_right,
    teach,
)
from sidestep.models.packaged import packaged_model_path
from sidestep.tasks.arithmetic import ArithmeticTask
from sidestep.tasks.prompts import encode_examples


@pytest.fixture(scope="module")
def model():
    return load_model("packaged", "float32", "cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("packaged")


def test_its_most_likely_answer_is_right_for_pairs_it_never_saw(model):
    assert share_right(model, greedy=True) >= 0.98


def test_a_sampled_answer_is_right_about_four_times_in_ten(model):
    """So that RL has much to gain, and groups with right and wrong answers to gain it from."""
    assert 0.30 <= share_right(model, greedy=False, samples=2) <= 0.50


def test_transformers_generate_and_the_task_agree_with_it(model, tokenizer):
    """The whole way of a user: text, ids, `generate` with left padding and cache, text, score."""
    task = ArithmeticTask(100)
    prompts = encode_examples(task.held_out, tokenizer, 8, 512)
    ids = torch.tensor([(tokenizer.pad_token_id, *prompt.token_ids) for prompt in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=(ids != tokenizer.pad_token_id).long(),
        do_sample=False,
        max_new_tokens=8,
    )
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    assert sum(task.score(task.held_out, texts)) >= 98


@torch.no_grad()
def test_its_answers_end(model):
    """Every batch is as long as its longest answer: a rare endless one would double the cost."""
    torch.manual_seed(0)
    pairs = operand_pairs()[:NUM_UNSEEN_PAIRS]
    ids = torch.tensor([list(addition_prompt(*pair).encode()) for pair in pairs])
    ids = ids.repeat_interleave(2, dim=0)
    for _ in range(NUM_ANSWER_TOKENS):
        ids = torch.cat([ids, torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1)], dim=1)
    ended = (ids == model.config.eos_token_id).any(dim=1)
    assert int((~ended).sum()) <= 2, "one in a thousand"


def test_it_weighs_less_than_a_megabyte():
    files = [file for file in packaged_model_path().iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 1_000_000
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".md"}


def test_it_passes_the_check_that_every_model_passes():
    assert check_model("packaged") == packaged_model_path()


def test_it_loads_and_saves_without_a_word(tmp_path):
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from sidestep.models.loading import load_model, load_tokenizer\n"
        "load_tokenizer('packaged').save_pretrained(sys.argv[1])\n"
        "load_model('packaged', 'float32', 'cpu')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_path_is_known_without_torch():
    code = (
        "import sys; from sidestep.models.packaged import packaged_model_path as path\n"
        "import sidestep.models.addition, sidestep.tasks.build, sidestep.models.folders\n"
        "assert (path() / 'model.safetensors').is_file()\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "text", ["12+34=", " a  b ,c .", "tab\tline\nend\r\n", "Zoë: 1€ 😀", "\x00\x7f\xa0\xad"]
)
def test_every_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()), "one id per byte, so one per ASCII character"
    assert tokenizer.decode(ids) == text


def test_end_and_padding_are_two_tokens_that_decoding_skips(tokenizer):
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    ids = [tokenizer.pad_token_id, *b"85", tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "85"


def test_config_names_the_tokens_of_the_tokenizer(model, tokenizer):
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_teaching_is_deterministic_and_never_shows_the_unseen_pairs(monkeypatch):
    seen = set()

    def taught(spy: bool):
        model = make_model(seed=1)
        if spy:
            forward = model.forward

            def look(ids):
                seen.update(bytes(row[:6].tolist()) for row in ids)
                return forward(ids)

            monkeypatch.setattr(model, "forward", look)
        teach(model, seed=1, steps=2, batch=3_000, peak_lr=1e-3)
        return model.state_dict()

    first, second = taught(spy=True), taught(spy=False)
    assert all(torch.equal(first[name], second[name]) for name in first)
    unseen = {addition_prompt(*pair).encode() for pair in operand_pairs()[:NUM_UNSEEN_PAIRS]}
    assert len(seen) > 4_000
    assert not seen & unseen


def test_answers_are_the_digits_and_the_end():
    rows = answer_tokens()
    assert rows[7].tolist() == [ord("7"), 256, -100, -100]
    assert rows[198].tolist() == [ord("1"), ord("9"), ord("8"), 256]


def test_the_command_writes_a_folder_that_passes_the_check(tmp_path, capsys):
    out = tmp_path / "made"
    threads = torch.get_num_threads()
    main(["--out", str(out), "--steps", "2"])
    torch.set_num_threads(threads)
    assert check_model(str(out)) == out
    assert "greedy 0." in capsys.readouterr().out
    shipped = packaged_model_path()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (shipped / name).read_bytes()
    made, ships = (json.loads((folder / "config.json").read_text()) for folder in (out, shipped))
    del made["transformers_version"], ships["transformers_version"]
    assert made == ships, "what ships was made by this command"


def test_the_card_tells_the_command_that_made_it():
    card = (packaged_model_path() / Path("README.md")).read_text()
    assert "python -m sidestep.models.make_packaged --out DIR --seed 0" in card
