"""The losses as their papers define them: computed pair by pair with plain sums, and differentiated by autograd.

The module shares no code with clipmill.train.losses. A step returns the value and the gradients of the embeddings, and
updates the stored state.

Paper: Wei et al. 2024, arXiv 2407.01445, in the version with the xlarge setting. Code: src/fast_clip/loss.py of
github.com/Optimization-AI/fast_clip at efd89d5 (3 October 2024).
"""

import math
from dataclasses import dataclass, field

import torch

GLOBAL_TEMPERATURE = ("sogclr", "fastclip-v0", "fastclip-v1", "fastclip-v3")
OWN_TEMPERATURE = ("isogclr", "fastclip-v2")


def in_batch_loss(
    kind: str,
    video: torch.Tensor,
    text: torch.Tensor,
    *,
    temperature: torch.Tensor,
    bias: torch.Tensor,
    margins: list[float],
) -> torch.Tensor:
    """Compute InfoNCE, MBCL, SigLIP or max-margin for one batch, as a scalar with gradient."""
    count = len(video)
    s = [[video[i] @ text[j] for j in range(count)] for i in range(count)]
    total = video.new_zeros(())
    for i in range(count):
        others = [j for j in range(count) if j != i]
        if kind == "infonce":
            for line in ([s[i][j] for j in range(count)], [s[j][i] for j in range(count)]):
                exps = [torch.exp(x / temperature) for x in line]
                total = total - torch.log(exps[i] / torch.stack(exps).sum())
        elif kind == "mbcl":
            for line in ([s[i][j] for j in others], [s[j][i] for j in others]):
                g = torch.stack([torch.exp((x - s[i][i]) / temperature) for x in line]).sum() / (count - 1)
                total = total + torch.log(1 / (count - 1) + g)
        elif kind == "siglip":
            for j in range(count):
                sign = 1 if i == j else -1
                total = total - torch.log(torch.sigmoid(sign * (s[i][j] / temperature + bias)))
        elif kind == "max-margin":
            for j in others:
                for x in (s[i][j], s[j][i]):
                    total = total + torch.clamp(margins[i] + x - s[i][i], min=0) / (2 * count * (count - 1))
        else:
            raise ValueError(kind)
    if kind == "infonce":
        return total / (2 * count)
    return total if kind == "max-margin" else total / count


@dataclass(frozen=True)
class Moments:
    """m and v of procedure 4, and the number of their updates."""

    m: float = 0.0
    v: float = 0.0
    num_updates: int = 0


@dataclass
class Memory:
    """u of each visited id, and temperatures with their moments."""

    u: dict[int, float] = field(default_factory=dict)
    tau: dict[int, float] = field(default_factory=dict)
    adam: dict[int, Moments] = field(default_factory=dict)


@dataclass
class Stepped:
    loss: float
    video_grad: torch.Tensor
    text_grad: torch.Tensor
    tau_grad: float | None = None


def _outer(kind: str, is_code: bool, tau: float) -> float:
    """Return the factor before log(epsilon + g)."""
    if kind == "fastclip-v0":
        return 1.0
    return tau if kind == "fastclip-v3" or not is_code else 1.0


Ids = tuple[list[int], list[int]]
Memories = tuple[Memory, Memory]
Sides = list[list[torch.Tensor]]


