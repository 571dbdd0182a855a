"""Results of other programs as an NLoRA adapter (init = slora): a LoRA, a PiSSA or OLoRA, a fine-tuned model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from mezzo.core import models
from mezzo.core.errors import UserError
from mezzo.core.fetch import first_line
from mezzo.core.files import atomic, check_free
from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.factors import Factors
from mezzo.nlora.folder import finish_folder
from mezzo.nlora.lora import Lora, moved, read_lora, shapes_in, tensor_in

Rank = Literal["exact", "same"]
Progress = Callable[[int, int], None]
"""Called with (modules done, modules in all)."""

Changes = dict[str, tuple[Factors, float]]
"""Module name -> its change in float32 with scale 1, and the relative error of that change (Frobenius norm)."""


def convert(
    source: Path,
    out: Path,
    *,
    base: str | None = None,
    initial: Path | None = None,
    r: int | None = None,
    rank: Rank = "exact",
    ignore_other: bool = False,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Writes an NLoRA adapter folder with the same change of the base's weights as `source`.

    Args:
        source: a LoRA adapter folder of PEFT, or a fine-tuned or merged model folder.
        out: folder to write; must not exist or be empty.
        base: the base model. Needed for a model; for an adapter it is checked against, and its hash is recorded.
        initial: for PiSSA, OLoRA, CorDA, LoRA-GA: the adapter as it was saved at step 0.
        r: for a model: the rank to keep.
        rank: with `initial`, where the exact rank is 2r: "exact", or "same" for the best r.
        ignore_other: for a model: leave out changed tensors that are no linear weights.
        progress: called after each module.

    Returns:
        {"modules": count, "rank": largest rank, "relative_error": largest of all modules, "worst_module": its name,
        "errors": {module: relative error}}, and for a model "left_out": changed tensors that were left out.

    Raises:
        UserError: something that cannot be converted as it stands; names the file and the tensor or setting.
    """
    check_free(out)
    if (source / "manifest.json").is_file():
        todo = "Its adapter needs no conversion: it lies in its folder `adapter`"
        raise UserError("is a run of `mezzo nlora train`", where=str(source), todo=todo)
    if (source / "adapter_config.json").is_file():
        if initial is None and rank != "exact":
            raise UserError("a LoRA keeps its rank", where="--rank", todo="Leave it out; it is for --initial")
        if r is not None or ignore_other:
            raise UserError("is an adapter", where=str(source), todo="--r and --ignore-other are for a model folder")
        lora = read_lora(source)
        start = _read_start(lora, initial)
        named = lora.config.get("base_model_name_or_path")
        files = models.find(base) if base else _base_at_hand(named)
        if base and files:
            _check_fits(lora, models.skeleton(files))
        changes = _of_adapter(lora, start, rank, progress)
        name = str(files.folder) if base and files else named
        _write(out, changes, files, name, lora.config.get("task_type"))
        return _summary(changes)
    if (source / "config.json").is_file():
        if initial is not None or rank != "exact":
            raise UserError("is a model", where=str(source), todo="--initial and --rank are for an adapter folder")
        if base is None or r is None:
            raise UserError("is a model", where=str(source), todo="Name its base with --base, and a rank with --r")
        if r < 1:
            raise UserError(f"{r} is no rank", where="r", todo="Give a whole number of 1 or more")
        files = models.find(base)
        changes, left_out = _of_model(source, files, r, ignore_other, progress)
        _write(out, changes, files, str(files.folder), "CAUSAL_LM")
        return _summary(changes) | {"left_out": left_out}
    raise UserError(
        "holds neither adapter_config.json nor config.json",
        where=str(source),
        todo="Name a LoRA adapter folder of PEFT, or a model folder",
    )


