"""Tokenizer for caption metrics: reproduces the tokens of Stanford's PTBTokenizer without Java.

All published caption metrics use PTBTokenizer. The tokens equal the output of
`pycocoevalcap.tokenizer.PTBTokenizer`: Stanford's PTBTokenizer (CoreNLP 3.4.1, `-preserveLines -lowerCase`), followed
by the removal of punctuation. docs/captions.md describes the comparison and the differences.

At each position of a caption, the rule with the longest match determines the next token. If several matches are equally
long, the first rule wins. Required context after a token counts towards the length, but is not part of the token. The
rules were derived by comparison with the original on millions of strings, and agree with it on all of them.

The original is from 2014, and knows only the Unicode characters of that year in the basic multilingual plane. Its
treatment of each of these 63,000 characters was measured. `ptb_characters.tsv` lists the characters beyond ASCII as
ranges of three kinds: a `letter` (or a digit of any script); a `mark`, which may be part of a word, but not of a
number; and a `symbol`, which is a separate token. All other characters, such as emoji, are dropped unless a rule
contains them.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).parent / "ptb_characters.tsv"
Rewrite = Callable[[str], str]

# In the following lists, words are separated by spaces.

# Abbreviations, which keep their full stop. A sentence may end with a word of the first group, but not with a word of
# the second. If a letter follows directly, the groups also differ: "etc.x" is two tokens, but "mr.x" is one token.
ABBREVIATIONS_AT_ENDS = (
    "al ala apr ariz assn aug bancorp bhd bldg blvd bros calif co colo conn corp cos ct dak dec esq est etc ext feb "
    "fla fri ga inc ind intl jan jr jul jun kan kans ky ltd mar md mich minn mo mon mont neb nev nov oct okla penn "
    "plc rd rt sep sept seq sq sr sys tel tenn thu thurs tue tues univ va vt wed wis wisc wyo"
)
ABBREVIATIONS_BEFORE_NAMES = (
    "adj adm adv alex assoc asst atty attys ave brig capt cf cie cmdr col comdr cpl dept det dr drs elec ens ft gen "
    "gov govs hon insp invt jos lieut lt maj messrs mlle mme mr mrs ms msgr mt natl pfc ph pres prof profs pvt rep "
    "reps rev sen sens sfc sgt spc st ste supt treas vs wm"
)
# Words that are abbreviations only if they are capitalised: "Mass.", but not "mass.".
ABBREVIATIONS_WITH_CAPITALS = "ark az del ill la mass miss ore pa tex wash"
# Words that are abbreviations only before a number: "no. 5", but not "no.".
ABBREVIATIONS_BEFORE_NUMBERS = "art ca fig figs no nos op pp prop"

# Words that are split into two tokens.
DOUBLE_WORDS = (("can", "not"), ("gim", "me"), ("gon", "na"), ("got", "ta"), ("lem", "me"), ("wan", "na"))

# Words that are one token despite their apostrophe.
WORDS_WITH_APOSTROPHES = "nor'easter c'mon c'est e'er s'mores ev'ry li'l nat'l cap'n"

# Words that begin a sentence if they are capitalised and follow a letter with a full stop: "the U.S. The man".
SENTENCE_STARTERS = (
    "A About According Additionally After An As At But Earlier He Her Here However If In It Last Many More Mr. Ms. "
    "Now Once One Other Our She Since So Some Such That The Their Then There These They This We When While What Yet You"
)

FILE_ENDINGS = (
    "bat bmp c cgi cpp dll doc docx exe gif gz h htm html jar java jpeg jpg mov mp3 pdf php pl png ppt ps py sql tar "
    "txt wav x xml zip"
)


@dataclass(frozen=True)
class Rule:
    """Rule for one kind of token.

    Attributes:
        pattern: Pattern whose first group is the token. Required context may follow. Two newlines are appended to every
            caption before it is matched.
        rewrite: Function that takes the token and returns its replacement, or an empty string to drop the token.
    """

    pattern: re.Pattern[str]
    rewrite: Rewrite | None = None


def _replace_spaces(token: str) -> str:
    """Replace the spaces in a token with no-break spaces, to distinguish them from spaces between tokens."""
    return token.replace(" ", "\u00a0")


_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}


def _escape_brackets(token: str) -> str:
    return token.replace("(", "-lrb-").replace(")", "-rrb-")


def _replace_apostrophes(token: str) -> str:
    return re.sub("[\u0092\u2019]|&apos;", "'", token)


_PLAIN_QUOTES = ["`", "'", "``", "''", "`", "'", "`", "``", "''", "``", "''", "`", "'"]
_QUOTES = dict(
    zip("\u0091\u0092\u0093\u0094\u2018\u2019\u201b\u201c\u201d\u00ab\u00bb\u2039\u203a", _PLAIN_QUOTES, strict=True)
)
_FRACTIONS = {"\u00bc": "1/4", "\u00bd": "1/2", "\u00be": "3/4", "\u2153": "1/3", "\u2154": "2/3"}
_DASHES = ("&md;", "&mdash;", "&ndash;")
# "&quot;" and "&apos;" are recognised only in lower case.
_ENTITIES = {"&quot;": "''", "&apos;": "'"}
_ENTITIES_OF_ANY_CASE = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&nbsp;": "", **dict.fromkeys(_DASHES, "--")}


def _decode_entity(token: str) -> str:
    return _ENTITIES.get(token) or _ENTITIES_OF_ANY_CASE.get(token.lower(), token)


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, and prefers longer words."""
    return "(?:" + "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) + ")"


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules, in order."""
    classes = character_classes()
    # Building blocks of the patterns.
    accent = "&(?i:[aeiou](?:acute|grave|uml));"
    base_letter = f"[A-Za-z{classes['letter']}]"
    letter = f"(?:[A-Za-z{classes['letter']}{classes['mark']}]|{accent})"
    word = f"{letter}(?:{letter}|[0-9])*"
    base_word = f"[A-Za-z{classes['letter']}0-9]+"
    hyphen = "[-_\u058a\u2010\u2011]"
    apostrophe = "(?:['\u0092\u2019]|&apos;)"
    any_apostrophe = "(?:['\u0092\u2019`\u2018\u0091]|&apos;)"
    number = "(?:[0-9]*(?:[.:,\u066b\u066c][0-9]+)+|[0-9]+)"
    french = f"(?:[dDoOlL]{any_apostrophe}{base_word[:-1]})?{base_word}"  # d'accord, o'clock
    hyphenated = f"{french}(?:{hyphen}{french})*"
    dotted = r"[A-Za-z0-9][A-Za-z0-9.,]*(?:-(?:[A-Za-z](?:\.[A-Za-z])+\.|[A-Za-z0-9]+))+"
    words = f"{word}(?:[.!?]{word})+"
    suffix = "(?:[sdm]|ll|re|ve)"
    tag = "[A-Za-z][A-Za-z0-9_.:-]*"
    tags = f"(?:<[!?][A-Za-z-][^>]*>|</{tag}[ ]*>|<{tag}(?:[ ]+{tag}(?:=(?:\"[^\"]*\"|'[^']*'))?)*[ ]*/?[ ]*>)"
    path = r'(?:/[^ \t\n\f\r"<>|()]+[^ \t\n\f\r"<>|.!?(){},-])?'
    hyphenated_word = r"[A-Za-z0-9]+(?:-[A-Za-z]+){0,2}"
    starters = _any_of({form for name in SENTENCE_STARTERS.split() for form in (name, name.upper())})
    capitals = "|".join(f"{name[0].upper()}(?i:{name[1:]})" for name in ABBREVIATIONS_WITH_CAPITALS.split())
    two_more = r"[\s\S]{2}"

    all_rules: list[Rule] = []

    def rule(token: str, context: str = "", rewrite: Rewrite | None = None, *, flags: int = 0) -> None:
        all_rules.append(Rule(re.compile(f"({token}){context}", flags), rewrite))

    any_case = re.IGNORECASE
    # Tags.
    rule(tags, rewrite=_replace_spaces)
    # Words, and words that are split into two tokens: can not, 't is, it 's, do n't.
    for first, second in DOUBLE_WORDS:
        rule(first, second, flags=any_case)
    rule("'t", "(?:is|was)", flags=any_case)
    rule(word)
    rule(r"(?:non|canada|sino|korean|eu|japan)-u\.s\.?", flags=any_case)
    rule(f"{word}(?:[.!?]{word})*", apostrophe + suffix, flags=any_case)
    rule("[A-Za-z]*[A-MO-Za-mo-z]", f"n{any_apostrophe}t", flags=any_case)
    rule(f"n{any_apostrophe}t", rewrite=_replace_apostrophes, flags=any_case)
    rule(f"'{suffix}", r"[^A-Za-z]", _replace_apostrophes, flags=any_case)
    rule(f"(?:[\u0092\u2019]|&apos;){suffix}", rewrite=_replace_apostrophes, flags=any_case)
    # Web addresses and names.
    rule(r'https?://[^ \t\n\f\r"<>|(){}]+[^ \t\n\f\r"<>|.!?(){},-]', flags=any_case)
    rule(r'(?i:www)\.(?:[^ \t\n\f\r"<>|.!?(){},]+\.)+[A-Za-z]{2,4}' + path)
    rule(r"""(?:[^ \t\n\f\r"`'<>|.!?(){},-_$]+\.)+(?:com|net|org|edu)""" + path)
    rule(
        r'(?:&lt;|<)?[A-Za-z0-9][^ \t\n\f\r"<>|()\u00a0{}]*@(?:[^ \t\n\f\r"<>|(){}.\u00a0]+\.)*'
        r'[^ \t\n\f\r"<>|(){}.\u00a0]+(?:&gt;|>)?',
    )
    rule("@[A-Za-z_][A-Za-z_0-9]*")
    rule(f"#{letter}+")
    # Words that contain or end with full stops.
    rule(words)
    rule(_any_of(ABBREVIATIONS_AT_ENDS.split()) + r"\.", two_more, flags=any_case)
    rule(_any_of(ABBREVIATIONS_BEFORE_NAMES.split()) + r"\.", flags=any_case)
    rule(f"(?:{capitals})\\.", two_more)
    rule(r"(?i:p?pt)[ey](?i:s?)\.", two_more)
    rule(r"(?i:m)[ft](?i:g)\.")
    rule(r"ph\.d\.", two_more, flags=any_case)
    rule("[A-Za-z]", f"\\.[ \\t\\n\u00a0]+(?:{starters}|{tags})[ \\t\\n\u00a0]")
    rule(r"[A-Za-z](?:\.[A-Za-z])*\.?")
    part = f"(?:{letter}|[0-9])+"
    extension = f"{part}(?:\\.{part})*\\.{_any_of(FILE_ENDINGS.split())}"
    rule(extension, "[ \\t\\n\u00a0!,.?]", flags=any_case)
    rule(_any_of(ABBREVIATIONS_BEFORE_NUMBERS.split()) + r"\.", " ?[0-9]", flags=any_case)
    for stem in (word, words, hyphenated, dotted):
        rule(rf"(?:{stem})\.", "[,:;]")
    # Numbers, fractions, dates, telephone numbers, money.
    rule(f"[-+]?{number}")
    rule("[0-9]{1,2}[-/][0-9]{1,2}[-/][0-9]{2,4}")
    rule("(?:[0-9]{1,4}[- \u00a0])?[0-9]{1,4}(?:\\\\?/|\u2044)[0-9]{1,4}", rewrite=_replace_spaces)
    rule(f"[{''.join(_FRACTIONS)}]", rewrite=_FRACTIONS.__getitem__)
    rule(
        "(?:\\([0-9]{2,3}\\)[ \u00a0]?|(?:\\+\\+?)?(?:[0-9]{2,4}[- \u00a0])?[0-9]{2,4}[- \u00a0])"
        "[0-9]{3,4}[- \u00a0]?[0-9]{3,5}"
        r"|(?:(?:\+\+?)?[0-9]{2,4}\.)?[0-9]{2,4}\.[0-9]{3,4}\.[0-9]{3,5}",
        rewrite=lambda token: _replace_spaces(_escape_brackets(token)),
    )
    rule(r"[A-Z]*\$")
    rule("[\u0080\u00a4\u20a0\u20ac]", rewrite=lambda token: "$")
    rule("\u00a3", rewrite=lambda token: "#")
    rule("\u00a2", rewrite=lambda token: "cents")
    # Words with hyphens, slashes, ampersands, apostrophes.
    rule(hyphenated)
    rule(dotted)
    rule(rf"{hyphenated_word}(?:\\?/{hyphenated_word}){{1,2}}")
    rule("[A-Z]+(?:(?:[+&]|&amp;)[A-Z]+)+", rewrite=lambda token: token.replace("&amp;", "&"))
    rule(f"{apostrophe}n{apostrophe}?", flags=any_case)
    rule(f"[lLdDjJ]{apostrophe}")
    rule(f"(?:dunkin|somethin|ol){apostrophe}|{apostrophe}em", flags=any_case)
    rule(_any_of(WORDS_WITH_APOSTROPHES.split()), flags=any_case)
    rule(f"[A-HJ-XZn]{any_apostrophe}{base_letter}{{2,}}")
    rule(f"{base_letter}+[aeiouyAEIOUY]{any_apostrophe}[aeiouA-Z]{base_letter}*")
    rule(f"[oO]{any_apostrophe}[oO]")
    rule(f"{apostrophe}(?:[2-9]0s|[0-9]{{2}}(?=[ \\t\\n\u00a0]))")
    rule(f"{apostrophe}(?:till?|cause)", flags=any_case)
    rule(f"y{apostrophe}", letter, flags=any_case)
    rule("'", "[A-Za-z][^ \\t\\n\\r\u00a0]")
    # Emoticons.
    rule(r"[<>]?[:;=][\-o*']?[()DPdpO\\{@|\[\]]", "[^A-Za-z0-9]", _escape_brackets)
    rule(r"[\-^x=~<>']_[\-^x=~<>']", rewrite=_escape_brackets)
    rule(r"\([\-^x=~<>'][_.]?[\-^x=~<>']\)|\([\^x=~<>']-[\^x=~<>'`]\)", rewrite=_escape_brackets)
    # Signs.
    rule("&(?:amp|lt|gt|quot|apos|nbsp|md|mdash|ndash);", rewrite=_decode_entity, flags=any_case)
    rule("&(?:#[0-9]+|cdq|odq|ht|tl|lr|ql|qr|qc|ur);", flags=any_case)
    rule(r"[cC]\+\+|[CcFf]#")
    rule(r"[!?]+|_+|\*+|\\\*|<<|>>|@+|#+|-{5,}|--|''|``|['`]")
    # The kind of quotation mark does not matter, because punctuation is dropped.
    rule('"', rewrite=lambda token: "''")
    rule("-{3,4}|[\u0096\u0097\u2013\u2014\u2015]", rewrite=lambda token: "--")
    rule("\\.{3,5}|\\. \\. \\.|[\u0085\u2026]", rewrite=lambda token: "...")
    quotes = f"[`\u201a\u201e\u201f{''.join(_QUOTES)}]{{1,2}}"
    rule(quotes, rewrite=lambda token: "".join(_QUOTES.get(character, character) for character in token))
    rule("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u2080-\u2089]+")
    rule(r"[()\[\]{}]", rewrite=_BRACKETS.__getitem__)
    rule(rf"[!#$%&*+,./:;<=>?@\\^_|~\-{classes['symbol']}]")
    return tuple(all_rules)


def character_classes() -> dict[str, str]:
    """Return the characters beyond ASCII of the kinds `letter`, `mark` and `symbol`, as content of regex classes."""
    classes = {"letter": "", "mark": "", "symbol": ""}
    for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]:
        first, last, kind = line.split("\t")
        classes[kind] += rf"\u{first}-\u{last}"
    return classes


