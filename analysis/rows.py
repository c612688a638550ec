"""Rows of published measurements (a CSV with the columns of logs/published) as `Columns`.

What a row leaves out is derived where an identity gives it (gas, dp, layers from parameters), else
taken as usual where that is harmless (vocabulary 51,200), else the row is left out with a reason.
"""

import csv
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from analysis.collectives import cluster_key
from analysis.records import Record
from analysis.timemodel import Machine, machine_of
from models.config import GPTConfig
from models.errors import UsageError
from models.files import check_ends
from models.flops import sc21
from models.hardware import planning_gpu
from parallel.columns import Columns, columns
from parallel.layout import OFFLOAD, RECOMPUTE

NEEDED = ("gpu_type", "gpus", "hidden", "tp", "pp", "micro_batch", "seconds_per_iteration")
WARM_UP = re.compile(r"first iteration|\bwarm-?up iteration", re.IGNORECASE)
COUNTS = (
    *("gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"),
    *("tp", "pp", "vpp", "dp", "cp", "micro_batch", "global_batch", "gas"),
)
FP8 = re.compile(r"fp8|float8|e4m3|e5m2")
BF16_GRADIENTS = re.compile(r"gradients in bf16", re.IGNORECASE)
SLOW = 1.3  # a row this much slower than one that had no less to do met something we do not model


@dataclass
class Rows:
    """The rows that can be modelled, and why the others cannot.

    measured: seconds per step, nan where there is none. memory_gb likewise. status: ok, OOM ...
    crowd: how many threads shared a core. fit: may be learnt from (not marked LINT).
    model: (layers, hidden) of each row, for splits.
    """

    ids: list[str]
    x: Columns
    machine: Machine
    crowd: np.ndarray
    measured: np.ndarray
    memory_gb: np.ndarray
    gpu_memory_gb: np.ndarray
    status: list[str]
    fit: np.ndarray
    guessed: np.ndarray
    steady: np.ndarray
    model: list[tuple[int, int]]
    engine: list[str]
    cluster: list[str]
    gpu: list[str]
    cluster_key: list[str]
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def take(self, index: np.ndarray) -> "Rows":
        """The rows that an index chooses."""
        kept: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "left_out":
                kept[f.name] = value
            elif isinstance(value, list):
                kept[f.name] = [value[i] for i in index]
            else:
                kept[f.name] = value.take(index)
        return Rows(**kept)

    def layout(self, i: int) -> dict[str, float]:
        """The split of row i, for a table."""
        split = {name: int(getattr(self.x, name)[i]) for name in ("tp", "pp", "vpp", "dp")}
        return split | {"micro_batch": float(self.x.micro_batch[i])}

    def key(self, i: int) -> tuple:
        """Equal for rows that are repeats of one run."""
        numbers = tuple(float(getattr(self.x, f.name)[i]) for f in fields(Columns))
        linear = float(np.ravel(self.machine.linear)[i])
        return (*numbers, linear, self.cluster_key[i], self.status[i])


def _number(row: dict[str, str], key: str) -> float | None:
    text = (row.get(key) or "").strip()
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _recompute(row: dict[str, str]) -> int:
    text = (row.get("act_recompute") or "").lower()
    if text in ("none", "selective", "full"):
        return ("none", "selective", "full").index(text)
    if text in ("uniform", "block"):  # Megatron's ways of full recomputation
        return 2
    counted = re.search(r"recomput|8\s*PT|96\s*\*?\s*B|eq\.?3", row.get("tflops_formula") or "")
    return 2 if counted else 0


