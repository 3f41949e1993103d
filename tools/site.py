"""`python -m tools.site`: build the documentation site into build/site; broken links and anchors are errors.

The pages are copied first, in the layout of the repository, so that links between them work on the site as they do in a
checkout. The configuration is mkdocs.yml.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools.prose.names import page as page_of_names
from tools.prose.names import public_names

ROOT = Path(__file__).parents[1]
PAGES = (
    *("*.md", "docs/**/*.md", "docs/**/*.svg", "docs/**/*.webp"),
    *("benchmarks/results/*.md", "benchmarks/results/pictures/*", "models/*/README.md"),
)


def copy_pages(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for page in {path for pattern in PAGES for path in ROOT.glob(pattern)}:
        copy = target / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, copy)
    (target / "docs/reference/names.md").write_text(page_of_names(list(public_names())))


def main() -> int:
    copy_pages(ROOT / "build/site-sources")
    return subprocess.call([sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
