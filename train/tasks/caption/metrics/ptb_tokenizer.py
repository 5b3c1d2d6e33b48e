"""Tokenize captions as all published caption metrics do, without Java.

The same tokens as `pycocoevalcap.tokenizer.PTBTokenizer`: Stanford's PTBTokenizer (CoreNLP 3.4.1, `-preserveLines
-lowerCase`), then without punctuation. docs/captions.md describes the comparison and the differences.
"""

import re
from functools import lru_cache

from train.tasks.caption.metrics.ptb_rules import (
    ABBREVIATIONS_AT_ENDS,
    ABBREVIATIONS_BEFORE_NAMES,
    ABBREVIATIONS_WITH_CAPITALS,
    DOUBLE_WORDS,
    Rule,
    rules,
)

# The original lower-cases brackets ("-lrb-") before it drops punctuation, so that brackets are never dropped.
PUNCTUATION = frozenset(["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", *".?!,:;-", "--", "..."])

# Characters at which the original starts a new line, which makes its caller lose count of the captions.
_LINE_ENDS = re.compile("[\n\r\x0b\x0c\u2028\u2029]")
_SOFT_HYPHEN = "\u00ad"
# Fast path: most captions are letters and spaces, perhaps with a full stop.
_PLAIN_CAPTION = re.compile(r"[A-Za-z ]*[a-z]{2}\.?")
# Fast path: most words are letters between spaces.
_PLAIN = re.compile(r"([A-Za-z]+)(?=[ \n])")
_DOUBLE = frozenset(first + second for first, second in DOUBLE_WORDS)
_SKIPPED = re.compile("[ \t][ \t\u00a0\u2000-\u200a\u3000]*")


@lru_cache(maxsize=1)
def _rules() -> tuple[Rule, ...]:
    return rules()


def tokenize(caption: str) -> str:
    """The caption's tokens in lower case without punctuation, separated by single spaces; may be empty."""
    if _PLAIN_CAPTION.fullmatch(caption):
        words = caption.lower().removesuffix(".").split()
        if words[-1] not in _special() and _DOUBLE.isdisjoint(words):
            return " ".join(words)
    line = " ".join(tokens_of(caption)).rstrip()  # like the original; it matters for an address before a wide space
    return " ".join(token for token in line.split(" ") if token not in PUNCTUATION)


@lru_cache(maxsize=1)
def _special() -> frozenset[str]:
    """Words that are two tokens, or that keep their full stop."""
    lists = (
        ABBREVIATIONS_AT_ENDS,
        ABBREVIATIONS_BEFORE_NAMES,
        ABBREVIATIONS_WITH_CAPITALS,
        "pte ptes pty ptys ppte ppty mfg mtg",
    )
    return _DOUBLE.union(*(words.split() for words in lists))


def tokens_of(caption: str) -> list[str]:
    """All tokens of a caption, including punctuation."""
    text = _LINE_ENDS.sub(" ", caption).replace(_SOFT_HYPHEN, "") + "\n\n"
    end = len(text) - 2
    tokens: list[str] = []
    place = 0
    while place < end:
        if plain := _PLAIN.match(text, place):
            token = plain[1].lower()
            if token not in _DOUBLE:
                tokens.append(token)
                place = plain.end(1)
                continue
        if space := _SKIPPED.match(text, place):
            place = space.end()
            continue
        token, place = _next_token(text, place)
        if token:
            tokens.append(token)
    return tokens


def _next_token(text: str, place: int) -> tuple[str, int]:
    """The token at a position, empty for a dropped character, and the position after it."""
    best: re.Match[str] | None = None
    best_rule: Rule | None = None
    for rule in _rules():
        match = rule.pattern.match(text, place)
        if match and (best is None or match.end() > best.end()):
            best, best_rule = match, rule
    if best is None or best_rule is None:
        return "", place + 1
    token = best[1] if best_rule.rewrite is None else best_rule.rewrite(best[1])
    if not token:
        return "", best.end(1)
    return token.lower(), best.end(1)
