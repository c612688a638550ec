"""What is archived of a process's environment and command line: no secret. Torch-free.

    python -m parallel.environment FILE     this process's own, for its owner alone (the scripts do)

Only variables that are known by name are archived: those of launchers, libraries, threads, devices,
modules and Slurm that can change how a run is started or how fast it is. A name cannot say that its
value is no secret, so one that begins like them and is not known here is told without its value. Of
what is known, passwords in addresses and what looks like a token are removed.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from models import errors

HIDDEN = "***"
# By prefix: what follows it in the names that are known. Left out on purpose: SLURM_JWT is a token,
# and SLURM_EXPORT_ENV holds the values of sbatch --export.
KNOWN = {
    "SLURM_": """ARRAY_JOB_ID ARRAY_TASK_COUNT ARRAY_TASK_ID ARRAY_TASK_MAX ARRAY_TASK_MIN
        ARRAY_TASK_STEP CLUSTER_NAME CONF CPUS_ON_NODE CPUS_PER_GPU CPUS_PER_TASK CPU_BIND
        CPU_BIND_LIST CPU_BIND_TYPE CPU_BIND_VERBOSE CPU_FREQ_REQ DISTRIBUTION GPUS GPUS_ON_NODE
        GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ GTIDS HINT JOBID JOB_ACCOUNT
        JOB_CPUS_PER_NODE JOB_DEPENDENCY JOB_END_TIME JOB_GID JOB_GPUS JOB_ID JOB_NAME JOB_NODELIST
        JOB_NUM_NODES JOB_PARTITION JOB_QOS JOB_RESERVATION JOB_START_TIME JOB_UID JOB_USER
        LAUNCH_NODE_IPADDR LOCALID MEM_BIND MEM_BIND_LIST MEM_BIND_TYPE MEM_PER_CPU MEM_PER_GPU
        MEM_PER_NODE MPI_TYPE NETWORK NNODES NODEID NODELIST NODE_ALIASES NPROCS NTASKS
        NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET OVERCOMMIT PRIO_PROCESS
        PROCID PROFILE RESTART_COUNT STEPID STEP_GPUS STEP_ID STEP_LAUNCHER_PORT STEP_NODELIST
        STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE SUBMIT_DIR SUBMIT_HOST TASKS_PER_NODE
        TASK_PID THREADS_PER_CORE TOPOLOGY_ADDR TOPOLOGY_ADDR_PATTERN UMASK WORKING_CLUSTER""",
    "NCCL_": """ALGO BLOCKING_WAIT BUFFSIZE CHECKS_DISABLE CHECK_POINTERS COLLNET_ENABLE
        COMM_BLOCKING CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE
        DEBUG_SUBSYS DMABUF_ENABLE ASYNC_ERROR_HANDLING GDRCOPY_ENABLE GRAPH_DUMP_FILE
        GRAPH_MIXING_SUPPORT
        IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC
        IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS IB_PCI_RELAXED_ORDERING IB_PKEY
        IB_QPS_PER_CONNECTION
        IB_RETRY_CNT IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT
        IB_RETURN_ASYNC_EVENTS IGNORE_CPU_AFFINITY LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LL128_BUFFSIZE
        LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MAX_P2P_NCHANNELS MAX_RINGS
        MIN_CTAS MIN_NCHANNELS MIN_RINGS MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY
        NET_DISABLE_INTRA NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_MERGE_LEVEL
        NET_OVERHEAD NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS
        NVB_DISABLE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS OOB_NET_ENABLE P2P_DIRECT_DISABLE
        P2P_DISABLE P2P_LEVEL P2P_NET_CHUNKSIZE PROFILER_PLUGIN PROTO PXN_DISABLE PXN_C2C RAS_ENABLE
        RUNTIME_CONNECT SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_USE_CUDA_MEMCPY SOCKET_FAMILY
        SOCKET_IFNAME SOCKET_NTHREADS SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_RTO
        SINGLE_RING_THRESHOLD TOPO_DUMP_FILE TOPO_FILE TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE
        UID_STAGGER_THRESHOLD VERSION WIN_ENABLE WORK_ARGS_BYTES WORK_FIFO_BYTES""",
    "GLOO_": "DEVICE_TRANSPORT SOCKET_IFNAME",
    "CUDA_": """ALLOC_CONF AUTO_BOOST CACHE_DISABLE CACHE_MAXSIZE CACHE_PATH DEVICE_MAX_CONNECTIONS
        DEVICE_ORDER DISABLE_PERF_BOOST FORCE_PTX_JIT HOME LAUNCH_BLOCKING LOG_FILE
        MANAGED_FORCE_DEVICE_ALLOC
        MODULE_DATA_LOADING MODULE_LOADING MPS_ACTIVE_THREAD_PERCENTAGE MPS_LOG_DIRECTORY
        MPS_PIPE_DIRECTORY PATH ROOT SCALE_LAUNCH_QUEUES VERSION VISIBLE_DEVICES""",
    "CUDNN_": "CONV_WSCAP_DBG HOME LOGDEST_DBG LOGLEVEL_DBG PATH",
    "CUBLAS_": "WORKSPACE_CONFIG",
    "CUBLASLT_": "LOG_LEVEL WORKSPACE_SIZE",
    "NVIDIA_": """DISABLE_REQUIRE DRIVER_CAPABILITIES PRODUCT_NAME PYTORCH_VERSION REQUIRE_CUDA
        TF32_OVERRIDE VISIBLE_DEVICES""",
    "NVTE_": "ALLOW_NONDETERMINISTIC_ALGO FLASH_ATTN FUSED_ATTN TORCH_COMPILE UNFUSED_ATTN",
    "NSYS_": "PROFILING_SESSION_ID",
    "ROCR_": "VISIBLE_DEVICES",
    "HIP_": "LAUNCH_BLOCKING PATH VISIBLE_DEVICES",
    "HSA_": "ENABLE_SDMA FORCE_FINE_GRAIN_PCIE NO_SCRATCH_RECLAIM OVERRIDE_GFX_VERSION",
    "TORCH_": """ALLOW_TF32_CUBLAS_OVERRIDE BLAS_PREFER_CUBLASLT CPP_LOG_LEVEL CUDA_ARCH_LIST
        DISABLE_ADDR2LINE DISTRIBUTED_DEBUG EXTENSIONS_DIR FR_BUFFER_SIZE FR_DUMP_TEMP_FILE HOME
        LOGS SHOW_CPP_STACKTRACES SYMBOLIZE_MODE NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS
        NCCL_BCAST_UNIQUEID NCCL_BLOCKING_WAIT NCCL_CUDA_EVENT_CACHE NCCL_DEBUG_INFO_TEMP_FILE
        NCCL_DESYNC_DEBUG NCCL_DUMP_ON_TIMEOUT NCCL_ENABLE_MONITORING NCCL_ENABLE_TIMING
        NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY NCCL_NAN_CHECK NCCL_PROPAGATE_ERROR
        NCCL_RETHROW_CUDA_ERRORS NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
        NCCL_TRACE_BUFFER_SIZE NCCL_TRACE_CPP_STACK NCCL_USE_COMM_NONBLOCKING
        NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK NCCL_WAIT_TIMEOUT_DUMP_MILSEC""",
    "TORCHINDUCTOR_": "CACHE_DIR COMPILE_THREADS FX_GRAPH_CACHE MAX_AUTOTUNE",
    "TORCHELASTIC_": """ERROR_FILE MAX_RESTARTS RESTART_COUNT RUN_ID SIGNALS_TO_HANDLE
        USE_AGENT_STORE""",
    "PYTORCH_": "ALLOC_CONF CUDA_ALLOC_CONF HIP_ALLOC_CONF NO_CUDA_MEMORY_CACHING",
    "TRITON_": "CACHE_DIR HOME PTXAS_PATH",
    "DS_": "ACCELERATOR BUILD_OPS IGNORE_CUDA_DETECTION SKIP_CUDA_CHECK",
    "OMP_": """DISPLAY_AFFINITY DISPLAY_ENV DYNAMIC MAX_ACTIVE_LEVELS NESTED NUM_THREADS PLACES
        PROC_BIND SCHEDULE STACKSIZE THREAD_LIMIT WAIT_POLICY""",
    "MKL_": "CBWR DEBUG_CPU_TYPE DOMAIN_NUM_THREADS DYNAMIC ENABLE_INSTRUCTIONS NUM_THREADS",
    "KMP_": "AFFINITY BLOCKTIME DUPLICATE_LIB_OK HW_SUBSET SETTINGS TPAUSE",
    "OPENBLAS_": "CORETYPE NUM_THREADS",
    "ONEDNN_": "DEFAULT_FPMATH_MODE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY VERBOSE",
    "GOMP_": "CPU_AFFINITY SPINCOUNT STACKSIZE",
    "MASTER_": "ADDR PORT",
    "LOCAL_": "RANK WORLD_SIZE",
    "GROUP_": "RANK WORLD_SIZE",
    "ROLE_": "NAME RANK WORLD_SIZE",
    "UCX_": """IB_GPU_DIRECT_RDMA IB_PCI_RELAXED_ORDERING IB_SL IB_TRAFFIC_CLASS LOG_LEVEL
        MAX_RNDV_RAILS MEMTYPE_CACHE NET_DEVICES RNDV_SCHEME RNDV_THRESH TLS""",
    "FI_": """CXI_ATS CXI_DEFAULT_CQ_SIZE CXI_DISABLE_HOST_REGISTER CXI_RDZV_PROTO CXI_RX_MATCH_MODE
        EFA_FORK_SAFE EFA_USE_DEVICE_RDMA EFA_USE_HUGE_PAGE HMEM_CUDA_USE_GDRCOPY LOG_LEVEL
        MR_CACHE_MONITOR PROVIDER""",
    "MALLOC_": "ARENA_MAX CONF MMAP_MAX_ MMAP_THRESHOLD_ TRIM_THRESHOLD_ TOP_PAD_",
    "LD_": "LIBRARY_PATH PRELOAD",
    "CONDA_": "DEFAULT_ENV PREFIX",
}
# Whole names: where things are found, and the scripts' own switches.
OTHERS = """CPATH DIST_DEBUG HOSTNAME LANG LC_ALL LIBRARY_PATH LOADEDMODULES MODULEPATH MODULESHOME
    NCCL_LOGS NSYS PATH PWD PYTHON PYTHONDONTWRITEBYTECODE PYTHONFAULTHANDLER PYTHONHASHSEED
    PYTHONHOME PYTHONNOUSERSITE PYTHONPATH PYTHONUNBUFFERED PYTHONWARNINGS RANK SLURMD_NODENAME
    TMPDIR TORCHRUN_LOGS VIRTUAL_ENV WORLD_SIZE _LMFILES_"""
_NAMES = {prefix + rest for prefix, text in KNOWN.items() for rest in text.split()}
_NAMES |= set(OTHERS.split())
_PREFIXES = tuple(KNOWN)

# What sounds like a secret's name: words that never stand in another one, and short ones alone.
_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|cookie|jwt|bearer|apikey|private"
    r"|(?<![a-z])(?:(?:db|my|pg|ssh)?pass|pwd|pw|pat|keys?|auth|authorization|cert|creds?|pin)(?![a-z])",
    re.IGNORECASE,
)
_COUNTS = re.compile(r"tokens|keys", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d_]*\.?\d+(?:e[-+]?\d+)?[kmgbt]?", re.IGNORECASE)
_VALUES = (
    # A password may hold slashes and an at sign, so all up to the last one goes.
    (re.compile(r"://\S*@"), f"://{HIDDEN}@"),
    (re.compile(r"\b(bearer|basic|negotiate)([ :=]+)\S+", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL), HIDDEN),
    # As they are issued: GitHub, GitLab, Hugging Face, AWS, Slack, Google, many an API, any JWT.
    (
        re.compile(
            r"\b(?:gh[a-z]_\w{16}|github_pat_\w{16}|glpat-[\w-]{12}|hf_[A-Za-z0-9]{20}"
            r"|A[KS]IA[0-9A-Z]{12}|xox[a-z]-[\w-]{8}|AIza[\w-]{20}|sk-[\w-]{20}"
            r"|eyJ[\w-]{8,}\.[\w-]+)[\w.-]*"
        ),
        HIDDEN,
    ),
)
_PAIR = re.compile(r"""([\w.-]+)(=|["']?:\s*["'])([^\s,;&"']+)""")


def is_secret(name: str, value: str) -> bool:
    """Whether a value is to be hidden for its name; a number of tokens or keys is a count."""
    if _NUMBER.fullmatch(value):
        name = _COUNTS.sub("", name)
    return bool(_SECRET_NAME.search(name))


def hide(text: str) -> str:
    """A text without the passwords and tokens that can be told by their own looks."""
    for pattern, without in _VALUES:
        text = pattern.sub(without, text)
    return _PAIR.sub(
        lambda pair: f"{pair[1]}{pair[2]}{HIDDEN}" if is_secret(pair[1], pair[3]) else pair[0],
        text,
    )


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that may be archived, by name; *** for a value that may not be."""
    return {
        name: hide(environment[name]) if name in _NAMES else HIDDEN
        for name in sorted(environment)
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def command_line(words: Sequence[str] | None = None) -> str:
    """The command as typed (default: this process's), without the values of secret flags."""
    if words is None:
        words = [Path(sys.executable).name, *sys.orig_argv[1:]]
    shown, flag = [], ""
    for word in words:
        if flag and not word.startswith("--") and is_secret(flag, word):
            shown.append(HIDDEN)
        else:
            shown.append(hide(word))
        flag = word if word.startswith("-") and "=" not in word else ""
    return " ".join(shown)


def write(path: Path, environment: Mapping[str, str] = os.environ) -> None:
    """The archived variables as NAME=value lines, in a file that its owner alone can read."""
    facts = environment_facts(environment)
    lines = [f"{name}={value}".replace("\n", "\\n") for name, value in facts.items()]
    lines.append(f"# {len(environment) - len(facts)} other variables are not archived")
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # one that was there keeps its mode otherwise
        file.write("\n".join(lines) + "\n")


@errors.command_line("parallel.environment")
def main(argv: list[str] | None = None) -> int:
    parser = errors.Parser(
        prog="python -m parallel.environment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    write(arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
