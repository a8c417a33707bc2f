"""OpenCL workers run although the user's cache folder cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from found_devices import infos

NAMES = ("HETPIPE_SET_", "POCL_CACHE_DIR", "PYOPENCL_NO_CACHE", "OCL_ICD_VENDORS")
POCL = [info.id for info in infos() if info.id.startswith("opencl:pocl")]
RUN = """
import sys
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.crew.crew import Crew
from hetpipe.profile.links import measure_links

cluster = Cluster(tuple(Member(f"m{n}", sys.argv[1]) for n in range(2)), transport="shared-memory")
with Crew.start(cluster) as crew:
    links, _ = measure_links(crew)
    print(sorted(links))
"""


@pytest.mark.slow
@pytest.mark.skipif(not POCL, reason="no PoCL: apt install pocl-opencl-icd")
@pytest.mark.parametrize("variable", ["HETPIPE_CACHE", "POCL_CACHE_DIR"])
def test_workers_run_without_the_users_cache_folder(tmp_path: Path, variable: str) -> None:
    """One warning appears and no traceback, neither from a worker nor at the exit."""
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "cache"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(NAMES)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, POCL[0]],
        env=clean | {variable: str(bad), "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('m0', 'm1'), ('m1', 'm0')]"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("CacheWarning") == 1, done.stderr
    assert f"no cache can be kept in {bad}" in done.stderr
    assert f"or set {variable} to another folder" in done.stderr
