import json
from pathlib import Path

from clipmill.train.tasks.caption.evaluation import write_coco_results


def test_captions_are_written_in_order_and_whole(tmp_path: Path) -> None:
    captions = {"b": "A man <b>plays</b> 吉他 \x01", "a_000001_000011": ""}
    write_coco_results(tmp_path / "results.json", captions)
    rows = json.loads((tmp_path / "results.json").read_bytes())
    assert rows == [{"image_id": name, "caption": caption} for name, caption in captions.items()]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
