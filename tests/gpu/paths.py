"""Make every distribution of the workspace importable without installing anything.

`python paths.py FOLDER` writes the metadata by which plugins are found to FOLDER, and prints the
necessary PYTHONPATH. It needs neither a network nor a build backend.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from workspace import member_folders  # noqa: E402


def make_importable(folder: Path) -> list[str]:
    """Return the folders for `sys.path`: the metadata, and each distribution's sources."""
    paths = [str(folder)]
    for member in member_folders(ROOT):
        file = ROOT / member / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        name, version = project["name"], project["version"]
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        required = "".join(f"Requires-Dist: {one}\n" for one in project.get("dependencies", ()))
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        lines = []
        for group, points in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(str(ROOT / member / "src"))
    return paths


if __name__ == "__main__":
    print(os.pathsep.join(make_importable(Path(sys.argv[1]).resolve())))
