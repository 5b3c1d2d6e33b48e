from pathlib import Path

import pytest

from tests.train.caption.language.tiny_models import KINDS, save_language_model

TEXTS = ["it begins", *(f"the middle of {letter}" for letter in "abcd"), *(f"the end of {letter}" for letter in "abcd")]


@pytest.fixture(scope="package")
def language_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each kind of language model."""
    folder = tmp_path_factory.mktemp("language_models")
    return {kind: save_language_model(folder / kind, kind, texts=TEXTS) for kind in KINDS}