def orthonormal(product: Factors) -> Factors:
    """Returns the same product with scale 1, B's columns and A's rows orthonormal, and a rank that fits the weight.

    With B = Q_b R_b and A^T = Q_a R_a it is Q_b (s R_b N R_a^T) Q_a^T. Where the rank is above the smaller side the
    middle is not square, and its SVD makes it so without loss. Cost: O((out + in) r^2) time.
    """
    Q_b, R_b = torch.linalg.qr(product.B)
    Q_a, R_a = torch.linalg.qr(product.A.T)
    core = product.scale * R_b @ product.N @ R_a.T
    if core.shape[0] == core.shape[1]:
        return Factors(Q_b, core, Q_a.T)
    U, S, Vh = torch.linalg.svd(core, full_matrices=False)
    return Factors(Q_b @ U, torch.diag(S), Vh @ Q_a.T)


def reduced(product: Factors, rank: int | None = None) -> tuple[Factors, float]:
    """Returns a float64 product in float32 with orthonormal B and A, and the relative error of that.

    Args:
        product: the change, in float64.
        rank: the best factors of this rank; None: exact.
    """
    whole = orthonormal(product)
    kept = whole if rank is None or rank >= whole.rank else orthonormal(whole.truncate(rank)[0])
    stored = Factors(kept.B.float(), kept.N.float(), kept.A.float())
    size = float(whole.N.norm())
    missed = float(orthonormal(whole.minus(stored)).N.norm())
    return stored, missed / size if size > 0 else 0.0


def nearest(D: Tensor, rank: int) -> tuple[Factors, float]:
    """Returns the best factors of a float64 change D (out x in), in float32, and their relative error.

    The singular vectors of D's smaller side come from its Gram matrix, D is projected onto them. What the squaring
    loses lies 1e-8 below the norm of D, under float32's rounding. Cost: O(out in m), m the smaller side.
    """
    wide = D if D.shape[0] <= D.shape[1] else D.T
    k = min(rank, wide.shape[0])
    U = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -k:]
    one = torch.eye(k, dtype=D.dtype)
    product = Factors(U, one, U.T @ D) if wide is D else Factors(D @ U, one, U.T)
    stored, _ = reduced(product)
    missed = D - stored.B.to(D) @ stored.N.to(D) @ stored.A.to(D)
    return stored, float(missed.norm() / D.norm())


def _read_start(lora: Lora, initial: Path | None) -> Lora | None:
    start = lora.config.get("init_lora_weights", True)
    if initial is None:
        if moved(start):
            raise UserError(
                f"init_lora_weights = {start!r}: this adapter belongs to a base that was changed at step 0",
                where=str(lora.folder),
                todo="Name the adapter as it was saved at step 0 with --initial; or merge it into its base with PEFT, "
                "then convert the merged model with --base and --r",
            )
        return None
    if not (initial / "adapter_config.json").is_file():
        raise UserError("holds no adapter", where=str(initial), todo="Name the adapter saved at step 0")
    first = read_lora(initial)
    for module in sorted(lora.shapes.keys() | first.shapes.keys()):
        here, there = ((x.shapes.get(module), x.ranks.get(module), x.scales.get(module)) for x in (lora, first))
        if here != there:
            raise UserError(
                f"{module} has other sizes, rank or scale than in {lora.folder}",
                where=str(initial),
                todo="Name the adapter that was saved at step 0 of this very run",
            )
    return first


def _base_at_hand(name: Any) -> models.ModelFiles | None:
    """Returns the base that an adapter names where it lies on this disk; the network is not asked."""
    try:
        here = isinstance(name, str) and (name == models.DEFAULT or Path(name).is_dir())
        return models.find(name) if here else None
    except (UserError, OSError, ValueError):
        return None


def _check_fits(lora: Lora, skeleton: Any) -> None:
    modules = dict(skeleton.named_modules())
    todo = "Name the base this adapter was made for"
    for module, (rows, columns) in lora.shapes.items():
        weight = getattr(modules.get(module), "weight", None)
        if weight is None:
            raise UserError("the base has no such layer", where=module, todo=todo)
        found = list(weight.shape)[:: -1 if lora.config.get("fan_in_fan_out") else 1]
        if found != [rows, columns]:
            raise UserError(f"the adapter is for a weight of {[rows, columns]}, not {found}", where=module, todo=todo)


def _of_adapter(lora: Lora, start: Lora | None, rank: Rank, progress: Progress) -> Changes:
    changes: Changes = {}
    for done, module in enumerate(lora.shapes, 1):
        product = lora.product(module)
        if start is not None:
            product = product.minus(start.product(module))
        limit = lora.ranks[module] if rank == "same" else None
        changes[module] = _finite(module, *reduced(product, limit))
        progress(done, len(lora.shapes))
    return changes


