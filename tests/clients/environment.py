"""Create an environment for clients: `environment.py FOLDER accelerate==1.15.0` (or a project's folder).

The clients are in `requirements.txt`, or in `requirements-4.57.txt` if the folder ends in `-4.57`.

The new environment extends the one that runs this script, so torch and our editable packages are not
installed twice. Its own site-packages contain the clients, and the distribution `accelerate`.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
#: The older version of Transformers that some libraries still require.
OLD = "4.57"


def make(folder: Path, accelerate: str) -> None:
    """Create the environment from scratch, with this distribution as `accelerate`."""
    venv.create(folder, clear=True)
    below = sysconfig.get_path("purelib")
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "below.pth").write_text(f"{below}\nimport site; site.addsitedir({below!r})\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    how = ["install", "--no-compile", "--no-warn-conflicts", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *how, "--no-deps", "--no-build-isolation", accelerate], check=True)
    variant = f"-{OLD}" if folder.name.endswith(f"-{OLD}") else ""
    subprocess.run([*pip, *how, "-r", str(HERE / f"requirements{variant}.txt")], check=True)
    if not variant:
        # It depends on torchvision, which can't be imported here. The case loads a module without it.
        subprocess.run([*pip, *how, "--no-deps", "denoising-diffusion-pytorch==2.3.*"], check=True)
    # fastai installs torchvision, whose build on PyPI only works with one build of torch. If it can't be
    # imported, Transformers can't be imported either.
    if subprocess.run([pip[0], "-c", "import torchvision"], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([*pip, "uninstall", "-y", "torchvision"], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute(), sys.argv[2])
