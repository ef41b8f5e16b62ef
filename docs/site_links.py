"""Links of a page that leave docs/ lead to the repository when the page is part of the site.

On GitHub `../../foredraft/engine/step.py` works as it stands; the site has no such file. This is an
extension of Python-Markdown, which `zensical.toml` names.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

REPOSITORY = "https://github.com/foredraft/foredraft/blob/main/"
_OUTSIDE = re.compile(
    r"(?:\.\./)+((?:foredraft|tests|examples|benchmarks)(?:[/#].*)?|[A-Z]+(?:\.md)?|Makefile|pyproject\.toml)$"
)


class _Links(Treeprocessor):
    def run(self, root: Element) -> None:
        for link in root.iter("a"):
            outside = _OUTSIDE.match(link.get("href", ""))
            if outside:
                link.set("href", REPOSITORY + outside[1])


class SiteLinks(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Links(md), "site_links", 5)


def makeExtension(**settings: Any) -> SiteLinks:
    return SiteLinks(**settings)
