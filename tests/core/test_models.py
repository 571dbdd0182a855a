"""Models: the hash is of the weights alone; what is missing or broken is said before weights load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mezzo.core import fetch, models
from mezzo.core.errors import UserError
from tests.tiny import llama


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def test_the_hash_is_of_the_weights_not_of_sharding_or_notes(folder: Path, tmp_path: Path) -> None:
    wanted = models.find(folder).sha256
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"note": "other"})
    assert models.content_hash(folder) == wanted
    llama().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert models.content_hash(tmp_path / "shards") == wanted
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    save_file(tensors, folder / "model.safetensors")
    assert models.content_hash(folder) != wanted


def test_load_gives_the_saved_model_in_eval_mode_and_skeleton_its_shapes(folder: Path) -> None:
    files = models.find(folder)
    model, words = models.load(files, dtype="float32", device="cpu")
    assert not model.training
    assert (words.padding_side, words.pad_token) == ("left", "<pad>")
    x = torch.arange(6).view(1, 6)
    assert torch.equal(model(x).logits, llama()(x).logits)
    empty = models.skeleton(files)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert [p.shape for p in empty.parameters()] == [p.shape for p in model.parameters()]


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "x.Y"}}))


Spoil = Callable[[Path], object]


def _index(names: dict[str, object]) -> Spoil:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


BROKEN: dict[str, tuple[Spoil, str]] = {
    "no_config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "config_no_json": (lambda f: (f / "config.json").write_text("{"), "is no JSON"),
    "no_type": (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
    "code": (_code, "needs code from the model's author"),
    "no_tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer"),
    "pickles": (_pickle, "pickles only"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "cut": (_cut, "is cut off"),
    "header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{]" + bytes(9)),
        "damaged header",
    ),
    "shard": (
        _index({"a": "gone.safetensors"}),
        "gone.safetensors: a shard",
    ),
    "index": (_index({}), "is damaged"),
    "index_number": (_index({"a": 5}), "is damaged"),
    "index_long": (_index({"a": "x" * 5000}), "is damaged"),
    "other_name": (lambda f: (f / "model.safetensors").rename(f / "x.safetensors"), "holds no weights"),
}


def _header(content: bytes) -> Spoil:
    whole = len(content).to_bytes(8, "little") + content + bytes(64)
    return lambda folder: (folder / "model.safetensors").write_bytes(whole)


def _entry(**fields: object) -> Spoil:
    return _header(json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | fields}).encode())


HEADERS = {
    "backwards": _entry(data_offsets=[8, 4]),
    "negative": _entry(data_offsets=[-4, 4]),
    "text_offsets": _entry(data_offsets=["0", "4"]),
    "three_offsets": _entry(data_offsets=[0, 4, 8]),
    "no_dtype": _entry(dtype=None),
    "a_list": _header(b"[]"),
    "too_deep": _header(b"[" * 200_000),
}


@pytest.mark.parametrize("fault", list(HEADERS))
def test_a_damaged_header_of_weights_is_refused(fault: str, folder: Path) -> None:
    HEADERS[fault](folder)
    with pytest.raises(UserError, match=r"model\.safetensors: has a damaged header"):
        models.find(folder)


def _config(**fields: object) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return spoil


UNFIT = {
    "unknown_architecture": (_config(model_type="foo"), "this model cannot be built"),
    "no_language_model": (_config(model_type="vit"), "this model cannot be built"),
    "faulty_value": (_config(hidden_size="x"), "this model cannot be built"),
    "other_shape": (_config(hidden_size=64), "the weights do not fit"),
    "tokenizer_no_json": (lambda f: (f / "tokenizer.json").write_text("{"), "no tokenizer can be read"),
    "tokenizer_empty": (lambda f: (f / "tokenizer.json").write_text("{}"), "no tokenizer can be read"),
    "bytes_of_no_tensor": (_entry(), "the weights do not fit"),
    "other_weights": (_entry(shape=[16], data_offsets=[0, 64]), "weights are missing"),
}


@pytest.mark.parametrize("fault", list(UNFIT))
def test_what_only_the_library_can_tell_is_one_line_too(fault: str, folder: Path) -> None:
    spoil, wanted = UNFIT[fault]
    spoil(folder)
    files = models.find(folder)
    with pytest.raises(UserError, match=wanted) as caught:
        models.load(files, dtype="float32", device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["~no-such-user/x", "x" * 5000, "a\0b"], ids=["home", "long", "null"])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no such model"):
        models.find(name)


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_broken_folder_is_refused_before_weights_load(fault: str, folder: Path) -> None:
    spoil, wanted = BROKEN[fault]
    spoil(folder)
    with pytest.raises(UserError, match=wanted) as caught:
        models.find(folder)
    assert str(folder) in str(caught.value)


def test_absent_models_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model"):
        models.find(tmp_path / "none")
    with pytest.raises(UserError, match="mezzo model get"):
        models.find(models.DEFAULT)


@pytest.mark.parametrize(("name", "value"), [("dtype", "int4"), ("device", "tpu"), ("device", "cpu:x")])
def test_unknown_dtype_and_device_are_refused(name: str, value: str) -> None:
    call = {"dtype": lambda: models.choose_dtype(value, "cpu"), "device": lambda: models.choose_device(value)}[name]
    with pytest.raises(UserError, match=value):
        call()


def _gguf(path: Path) -> Path:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.ones((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_that_is_cut_off_or_none_is_refused(tmp_path: Path) -> None:
    whole = _gguf(tmp_path / "whole.gguf")
    fetch.check_gguf(whole)
    content = whole.read_bytes()
    for name, part in {"half": content[: len(content) // 2], "head": content[:20], "end": content[:-64]}.items():
        cut = tmp_path / f"{name}.gguf"
        cut.write_bytes(part)
        with pytest.raises(UserError, match="cut off"):
            models.find(cut)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"hello, world")
    with pytest.raises(UserError, match="is no GGUF file"):
        models.find(other)


def test_a_sealed_folder_with_a_short_file_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1234")
    (tmp_path / fetch.SEAL).write_text(json.dumps({"bytes": {"a.bin": 4}}))
    assert fetch.sealed(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"123")
    assert not fetch.sealed(tmp_path)


def test_a_full_disk_is_one_line_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # a limit to the size of files fails as a full disk does
    model, words = models.load(models.find(folder), device="cpu")
    target, limits = tmp_path / "made" / "model", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be written") as caught:
            fetch.save(model, words, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert list(target.parent.iterdir()) == []
    fetch.save(model, words, target)
    assert fetch.sealed(target)
    assert models.content_hash(target) == models.content_hash(folder)


@pytest.mark.slow
def test_the_built_in_model_is_fetched_converted_and_mended(tmp_path: Path) -> None:
    said: list[str] = []
    files = models.get(say=said.append)
    assert len(said) == 2
    assert models.get(say=said.append) == files
    assert len(said) == 2
    weights = files.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert models.get(say=said.append).sha256 == files.sha256
    assert len(said) == 4
