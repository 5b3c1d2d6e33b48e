"""How many operations a second GPUs are made for: the 100 % of a model's FLOP/s utilisation (MFU).

Dense products of bf16 or fp16 with float32 accumulation, in TFLOP/s at boost clock, from NVIDIA's data sheets and
architecture white papers (which print the double for sparse matrices of most).
"""

import re

# The first pattern that is found in the device's name counts.
_TFLOPS = (
    (r"\bB200\b", 2250.0),
    (r"\bGH200\b|\bH200\b", 989.4),
    (r"\b(H100|H200) NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b", 989.4),
    (r"\bH800\b", 989.4),
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bA30\b", 165.0),
    (r"\bA40\b", 149.7),
    (r"\bA10G\b", 70.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.1),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 6000 Ada\b", 364.2),
    (r"\bRTX A6000\b", 154.8),
    (r"\bRTX A5000\b", 111.1),
    (r"\bRTX 5090\b", 209.5),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
    (r"\bV100S?-PCIE\b", 112.0),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
)
_WITHOUT_TF32 = re.compile(r"\bV100|\bT4\b")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations a second of a GPU (as torch names it) in bf16, fp16 or tf32; None where the table has no number."""
    tflops = next((tflops for pattern, tflops in _TFLOPS if re.search(pattern, device_name)), None)
    if tflops is None or precision not in ("bf16", "fp16", "tf32"):
        return None
    if precision == "tf32":
        # Tensor cores are half as fast on it.
        return None if _WITHOUT_TF32.search(device_name) else tflops * 1e12 / 2
    return tflops * 1e12
