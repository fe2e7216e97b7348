"""Schemathesis: requests made of /openapi.json, valid and not. No answer may be a 500, or other than is described."""

import os
import subprocess
from pathlib import Path

here = Path(__file__).parent
subprocess.run(
    [
        "schemathesis",
        "--config-file", str(here / "schemathesis.toml"),
        "run", f"{os.environ['TWOSTEP_URL']}/openapi.json",
        "--max-examples", "15",
        "--seed", "1",
        "--request-timeout", "60",
        "--no-color",
    ],
    check=True,
)  # fmt: skip
