"""Tests of `prep text --part K/N`: parts divide the texts, encode each once, and the last part makes the shards."""

import shutil
from pathlib import Path

import open_clip
import pytest
from safetensors.torch import load_file, save_file

from clipmill.prep.core.parts import Part, PartRun, register_part
from clipmill.prep.core.run import Summary
from clipmill.prep.text.bank import TextEncoderOptions
from clipmill.prep.text.recipe import TEXT
from clipmill.prep.text.work import run_text
from clipmill.shards.commit_table import read_commits
from tests.prep.running import contents
from tests.prep.text.conftest import Checkpoints
from tests.prep.text.sets import CAPTIONS, SPLITS, Encoding, encode, plan_of, write_captions


def encode_part(data: Path, part: str, clip: str = "tiny", *, engine: Encoding) -> tuple[Summary, PartRun]:
    """Run `prep text --part` on the CPU."""
    with register_part(data, Part.parse(part), column=TEXT) as run:
        plan = plan_of(data, clip)
        use = TextEncoderOptions(plan.recipe, batch=8, device="cpu")
        return run_text(plan, use, engine, part_run=run), run


def test_each_text_is_encoded_by_one_part_though_one_is_killed(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    captions = {f"v{n}": ["all", f"one of {n % 2}", *(f"text {k} of {n}" for k in range(20))] for n in range(4)}
    write_captions(data, captions, splits={"v3": "val"})
    shutil.copytree(data, other)
    engine = Encoding()
    first, run = encode_part(data, "1/3", engine=engine)
    assert (first.num_encoded, first.num_reused, first.num_shards_made) == (len(engine.texts), 0, 0)
    assert run.is_last and run.not_made.keys() == {Part(2, 3), Part(3, 3)}
    with pytest.raises(KeyboardInterrupt):
        encode_part(data, "2/3", engine=Encoding(max_blocks=0))
    _, run = encode_part(data, "3/3", engine=engine)
    assert run.not_made.keys() == {Part(2, 3)} and not read_commits(plan_of(data).variant_dir).commits
    second, run = encode_part(data, "2/3", engine=engine)
    assert run.is_last and not run.not_made
    assert sorted(engine.texts) == sorted({text for texts in captions.values() for text in texts})
    assert second.num_shards_made == len(read_commits(plan_of(data).variant_dir).commits) > 0
    encode(other)
    assert contents(data / TEXT) == contents(other / TEXT)


def test_a_text_without_embedding_fails_in_the_part_that_makes_the_shards(
    tmp_path: Path, checkpoints: Checkpoints
) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    write_captions(data, CAPTIONS, splits=SPLITS)
    shutil.copytree(data, other)
    state = load_file(checkpoints.safetensors)
    (name,) = (name for name in state if name.endswith("token_embedding.weight"))
    (bird,) = open_clip.SimpleTokenizer().encode("bird")
    state[name][bird] = float("nan")
    save_file(state, tmp_path / "nan.safetensors")
    clip = f"{checkpoints.model}:{tmp_path / 'nan.safetensors'}"

    parts = ["1/3", "3/3", "2/3"]  # the text belongs to the second part
    engines = {part: Encoding() for part in parts}
    ran = [encode_part(data, part, clip, engine=engines[part])[0] for part in parts]
    assert [part for part in parts if "a bird" in engines[part].texts] == ["3/3"]
    assert [len(summary.failures) for summary in ran] == [0, 0, 1]
    assert encode(other, clip).failures == ran[-1].failures
    assert contents(data / TEXT) == contents(other / TEXT)
