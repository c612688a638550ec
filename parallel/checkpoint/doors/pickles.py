"""The one reader of pickles: it makes tensors, numbers, texts and tables, and runs nothing.

A class that it does not know is refused by name. Classes of megatron-core and of torch's
checkpoint tables become an `Inert`, which keeps what was stored in it.
"""

import contextlib
import io
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from base.errors import UsageError
from base.storage import write_blocks


class Inert:
    """An object in place of one of another library: it keeps the arguments and attributes."""

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
_KNOWN |= {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _known(path: str) -> Any:
    """Returns what stands for a class in a pickle; None where it is to be refused."""
    return Inert if path.startswith(_INERT) else _KNOWN.get(path)


class _Unpickler(pickle.Unpickler):
    """An unpickler that calls nothing but what `_known` returns."""

    def find_class(self, module: str, name: str) -> Any:
        if (stand_in := _known(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return stand_in


@contextlib.contextmanager
def understood(path: Path, otherwise: str = "cannot be read") -> Iterator[None]:
    """Turns any exception inside into a UsageError, which names a class that is refused."""
    try:
        yield
    except UsageError:
        raise
    except pickle.UnpicklingError as error:
        name = str(error).partition("\n")[0]
        raise UsageError(
            f"{path} is refused: it holds {name:.80}, and reading that may run code; save tensors,"
            " numbers and texts alone"
        ) from error
    except Exception as error:  # of damaged bytes, whatever they spell
        reason = f"{type(error).__name__} {error!s:.80}"
        raise UsageError(f"{path} {otherwise}: {reason}") from error


def read_table(path: Path) -> Any:
    """Returns the content of a plain pickle without tensors, as torch's .metadata is."""
    with understood(path):
        return _Unpickler(io.BytesIO(path.read_bytes())).load()


def write_table(path: Path, content: Any) -> None:
    """Writes a plain pickle and syncs it."""
    write_blocks(path, [pickle.dumps(content)])


def load(path: Path, begin: int = 0, size: int | None = None) -> Any:
    """Returns what torch.save wrote, on the CPU. It is read from a whole file, whose tensors' bytes
    are read when they are used, or from `size` bytes of it, from `begin` on."""
    with understood(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another pickle protocol
        source: Any = path
        if size is not None:
            with path.open("rb") as stream:
                stream.seek(begin)
                source = io.BytesIO(stream.read(size))
        with zipfile.ZipFile(source) as archive:  # torch does not compare its checksums
            has_checksums = any(entry.CRC for entry in archive.infolist())  # not written by all
            if has_checksums and (damaged_entry := archive.testzip()) is not None:
                raise UsageError(f"{path} is damaged: {damaged_entry} has another checksum")
        if size is not None:
            source.seek(0)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        allowed = [(_known(name), name) for name in unknown]
        for stand_in, name in allowed:
            if stand_in is None:
                raise pickle.UnpicklingError(name)
        if size is not None:
            source.seek(0)
        with torch.serialization.safe_globals(allowed):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=size is None)
