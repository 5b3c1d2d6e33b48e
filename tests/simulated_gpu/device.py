"""A simulated CUDA device: tensors that say `cuda:N` and keep their numbers on the CPU.

Operators run on the CPU at once. What a real GPU does later, or refuses, is kept in a `Journal`:

- operators on tensors of two devices raise, and norms whose weights have another dtype than their input;
- a copy that does not wait holds on to its source, and compares it when its end is waited for: a source that was
  refilled is a race. A copy to the host fills its target when it is waited for;
- a copy from memory that is not pinned, and whatever makes the host wait, is noted with its place in clipmill;
- a tensor that is used on another stream than the one that made it must be complete, and known to the allocator.

Modes of torch are of one thread, so every thread that starts within `simulation` enters them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.simulated_gpu.journal import Copy, Journal, place
from tests.simulated_gpu.kernels import emulation_of, scaled_dot_product
from tests.simulated_gpu.operators import collect_tensors, has_aliases, is_dense, name_of

CPU = torch.device("cpu")
# The host waits for a number or for the size of a result.
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "bincount", "is_nonzero", "histc",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
# CUDA takes their weights in the dtype of the input only; the CPU takes float32 weights with half precision too.
_OF_ONE_DTYPE = {"native_layer_norm", "native_group_norm"}
_ON_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "is_pinned"}
_OURS = ("aten", "prims", "c10d", "_c10d_functional", "torchvision", "profiler")


class MixedDevices(RuntimeError):
    """An operator got tensors of two devices, which CUDA refuses."""


def _stream_of(device: torch.device) -> tuple[int, int]:
    # torch.cuda.current_stream makes an object of this, which takes longer than a small operator.
    stream_id, number, _ = torch._C._cuda_getCurrentStream(device.index or 0)
    return number, stream_id


class Simulated(torch.Tensor):
    """A tensor of the simulated device. `numbers` are on the CPU; `stream` is the one that made it."""

    numbers: torch.Tensor
    stream: tuple[int, int]
    known_to: set[tuple[int, int]]
    made_by: Copy | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> "Simulated":
        made: Simulated = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=device,
            requires_grad=False,
        )
        made.numbers, made.stream, made.made_by = values, _stream_of(device), None
        made.known_to = {made.stream}
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _ACTIVE[-1].dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        """The numbers; torch refuses this to subclasses."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        """Refused, as by CUDA."""
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator of another stream that uses the tensor."""
        self.known_to.add((stream.device.index, stream.stream_id))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Simulated({self.device}, {tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> Any:
        return ["numbers"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: Any, device: Any, *_: Any) -> "Simulated":
        return Simulated(inner["numbers"], device)


class Device:
    """Runs operators on simulated tensors."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as it would run on its tensors' device."""
        name = name_of(func)
        tensors: list[torch.Tensor] = []
        collect_tensors((*args, *kwargs.values()), tensors)
        ours = [x for x in tensors if isinstance(x, Simulated)]
        for tensor in ours:
            self._use(tensor)
        if name in ("_to_copy", "copy_", "copy") and (ours or _is_cuda(kwargs.get("device"))):
            return self._copy(func, name, args, kwargs)
        if ours:
            self._check(func, name, args, kwargs, tensors, ours)
        elif kwargs.get("device") is None and kwargs.get("generator") is None:
            return func(*args, **kwargs)  # of the CPU
        return self._run(func, name, args, kwargs, ours)

    def _use(self, tensor: Simulated) -> None:
        stream = _stream_of(tensor.device)
        if stream == tensor.stream:
            return
        if tensor.made_by is not None and tensor.made_by in self.journal.pending:
            self.journal.note(self.journal.races, "a tensor was used before the copy that makes it was over")
        if stream not in tensor.known_to:
            self.journal.note(self.journal.races, "a tensor was used on a stream that the allocator does not know of")

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, tensors: Any, ours: Any) -> None:
        journal = self.journal
        if name in _INDEXING:
            if len(args) > 2 and args[2].ndim and args[2].device != args[0].device:
                raise MixedDevices(f"{func}: values of {args[2].device} for a tensor of {args[0].device}")
            # An index of the CPU is copied to the device, and true values are counted.
            for index in args[1]:
                if isinstance(index, Simulated) and index.device != args[0].device:
                    raise MixedDevices(f"{func}: an index of {index.device} for a tensor of {args[0].device}")
                if isinstance(index, torch.Tensor) and not isinstance(index, Simulated) and index.numel() > 1:
                    journal.note(journal.waits, f"{name} by an index of the CPU")
                is_put = name != "index" and len(args) > 2 and args[2].numel() == 1
                if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and not is_put:
                    self._wait(f"{name} by a mask", ours[0].device)
            return
        if name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._wait(name, ours[0].device)
            return
        device = ours[0].device
        for tensor in tensors:
            is_scalar = tensor.ndim == 0 and not isinstance(tensor, Simulated)
            if tensor.device != device and tensor.numel() and not is_scalar and name not in ("set_", "_foreach_copy_"):
                raise MixedDevices(f"{func}: tensors of {device} and of {tensor.device}, {tuple(tensor.shape)}")
        if name in _OF_ONE_DTYPE and len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
            raise RuntimeError(f"{func}: tensors of {' and '.join(sorted(map(str, dtypes)))}")

    def _wait(self, what: str, device: torch.device) -> None:
        self.journal.note(self.journal.waits, what)
        self.journal.finish(stream=_stream_of(device))

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        source = args[0] if name == "_to_copy" else args[1]
        if name == "_to_copy":
            target = source.device if kwargs.get("device") is None else _with_index(kwargs["device"])
            waits = not kwargs.get("non_blocking", False)
        else:
            target, waits = args[0].device, not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        journal, copy, what = self.journal, None, f"{tuple(source.shape)} {source.dtype}"
        if not source.numel():
            pass  # torch copies nothing
        elif source.device.type == "cpu" and target.type == "cuda":
            if waits:
                self._wait(f"a copy of {what} to the device", target)
            elif not (source.is_pinned() and source.is_contiguous() | is_dense(source)):
                journal.note(journal.pageable, what)
            else:
                journal.note(journal.copies, what)
                copy = Copy(source, source.clone(), place(), _stream_of(target))
                journal.begin(copy)
        elif source.device.type == "cuda" and target.type == "cpu" and not waits:
            out = (
                args[0] if name != "_to_copy" else torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            )
            if name == "_to_copy" or out.is_pinned():
                values = source.numbers.to(out.dtype, copy=True)
                out.fill_(float("nan") if out.dtype.is_floating_point else -1)
                journal.begin(Copy(out, out, place(), _stream_of(source.device), arrives=values))
                return out
            self._wait(f"a copy of {what} to memory of the host that is not pinned", source.device)
        elif source.device.type == "cuda" and target.type == "cpu":
            self._wait(f"a copy of {what} to the host", source.device)
        made = self._run(func, name, args, kwargs, [x for x in (args[0],) if isinstance(x, Simulated)], device=target)
        if isinstance(made, Simulated):
            made.made_by = copy
        return made

    def _run(
        self, func: Any, name: str, args: Any, kwargs: Any, ours: list[Simulated], *, device: torch.device | None = None
    ) -> Any:
        if device is None:
            asked = kwargs.get("device")
            device = _with_index(asked) if asked is not None else ours[0].device if ours else CPU
        plain_args = _map(_as_plain, args)
        plain_kwargs = {key: _map(_as_plain, value) for key, value in kwargs.items()}
        if _is_cuda(plain_kwargs.get("device")):
            plain_kwargs["device"] = CPU
        generator = plain_kwargs.get("generator")
        if generator is not None and generator.device.type == "cuda":
            plain_kwargs["generator"] = None
        if ours and (known := emulation_of(func)):
            outcome = known(*plain_args, **plain_kwargs)
        else:
            if ours and func.namespace not in _OURS:
                parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            outcome = func(*plain_args, **plain_kwargs)
        if name in _ON_HOST:
            return outcome
        is_on_device = device.type == "cuda"

        def wrap(x: Any) -> Any:
            return Simulated(x, device) if isinstance(x, torch.Tensor) and is_on_device else x

        if is_on_device:
            self.journal.devices.add(device.index)
        wrapped = _map(wrap, outcome)
        if name == "_to_copy" or not (ours or is_on_device) or not has_aliases(func):
            return wrapped
        try:
            return return_and_correct_aliasing(func, args, kwargs, wrapped)
        except (RuntimeError, AssertionError, IndexError, AttributeError):  # of operators on lists
            return wrapped


def _as_plain(value: Any) -> Any:
    return value.numbers if isinstance(value, Simulated) else value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)([_map(change, part) for part in value])
    return change(value)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _with_index(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


class _Operators(TorchDispatchMode):
    """Hands operators of a thread to the device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled, and torch would wrap each operator in a switch for its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ACTIVE[-1].dispatch(func, args, kwargs or {})


_ACTIVE: list[Device] = []


@contextmanager
def simulation() -> Iterator[Journal]:
    """Simulate the GPUs of the runtime within the block, in this thread and in those that start there."""
    journal = Journal()
    # On its first use torch keeps the functions that `with torch.device(...)` acts on. transformers asks torch.tensor
    # whether a model is built without memory; a replaced one would leave buffers unset.
    with torch.device("meta"):
        torch.empty(0)
    start, make_tensor = threading.Thread.run, torch.tensor

    def run(thread: threading.Thread) -> None:
        with _Operators():
            start(thread)

    def tensor(values: Any, **options: Any) -> torch.Tensor:
        # torch reads the numbers of tensors in a list from their memory, which the host waits for.
        if isinstance(values, list):
            values = _map(lambda part: part.item() if isinstance(part, Simulated) else part, values)
        return make_tensor(values, **options)

    with pytest.MonkeyPatch.context() as patch:
        _follow_streams(patch, journal)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product)
        patch.setattr(torch, "inference_mode", torch.no_grad)  # in which no view of a wrapped tensor can be made
        patch.setattr(torch, "tensor", tensor)
        # For a checkpoint torch copies whole storages, which a simulated tensor does not have.
        patch.setattr(StateDictStager, "stage", lambda _, state: {key: x.cpu().clone() for key, x in state.items()})
        patch.setattr(threading.Thread, "run", run)
        _ACTIVE.append(Device(journal))
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            # SDPA by matrix products: its fused kernels have no emulation.
            with torch.autograd.set_multithreading_enabled(False), sdpa_kernel(SDPBackend.MATH), _Operators():
                yield journal
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
            _ACTIVE.pop()
            torch.cuda.set_device(0)


def _follow_streams(patch: pytest.MonkeyPatch, journal: Journal) -> None:
    """Note where the host waits for events and streams, and end the copies that it waits for."""

    def record(event: Any, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        event.copies = [copy for copy in journal.pending if copy.stream == (stream.device.index, stream.stream_id)]

    def wait_for_event(event: Any) -> None:
        journal.note(journal.waits, "an event")
        journal.finish(event.copies)

    def wait_for_stream(stream: Any) -> None:
        journal.note(journal.waits, "a stream")
        journal.finish(stream=(stream.device.index, stream.stream_id))

    def wait_for_device(device: Any = None) -> None:
        journal.note(journal.waits, "the device")
        journal.finish()

    patch.setattr(torch.cuda.Event, "record", record)
    patch.setattr(torch.cuda.Event, "synchronize", wait_for_event)
    patch.setattr(torch.cuda.Event, "elapsed_time", lambda event, other: 1.0)
    patch.setattr(torch.cuda.Stream, "synchronize", wait_for_stream)
    patch.setattr(torch.cuda, "synchronize", wait_for_device)