def _of_model(
    source: Path, files: models.ModelFiles, r: int, ignore_other: bool, progress: Progress
) -> tuple[Changes, list[str]]:
    ours, theirs = _places(files.folder), _places(source)
    linear = {
        f"{name}.weight": isinstance(module, Conv1D)  # whose weight is in x out
        for name, module in models.skeleton(files).named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
    }
    other = sorted(ours.keys() ^ theirs.keys())
    changes: Changes = {}
    shared = sorted(ours.keys() & theirs.keys())
    for done, name in enumerate(shared, 1):
        D = _difference(name, theirs[name], ours[name])
        if D is not None and name in linear:
            module = name.removesuffix(".weight")
            changes[module] = _finite(module, *nearest(D.T if linear[name] else D, r))
        elif D is not None:
            other.append(name)
        progress(done, len(shared))
    if other and not ignore_other:
        raise UserError(
            f"{len(other)} changed tensors are no linear weights ({', '.join(other[:4])}{', ...' * (len(other) > 4)})",
            where=str(source),
            todo="Leave them out with --ignore-other; the result is then another model",
        )
    if not changes:
        raise UserError(f"no linear weight differs from {files.name}", where=str(source), todo="Name another model")
    return changes, other


def _places(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    return {name: (file, shape) for file in models.shards(folder) for name, shape in shapes_in(file).items()}


def _difference(name: str, new: tuple[Path, tuple[int, ...]], old: tuple[Path, tuple[int, ...]]) -> Tensor | None:
    """Returns new minus old in float64, or None where they are equal. Only these two tensors are read."""
    if new[1] != old[1]:
        raise UserError(
            f"its shape is {list(new[1])}, but {list(old[1])} in the base",
            where=f"{new[0]}, {name}",
            todo="Name the base of this model",
        )
    W1, W0 = tensor_in(new[0], name), tensor_in(old[0], name)
    if W1.dtype == W0.dtype and torch.equal(W1, W0):
        return None  # most tensors of a model, without a copy
    D = W1.double().sub_(W0)
    return D if bool(D.any()) else None


def _finite(module: str, change: Factors, error: float) -> tuple[Factors, float]:
    if not (math.isfinite(error) and bool(torch.isfinite(change.N).all())):
        raise UserError("the change is too large for float32", where=module, todo="Use an earlier checkpoint")
    return change, error


def _write(out: Path, changes: Changes, files: models.ModelFiles | None, name: Any, task_type: str | None) -> None:
    ranks = {module: change.rank for module, (change, _) in changes.items()}
    largest = max(ranks.values())
    odd = {f"^{re.escape(module)}": rank for module, rank in ranks.items() if rank != largest}
    config = NLoraConfig(
        r=largest, lora_alpha=float(largest), target_modules=sorted(ranks), init="slora", train="all",
        rank_pattern=odd, alpha_pattern={key: float(rank) for key, rank in odd.items()}, task_type=task_type,
        inference_mode=True, base_model_name_or_path=name, base_sha256=files.sha256 if files else None,
    )  # fmt: skip
    tensors = {
        f"base_model.model.{module}.nlora_{side}": getattr(change, side).contiguous()
        for module, (change, _) in changes.items()
        for side in "BNA"
    }
    with atomic(out) as temporary:
        temporary.mkdir()
        try:
            save_file(tensors, temporary / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk comes as this, not as OSError
            raise UserError(
                f"cannot be written ({first_line(error)})", where=str(out), todo="Free some space"
            ) from error
        config.save_pretrained(str(temporary))
        finish_folder(temporary)


def _summary(changes: Changes) -> dict[str, Any]:
    errors = {module: error for module, (_, error) in changes.items()}
    worst = max(errors, key=errors.__getitem__)
    return {
        "modules": len(changes),
        "rank": max(change.rank for change, _ in changes.values()),
        "relative_error": errors[worst],
        "worst_module": worst,
        "errors": errors,
    }
