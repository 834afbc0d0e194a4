"""Run released plugins with the working core: `downstream.py [--ref REF] [--only PLUGIN...]`.

The script builds wheels of the backends and trackers at a git ref (default: the last tag), puts them
before the installed packages, and runs the conformance suite of each plugin with the core of this tree.
Plugins that cannot be run are named. It exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUPS = {
    "accelerate_core.backends": "backend",
    "accelerate_core.precisions": "precision",
    "accelerate_core.trackers": "tracker",
    "accelerate_core.launchers": "launcher",
    "accelerate_core.extensions": "extension",
}


def git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True
    ).stdout


def last_tag() -> str | None:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def members(ref: str) -> list[str]:
    """Return the folders of the plugins at a ref."""
    listed = git("ls-tree", "-r", "--name-only", ref, "backends", "trackers").decode().split()
    paths = [Path(name) for name in listed]
    return sorted(str(p.parent) for p in paths if p.name == "pyproject.toml" and len(p.parts) == 3)


def build(ref: str, member: str, wheels: Path, folder: Path) -> dict[str, str]:
    """Build the wheel of a member at a ref. Return its plugins: name -> kind."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", ref, member))) as archive:
        archive.extractall(folder, filter="data")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "wheel"]
    how = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    subprocess.run([*pip, *how, str(folder / member)], check=True, timeout=300)
    project = tomllib.loads((folder / member / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"].get("entry-points", {})
    return {name: kind for group, kind in GROUPS.items() for name in points.get(group, {})}


def check(name: str, kind: str, site: Path) -> bool:
    """Run the suite of one plugin, and print the result. Return whether it passed."""
    environ = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "accelerate_core", "plugins", "check", name, "--kind", kind]
    done = subprocess.run(
        [*command, "--json"], env=environ, capture_output=True, text=True, timeout=900
    )
    if not done.stdout:
        print(f"{kind} {name}: not checked: {done.stderr.strip().splitlines()[-1]}")
        return False
    made = json.loads(done.stdout)
    states = [one["state"] for one in made["checks"]]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("passed", "failed", "skipped"))
    print(f"{kind} {made['plugin']}: {counts}")
    for one in made["checks"]:
        if one["state"] == "failed":
            print(f"  {one['name']}: {one['error']}")
    return bool(made["passed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ref", help="tag or commit of the plugins; default: the last tag")
    parser.add_argument("--only", nargs="*", help="names of plugins; default: all")
    given = parser.parse_args()
    ref = given.ref or last_tag()
    if ref is None:
        print("Nothing has been released: there is no tag. Pass a commit with --ref.")
        return 0
    commit = git("rev-parse", "--short", ref).decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        found: dict[str, str] = {}
        for member in members(ref):
            if given.only is None or Path(member).name in given.only:
                found.update(build(ref, member, wheels, Path(folder)))
        if not found:
            print(f"{ref} does not have the requested plugins.")
            return 2
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        built = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
        subprocess.run([*pip, "--no-deps", "--target", str(site), *built], check=True, timeout=300)
        print(f"plugins of {ref} ({commit}) with the core in {ROOT.name}:")
        green = [check(name, kind, site) for name, kind in found.items()]
    return 0 if all(green) else 1


if __name__ == "__main__":
    sys.exit(main())