def _derive(row: dict[str, str]) -> dict:
    """The settings of one row.

    Raises:
        ValueError: what is missing.
    """
    for key in COUNTS:
        value = _number(row, key)
        if value is not None and not (0 <= value < 2**40 and value % 1 == 0):
            raise ValueError(f"{key} cannot be {value:g}")
    if (_number(row, "zero_stage") or 0) not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage cannot be {row['zero_stage']}")
    known = {k: _number(row, k) for k in (*NEEDED, "layers", "heads", "ffn", "vocab", "seq")}
    for key in ("gpus", "tp", "pp"):
        if not known[key]:
            raise ValueError(f"no {key}")
    seq = known["seq"] or 2048.0
    vocab = known["vocab"] or 51200.0
    params, hidden, layers = _number(row, "params_b"), known["hidden"], known["layers"]
    pp = known["pp"]
    if not (hidden or params) or not (layers or params):
        raise ValueError("no model sizes (hidden, layers or params_b)")
    inferred = not hidden
    if not hidden:  # GPTs of this size are about 128 times as wide as deep
        hidden = 128.0 * round((params * 1e9 / 12 / 128**2 * 1.0) ** (1 / 3))
    if not layers:
        layers = round((params * 1e9 - vocab * hidden) / (12 * hidden**2) / pp) * pp
        layers = max(layers, pp)
    heads = known["heads"] or max(1, round(hidden / 128))
    gpus = known["gpus"]
    cp = _number(row, "cp") or 1.0
    dp = gpus / (known["tp"] * pp * cp)
    if dp < 1 or dp % 1:
        raise ValueError(
            f"gpus {gpus:g} is no multiple of tp {known['tp']:g} x pp {pp:g} x cp {cp:g}"
        )
    batch, gas = _number(row, "global_batch"), _number(row, "gas")
    micro = known["micro_batch"]
    if not micro and batch and gas:
        micro = batch / gas / dp
    if not micro and batch and pp == 1:  # no accumulation is stated
        micro = batch / dp
    micro = micro or 1.0
    if not batch and not gas:
        if pp == 1:
            gas = 1.0
        else:
            raise ValueError("no global_batch and no gas")
    n_micro = batch / micro / dp if batch else gas
    n_micro = max(1.0, round(n_micro))
    # A context-parallel group shares its sequences and reduces its gradients as data-parallel ranks
    # do: cp times as many of those, each with 1/cp of a micro-batch (attention of all of s, too).
    dp, micro = dp * cp, micro / cp
    engine = row.get("engine") or ""
    precision = (row.get("precision") or "fp16").lower()
    width = 4 if re.search(r"fp32|float32|tf32", precision) else 2
    glu = str(row.get("glu") or "").strip().lower() in ("1", "1.0", "true", "yes", "swiglu")
    modern = bool(re.search(r"H100|H200|H800|B200|MI3", row.get("gpu_type") or "")) or bool(
        re.search(r"torchtitan|nanotron|picotron|nemo|core|flash", engine, re.IGNORECASE)
    )
    ds = bool(re.search(r"deepspeed", engine, re.IGNORECASE))
    fp8 = bool(FP8.search(precision))
    if fp8 and "fp8" not in planning_gpu(row.get("gpu_type")).peaks:
        raise ValueError(f"{row.get('gpu_type')} has no fp8")
    grad_width = 4 if fp8 or re.search("bf16|bfloat16", precision) else width  # accumulated so
    if BF16_GRADIENTS.search(row.get("notes") or ""):
        grad_width = 2
    offload = (row.get("offload") or "none").lower()
    off = 0 if offload in ("", "none", "no", "0") else 2 if "param" in offload else 1
    zero = _number(row, "zero_stage")
    if zero is None and re.search(r"Megatron-DeepSpeed", engine):
        zero = 1.0  # what its launch scripts set; 1.3B would not fit 16 GB without
    if layers + 2 < pp:  # embedding and logits may each have a stage (BLOOM)
        raise ValueError(f"{layers:g} layers cannot fill {pp:g} stages")
    if (zero or 0) > 1 and pp > 1:
        raise ValueError(f"ZeRO-{zero:g} cannot run with {pp:g} pipeline stages")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _number(row, "kv_heads") or heads,
        "ffn": known["ffn"] or 4 * hidden,
        "glu": glu,
        "vocab": vocab,
        "seq": seq,
        "tp": known["tp"],
        "pp": pp,
        "vpp": _number(row, "vpp") or 1,
        "dp": dp,
        "micro_batch": micro,
        "n_micro": n_micro,
        "zero_stage": zero or 0,
        "recompute": _recompute(row),
        "sequence_parallel": (row.get("seq_parallel") or "").strip().lower()
        in ("1", "1.0", "true", "yes"),
        "offload": off,
        "width": width,
        "grad_width": grad_width,
        "flash": modern,
        "gpus_per_node": _number(row, "gpus_per_node") or 8,
        "deepspeed": ds,
        "_fp8": fp8,
        "_inferred": inferred,
    }


def _seconds(row: dict[str, str], s: dict) -> float:
    """Published seconds, or what the published tokens/s or TFLOP/s say under their formula."""
    seconds = _number(row, "seconds_per_iteration")
    if seconds:
        return seconds
    sequences = s["dp"] * s["micro_batch"] * s["n_micro"]
    tokens = sequences * s["seq"]
    if rate := _number(row, "tokens_per_s"):
        return tokens / rate
    rate, formula = _number(row, "tflops_per_gpu"), row.get("tflops_formula") or ""
    gpus = s["dp"] * s["tp"] * s["pp"]
    if rate and re.search(r"96|eq\.?3", formula):
        shape = GPTConfig(int(s["layers"]), int(s["hidden"]), 1, int(s["vocab"]), int(s["seq"]))
        return sc21(shape, shape.max_seq_len, recompute=True) * tokens / (rate * 1e12 * gpus)
    params = _number(row, "params_b")
    if rate and params and (found := re.search(r"([68])\s*PT", formula)):
        return int(found[1]) * params * 1e9 * tokens / (rate * 1e12 * gpus)
    return math.nan


