"""Base models: found and checked without loading weights, then loaded with one rule for device and dtype."""

from __future__ import annotations

import hashlib
import json
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mezzo.core.errors import UserError
from mezzo.core.fetch import check_gguf, convert_gguf, fetch_builtin, first_line, home, locked, sealed, silent
from mezzo.core.files import sha256_file, write_json
from mezzo.core.sources import looks_like_id

if TYPE_CHECKING:
    import torch

DEFAULT = "smollm2-135m"
DTYPES = ("float32", "bfloat16", "float16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class ModelFiles:
    """A model as files: its name as the user wrote it, its folder, the content hash of its weights (64 hex digits)."""

    name: str
    folder: Path
    sha256: str


def find(name: str | Path, *, say: Callable[[str], None] = lambda text: None) -> ModelFiles:
    """Returns a checked model: the built-in one, a folder, a GGUF file (converted once), or a hub id.

    No weights are loaded. The network is used only for a hub id.

    Raises:
        UserError: nothing usable lies there; says what is missing.
    """
    text, path = str(name), _path(str(name))
    if text == DEFAULT:
        folder = home() / "models" / DEFAULT
        if not sealed(folder):
            raise UserError(f"the built-in model {DEFAULT} is not here", todo="Run `mezzo model get` once (93 MB)")
        return ModelFiles(text, folder, content_hash(folder))
    if path.is_file():
        return ModelFiles(text, folder := _converted(path, say), content_hash(folder))
    if path.is_dir():
        return ModelFiles(text, path, _checked(path))
    if looks_like_id(text):
        return ModelFiles(text, folder := _from_hub(text), _checked(folder))
    raise UserError(
        "no such model", where=text, todo=f"Name a model folder, a GGUF file, a hub id (org/name), or {DEFAULT}"
    )


def get(name: str = DEFAULT, *, say: Callable[[str], None] = lambda text: None) -> ModelFiles:
    """Returns the model after fetching it where it is not whole here. A broken download or folder is made again.

    Raises:
        UserError: the download failed.
    """
    if name != DEFAULT:
        return find(name, say=say)
    folder = home() / "models" / DEFAULT
    if not sealed(folder):
        with locked(folder):
            if not sealed(folder):
                fetch_builtin(folder, say)
    return find(name)


def known() -> list[dict[str, Any]]:
    """Returns the built-in model and the converted ones: name, present, folder, bytes, sha256 (None where absent)."""
    found = [(DEFAULT, home() / "models" / DEFAULT)]
    converted = home() / "converted"
    if converted.is_dir():
        found += [
            (folder.name[:12], folder) for folder in sorted(converted.iterdir()) if not folder.name.startswith(".")
        ]
    return [
        {
            "name": name,
            "present": (here := sealed(folder)),
            "folder": str(folder),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()) if here else None,
            "sha256": content_hash(folder) if here else None,
        }
        for name, folder in found
    ]


def load(files: ModelFiles, *, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any]:
    """Returns (model in eval mode, tokenizer padding on the left), placed by `choose_device` and `choose_dtype`.

    Raises:
        UserError: an architecture this transformers does not know, or weights that do not fit the configuration.
    """
    from transformers import AutoModelForCausalLM

    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    skeleton(files)  # a faulty configuration is said before the weights are read
    words = tokenizer(files)
    where, todo = str(files.folder), "Copy the model again"
    try:
        with silent():
            loaded: Any = AutoModelForCausalLM.from_pretrained(where, dtype=kind, output_loading_info=True)
    except Exception as error:  # safetensors' own error has no other base
        raise UserError(f"the weights do not fit config.json ({first_line(error)})", where=where, todo=todo) from error
    model, told = loaded
    if absent := sorted(told["missing_keys"]):
        raise UserError(f"{len(absent)} weights are missing ({absent[0]} first)", where=where, todo=todo)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = words.pad_token_id
    return model.to(place).eval(), words


def tokenizer(files: ModelFiles) -> Any:
    """Returns the tokenizer, with a pad token and padding on the left.

    Raises:
        UserError: the folder holds none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        with silent():
            words = AutoTokenizer.from_pretrained(str(files.folder))
    except Exception as error:  # the tokenizers library raises the bare class
        raise UserError(
            f"no tokenizer can be read ({first_line(error)})",
            where=str(files.folder),
            todo="Add the model's tokenizer files",
        ) from error
    if words.pad_token is None:
        words.pad_token = words.eos_token
    words.padding_side = "left"
    return words


def skeleton(files: ModelFiles) -> Any:
    """Returns the model on the meta device: shapes, no weights. Cost: no memory worth naming.

    Raises:
        UserError: this transformers does not know the architecture.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with silent(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(files.folder)))
    except Exception as error:  # a faulty configuration fails in its own checks, or anywhere in the layers
        raise UserError(
            f"this model cannot be built ({first_line(error)})",
            where=str(files.folder),
            todo="Use a causal language model",
        ) from error


