"""mkdocs hook: links from pages to files of the repository outside docs/.

Plots are copied into the site. What the site does not hold is shown as its name and path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
_PLOTS = "benchmarks/results"
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)\s]*)\)")


def on_files(files, config):
    """Adds the plots of benchmarks/results to the site."""
    for plot in sorted((ROOT / _PLOTS).glob("*.svg")):
        uri = f"{_PLOTS}/{plot.name}"
        files.append(File.generated(config, uri, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links that leave docs/."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def rewritten(found: re.Match) -> str:
        path = found["target"].partition("#")[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        if target.startswith("docs/"):
            return found[0]
        if target.startswith(f"{_PLOTS}/") and target.endswith(".svg"):
            inside = posixpath.relpath(f"docs/{target}", folder)
            return f"{found['image']}[{found['text']}]({inside})"
        text = found["text"].strip("`")
        return (
            f"`{target}`"
            if text in (target, posixpath.basename(target))
            else f"{found['text']} (`{target}`)"
        )

    return _LINK.sub(rewritten, markdown)
