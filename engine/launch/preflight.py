"""What can be known before anything is started and without reading a weight: do settings, model and machine fit?

``serve`` asks first, so that a setting that cannot be used is one line and exit code 2; ``config --check`` asks only this.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from engine import default_model, faults
from engine.config import ConfigError, Settings
from engine.flags import fit_model
from engine.model.hf_config import ModelConfig, ModelConfigError, read_config
from engine.parallel.secret import GroupSecret
from engine.server.sampling_defaults import read_defaults
from engine.text.chat_template import TemplateError
from engine.text.tokenizer import Tokenizer, TokenizerError

_DRIVER_S = 60.0
_COUNT = """
import ctypes, sys
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(f"this machine has no NVIDIA driver ({error})")
if (code := driver.cuInit(0)) != 0:
    sys.exit(f"the NVIDIA driver finds no GPU (cuInit: {code})")
count = ctypes.c_int()
if (code := driver.cuDeviceGetCount(ctypes.byref(count))) != 0:
    sys.exit(f"the NVIDIA driver does not count its GPUs (cuDeviceGetCount: {code})")
print(count.value)
"""


def check(settings: Settings) -> Path:
    """The folder of the model that these settings serve.

    Raises:
        ConfigError: a setting that cannot be used here, naming the flag.
        default_model.NotFetched: no model was named, and the default one is not there.
    """
    folder = model_folder(settings)
    try:
        _fit(settings, read_config(folder))
        _check_files(folder)
    except ModelConfigError as error:
        raise ConfigError(f"--model: {error}") from None
    if settings.launch.enable_faults:
        try:
            for spec in settings.launch.fault:
                faults.parse(spec)
        except faults.FaultError as error:
            raise ConfigError(f"--fault: {error}") from None
    GroupSecret.of(settings)
    if settings.model.device == "cuda":
        _check_cuda(len(settings.local_ranks))
    return folder


def check_texts(settings: Settings, folder: Path) -> None:
    """Read tokenizer, chat template and sampling defaults, as the API process will. Raises ConfigError."""
    read_defaults(settings, folder)
    template = Path(settings.model.chat_template) if settings.model.chat_template else None
    try:
        Tokenizer.load(folder, template)
    except (TokenizerError, TemplateError) as error:
        raise ConfigError(f"{'--chat-template' if template else '--model'}: {error}") from None


def model_folder(settings: Settings) -> Path:
    """Where the model lies, as an absolute path. Raises as ``check`` does."""
    if not settings.model.path:
        return default_model.path()
    folder = Path(settings.model.path).expanduser()
    if not (folder / "config.json").is_file():
        where = (
            ""
            if folder.is_absolute()
            else (f" (looked for from {Path.cwd()}, where this process runs: a service runs in / unless its unit sets WorkingDirectory=)")
        )
        remedy = "give a Hugging Face model folder" if folder.is_absolute() else "give the folder's absolute path"
        raise ConfigError(f"--model: {folder}: no config.json there{where}; {remedy}")
    return folder.absolute()


def _fit(settings: Settings, config: ModelConfig) -> None:
    fit_model(settings, heads=config.heads, kv_heads=config.kv_heads, intermediate=config.intermediate, vocab=config.vocab,
              context=config.context)  # fmt: skip


def _check_files(folder: Path) -> None:
    """Tokenizer and weights are there; whether they can be read shows when they are."""
    index = folder / "model.safetensors.index.json"
    wanted = {"tokenizer.json", "model.safetensors"}
    if index.is_file():
        try:
            wanted = {"tokenizer.json", *json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelConfigError(f"{index}: no weight_map could be read from it: {error!r}") from error
    if missing := sorted(name for name in wanted if not (folder / name).is_file()):
        raise ModelConfigError(f"{folder}: {', '.join(missing)}: no such file")


def _check_cuda(ranks: int) -> None:
    """Torch is asked by reading its version file, for importing it takes seconds, and the driver in a process of its own,
    for a broken one may never answer."""
    built, version = _torch()
    if not built:
        raise ConfigError(f"--device cuda: PyTorch {version} was built without CUDA; install one that was, or give --device cpu")
    try:
        asked = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_DRIVER_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--device cuda: the NVIDIA driver did not answer in {_DRIVER_S:g} s; nvidia-smi may say why") from None
    if asked.returncode != 0:
        raise ConfigError(f"--device cuda: {asked.stderr.strip()}; give --device cpu, or mend the driver")
    count = int(asked.stdout)
    if count < ranks:
        raise ConfigError(f"--device cuda: {ranks} ranks on this node and {count} GPUs (CUDA_VISIBLE_DEVICES hides others); lower --tp")


def _torch() -> tuple[str | None, str]:
    """The CUDA that PyTorch was built for (None: without), and its version."""
    found = importlib.util.find_spec("torch")
    names: dict[str, str | None] = {}
    if found is not None and found.submodule_search_locations:
        path = Path(found.submodule_search_locations[0]) / "version.py"
        exec(compile(path.read_text(), str(path), "exec"), names)  # a file of assignments
    return names.get("cuda"), names.get("__version__") or "(not installed)"
