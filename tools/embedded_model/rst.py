"""Parses pages of reStructuredText well enough to train on: their plain text, sections, and the objects described."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

SECTION_CHARS = 4000
HEADING = re.compile(r"(?m)^(?=\S[^\n]*\n(?:={4,}|-{4,}|~{4,}|\^{4,}|\*{4,}|\"{4,})$)")
OBJECTS = "function|method|class|exception|data|attribute|decorator"
DIRECTIVE = re.compile(rf"(?m)^( *)\.\. (?:c:|py:)?(?:{OBJECTS}|classmethod)::")
OPTIONS = "noindex|synopsis|module|platform|linenos|name|class|async|abstractmethod"
MARKUP = (  # patterns of markup that a rendered page does not show, with what it shows instead
    (r"(?m)^\.\. (?:index|_|only|sectionauthor|moduleauthor|highlight|audit-event)[^\n]*\n(?:[ \t]+.*\n)*", ""),
    (r"(?m)^ *\.\. (?:audit-event|availability|impl-detail|index)::.*\n(?:\s+single:.*\n)*", ""),
    (r"(?m)^( *)\.\. versionadded:: *(\S+)", r"\1New in version \2."),
    (r"(?m)^( *)\.\. versionchanged:: *(\S+)", r"\1Changed in version \2."),
    (r"(?m)^( *)\.\. deprecated(?:-\w+)?:: *(\S+)", r"\1Deprecated since version \2."),
    (r"(?m)^( *)\.\. (note|warning|seealso|tip|rubric|important)::", r"\1\2:"),
    (rf"(?m)^( *)\.\. [a-z:]*(?:{OBJECTS}|module)::", r"\1"),
    (r"(?m)^ *\.\. [\w:+-]+::.*\n", ""),
    (rf"(?m)^ +:(?:{OPTIONS})\w*:.*\n", ""),
    (r":[\w:+-]+:`[!~.]*([^`<]+?)(?:\s*<[^`>]*>)?`", r"\1"),
    (r"`([^`<]+?)\s*<[^`>]*>`_+", r"\1"),
    (r"``([^`]+)``", r"`\1`"),
    (r"::\n", ":\n"),
    (r"(?m)[ \t]+$", ""),
    (r"\n{3,}", "\n\n"),
)


def plain_text(page: str) -> str:
    """Returns the page without its markup; headings, lists and examples stay."""
    for pattern, replacement in MARKUP:
        page = re.sub(pattern, replacement, page)
    return page.strip()


def sections(text: str) -> Iterator[str]:
    """Splits a page at its headings, and joins neighbours up to SECTION_CHARS, so that both ends are natural ones."""
    held = ""
    for part in HEADING.split(text):
        if held and len(held) + len(part) > SECTION_CHARS:
            yield held
            held = ""
        held += part
    if held.strip():
        yield held


def described_objects(page: str) -> Iterator[tuple[str, str, str]]:
    """Yields the qualified name, the signature and the text of each object that the page describes.

    The directive's own line is the signature, the indented lines below it are the text, up to the next directive.
    """
    current = re.search(r"(?m)^\.\. (?:current)?module:: (\S+)", page)
    module = current[1] if current else ""
    for match in DIRECTIVE.finditer(page):
        indent = len(match[1])
        lines = re.sub(r"\\\n\s*", "", page[match.end() : match.end() + 40_000]).split("\n")
        signature = lines[0].strip()
        body: list[str] = []
        for line in lines[1:]:
            if line.strip() and (len(line) - len(line.lstrip()) <= indent or DIRECTIVE.match(line)):
                break
            body.append(line)
        text = plain_text(inspect.cleandoc("\n" + "\n".join(body)))
        declared = re.search(r"[\w.]+(?=\s*[(\[]|$)" if "c:" in match[0] else r"^@?[\w.]+", signature)
        name = declared[0] if declared else ""
        qualified = name if not module or name.startswith(module) else f"{module}.{name}"
        if text and name:
            yield qualified, signature, text
