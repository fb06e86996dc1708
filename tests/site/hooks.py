"""Hooks of mkdocs: files outside of ``docs`` that pages link to become pages of the site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tests.readme import FENCE, LINK, ROOT
from tests.site import names, settings, sql

DOCS = "docs"
GENERATED = {
    "codes": sql.codes,
    "commands": settings.commands,
    "configuration": settings.configuration,
    "functions": sql.functions,
    "grants": sql.grants,
}
"""By mark, such as ``<!-- generated: commands -->``: the function that returns the text for it."""
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".sql": "sql", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of public names, and a page for each source file to which a page links, directly or through such a
    page."""
    for path, text in names.pages().items():
        files.append(File.generated(config, path, content=text))
    waiting = [path.relative_to(ROOT) for path in sorted((ROOT / DOCS).rglob("*.md"))]
    known = set(waiting)
    while waiting:
        for target in _targets(waiting.pop()):
            if target not in known and site_uri(target) not in files.src_uris:
                known.add(target)
                waiting.append(target)
                files.append(
                    File.generated(
                        config, site_uri(target), content=_text(target), inclusion=InclusionLevel.NOT_IN_NAV
                    )
                )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the generated parts, and let links lead to the pages of source files in the site."""
    markdown = MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
    here = source_path(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        path, hash_sign, fragment = link[1].partition("#")
        if not path or "://" in path:
            return link[0]
        target = site_uri(Path(os.path.normpath(here.parent / path)))
        relative = os.path.relpath(target, PurePosixPath(page.file.src_uri).parent)
        return f"]({relative}{hash_sign}{fragment})"

    parts = re.split(r"(^```\w+\n.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def _targets(page: Path) -> Iterator[Path]:
    """Return the files to which a page links, as paths from the root of the repository."""
    for link in LINK.findall(FENCE.sub("", _text(page))):
        path = link.partition("#")[0]
        if path and "://" not in path:
            yield Path(os.path.normpath((page if (ROOT / page).is_dir() else page.parent) / path))


def _text(path: Path) -> str:
    """Return the content of the page for a source file or folder."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.suffix == ".py")
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names), ""])
    if path.suffix == ".md":
        return file.read_text()
    return f"# {path.name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{file.read_text()}```\n"


def site_uri(path: Path) -> str:
    """Return the path of the page for a source file."""
    if path.parts[0] == DOCS:
        return path.relative_to(DOCS).as_posix()
    if (ROOT / path).is_dir():
        return f"source/{path.as_posix()}/README.md"
    return f"source/{path.as_posix()}" + ("" if path.suffix == ".md" else ".md")


def source_path(uri: str) -> Path:
    """Return the source file of a page: the reverse of ``site_uri``."""
    path = Path(uri)
    if path.parts[0] != "source":
        return DOCS / path
    inside = path.relative_to("source")
    if (ROOT / inside).exists():
        return inside
    return inside.with_suffix("") if (ROOT / inside.with_suffix("")).exists() else inside
