"""Kinds of datasets that `prep manifest` reads: `DATASETS` contains an `Adapter` for each kind.

To add a kind, write a reader in `manifests/adapters/` and add an `Adapter` to `DATASETS`, or declare the `Adapter` in a
different package (docs/plugins.md).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from clipmill.manifests.plugins import Parts, import_object

if TYPE_CHECKING:
    from clipmill.manifests.adapters.reading import Reading


@dataclass(frozen=True)
class Adapter:
    """A kind of dataset that `prep manifest` reads.

    Attributes:
        name: Name of the command, and default name of the dataset.
        reader: Import path `package.module:function` of the reader, which returns a `Reading`.
        takes: Input of the reader: "captions" for a folder of videos and an optional caption table, "annotations" for a
            folder of videos and annotation files, "lists" for lists of clips, "folder" for a folder that contains
            videos and annotations.
        text: Help text of the command, including its parameters.
    """

    name: str
    reader: str
    takes: Literal["captions", "annotations", "lists", "folder"]
    text: str

    def read(self, *arguments: Any, **options: Any) -> "Reading":
        """Call the reader."""
        reading: Reading = import_object(self.reader)(*arguments, **options)
        return reading


DATASETS = (
    Adapter(
        "folder",
        "clipmill.manifests.adapters.folder:read_folder",
        "captions",
        """Read all video files in a folder, with an optional caption table.

        The table has the columns video and text, and optionally begin_s, end_s or duration_s (in seconds), source,
        likelihood, split (train, val or test), group, view, label, and label_NAME for other labels. Rows with a label
        need no text. Other common names of these columns, separators and encodings are recognized. If no row is
        valid, the manifest is not changed.

        Folders on a web server cannot be listed, so the table must contain the URLs of the videos, or their paths
        relative to the URL that is passed as the folder.

        Example: prep manifest folder VIDEOS --captions captions.csv

        Parameters
        ----------
        directory
            Folder of the videos, a path or a URL such as s3://bucket/videos. Subfolders are included. Omit the folder
            if the table contains the URLs of the videos.
        """,
    ),
    Adapter(
        "vatex",
        "clipmill.manifests.adapters.clips:read_vatex",
        "annotations",
        """Read VATEX: clips with ten English captions each.

        Example: prep manifest vatex VIDEOS --annotations vatex_training_v1.0.json

        Parameters
        ----------
        directory
            Folder that contains the videos <videoID>.mp4. The extension may differ.
        """,
    ),
    Adapter(
        "ego4d",
        "clipmill.manifests.adapters.ego4d:read_ego4d",
        "annotations",
        """Read Ego4D narrations: the official JSON files, the pickled lists of AVION and LaViLa, or EgoVLP's files.

        The official file is all_narrations_redacted.json or narration.json. Its timestamps are expanded to intervals by
        EgoVLP's rule. With ego4d.json, videos of any validation or test split are put into val or test. Pickles may
        contain only lists, tuples, strings and numbers; any other pickle is rejected without being executed. Training
        pairs are read from EgoVLP's egoclip.csv, and the clips in EgoVLP's egomcq.json are put into val. A .txt file
        lists videos to omit, one ID per line.

        Example: prep manifest ego4d VIDEOS --annotations narration.json ego4d.json

        Parameters
        ----------
        directory
            Folder that contains the videos <video_uid>.mp4.
        """,
    ),
    Adapter(
        "epic-kitchens",
        "clipmill.manifests.adapters.timed_captions:read_epic_kitchens",
        "annotations",
        """Read EPIC-KITCHENS-100: narrated actions with verb and noun classes.

        Example: prep manifest epic-kitchens VIDEOS --annotations EPIC_100_train.csv

        Parameters
        ----------
        directory
            Folder that contains the videos <video_id>.MP4, in any subfolder.
        """,
    ),
    Adapter(
        "lerobot",
        "clipmill.manifests.adapters.lerobot:read_lerobot",
        "folder",
        """Read a LeRobot dataset (version 3 or 2): episodes of a robot, recorded by one or more cameras.

        Tasks become captions, columns of the episodes become labels, and the splits are read from meta/info.json.
        States and actions are not copied.

        Example: prep manifest lerobot DATASET

        Parameters
        ----------
        directory
            Folder of the dataset, which contains meta, data and videos.
        """,
    ),
    Adapter(
        "kinetics",
        "clipmill.manifests.adapters.clips:read_kinetics",
        "lists",
        """Read Kinetics, or other lists of clips with one class per clip.

        Example: prep manifest kinetics train.csv val.csv --videos VIDEOS

        Parameters
        ----------
        lists
            CSV files with the columns label, youtube_id, time_start, time_end and split; or text files with lines of
            the form "path label", "path num_frames label" (AVION) or "path 0 -1" (VideoMAE V2, without a label).
        """,
    ),
    Adapter(
        "msrvtt",
        "clipmill.manifests.adapters.clips:read_msrvtt",
        "annotations",
        """Read MSR-VTT: clips with about twenty captions each.

        The splits are read from the JSON files, unless CSV files are passed. The 1k-A split consists of the 1,000 test
        pairs in MSRVTT_JSFUSION_test.csv and the training videos in MSRVTT_train.9k.csv, whose captions are in the JSON
        file.

        Example: prep manifest msrvtt VIDEOS --annotations MSRVTT_JSFUSION_test.csv

        Parameters
        ----------
        directory
            Folder that contains the videos videoN.mp4 (video0.mp4, video1.mp4 and so on).
        """,
    ),
    Adapter(
        "didemo",
        "clipmill.manifests.adapters.timed_captions:read_didemo",
        "annotations",
        """Read DiDeMo: captions of moments in videos.

        If annotators marked different intervals for a moment, the most frequent interval is used. A list of videos,
        such as test_list.txt, restricts the split in its file name to the listed videos.

        Example: prep manifest didemo VIDEOS --annotations val_data.json test_data.json

        Parameters
        ----------
        directory
            Folder that contains the videos under their names in the annotations. The extension .mp4 may be added to a
            name, or replace its extension.
        """,
    ),
    Adapter(
        "activitynet",
        "clipmill.manifests.adapters.timed_captions:read_activitynet",
        "annotations",
        """Read ActivityNet Captions: videos with several captions, each with a start and an end time.

        The captions in the second validation file (val_2.json) were written by different annotators. Their source is
        human-2.

        Example: prep manifest activitynet VIDEOS --annotations train.json val_1.json

        Parameters
        ----------
        directory
            Folder that contains the videos v_ID.mp4 or ID.mp4.
        """,
    ),
    Adapter(
        "ssv2",
        "clipmill.manifests.adapters.clips:read_something_something",
        "annotations",
        """Read Something-Something v2: captions, and one of 174 classes per clip.

        The class is the template without brackets. The classes of test videos are read from test-answers.csv.

        Example: prep manifest ssv2 VIDEOS --annotations train.json validation.json

        Parameters
        ----------
        directory
            Folder that contains the videos ID.webm.
        """,
    ),
)
ADAPTERS = Parts(
    "adapter",
    group="adapters",
    kind=Adapter,
    builtin={adapter.name: adapter for adapter in DATASETS},
    reserved_names=("captions", "synthetic"),
)