# The original converts brackets to lower case ("-lrb-") before it drops punctuation, so brackets are not dropped.
PUNCTUATION = frozenset(["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", *".?!,:;-", "--", "..."])

# Characters at which the original starts a new line. In pycocoevalcap, such a line break shifts all later captions.
_LINE_ENDS = re.compile("[\n\r\x0b\x0c\u2028\u2029]")
_SOFT_HYPHEN = "\u00ad"
# Fast path: most captions consist of letters and spaces, perhaps with a full stop.
_PLAIN_CAPTION = re.compile(r"[A-Za-z ]*[a-z]{2}\.?")
# Fast path: most words consist of letters between spaces.
_PLAIN_WORD = re.compile(r"([A-Za-z]+)(?=[ \n])")
_JOINED_WORDS = frozenset(first + second for first, second in DOUBLE_WORDS)
_SPACES = re.compile("[ \t][ \t\u00a0\u2000-\u200a\u3000]*")


def tokenize(caption: str) -> str:
    """Return the tokens of a caption in lower case, without punctuation, separated by single spaces.

    The result may be empty.
    """
    if _PLAIN_CAPTION.fullmatch(caption):
        words = caption.lower().removesuffix(".").split()
        if words[-1] not in _special_words() and _JOINED_WORDS.isdisjoint(words):
            return " ".join(words)
    # Strip the line, as the original does. This matters if a URL is followed by a wide space.
    line = " ".join(tokens_of(caption)).rstrip()
    return " ".join(token for token in line.split(" ") if token not in PUNCTUATION)


