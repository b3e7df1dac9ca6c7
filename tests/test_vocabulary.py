"""Words that a reader who knows PyTorch, NumPy and h5py would read twice, and what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for pattern in ("h5pack/**/*.py", "tests/**/*.py", "benchmarks/**/*.py", "examples/*.py", "docs/*.md", "*.md")
    for path in ROOT.glob(pattern)
    if path != Path(__file__) and path.name != "CHANGELOG.md"
)
AVOID = {
    r"anew": "again, from scratch",
    r"whoever|nobody|anybody's|somebody": "name the caller or the program",
    r"(is|are|was|were|be|been) told|tells": "says, reports; receives",
    r"hand(s|ed|ing)? out": "yield, deliver",
    r"amid|lest|thereof|whereof|henceforth": "plain English",
    r"mend(s|ed|ing)?": "fix, repair",
    r"cures?|cured": "fix, recommendation",
    r"so many(?! \w+ that)|as ever": "this many; as before",
    r"wings?|the house|noun a file": "package, architecture",
    r"guilty|patient": "bottleneck; target",
    r"contenders?|swept": "cases; measured",
    r"of (their|other|our|its) (own )?making|other people's": "made by other tools",
    r"looked at|(is|to) look(ed)? whether": "checked",
    r"befalls?|partakes?": "happens to; takes part",
    r"(goes|went|going) about it": "execution",
}


WORDS = re.compile(rf"\b(?:{'|'.join(AVOID)})\b")


def test_no_word_to_avoid() -> None:
    found = [
        f"{path.relative_to(ROOT)}, line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r} (write: {instead})"
        for path, text in ((path, path.read_text(encoding="utf-8").lower()) for path in FILES)
        for match in WORDS.finditer(text)
        for words, instead in AVOID.items()
        if re.fullmatch(words, match[0])
    ]
    assert found == []
