"""The attention kernel of each preset on each GPU generation, according to xformers' dispatcher: docs/models.md."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.files import load_settings, preset_path, presets_of
from clipmill.train.models.attention import pack
from clipmill.train.models.attention_choice import kernels_of, operator_reasons
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.videomae import decoder_size
from clipmill.train.registry import TASKS
from clipmill.train.tasks.caption.model import decoder_size as text_decoder_size
from clipmill.train.tasks.caption.spec import CaptionerSettings
from clipmill.train.tasks.mae.spec import MaeSettings

GPUS = {
    (7, 5): "T4 (7.5)",
    (8, 0): "A100 (8.0)",
    (8, 6): "A10, RTX 3090 (8.6)",
    (8, 9): "L40S, RTX 4090 (8.9)",
    (9, 0): "H100, H200 (9.0)",
    (10, 0): "B200 (10.0)",
    (12, 0): "RTX 5090 (12.0)",
}
NAMES = {"fa2F@2.5.7 and fa2B@2.5.7 of torch": "FlashAttention 2", "cutlassF and cutlassB of torch": "CUTLASS"}
LENGTHS = (12, 9, 17, 26)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or sys.platform != "linux", reason="xformers dispatches by a torch with CUDA"
)


@dataclass(frozen=True)
class Call:
    """A call of attention: the kind of tokens, the width of a head, and the precision of the preset."""

    what: str
    width: int
    precision: str


def calls_of(settings: ClipSettings) -> list[Call]:
    """Return all kinds of calls that a preset makes; towers from libraries have their own attention."""
    if settings.towers.image is not None:
        return []
    size = size_of(settings.model, settings.towers)
    trunks: list[tuple[str, TransformerSize]] = [("clips", size.video.trunk)]
    if isinstance(settings, MaeSettings):
        trunks.append(("clips", decoder_size(size.video.trunk, depth=1)))
    elif isinstance(settings, CaptionerSettings):
        trunks.append(("captions", text_decoder_size(settings.decoder, vocabulary_size=50257).trunk))
    elif "text" in settings.tower_names():
        trunks.append(("packed captions", size.text.trunk))
    calls = [Call(what, trunk.width // trunk.num_heads, settings.precision) for what, trunk in trunks]
    return list(dict.fromkeys([*calls, *(replace(call, precision="fp32") for call in calls)]))


def kernel_of(call: Call, capability: tuple[int, int]) -> str:
    """Return the kernels of a call on a GPU, or xformers' reason for falling back to SDPA."""
    precision = call.precision
    if precision == "auto":
        precision = "bf16" if capability >= (8, 0) else "fp32"
    device, is_packed = torch.device("cuda", 0), call.what == "packed captions"
    # The layout holds real numbers on the CPU, because the dispatcher only checks the query, key and value tensors.
    packing = pack(LENGTHS, device=torch.device("cpu")) if is_packed else None
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        shape = (1 if is_packed else 2, sum(LENGTHS), 3, 4, call.width)
        qkv = torch.zeros(shape, dtype=DTYPES[precision], device=device, requires_grad=True).unbind(2)
        try:
            return NAMES[str(kernels_of("xformers", *qkv, causal=call.what != "clips", packing=packing))]
        except NotImplementedError as error:
            return operator_reasons(error)


def test_other_errors_keep_their_text() -> None:
    assert operator_reasons(NotImplementedError("SDPA has no kernel\nmore")) == "SDPA has no kernel"


def table() -> str:
    """Return the tables of docs/models.md: the kernels with xformers' reasons, and the presets that make each call."""
    calls: dict[tuple[str, ...], dict[str, None]] = {}
    presets: dict[tuple[str, ...], list[str]] = {}
    reasons: dict[str, int] = {}
    for spec in TASKS.values():
        for name in presets_of(spec.settings):
            try:
                settings = load_settings(preset_path(name, spec.settings.command), spec.settings)
            except UserError:  # a preset of a different task with the same name
                continue
            for call in calls_of(settings):
                # All GPUs that are too new share one reason, because their columns state the capability.
                kernels = [
                    kernel_of(call, capability).replace(f"capability {capability}", "a higher one")
                    for capability in GPUS
                ]
                cells = [
                    kernel if kernel in NAMES.values() else f"SDPA [{_number(kernel, reasons)}]" for kernel in kernels
                ]
                calls.setdefault((call.precision, *cells), {})[f"{call.what} {call.width}"] = None
                if call.precision == settings.precision:
                    presets.setdefault((f"{call.what} {call.width}", call.precision), []).append(f"`{name}`")
    lines = [f"| `--precision` | {' | '.join(GPUS.values())} | attention of |", "|---" * (2 + len(GPUS)) + "|"]
    lines += [f"| {' | '.join(cells)} | {', '.join(names)} |" for cells, names in calls.items()]
    lines += ["", *(f"[{number}] {reason}" for reason, number in reasons.items())]
    lines += ["", "| attention of | `precision` of the preset | presets |", "|---|---|---|"]
    lines += [f"| {' | '.join(cells)} | {', '.join(dict.fromkeys(names))} |" for cells, names in presets.items()]
    return "\n".join(lines)


def _number(reason: str, reasons: dict[str, int]) -> int:
    return reasons.setdefault(reason, len(reasons) + 1)


@pytest.mark.nightly
@pytest.mark.usefixtures("complete_tiny")
def test_the_documentation_has_the_kernel_of_every_preset_on_every_gpu(repository: Path) -> None:
    pytest.importorskip("xformers.ops")
    assert table() in (repository / "docs" / "models.md").read_text(), f"docs/models.md needs this table:\n{table()}"


def test_the_table_has_every_generation_that_torch_supports() -> None:
    """Kernels for a major capability also run on its higher minor versions."""
    built = {(int(arch[3:-1]), int(arch[-1])) for arch in torch.cuda.get_arch_list() if arch[3:].isdigit()}
    assert built <= set(GPUS), built


def test_xformers_is_pinned_to_what_is_tested(repository: Path) -> None:
    xformers = pytest.importorskip("xformers")
    assert f'"xformers=={xformers.__version__}; ' in (repository / "pyproject.toml").read_text()
    assert f"xformers=={xformers.__version__} " in (repository / "requirements.lock").read_text()
