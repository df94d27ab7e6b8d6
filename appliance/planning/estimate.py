"""Estimates for a planned service: load time, download time and the roofline of its speed."""

from dataclasses import dataclass, replace
from functools import partial

from appliance.hardware.machine import Machine
from appliance.planning.derivation import Account, Step, number
from appliance.planning.memory_budget import MemoryBudget, draft_holdings, draft_pages
from appliance.planning.roofline import Limits, Roofline, limits, roofline, slowest_step_s, step_seconds
from appliance.planning.speculation import DraftSteps, draft_gains
from engine.models.checkpoint import Checkpoint
from engine.models.stored import native_paths

DISK_BYTES_S = 1_000_000_000  # assumed: local disk of a cloud host; the page cache is several times as fast
NETWORK_BYTES_S = 125_000_000  # assumed: 1 Gbit/s


@dataclass(frozen=True)
class Estimate:
    """Estimates of load time and speed."""

    file_bytes: int  # bytes of the checkpoint's weight files
    load_s: float  # seconds to read them from a disk
    download_s: float  # seconds to download them over a network
    roofline: Roofline | None  # None for a GPU that is not in the table of devices
    slowest_step_s: float  # 0 without a roofline
    accounts: tuple[Account, ...]
    limits: Limits | None = None  # throughput of the hardware of one rank


def estimate(
    checkpoint: Checkpoint,
    machine: Machine,
    budget: MemoryBudget,
    *,
    threads: int,
    engines: int,
    max_context: int,
    most_rows: int,
) -> Estimate:
    """Return the estimates. `most_rows` is the largest decode batch that fits."""
    size = sum(info.bytes for info in checkpoint.tensors.values())
    kind = _multiplied(checkpoint, budget)
    limit = limits(
        machine,
        device=budget.view.device,
        dtype=budget.view.activations,
        weights=kind,
        threads=threads,
        engines=engines,
        ranks=budget.view.tensor,
    )
    made, slowest_s = None, 0.0
    # Towers alone have no weights that each token is multiplied by.
    if limit is not None and not checkpoint.model.encoder_only:
        made = roofline(
            checkpoint.model,
            [one for one in budget.holdings if one.part != "draft"],
            budget.pages,
            limit,
            step_tokens=budget.size.tokens,
            length=max_context,
            most=most_rows,
            media_tokens=budget.size.media_tokens,
        )
        if budget.size.draft_rows:
            made = _with_drafts(checkpoint, budget, made, limit)
        slowest_s = slowest_step_s(
            checkpoint.model, made, limit, step_tokens=budget.size.tokens, max_context=max_context
        )
    return Estimate(
        file_bytes=size,
        load_s=size / DISK_BYTES_S,
        download_s=size / NETWORK_BYTES_S,
        roofline=made,
        slowest_step_s=slowest_s,
        accounts=(
            _takes("load", "seconds to read the weight files from a disk", size, DISK_BYTES_S),
            _takes("download", "seconds to download the weight files", size, NETWORK_BYTES_S),
            *(() if made is None else made.accounts),
        ),
        limits=limit,
    )


def _with_drafts(checkpoint: Checkpoint, budget: MemoryBudget, made: Roofline, limit: Limits) -> Roofline:
    """Add the expected gain by drafts of the largest length."""
    own = [one for one in budget.holdings if one.part != "draft"]
    step = partial(step_seconds, checkpoint.model, own, budget.pages, limit, length=made.length)
    draft, tokens, steps, passing = checkpoint.draft, budget.size.draft_rows, [], None
    if draft is not None:  # rank 0 computes it; each of several heads is like the first
        first = replace(checkpoint, draft=replace(draft, draft=None))
        read, (pages,) = draft_holdings(first, budget.view), draft_pages(first, budget.view)
        passing = partial(step_seconds, draft.model, read, pages, replace(limit, ranks=1), length=made.length)
    for one in made.decode:
        passed = None if passing is None else passing(rows=one.rows, tokens=1)
        steps.append(DraftSteps(step(rows=one.rows, tokens=1), step(rows=one.rows, tokens=1 + tokens), passed))
    gains, accounts = draft_gains(steps, tokens)
    return replace(made, drafts=gains, accounts=(*made.accounts, *accounts))


def _takes(key: str, meaning: str, size: int, rate: int) -> Account:
    step = Step(f"at {number(rate / 1e9)} GB/s, assumed", f"{number(size)} / {number(rate)}", size / rate, "s", False)
    return Account(key, meaning, (step,), "s", is_sum=False)


def _multiplied(checkpoint: Checkpoint, budget: MemoryBudget) -> str:
    """Return the data type of most matrix products: fp8 or int8 if the weights have it, else bfloat16 or float32.

    On a GPU, fp8 is returned if any matrix is stored in it. For compiled kernels, int8 is returned if the MLP or expert
    matrices are integers.
    """
    if any(one.what == "fp8" for one in budget.holdings):
        return "fp8"
    whole = budget.compiled and any(
        one.what.startswith("int") for one in budget.holdings if one.part in ("mlp", "experts")
    )
    return (
        "int8"
        if whole or (budget.compiled and native_paths(checkpoint.model, checkpoint.quantization, "compiled"))
        else ("bfloat16" if budget.view.multiplies_bf16 else "float32")
    )
