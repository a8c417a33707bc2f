"""A simulated accelerator: its streams run work late, and notice work that came too early.

An operator in a stream is queued. It runs when somebody waits for the stream, or one at a time when
somebody asks whether an event has happened. Until then its results are NaN. So a missing wait shows
in the results. An error names the read of a tensor that was freed while its stream still needed it,
and the read of an unfinished value by the host.

Memory of the card is out of the host's reach: only queued work may touch it, while it runs. Python
dies of SIGSEGV at any other touch, and prints where it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hetpipe.sdk.decompositions.formulas import DECOMPOSITIONS

MOST = 64
"""The longest queue of a stream."""
ROUNDED = {
    "conv": ("convolution", "convolution_backward"),
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "mv", "dot"),
}
"""Operators whose float32 operands a card may round, by torch's name of the setting."""

CLOSED, OPEN = 0, mmap.PROT_READ | mmap.PROT_WRITE
"""What the host may do with a page of memory."""

if not faulthandler.is_enabled():  # pytest has enabled it
    faulthandler.enable()


class Card:
    """The state of a simulated card: memory, owners of tensors, and the current device."""

    def __init__(self, memory_nbytes: int = 1 << 40) -> None:
        self.memory_nbytes = memory_nbytes
        self.lock = threading.RLock()
        self.owners: dict[StorageWeakRef, set[Stream]] = {}
        """Streams that may read a storage after it was freed: its own, and recorded ones."""
        self.sizes: dict[StorageWeakRef, int] = {}
        self.here = threading.local()
        self.foreign_nbytes = 0
        """Bytes that other processes hold."""

    def new(self, form: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Return a tensor of NaN in memory of the card. Raises torch's error if there is none."""
        self.owners = {ref: streams for ref, streams in self.owners.items() if not ref.expired()}
        self.sizes = {ref: size for ref, size in self.sizes.items() if not ref.expired()}
        held = sum(self.sizes.values())
        if held + form.nbytes > self.memory_nbytes:
            raise torch.OutOfMemoryError(
                f"Tried to allocate {form.nbytes} bytes. {held} of {self.memory_nbytes} are in use."
            )
        storage = _pages(_meta(form).untyped_storage().nbytes())
        tensor = torch.empty(0, dtype=form.dtype).set_(storage, 0, form.shape, form.stride())
        ref = StorageWeakRef(storage)
        self.owners[ref], self.sizes[ref] = {stream}, form.nbytes
        with self.opened([tensor]):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 113)
        return tensor

    @contextlib.contextmanager
    def opened(self, operands: Any) -> Iterator[None]:
        """Let work of the card touch its operands, which are tensors in any nest of containers."""
        storages = [t.untyped_storage() for t in tree_leaves(operands) if torch.is_tensor(t)]
        own = (s for s in storages if s.nbytes() and StorageWeakRef(s) in self.sizes)
        pages = {storage.data_ptr(): storage.nbytes() for storage in own}
        try:
            for address, nbytes in pages.items():
                _protect(address, nbytes, OPEN)
            yield
        finally:
            for address, nbytes in pages.items():
                _protect(address, nbytes, CLOSED)

    @property
    def stream(self) -> Stream | None:
        """The current stream of this thread."""
        return getattr(self.here, "stream", None)


class Stream:
    """A queue of work that runs when somebody waits for it."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.queue: deque[Callable[[], None]] = deque()
        self.queued = self.ran = 0
        self.failure: RuntimeError | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Queue work; the oldest work runs once there is more than `MOST`."""
        self.queue.append(work)
        self.queued += 1
        if len(self.queue) > MOST:
            with contextlib.suppress(RuntimeError):  # whoever waits gets the error
                self.run(self.ran + 1)

    def run(self, until: int) -> None:
        """Run the work up to a number. After an error the stream runs nothing, as on a card."""
        with self.card.lock:
            while self.ran < until:
                work = self.queue.popleft()
                self.ran += 1
                if self.failure is None:
                    try:
                        with _disable_current_modes():  # a stream's mode would queue it again
                            work()
                    except IndexError:
                        self.failure = RuntimeError("device-side assert triggered")
                    except RuntimeError as error:
                        self.failure = error
            if self.failure is not None:
                raise RuntimeError(f"the stream failed: {self.failure}")

    def wait_event(self, event: Event) -> None:
        with self.card.lock:
            self.put(event.synchronize)

    def synchronize(self) -> None:
        self.run(self.queued)


