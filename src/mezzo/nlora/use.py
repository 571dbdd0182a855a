"""A finished run in use: score, export, inspect, chat. The base is checked before its weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from mezzo.core import models
from mezzo.core.errors import UserError
from mezzo.core.fetch import first_line
from mezzo.core.files import check_free
from mezzo.core.records import Row, Rows, read
from mezzo.core.runs import Run
from mezzo.nlora.evaluate import answer_rows, differences, evaluate
from mezzo.nlora.export import check_lora, export_lora, export_merged
from mezzo.nlora.folder import adapter_tensors
from mezzo.nlora.job import Screen, rows_for
from mezzo.nlora.layer import NLoraLayer
from mezzo.nlora.llamacpp import export_gguf
from mezzo.nlora.nystrom import balanced, leading_landmarks, product_norm, slices
from mezzo.nlora.recipe import recipe_of
from mezzo.nlora.tuner import adapted_layers


def find_adapter(path: Path) -> Path:
    """Returns the adapter folder of a run folder or of an adapter folder.

    Raises:
        UserError: neither lies there.
    """
    for folder in (path, path / "adapter"):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise UserError(
        "holds no adapter", where=str(path), todo="Name a run of `mezzo nlora train` that is done, or an adapter folder"
    )


def adapter_config(path: Path) -> dict[str, Any]:
    """Returns the settings in an adapter folder.

    Raises:
        UserError: they are damaged, or of another method.
    """
    file = find_adapter(path) / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"is no JSON ({first_line(error)})", where=str(file), todo="Copy the adapter again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "NLORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        todo = "Convert it first: mezzo nlora convert" if kind == "LORA" else "Name a run or an NLoRA adapter folder"
        raise UserError("is no NLoRA adapter", where=str(file), todo=todo)
    if not isinstance(config.get("base_sha256"), (str, type(None))):
        raise UserError("is no hash", where=f"{file}: base_sha256", todo="Copy the adapter again")
    return config


def load_adapter(
    path: Path, *, model: str | None = None, dtype: str = "auto", device: str = "auto"
) -> tuple[Any, Any, models.ModelFiles]:
    """Returns (model with adapter, tokenizer, base files) for a run or adapter folder.

    Args:
        path: run or adapter folder.
        model: the base; None: the one the run names.
        dtype: dtype of the base weights.
        device: where to.

    Raises:
        UserError: no adapter there, its tensors are damaged, the base is not at hand, or it is another than the
            adapter was trained on: all before the base's weights are loaded; and after that, where the adapter does
            not fit the base or the file lacks tensors.
    """
    from peft import PeftModel, get_peft_model_state_dict

    config = adapter_config(path)
    name = model or _base_of(path, config)
    files = models.find(name)
    if config.get("base_sha256") not in (None, files.sha256):
        raise UserError(
            f"was trained on a base with hash {config['base_sha256'][:12]}, but {name} has {files.sha256[:12]}",
            where=str(find_adapter(path)),
            todo="Name the right base with --model",
        )
    found = {key for key in adapter_tensors(find_adapter(path)) if "nlora_" in key}
    base, tokenizer = models.load(files, dtype=dtype, device=device)
    try:
        adapted = PeftModel.from_pretrained(base, str(find_adapter(path))).eval()
        wanted = {key for key in get_peft_model_state_dict(adapted) if "nlora_" in key}
    except UserError:
        raise
    except (RuntimeError, OSError, KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot be loaded ({first})", where=str(find_adapter(path)), todo="Copy the adapter again"
        ) from error
    if lacking := sorted(wanted - found):
        raise UserError(
            f"lacks {lacking[0]}" + (f" and {len(lacking) - 1} more" if lacking[1:] else ""),
            where=str(find_adapter(path) / SAFETENSORS_WEIGHTS_NAME),
            todo="Copy the adapter again",
        )
    return adapted, tokenizer, files


def _base_of(path: Path, config: dict[str, Any]) -> str:
    run = find_adapter(path).parent
    if (run / "config.json").is_file() and (run / "manifest.json").is_file():
        return recipe_of(Run.open(run)).model
    return str(config.get("base_model_name_or_path") or models.DEFAULT)


def held_out_rows(run: Path, count: int) -> Rows:
    """Returns the first `count` held-out rows of a run: those that training did not see.

    Raises:
        UserError: the folder is no run, or its run held nothing out.
    """
    config = find_adapter(run).parent / "config.json"
    if not config.is_file():
        raise UserError("is an adapter without its run", where=str(run), todo="Name rows to score with --data")
    held_out = rows_for(recipe_of(Run.open(config.parent)))[1]
    if held_out is None:
        raise UserError("this run held no rows out", where=str(run), todo="Name rows to score with --data")
    return replace(held_out, rows=held_out.rows[:count])


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{value} is too small", where=name, todo="Give 1 or more")


def score_run(
    run: Path,
    *,
    data: str | None,
    shape: str | None,
    rows: int,
    max_new_tokens: int,
    model: str | None,
    base: bool,
    screen: Screen,
) -> dict[str, Any]:
    """Returns the adapter's scores on rows (fields of `Score`), and with `base` the base's and the paired differences.

    Raises:
        UserError: bad rows, no adapter, another base.
    """
    _check_counts(rows=rows, max_new_tokens=max_new_tokens)
    adapter_config(run)
    chosen = read(data, shape=shape, limit=rows) if data else held_out_rows(run, rows)  # type: ignore[arg-type]
    loaded, tokenizer, _ = load_adapter(run, model=model)
    with screen.bar("scoring the adapter") as update:
        after = evaluate(loaded, tokenizer, list(chosen), max_new_tokens=max_new_tokens, progress=update)
    found: dict[str, Any] = {"data": chosen.source, "adapter": [s.to_dict() for s in after.scores()]}
    if base:
        with loaded.disable_adapter(), screen.bar("scoring the base") as update:
            before = evaluate(loaded, tokenizer, list(chosen), max_new_tokens=max_new_tokens, progress=update)
        found["base"] = [s.to_dict() for s in before.scores()]
        found["difference"] = [s.to_dict() for s in differences(before, after)]
    return found


def export_run(run: Path, *, to: str, out: Path, rank: str, model: str | None) -> dict[str, Any]:
    """Writes a run's adapter as plain LoRA, merged model or llama.cpp's LoRA file, and returns what was written.

    Raises:
        UserError: `out` is in use, no adapter, another base.
    """
    check_free(out)
    if to == "merged" and rank != "exact":
        raise UserError("a merged model has no rank", where="--rank", todo="Leave it out, or write --to lora")
    loaded, tokenizer, _ = load_adapter(run, model=model)
    if to == "merged":
        return {"folder": str(out)} | export_merged(loaded, tokenizer, out)
    if to == "gguf":
        return {"file": str(out)} | export_gguf(loaded, out, rank=rank)  # type: ignore[arg-type]
    done = export_lora(loaded, out, rank=rank)  # type: ignore[arg-type]
    if done["relative_error"] == 0:
        done["logits_off_in_stock_peft"] = check_lora(loaded, out)
    return {"folder": str(out)} | done


def inspect_run(run: Path, *, model: str | None) -> list[dict[str, Any]]:
    """Returns one entry a module: rank, trained numbers, and sizes in percent of the weight's norm.

    `start_percent` is the change before the first step, `change_percent` the change now. `middle_moved_percent` is how
    far N lies from its start, in percent of the start's norm (IntTune with offset: of W[I, J], the middle it stands
    for); None for slora, whose random start is not kept.
    """
    loaded, _, _ = load_adapter(run, model=model)
    return [_inspected(key, layer, loaded.peft_config["default"]) for key, layer in adapted_layers(loaded)]


def _inspected(key: str, layer: NLoraLayer, config: Any) -> dict[str, Any]:
    name = "default"
    W = layer.original_weight().float().contiguous()
    norm, r, scale = float(W.norm()), layer.r[name], layer.scaling[name]
    product, _ = layer.factors(name)
    start, start_change = None, 0.0
    if config.init == "nystrom_paper":
        raw = slices(W, *leading_landmarks(r), scale=scale)
        start, start_change = raw.N, scale * product_norm(raw.B, raw.N, raw.A) / norm
    elif config.init == "nystrom":
        raw = slices(W, layer.nlora_rows[name], layer.nlora_columns[name], scale)
        start = balanced(raw, norm)[0].N if config.train == "all" else raw.N
    moved = None
    if start is not None:
        still_zero = config.init == "nystrom" and config.train == "middle"
        moved = float((product.N if still_zero else product.N - start).norm() / start.norm())
    return {
        "module": key.removeprefix("base_model.model."),
        "rank": r,
        "trained": sum(table[name].numel() for table in (layer.nlora_A, layer.nlora_N, layer.nlora_B) if name in table),
        "start_percent": 100 * start_change,
        "middle_moved_percent": None if moved is None else 100 * moved,
        "change_percent": 100 * float(layer.get_delta_weight(name).norm()) / norm,
    }


def both_answers(run: Path, *, model: str | None, max_new_tokens: int) -> Callable[[str], dict[str, str]]:
    """Returns a function from a question to the greedy answers {"base": ..., "adapter": ...}."""
    _check_counts(max_new_tokens=max_new_tokens)
    loaded, tokenizer, _ = load_adapter(run, model=model)

    def answer(question: str) -> dict[str, str]:
        row = Row(1, ({"role": "user", "content": question},), "")
        with loaded.disable_adapter():
            base = answer_rows(loaded, tokenizer, [row], max_new_tokens)[0]
        return {"base": base, "adapter": answer_rows(loaded, tokenizer, [row], max_new_tokens)[0]}

    return answer