def read_rows(paths: list[Path]) -> Rows:
    """Every row of the files that can be modelled.

    Raises:
        UsageError: unreadable, or a column is missing, or no row is usable.
    """
    found: list[tuple[dict, dict, float]] = []
    left_out: list[tuple[str, str]] = []
    for path in paths:
        try:
            with open(check_ends(path), newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                names = set(reader.fieldnames or ())
                if missing := [n for n in NEEDED if n not in names]:
                    raise UsageError(f"{path}: missing columns: {', '.join(missing)}")
                table = list(reader)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"{path}: not CSV: {error}") from error
        for number, row in enumerate(table, start=2):
            name = row.get("id") or f"{Path(path).stem}:{number}"
            row["id"] = name
            try:
                settings = _derive(row)
                machine_of(row.get("gpu_type"), row.get("cluster"), 8)
            except ValueError as error:
                left_out.append((name, str(error)))
                continue
            found.append((row, settings, _seconds(row, settings)))
    if not found:
        raise UsageError(
            f"{', '.join(map(str, paths))}: no row can be modelled"
            + (f" ({left_out[0][0]}: {left_out[0][1]})" if left_out else "")
        )
    settings = {k: np.array([s[k] for _, s, _ in found]) for k in found[0][1] if k[0] != "_"}
    machines = [
        machine_of(r.get("gpu_type"), r.get("cluster"), s["gpus_per_node"], s["width"], s["_fp8"])
        for r, s, _ in found
    ]
    status = [(r.get("status") or "ok").strip() for r, _, _ in found]
    status = ["ok" if s.lower() == "ok" else s for s in status]
    ok = np.array([s == "ok" for s in status])
    return Rows(
        ids=[r["id"] for r, _, _ in found],
        x=columns(**settings),
        machine=Machine.stack(machines),
        crowd=np.ones(len(found)),
        measured=np.where(ok, np.array([t for _, _, t in found]), np.nan),
        memory_gb=np.array([_number(r, "mem_gb") or math.nan for r, _, _ in found]),
        gpu_memory_gb=np.array([_number(r, "gpu_mem_gb") or math.nan for r, _, _ in found]),
        status=status,
        fit=np.array(["LINT" not in (r.get("notes") or "") for r, _, _ in found]),
        steady=np.array([not WARM_UP.search(r.get("notes") or "") for r, _, _ in found]),
        guessed=np.array([s["_inferred"] for _, s, _ in found]),
        model=[(int(s["layers"]), int(s["hidden"])) for _, s, _ in found],
        engine=[r.get("engine") or "" for r, _, _ in found],
        cluster=[r.get("cluster") or "" for r, _, _ in found],
        gpu=[r.get("gpu_type") or "" for r, _, _ in found],
        cluster_key=[cluster_key(r.get("gpu_type"), r.get("cluster")) for r, _, _ in found],
        left_out=left_out,
    )


def healthy(rows: Rows) -> np.ndarray:
    """False for the runs that met a slow network, bool (n,).

    Only on a cluster whose own repeats prove such days: two identical runs 1.3 times apart (Jean
    Zay's V100 nodes: 129 and 217 s). There a run is slow when one with no less to do was 1.3 times
    as fast: on one split of one model, time only grows with the micro-batch and with their number;
    and t / (b (m + (pp - 1) / vpp)), the time of a sequence and pipeline slot, with neither.
    """
    x, t = rows.x, rows.measured
    slot = t / (x.micro_batch * (x.n_micro + (x.pp - 1) / x.vpp))
    groups: dict[tuple, list[int]] = {}
    same: dict[tuple, list[int]] = {}
    for i in range(len(t)):
        if np.isfinite(t[i]) and rows.fit[i] and rows.steady[i]:
            key = (*rows.model[i], int(x.heads[i]), int(x.seq[i]), int(x.tp[i]), int(x.pp[i]))
            key += (int(x.vpp[i]), int(x.dp[i]), int(x.zero_stage[i]) == 3, int(x.recompute[i]))
            key += (float(rows.machine.linear[i]), rows.cluster[i])
            groups.setdefault(key, []).append(i)
            same.setdefault(rows.key(i), []).append(i)
    unsteady = {rows.cluster[g[0]] for g in same.values() if t[g].max() > SLOW * t[g].min()}
    good = np.ones(len(t), bool)
    for group in groups.values():
        if rows.cluster[group[0]] not in unsteady:
            continue
        for i in group:
            for j in group:
                more = x.micro_batch[j] >= x.micro_batch[i] and x.n_micro[j] >= x.n_micro[i]
                less = x.micro_batch[j] <= x.micro_batch[i] and x.n_micro[j] <= x.n_micro[i]
                if (more and t[i] > SLOW * t[j]) or (less and slot[i] > SLOW * slot[j]):
                    good[i] = False
    return good


