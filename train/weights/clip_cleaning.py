"""open_clip's cleaning of texts as a normaliser of tokenizers, for exported tokenizers.

open_clip repairs texts with ftfy, decodes HTML twice, folds white space and lowers the case. A normaliser is a list of
replacements, so that it has every step whose result depends on a few characters alone. What it lacks depends on the
text around them:

- text that was decoded with the wrong encoding ("schÃ¶n"), which ftfy recognises by statistics,
- HTML in a text with "<", where ftfy leaves the quotes and ligatures that HTML stands for,
- character references by number outside of `_NUMBERED`, and HTML that was escaped again and again without semicolons.
"""

import html
import re
from collections import defaultdict
from collections.abc import Iterator
from html.entities import html5
from typing import Any

# Latin letters, punctuation, signs, and emoji. Each is a replacement that takes time for every text.
_NUMBERED = (
    *(range(32, 0x180), range(0x2000, 0x2070), range(0x20A0, 0x20C0), range(0x2100, 0x2150)),
    *(range(0x2600, 0x27C0), range(0x1F300, 0x1F650)),
)
_AMPERSAND = "&"
_SIGMA = "(?<=[\\p{Lu}\\p{Ll}\\p{Lt}])\u03a3(?!\\p{M}*[\\p{Lu}\\p{Ll}\\p{Lt}])"


def cleaning_normalizer() -> Any:
    """The normaliser (`tokenizers.normalizers.Sequence`)."""
    from tokenizers import Regex, normalizers

    rules = (*_replacements(), None, *_without_semicolons(), (Regex(r"\s+"), " "))
    steps = [normalizers.NFC() if rule is None else normalizers.Replace(*rule) for rule in rules]
    # Rust lowers letter by letter; Python knows the sigma that ends a word.
    return normalizers.Sequence(
        [*steps, normalizers.Strip(), normalizers.Replace(Regex(_SIGMA), "\u03c2"), normalizers.Lowercase()]
    )


def _replacements() -> Iterator[tuple[Any, str]]:
    """Texts or patterns, and what replaces them, in the order in which ftfy replaces them."""
    from open_clip import tokenizer as theirs
    from tokenizers import Regex

    chardata: Any = theirs.ftfy.chardata
    # Text that was escaped several times.
    yield Regex(r"&(?:(?:amp|AMP|#0*38|#[xX]0*26);)+"), _AMPERSAND
    patterns = defaultdict[str, list[str]](list)
    for name, value in {**{f"&{name}": value for name, value in html5.items()}, **chardata.HTML_ENTITIES}.items():
        if name.endswith(";") and value != _AMPERSAND:
            patterns[value].append(re.escape(name))
    for number in (number for numbers in _NUMBERED for number in numbers):
        value = html.unescape(f"&#{number};")
        patterns[value] += [f"&#0*{number}(?![0-9]);?", f"&#[xX]0*(?i:{number:x})(?![0-9a-fA-F]);?"]
    for value, alternatives in patterns.items():
        yield Regex("|".join(alternatives)), value
    # Control characters of ISO 8859-1 are meant as those of Windows.
    for number in range(0x80, 0xA0):
        yield chr(number), bytes([number]).decode("cp1252", errors="replace").replace("\ufffd", chr(number))
    for number, value in {**chardata.LIGATURES, **chardata.WIDTH_MAP}.items():
        yield chr(number), value
    yield Regex(chardata.SINGLE_QUOTE_RE.pattern), "'"
    yield Regex(chardata.DOUBLE_QUOTE_RE.pattern), '"'
    yield Regex("\\x1b\\[[0-9;]*[a-zA-Z]"), ""
    removed = (number for number, value in chardata.CONTROL_CHARS.items() if value is None)
    yield Regex(f"[{''.join(f'{chr(92)}x{{{number:x}}}' for number in removed)}]"), ""


def _without_semicolons() -> Iterator[tuple[Any, str]]:
    """Old names of HTML, which need no semicolon; the longest first, of which others are the beginning."""
    from tokenizers import Regex

    names = sorted((name for name in html5 if not name.endswith(";")), key=len, reverse=True)
    for name in names:
        yield Regex(f"&{name};?"), html5[name]