class Event:
    """A place in a stream. `blocking` is accepted as by `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.blocking = blocking

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        return super().__new__(cls)

    def record(self, stream: Stream) -> None:
        with stream.card.lock:
            self.stream, self.number = stream, stream.queued

    def query(self) -> bool:
        """Return whether the event has happened; each question lets one more operator run."""
        with self.stream.card.lock:
            self.stream.run(min(self.number, self.stream.ran + 1))
            return self.stream.ran >= self.number

    def synchronize(self) -> None:
        self.stream.run(self.number)


class Driver:
    """Functions like those of `torch.cuda.cudart()`."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class Module:
    """Functions like those of `torch.cuda`, for one simulated card."""

    Event = Event

    def __init__(self, card: Card) -> None:
        self.card = card
        self.trims = 0
        self.driver = Driver()

    def cudart(self) -> Driver:
        return self.driver

    def Stream(self, device: torch.device | None = None) -> Stream:
        return Stream(self.card)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.card.here.stream = self.card.stream, stream
        try:
            with _Deferring(stream):
                yield
        finally:
            self.card.here.stream = before

    def memory_reserved(self, device: torch.device) -> int:
        return sum(size for ref, size in self.card.sizes.items() if not ref.expired())

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        total = self.card.memory_nbytes
        return total - self.memory_reserved(device) - self.card.foreign_nbytes, total

    def empty_cache(self) -> None:
        self.trims += 1


class _Deferring(TorchDispatchMode):
    """Queues each operator of the block in a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, stream, card = kwargs or {}, self._stream, self._stream.card
        name = func._schema.name.removeprefix("aten::")
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        with card.lock:
            if name in ("_local_scalar_dense", "equal"):
                raise RuntimeError(f"the host reads a value of the card ({name})")
            if name.startswith(("empty", "new_empty")):
                return self._results(func, args, kwargs)
            if any(r.alias_info is not None for r in func._schema.returns) and not (
                func._schema.is_mutable
            ):
                return func(*args, **kwargs)  # a view
            held_args, held_kwargs = tree_map_only(
                torch.Tensor, self._hold, (tuple(args), dict(kwargs))
            )
            if func._schema.is_mutable:
                result = self._written(func, args, kwargs)
            else:
                result = self._results(func, args, kwargs)
            outputs = [self._hold(each) for each in _tensors(result)]
            rounds, with_grad = _rounds(name), torch.is_grad_enabled()

            def work() -> None:
                with torch.inference_mode(), torch.set_grad_enabled(with_grad):
                    own_args, own_kwargs, own_outputs = tree_map_only(
                        _Held, lambda held: held.tensor(), (held_args, held_kwargs, outputs)
                    )
                    with card.opened([own_args, own_kwargs, own_outputs]):
                        if rounds:
                            own_args = tree_map_only(torch.Tensor, rounded, own_args)
                        computed = func(*own_args, **own_kwargs)
                        if not func._schema.is_mutable:
                            for output, value in zip(own_outputs, _tensors(computed), strict=True):
                                if output.shape == value.shape:  # batch norm: unused results
                                    output.copy_(value)

            stream.put(work)
            return result

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments that an operator writes."""
        arguments = func._schema.arguments
        given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
        written = [
            given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        returned = len(func._schema.returns)
        return None if returned == 0 else written[0] if returned == 1 else tuple(written)

    def _results(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return tensors of the results' shapes, filled with NaN."""
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, _meta, (tuple(args), dict(kwargs)))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = "meta"
        try:
            forms = func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # torch has no meta kernel of a few operators
            forms = DECOMPOSITIONS[func](*meta_args, **meta_kwargs)
        return tree_map_only(
            torch.Tensor, lambda form: self._stream.card.new(form, self._stream), forms
        )

    def _hold(self, tensor: torch.Tensor) -> _Held:
        return _Held(tensor, self._stream)


class _Held:
    """A tensor in queued work: the work keeps it alive only if torch's allocator would."""

    def __init__(self, tensor: torch.Tensor, stream: Stream) -> None:
        storage = tensor.untyped_storage()
        self._ref = StorageWeakRef(storage)
        owners = stream.card.owners.get(self._ref)
        self._stream, self._kept = stream, None
        if owners is None or stream in owners:  # memory of the host, or of this stream
            self._kept = storage
        self.shape = tensor.shape
        self._form = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._marks = tensor.is_conj(), tensor.is_neg()  # of a lazy view

    def tensor(self) -> torch.Tensor:
        storage = self._kept
        if storage is None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if storage is None:
            raise RuntimeError(
                "a stream reads a tensor that was freed, and that another stream had allocated"
            )
        offset, shape, strides = self._form
        empty = torch.empty(0, dtype=self._dtype)
        whole = empty.set_(storage, offset, shape, strides)
        conjugated, negated = self._marks
        whole = torch._conj(whole) if conjugated else whole
        return torch._neg_view(whole) if negated else whole


def _pages(nbytes: int) -> torch.UntypedStorage:
    """Return memory in separate pages, which the system takes back with the storage."""
    if nbytes == 0:  # torch expects that an empty tensor has no memory
        return torch.UntypedStorage(0)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()


def _protect(address: int, nbytes: int, access: int) -> None:
    if _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for each in value or () if isinstance(each, torch.Tensor)]


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to mantissas of ten bits, as in TF32; return other tensors unchanged."""
    if tensor.dtype is not torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _rounds(name: str) -> bool:
    """Return whether torch's settings allow a card to round this operator's operands."""
    for setting, names in ROUNDED.items():
        if name in names:
            return bool(torch._C._get_fp32_precision_getter("cuda", setting) == "tf32")
    return False
