"""The tables of FastCLIP (Wei et al. 2024, section 5 and appendix B), typed from the paper."""

from typing import Any

from clipmill.train.config.training import OptimizerSettings, flatten
from clipmill.train.losses.settings import Loss

# Table 7: betas, epsilon, peak learning rate, weight decay.
TABLE_7 = {
    "medium": (0.9, 0.999, 1e-8, 1e-3, 0.1),
    "large": (0.9, 0.98, 1e-6, 4e-4, 0.1),
    "xlarge": (0.9, 0.98, 1e-6, 2e-4, 0.2),
}
# Table 8, row of the constant schedule: gamma of SogCLR and iSogCLR.
CONSTANT = {"medium": {"sogclr": 0.6, "isogclr": 0.6}, "large": {"sogclr": 0.6, "isogclr": 0.8}, "xlarge": {}}
# Table 8, the cosine schedule, and 'Experiments benchmarking the temperature parameter updates: For all algorithms we
# leverage a cosine schedule with gamma_min = 0.2 and decay epochs E equal to 50% of the number of training epochs'. The
# pair of table 3 has 0.6 for v2 in the large setting.
COSINE = {
    "medium": {f"fastclip-v{version}": (0.2, 18) for version in range(4)},
    "large": {f"fastclip-v{version}": (0.2, 16) for version in range(4)},
    "xlarge": {"fastclip-v3": (0.8, 10)},
}
# Table 9; for iSogCLR 'rho to 9.0' (inner LR schedule).
RHO = {
    "medium": {"isogclr": 9.0, "fastclip-v2": 7.0, "fastclip-v3": 6.5},
    "large": {"isogclr": 9.0, "fastclip-v2": 8.5, "fastclip-v3": 8.5},
    "xlarge": {"fastclip-v3": 16.0},
}
# Text: for iSogCLR 'the learning rate of tau to 1e-2' (inner LR schedule), for v2 '1e-2 in the medium-scale setting and
# 1e-4 in the large-scale setting', for v3 '2e-4 in the medium-scale setting and 1e-4 in the large-scale setting'
# (temperature), 5e-5 (scaling performance).
TEMPERATURE_LR = {
    "medium": {"isogclr": 1e-2, "fastclip-v2": 1e-2, "fastclip-v3": 2e-4},
    "large": {"isogclr": 1e-2, "fastclip-v2": 1e-4, "fastclip-v3": 1e-4},
    "xlarge": {"fastclip-v3": 5e-5},
}
# Text: 'The tuned initial temperature is 0.07 for FastCLIP-v3 and 0.03 for other algorithms'. The paper does not name a
# temperature for OpenCLIP.
TEMPERATURE = dict.fromkeys(("sogclr", "isogclr", *COSINE["medium"]), 0.03) | {"fastclip-v3": 0.07}
# Table 10: learning rate, weight decay.
TABLE_10 = {
    "medium": {"sgd": (1.0, 3e-6), "lamb": (2e-3, 0.1), "lion": (2e-4, 0.3), "adamw": (1e-3, 0.1)},
    "large": {"sgd": (2.0, 3e-6), "lamb": (2e-3, 0.1), "lion": (1e-4, 0.3), "adamw": (4e-4, 0.1)},
    "xlarge": {"adamw": (2e-4, 0.2)},  # table 7: 'Other hyperparameters are set according to Table 7 to 9'
}
ALGORITHMS = {
    **dict.fromkeys(("medium", "large"), ("mbcl", "sogclr", "isogclr", *COSINE["medium"])),
    "xlarge": ("mbcl", "fastclip-v3"),  # section 5: 'only used to compare the best version of FastCLIP with OpenCLIP'
}


def losses_of(size: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each algorithm, `loss.*`."""
    values_by_name: dict[str, dict[str, Any]] = {name: {} for name in ALGORITHMS[size]}
    for name, algorithm in values_by_name.items():
        for setting, table in (("rho", RHO), ("temperature_lr", TEMPERATURE_LR)):
            algorithm |= {setting: table[size][name]} if name in table[size] else {}
        algorithm |= {"temperature": TEMPERATURE[name]} if name in TEMPERATURE else {}
        if name in CONSTANT[size]:
            algorithm |= {"gamma": CONSTANT[size][name], "gamma_schedule": "constant"}
        if name in COSINE[size]:
            algorithm |= {
                "gamma": COSINE[size][name][0],
                "gamma_schedule": "cosine",
                "gamma_epochs": COSINE[size][name][1],
            }
    return values_by_name


def optimizers_of(size: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each optimizer by flag name."""
    beta1, beta2, eps, *_ = TABLE_7[size]
    values_by_name = {}
    for name, (lr, decay) in TABLE_10[size].items():
        values_by_name[name] = {"lr": lr, "weight_decay": decay}
        # 'Other hyperparameters are kept the same'. The code passes the same betas and epsilon to LAMB.
        values_by_name[name] |= {} if name == "sgd" else {"optimizer.beta1": beta1, "optimizer.beta2": beta2}
        values_by_name[name] |= {"optimizer.eps": eps} if name in ("adamw", "lamb") else {}
    return values_by_name


def published_rows(preset: str) -> dict[str, Any]:
    """Return the rows that a packaged preset has, with their sources, by loss and by optimizer."""
    values_by_name: dict[str, Any] = {}
    for choice, rows in (("loss.kind", Loss.published), ("optimizer.name", OptimizerSettings.published)):
        for name, row in rows.get(preset, {}).items():
            values = flatten(row.values) | {"source": row.source}
            values_by_name |= {f"by.{choice}.{name}.{key}": value for key, value in values.items()}
    return values_by_name
