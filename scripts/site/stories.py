"""Advice for errors without a hint, for the page of messages.

The first pattern that a message contains determines the advice.
"""

import re

_REPAIR = "run `prep verify`, which lists damaged files and the command that makes them again"
_CHECK = "check the path, its permissions and the disk, and run the command again"
STORIES: tuple[tuple[str, str], ...] = (
    (
        r"run the same command again|failures are listed in|to repair, run",
        "follow the message, which says how to continue",
    ),
    (r"not finite|the … is … at step", "[the loss is not finite](troubleshooting.md#the-loss-is-not-finite)"),
    (r"\branks? |\branks\b", "[several processes](troubleshooting.md#several-processes)"),
    (r"generated captions are empty|learns nothing", "check the captions, the loss, and what is frozen"),
    (r"captions have no label", "use a label column of the captions, or add one"),
    (r"another process", "wait until it has finished, or stop it"),
    (r"no such folder|is a file, not a folder", "use the folder of the videos"),
    (r"requested by …\) does not exist|^timm:", "check the name: a folder, or a model that its library knows"),
    (r"ha(s|ve) no column|lists videos|does not have the lists|belong together", "use files of the same release"),
    (
        r"scores are of|is stale|is missing$|no … shards|no committed shards|has no (video )?chunks|"
        r"no text of any video|contains no texts|has no variant",
        "run the `prep` command of that column, which `prep status` shows",
    ),
    (r"missing or damaged|is damaged$|does not match its checksum", _REPAIR),
    (r"not a page that clipmill wrote", "use a different file"),
    (r"listed as lost", "restore the sources that `prep status` lists as lost, or remove them from the manifest"),
    (r"cannot connect to a Ray cluster", "check the address, and that `ray status` works on this machine"),
    (r"--min-likelihood", "choose a lower value"),
    (r"after the warm-up|step time in", "train for more steps, or use `--step-time`"),
    (r"would stop training|see train doctor", "follow the hints of the findings above the message"),
    (r"out of range|has no preset|is not a preset of train|with the key", "see `--help-all` for the possible values"),
    (r"character …", "correct the expression there: [selection](data.md#selection---where)"),
    (r"--freeze|videomae tower|towers from libraries", "omit the flag, or choose a different part of the model"),
    (r"not of train|of source … only", "use the evaluation and the captions that the message states"),
    (
        r"do(es)? not fit (the model|its config)|the weights belong to|only adapters|part of a captioner|"
        r"no tokenizer|the tokenizer",
        "see [weights](weights.md) for the weights that fit",
    ),
    (
        r"no row in the relevancy|has a row in the relevancy|has a class|protocol",
        "compare the files with the split of the data",
    ),
    (r"completely in the cache|has to be in the cache", "use a larger `--cache-size`, or another `--cache`"),
    (r"decoded|loaded|samples? failed|could not be read|more than (--max-failures|max_failures)|cannot show", _REPAIR),
    (r"credentials are refused", "set or correct the variables of the account: [buckets](cluster.md)"),
    (r"cannot|could not|was not written|holds no object|no data folder", _CHECK),
    (r"^… failed|^evaluation of|^…: …", "follow the message, which contains the reason and a hint"),
)


def what_to_do(message: str) -> str | None:
    """Return advice for a message, in Markdown; None if no pattern matches."""
    return next((advice for pattern, advice in STORIES if re.search(pattern, message)), None)
