"""`hp.capture` is called as documented, and `hetpipe.capture` stays the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

CALL = """
import torch
captured = hp.capture(torch.nn.Linear(3, 2), torch.nn.functional.mse_loss,
                      (torch.randn(4, 3), torch.randn(4, 2)))
assert captured.name == "Linear"
assert type(captured) is hetpipe.capture.Captured
assert callable(hetpipe.capture.capture)
import hetpipe.capture as package
from hetpipe import capture
assert package is capture is hp.capture is sys.modules["hetpipe.capture"]
from hetpipe.capture.captured import Captured
assert type(captured) is Captured
assert callable(hp.capture)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import hetpipe, hetpipe as hp; hp.capture",
        "import hetpipe.capture, hetpipe as hp",
        "import hetpipe, hetpipe as hp; hp.Pipeline; import hetpipe.capture",
    ],
)
def test_capture_is_callable_after_imports_in_any_order(imports: str) -> None:
    """Guard against a former error: `TypeError: 'module' object is not callable`."""
    subprocess.run([sys.executable, "-c", f"import sys; {imports}\n{CALL}"], check=True)


def test_importing_it_does_not_import_torch() -> None:
    text = (
        "import sys, hetpipe.capture, hetpipe as hp; hp.capture; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