@cache
def _special_words() -> frozenset[str]:
    """Return the words that are split into two tokens, or that keep their full stop."""
    lists = [ABBREVIATIONS_AT_ENDS, ABBREVIATIONS_BEFORE_NAMES, ABBREVIATIONS_WITH_CAPITALS]
    lists.append("pte ptes pty ptys ppte ppty mfg mtg")
    return _JOINED_WORDS.union(*(words.split() for words in lists))


def tokens_of(caption: str) -> list[str]:
    """Return all tokens of a caption, including punctuation."""
    text = _LINE_ENDS.sub(" ", caption).replace(_SOFT_HYPHEN, "") + "\n\n"
    end = len(text) - 2
    tokens: list[str] = []
    position = 0
    while position < end:
        if plain := _PLAIN_WORD.match(text, position):
            token = plain[1].lower()
            if token not in _JOINED_WORDS:
                tokens.append(token)
                position = plain.end(1)
                continue
        if space := _SPACES.match(text, position):
            position = space.end()
            continue
        token, position = _next_token(text, position)
        if token:
            tokens.append(token)
    return tokens


def _next_token(text: str, position: int) -> tuple[str, int]:
    """Return the token at a position ("" for a dropped character), and the position after the token."""
    matches = [(match, rule) for rule in rules() if (match := rule.pattern.match(text, position))]
    if not matches:
        return "", position + 1
    match, rule = max(matches, key=lambda pair: pair[0].end())  # the first of equally long matches
    token = match[1] if rule.rewrite is None else rule.rewrite(match[1])
    return token.lower(), match.end(1)
