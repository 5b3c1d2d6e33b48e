import subprocess
import sys

import pytest
import torch

from manifests.errors import UserError
from train.models.attention import attend_with_sdpa, attend_with_xformers, open_attention


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """The formula, written out."""
    scores = torch.einsum("bmhk,bnhk->bhmn", q, k) / q.shape[-1] ** 0.5
    if causal:
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.einsum("bhmn,bnhk->bmhk", scores.softmax(-1), v)


def random_qkv(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 17, 3, 16, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_computes_the_formula(causal: bool) -> None:
    q, k, v = random_qkv(torch.float64)
    torch.testing.assert_close(
        attend_with_sdpa(q, k, v, causal=causal), naive(q, k, v, causal=causal), atol=1e-12, rtol=0
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="xformers has no attention for a CPU")
@pytest.mark.parametrize("causal", [False, True])
def test_xformers_computes_the_formula(causal: bool) -> None:
    pytest.importorskip("xformers.ops")
    q, k, v = random_qkv(torch.float32, "cuda")
    expected = naive(q.double(), k.double(), v.double(), causal=causal).float()
    torch.testing.assert_close(attend_with_xformers(q, k, v, causal=causal), expected, atol=2e-3, rtol=2e-3)


def test_a_cpu_gets_sdpa_and_is_told_why() -> None:
    door = open_attention("auto", device_type="cpu")
    assert (door.name, door.attend) == ("sdpa", attend_with_sdpa)
    assert "cpu" in door.reason
    assert open_attention("sdpa", device_type="cuda").name == "sdpa"


def test_xformers_on_a_cpu_is_refused_in_words() -> None:
    with pytest.raises(UserError, match="xformers has no attention for a cpu") as caught:
        open_attention("xformers", device_type="cpu")
    assert "--attention sdpa" in (caught.value.hint or "")


def test_a_cpu_run_never_loads_xformers() -> None:
    code = (
        "import sys; from train.models.attention import open_attention; open_attention('auto', device_type='cpu');"
        "sys.exit('xformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
