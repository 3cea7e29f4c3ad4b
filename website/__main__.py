"""`python -m website`: build the site into build/site; a warning is an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from website.pages import ROOT, write_pages


def build(folder: Path) -> int:
    """Build the site in a folder; return the exit status of Zensical."""
    write_pages(folder / "pages")
    settings = (ROOT / "mkdocs.yml").read_text()
    settings = settings.replace("_dir: build/", "_dir: ")  # they are relative to the file
    settings = settings.replace("paths: [src]", f"paths: [{ROOT / 'src'}]")
    (folder / "mkdocs.yml").write_text(settings)
    zensical = str(Path(sys.executable).parent / "zensical")
    return subprocess.run([zensical, "build", "--strict", "--clean"], cwd=folder).returncode


if __name__ == "__main__":
    status = build(ROOT / "build")
    if status == 0:
        print(f"open {ROOT / 'build' / 'site' / 'index.html'}")
    sys.exit(status)