def settings_of(record: Record, cpu: bool = False) -> dict[str, Any]:
    """A run's settings as `columns` takes them.

    Raises:
        ValueError: a fact that the model needs is not in the log.
    """
    model = record.model
    if missing := [k for k in ("n_layer", "hidden", "n_head") if not model.get(k)]:
        raise ValueError(f"no {', '.join(missing)}")
    if not (record.gpus and record.global_batch and record.seq_len):
        raise ValueError("no number of GPUs, global batch or sequence length")
    tp, pp = record.tp or 1, record.pp or 1
    dp = record.dp or max(1, record.gpus // (tp * pp))
    micro = record.micro_batch or 1
    if not (precision := record.precision):
        raise ValueError("no precision")
    width = 4 if precision == "fp32" else 2
    layout = (record.extra.get("facts") or {}).get("layout") or {}
    engine = (record.engine or "").lower()
    settings = {
        "layers": model["n_layer"],
        "hidden": model["hidden"],
        "heads": model["n_head"],
        "ffn": model.get("ffn_hidden") or 4 * model["hidden"],
        "vocab": model.get("vocab_size") or 51200,
        "seq": record.seq_len,
        "tp": tp,
        "pp": pp,
        "vpp": record.vpp or 1,
        "dp": dp,
        "micro_batch": micro,
        "n_micro": max(1, round(record.global_batch / micro / dp)),
        "zero_stage": record.zero_stage or 0,
        "recompute": RECOMPUTE.index(record.recompute or "none"),
        "sequence_parallel": bool(layout.get("sequence_parallel")),
        "offload": OFFLOAD.index(layout.get("offload") or "none"),
        "width": width,
        "grad_width": 4 if precision in ("bf16", "fp8") else width,
        "flash": False,
        "gpus_per_node": 8,
        "deepspeed": "deepspeed" in engine,
    }
    return settings | host_columns(engine, tp, record.gpus) if cpu else settings


def host_columns(engine: Any, tp: Any, gpus: Any) -> dict[str, Any]:
    """The columns that only a fit of this machine's own runs sets; scalars or arrays.

    Its ranks share one node, its attention is fused, and those that run megatron-core's layers,
    rather than plain ones, are the slower engines: the factor `engine` of the fit.
    """
    engine, tp = np.asarray(engine), np.asarray(tp)
    core = np.isin(engine, ("megatron", "deepspeed_pipe"))
    core = core | ((engine == "deepspeed_zero") & (tp > 1))
    return {"flash": True, "gpus_per_node": gpus, "slower": core}


def crowding(record: Record) -> float:
    """Ranks' threads per core where there are more of them than cores, else 1."""
    facts = record.extra.get("facts") or {}
    host, spec = facts.get("host") or {}, facts.get("spec") or {}
    ranks = host.get("ranks_per_node") or record.gpus or 1
    if host.get("gpu") or not host.get("cores"):
        return 1.0
    return max(1.0, ranks * (spec.get("threads") or 1) / host["cores"])


def rows_of_runs(paths: list[Path], cpu: bool = True) -> Rows:
    """Run folders and logs with a steady time, as rows of this machine.

    Raises:
        UsageError: nothing with a time.
    """
    from analysis.load import load, name_of
    from analysis.quality import timed

    records, refused = load(paths)
    found, left_out = [], [(line.split(":")[0], line) for line in refused]
    for record in records:
        time = timed(record)
        try:
            if time is None or not time.step_s > 0:
                raise ValueError("no steady step time")
            found.append((name_of(record), settings_of(record, cpu), time.step_s, record))
        except ValueError as error:
            left_out.append((name_of(record), str(error)))
    if not found:
        raise UsageError("no run with a time and all its settings")
    n = len(found)
    nan = np.full(n, np.nan)
    machine = Machine(1e12, 1e10, 1e9, 1e9, False).spread(n)
    return Rows(
        ids=[name for name, *_ in found],
        x=columns(**{k: np.array([s[k] for _, s, *_ in found]) for k in found[0][1]}),
        machine=machine,
        measured=np.array([t for *_, t, _ in found]),
        crowd=np.array([crowding(r) for *_, r in found]),
        memory_gb=nan,
        gpu_memory_gb=nan,
        status=["ok"] * n,
        fit=np.ones(n, bool),
        guessed=np.zeros(n, bool),
        steady=np.ones(n, bool),
        model=[(s["layers"], s["hidden"]) for _, s, *_ in found],
        engine=[r.engine or "" for *_, r in found],
        cluster=["here"] * n,
        gpu=[r.gpu_type or "" for *_, r in found],
        cluster_key=["here"] * n,
        left_out=left_out,
    )
