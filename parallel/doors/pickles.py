"""The one reader of pickles: it makes tensors, numbers, texts and tables, and runs nothing.

A class that it does not know is refused by name. Classes of megatron-core and of torch's
checkpoint tables become an `Inert`, which keeps what was stored in it.
"""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch

from base.errors import UsageError
from base.storage import write_blocks


class Inert:
    """Stands for a class of another library: its arguments, and its state as attributes."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


# What stands in tables beside tensors and says nothing about the training.
_INERT = ("megatron.", "nemo.", "deepspeed.", "nvidia_resiliency_ext.", "torch.distributed.")
_INERT += ("pathlib.", "signal.", "numpy.")
_KNOWN: dict[str, Any] = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": dict,
    "collections.defaultdict": lambda *_: {},
    "argparse.Namespace": Inert,
    "types.SimpleNamespace": Inert,
    "builtins.getattr": Inert,  # how Python 3.11 names a member of an enumeration
    "_io.BytesIO": lambda data=b"", *_: data,
    "torch.serialization._get_layout": Inert,
    "builtins.set": set,
}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _known(module: str, name: str) -> Any:
    """What stands for a class in a pickle; None where it is to be refused."""
    path = f"{module}.{name}"
    if path.startswith(_INERT):
        return Inert
    return _KNOWN.get(path, _DTYPES.get(path))


class _Unpickler(pickle.Unpickler):
    """Calls nothing but what `_known` returns."""

    def find_class(self, module: str, name: str) -> Any:
        if (known := _known(module, name)) is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return known


def _refused(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} is refused: it holds {what:.80}, and reading that may run code; save tensors,"
        " numbers and texts alone"
    )


def read_table(path: Path) -> Any:
    """A plain pickle without tensors, as torch's .metadata.

    Raises:
        UsageError: it holds another class, named; or it is damaged.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        return _Unpickler(content).load()
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from error
    except Exception as error:  # of damaged bytes, whatever they spell
        raise UsageError(f"{path} is damaged: {error!r:.80}") from error


def write_table(path: Path, content: Any) -> None:
    """Write a plain pickle and sync it. Raises: OSError: the disk does not take it."""
    write_blocks(path, [pickle.dumps(content)])


def load(file: Path | BinaryIO, name: Path | None = None, lazily: bool = True) -> Any:
    """What torch.save wrote, on the CPU. lazily: a tensor's bytes are read when it is used.

    name: of the file, where `file` is a stream of a part of it.

    Raises:
        UsageError: it holds a class that torch does not count as harmless, named; or it is damaged.
    """
    path = name or file
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        allowed = [(_known(*each.rpartition(".")[::2]), each) for each in unknown]
        for stand_in, each in allowed:
            if stand_in is None:
                raise pickle.UnpicklingError(each)
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another pickle protocol
            if not (is_file := isinstance(file, Path)):
                file.seek(0)
            mapped = lazily and is_file
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error).partition("\n")[0]) from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {str(error):.80}") from error
