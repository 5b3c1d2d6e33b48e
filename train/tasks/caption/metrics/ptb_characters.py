"""Which characters are letters to the tokenizer of the Penn Treebank, and which it throws away.

The tokenizer that caption metrics are defined by is of 2014 and knows the characters of that year's Unicode, of the
first plane only. What it does with each of the 63,000 was measured, one by one; `ptb_characters.tsv` has the outcome
for those beyond ASCII, as ranges of three kinds: a `letter` (digits of any script among them), a `mark`, which may
stand in a word but not in a number, and a `symbol`, a token of its own. All others but those that a rule names, emoji
among them, leave no trace.
"""

from functools import lru_cache
from pathlib import Path

_TABLE = Path(__file__).parent / "ptb_characters.tsv"


@lru_cache(maxsize=1)
def character_classes() -> dict[str, str]:
    """The insides of a regular expression's brackets for `letter`, `mark` and `symbol`, ASCII not among them."""
    inside = {"letter": "", "mark": "", "symbol": ""}
    for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]:
        first, last, kind = line.split("\t")
        inside[kind] += rf"\u{first}-\u{last}"
    return inside
