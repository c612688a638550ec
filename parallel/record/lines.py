"""The lines of train.log: the header, and Megatron-LM's iteration and validation lines."""

import time
from typing import Any

from models.config import preset
from models.flops import DEFAULT_CONVENTION, tflops_per_gpu
from models.gpus import mfu
from parallel.config.layout import AXES, EXPERT_AXES, FORCED
from parallel.config.library_variables import kept
from parallel.config.run_spec import RunSpec
from parallel.record.facts import tried


def header(spec: RunSpec, facts: dict[str, Any]) -> list[str]:
    """Returns what the log says once, before the first iteration; `facts` is run.json."""
    model, layout = facts["model"], facts["layout"]
    split = (f"{axis} {layout[axis]}" for axis in (*AXES, *EXPERT_AXES) if axis in layout)
    lines = [
        f"run {facts['run']}: engine {spec.engine}, {model['n_params']:,} parameters,"
        f" {' '.join(split)},"
        f" {layout['n_micro']} micro-batches of {layout['micro_batch']},"
        f" seq_len {spec.seq_len}, {spec.precision}",
        tried(facts["versions"]),
        f"kernels: {facts['kernels']}; attention: {facts['attention']}"
        f"; {' '.join(name for name, used in facts['engine'].items() if used is True)}",
        *kept(spec, facts["variables"]),
        _documents(spec, facts["data"]),
        f"watchdog: no progress for {spec.hang_after_s:g} s ends the run",
    ]
    if facts["host"].get("gpus_visible_to_rank_0") == 1 < facts["host"]["ranks_per_node"]:
        lines.append(
            "each rank sees its own GPU alone: between these NCCL may not use NVLink (srun"
            " --gpu-bind=none shows every rank all GPUs of its node)"
        )
    if reason := facts["host"].get("uncompiled"):
        lines.append(f"megatron-core's fused functions are not compiled: {reason}")
    if reason := mfu(0.0, facts["host"]["gpu"], spec.gemm_precision, DEFAULT_CONVENTION).reason:
        lines.append(f"the lines below have no MFU: {reason}")
    if spec.routing == FORCED:
        lines.append(
            "routing: forced, tokens go to the experts by turns: its speed is not that of a router,"
            " and it learns otherwise"
        )
    if spec.deepspeed_config:
        lines.append(
            f"from {spec.deepspeed_config}: all but its optimizer and scheduler; AdamW and the"
            " run's own schedule are the same in every engine"
        )
    usual_size = preset(spec.preset).vocab_size
    if model["vocab_size"] == facts["data"]["vocab_size"] > usual_size:
        lines.append(
            f"vocabulary: the {model['vocab_size']} ids of {spec.data}; preset {spec.preset} has"
            f" {usual_size}"
        )
    if model["padded_vocab"] != model["vocab_size"]:
        lines.append(
            f"vocabulary padded from {model['vocab_size']} to {model['padded_vocab']} rows, a"
            f" multiple of {spec.vocab_multiple} x tp {layout['tp']}; the added logits are masked"
        )
    return lines


def _documents(spec: RunSpec, data: dict[str, Any]) -> str:
    """Returns how many documents there are, and what happens where a sequence crosses a document's
    end."""
    documents = data["documents"]
    if documents == 1:
        return f"documents of {spec.data}: 1, so no sequence crosses a document's end"
    number = "unknown (the token files do not say)" if documents is None else f"{documents:,}"
    crossing = "and attention crosses them too (--reset-at-documents stops that)"
    if spec.reset_at_documents:
        crossing = f"positions start again and attention stops there, at id {spec.end_of_text}"
        crossing += f", as if sequences had {data['attended_seq_len']:.5g} tokens"
    return (
        f"documents of {spec.data}: {number}, in one stream of tokens; sequences cross their ends,"
        f" {crossing}"
    )


def iteration_line(
    spec: RunSpec,
    rows: list[dict[str, Any]],
    skipped: int,
    nans: int,
    gpu: str | None,
    peak_bytes: int,
    attended_seq_len: float | None = None,
) -> str:
    """Returns Megatron-LM's iteration line over `rows`, the steps since the last one. Three fields
    more stand at its end: tokens/s of a GPU, MFU where the peak of `gpu` is known, and the most
    bytes that rank 0 has held (allocated on CUDA, resident on CPU); with experts a fourth before
    them, their load in the last step. attended_seq_len: `batches.attended_seq_len` of documents."""
    last = rows[-1]
    step_s = sum(row["step_s"] for row in rows) / len(rows)
    loss = sum(row["loss"] for row in rows) / len(rows)
    seen = attended_seq_len or spec.seq_len
    tflops = tflops_per_gpu(spec.model, seen, spec.tokens_per_step, step_s, spec.gpus)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    tokens_per_s = spec.tokens_per_step / spec.gpus / step_s
    share, _ = mfu(tflops, gpu, spec.gemm_precision, DEFAULT_CONVENTION)
    used = "" if share is None else f" MFU (%): {share * 100:.1f} |"
    norm = "" if last["grad_norm"] is None else f" grad norm: {last['grad_norm']:.3f} |"
    load = f" expert load: {last['expert_load']:.3f} |" if "expert_load" in last else ""
    return (
        f" [{stamp}] iteration {last['step']:8d}/{spec.steps:8d} |"
        f" consumed samples: {last['step'] * spec.layout.global_batch:12d} |"
        f" elapsed time per iteration (ms): {step_s * 1000:.1f} |"
        f" throughput per GPU (TFLOP/s/GPU): {tflops:.{1 if tflops >= 1 else 5}f} |"
        f" learning rate: {last['lr']:.6E} |"
        f" global batch size: {spec.layout.global_batch:5d} |"
        f" lm loss: {loss:.6E} |"
        f" loss scale: {last['loss_scale']:.1f} |{norm}"
        f" number of skipped iterations: {skipped:3d} |"
        f" number of nan iterations: {nans:3d} |{load}"
        f" tokens per gpu per second: {tokens_per_s:.1f} |{used}"
        f" max memory (GB): {peak_bytes / 1e9:.2f} |"
    )


def validation_line(step: int, loss: float) -> str:
    """Returns Megatron-LM's validation line; like there, the perplexity is capped at e^20."""
    return (
        f" validation loss at iteration {step} |"
        f" lm loss value: {loss:.6E} |"
        f" lm loss PPL: {2.718281828459045 ** min(loss, 20.0):.6E} |"
    )