def global_step(
    kind: str,
    convention: str,
    video: torch.Tensor,
    text: torch.Tensor,
    ids: Ids,
    memories: Memories,
    *,
    gamma: float,
    tau: float,
    rho: float,
    epsilon: float,
    sizes: tuple[int, int],
    lr: float,
    epoch: int,
) -> Stepped:
    """Compute one step of a global loss; `ids` and `memories` hold the values of clips and captions."""
    count = len(video)
    video, text = video.clone().requires_grad_(), text.clone().requires_grad_()
    is_code = convention == "fast_clip"
    half = 0.5 if is_code else 1.0
    taus = []
    for side in range(2):
        if kind in OWN_TEMPERATURE:
            values = [memories[side].tau.setdefault(sample_id, tau) for sample_id in ids[side]]
        else:
            values = [tau] * count
        taus.append(torch.tensor(values, dtype=torch.float64, requires_grad=True))
    shared = torch.tensor(tau, dtype=torch.float64, requires_grad=True)

    def g(side: int, i: int) -> torch.Tensor:
        used = taus[side][i] if kind in OWN_TEMPERATURE else shared
        total = video.new_zeros(())
        for j in range(count):
            if j != i:
                x = video[i] @ text[j] if side == 0 else video[j] @ text[i]
                total = total + torch.exp((x - video[i] @ text[i]) / used)
        return total / (count - 1)

    inner = [[g(side, i) for i in range(count)] for side in range(2)]
    u = []
    for side in range(2):
        new: dict[int, float] = {}
        for sample_id in set(ids[side]):
            seen = [inner[side][i].item() for i in range(count) if ids[side][i] == sample_id]
            mean = sum(seen) / len(seen)
            old = memories[side].u.get(sample_id)
            new[sample_id] = mean if old is None else (1 - gamma) * old + gamma * mean
        memories[side].u.update(new)
        u.append([new[sample_id] for sample_id in ids[side]])

    # f(u') g_i(w), with f' evaluated at the new average, is the estimator of FCCO.
    both = [(k, i) for k in range(2) for i in range(count)]
    surrogate = (
        torch.stack(
            [_outer(kind, is_code, taus[k][i].item()) * inner[k][i] / (epsilon + u[k][i]) for k, i in both]
        ).sum()
        / count
    )
    video_grad, text_grad = torch.autograd.grad(half * surrogate, [video, text], retain_graph=True)
    logs = [[math.log(epsilon + x) for x in line] for line in u]
    if kind in OWN_TEMPERATURE:
        loss = sum(taus[k][i].item() * (logs[k][i] + rho) for k, i in both) / count
        _move(convention, inner, u, taus, ids, memories, rho=rho, epsilon=epsilon, sizes=sizes, lr=lr, epoch=epoch)
        return Stepped(half * loss, video_grad, text_grad)
    loss = sum(
        _outer(kind, is_code, taus[k][i].item()) * (logs[k][i] + (rho if kind == "fastclip-v3" else 0)) for k, i in both
    )
    tau_grad = None
    if kind in ("fastclip-v0", "fastclip-v3"):
        inside = torch.stack([inner[k][i] / (epsilon + u[k][i]) for k, i in both]).sum() / count
        tau_grad = torch.autograd.grad(inside, [shared])[0].item()
        if kind == "fastclip-v3":
            own_logs = [[math.log(x) for x in line] for line in u] if is_code else logs
            outside = sum(own_logs[0] + own_logs[1]) / count + 2 * rho
            tau_grad = half * outside + tau * tau_grad
        # The public code trains log(1 / tau).
        tau_grad = -tau * tau_grad if is_code else tau_grad
    return Stepped(half * loss / count, video_grad, text_grad, tau_grad)


def _move(
    convention: str,
    inner: Sides,
    u: list[list[float]],
    taus: list[torch.Tensor],
    ids: Ids,
    memories: Memories,
    *,
    rho: float,
    epsilon: float,
    sizes: tuple[int, int],
    lr: float,
    epoch: int,
) -> None:
    """Update both temperatures of each pair by their own gradients (equation 9), as in procedure 5, lines 7 to 9."""
    for side in range(2):
        memory = memories[side]
        grads: dict[int, list[float]] = {}
        for i, sample_id in enumerate(ids[side]):
            (slope,) = torch.autograd.grad(inner[side][i], [taus[side]], retain_graph=True)
            tau = taus[side][i].item()
            # Equation 9 without its 1 / |S|. The slope is the mean of the third partial derivatives of l over the other
            # pairs.
            gradient = math.log(epsilon + u[side][i]) + rho + tau / (epsilon + u[side][i]) * slope[i].item()
            # FastCLIPLossIndividual.local: "we do not divide the gradient by dataset size", then clamp_.
            gradient = gradient / sizes[side] if convention == "paper" else min(max(gradient, -5.0), 5.0)
            grads.setdefault(sample_id, []).append(gradient)
        for sample_id, several in grads.items():
            gradient = sum(several) / len(several)
            moments = memory.adam.get(sample_id, Moments())
            if convention == "paper":
                # In procedure 4, t counts the updates of a parameter. A temperature is updated at each visit.
                moments, direction = adamw_without_decay(moments, gradient, t=moments.num_updates)
                memory.tau[sample_id] = max(memory.tau[sample_id] - lr * direction, 0.01)
            else:
                # In adjust_hyperparams, the betas are 0 until epoch 1. In local, they are raised to the power of
                # self.epoch + 1.
                betas = (0.9, 0.999) if epoch > 0 else (0.0, 0.0)
                moments, direction = adamw_without_decay(moments, gradient, t=epoch, betas=betas)
                memory.tau[sample_id] = min(max(memory.tau[sample_id] - lr * direction, 0.01), 1.0)
            memory.adam[sample_id] = moments


def adamw_without_decay(
    moments: Moments, gradient: float, *, t: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> tuple[Moments, float]:
    """Compute an update of AdamW as in procedure 4, with lambda = 0.

    Returns:
        New moments, and the factor that line 16 multiplies by the learning rate.
    """
    beta1, beta2 = betas
    m = beta1 * moments.m + (1 - beta1) * gradient  # line 13
    v = beta2 * moments.v + (1 - beta2) * gradient**2  # line 14
    m_hat, v_hat = m / (1 - beta1 ** (t + 1)), v / (1 - beta2 ** (t + 1))  # line 15
    return Moments(m, v, moments.num_updates + 1), m_hat / (math.sqrt(v_hat) + eps)  # line 16