def choose_device(device: str) -> str:
    """Returns the device: as named, or for "auto" cuda before mps before cpu.

    Raises:
        UserError: an unknown name, or a device that is not here.
    """
    import torch

    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(name for name, present in here.items() if present)
    kind, colon, number = device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if not here.get(kind) or (colon and not (number.isdecimal() and int(number) < count)):
        present = ", ".join(name for name, there in here.items() if there)
        raise UserError(f"no device {device!r} here", where="device", todo=f"Use auto or one of: {present}")
    return device


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """Returns the dtype of base weights: as named, or for "auto" bfloat16 on cuda and float32 elsewhere.

    Raises:
        UserError: an unknown name.
    """
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}", where="dtype", todo=f"Use auto, {', '.join(DTYPES)}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def content_hash(folder: Path) -> str:
    """Returns the SHA-256 over every tensor's name, dtype, shape and bytes; sharding and header notes do not matter.

    Kept under `home()` by path, size and time of change, so a large model is read once.

    Raises:
        UserError: no safetensors file, a damaged one, or a missing shard.
    """
    files = shards(folder)
    key = hashlib.sha256(
        json.dumps([(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode()
    ).hexdigest()
    kept = home() / "hashes" / key
    try:
        if len(text := kept.read_text(encoding="ascii").strip()) == 64:
            return text
    except OSError:
        pass
    tensors = sorted(entry for shard in files for entry in _tensor_hashes(shard))
    digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(digest, encoding="ascii")
    except OSError:
        pass  # only a cache
    return digest


def shards(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder.

    Raises:
        UserError: no safetensors file, or a missing shard.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not names or not all(isinstance(name, str) and 0 < len(name) < 256 for name in names):
                raise ValueError("no names of files")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError("is damaged", where=str(index), todo="Copy the model again") from error
        for name in names:
            if not (folder / name).is_file():
                raise UserError(
                    "a shard of the weights is missing", where=str(folder / name), todo="Copy the model again"
                )
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    pickles = [file.name for file in sorted(folder.iterdir()) if file.suffix in PICKLES]
    if pickles:
        raise UserError(
            f"holds its weights as pickles only ({pickles[0]})",
            where=str(folder),
            todo="Save it as safetensors first (transformers: save_pretrained)",
        )
    raise UserError("holds no weights", where=str(folder), todo="Name a folder with model.safetensors")


def _tensor_hashes(file: Path) -> list[list[Any]]:
    try:
        with file.open("rb") as opened:
            start, entries = _header(opened, file)
            found = []
            for name, tensor in entries:
                begin, end = tensor["data_offsets"]
                opened.seek(start + begin)
                digest, left = hashlib.sha256(), end - begin
                while left:
                    if not (block := opened.read(min(left, 1 << 24))):
                        raise UserError("is cut off", where=str(file), todo="Copy the model again")
                    digest.update(block)
                    left -= len(block)
                found.append([name, tensor["dtype"], tensor["shape"], digest.hexdigest()])
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), todo="Check the file") from error
    return found


def _header(opened: BinaryIO, file: Path) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Returns where the tensors' bytes start, and (name, entry) of each tensor in the order of its bytes."""
    head, size = opened.read(8), file.stat().st_size
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
    if length > size - 8:
        raise UserError("is cut off or damaged", where=str(file), todo="Copy the model again")
    try:
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        ends = [0]
        for tensor in header.values():
            begin, end = map(operator.index, tensor["data_offsets"])
            if not (0 <= begin <= end and isinstance(tensor["dtype"], str) and isinstance(tensor["shape"], list)):
                raise ValueError("an entry that is none")
            ends.append(end)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError("has a damaged header", where=str(file), todo="Copy the model again") from error
    if 8 + length + max(ends) > size:
        raise UserError("is cut off", where=str(file), todo="Copy the model again")
    return 8 + length, entries


def _path(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        path.is_file()  # a name that is too long, or in a folder that may not be read, fails here
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no such model ({first_line(error)[:60]})", where=name[:80] or "model", todo="Name a model folder"
        ) from error


def _checked(folder: Path) -> str:
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(
            "holds no config.json",
            where=str(folder),
            todo="Name a model folder (config.json, *.safetensors, tokenizer)",
        )
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"is no JSON ({first_line(error)})", where=str(config), todo="Copy the model again") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError("names no model_type", where=str(config), todo="Name the folder of a transformers model")
    if "auto_map" in values:
        raise UserError(
            "needs code from the model's author", where=str(config), todo="Use a model that transformers knows itself"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError("holds no tokenizer", where=str(folder), todo="Add the model's tokenizer files")
    return content_hash(folder)


def _converted(file: Path, say: Callable[[str], None]) -> Path:
    check_gguf(file)
    folder = home() / "converted" / sha256_file(file)
    if not sealed(folder):
        with locked(folder):
            if not sealed(folder):
                convert_gguf(file, folder, say)
                write_json(folder / "source.json", {"file": file.name})
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:  # the hub client's errors share no base
        raise UserError(
            f"no such folder, and the hub gave nothing ({first_line(error)})",
            where=name,
            todo="Check the name and the network",
        ) from error
