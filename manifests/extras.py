"""Find the extra of clipmill, such as `train`, that installs a missing module."""

import re
from importlib.metadata import PackageNotFoundError, requires

# Distributions by module, where the two names differ by more than `-` and `_`.
_DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "ffmpeg": "ffmpeg-python",
    "open_clip": "open-clip-torch",
    "pynvml": "nvidia-ml-py",
    "scenedetect": "scenedetect-headless",
    "webrtcvad": "webrtcvad-wheels",
}
_REQUIREMENT = re.compile(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]")


def extra_with(module: str, *, program: str) -> str | None:
    """Return the name of the extra that installs a module, or None if no extra does.

    Args:
        module: Full name of the module, as in `ModuleNotFoundError.name`.
        program: Name of the program. If several extras install the module, the extra with this name is preferred.
    """
    package = module.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
    try:
        matches = [_REQUIREMENT.match(requirement) for requirement in requires("clipmill") or []]
    except PackageNotFoundError:
        return None
    extras = [match[2] for match in matches if match is not None and match[1].lower() == distribution]
    return program if program in extras else next(iter(extras), None)
