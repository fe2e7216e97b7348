"""A file of two keys, and requests with one of them."""

import hashlib
from pathlib import Path

SECRETS = {"alice": "sk-alice", "bob": "sk-bob"}
HASHES = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in SECRETS.items()}
FILE = f"""
alice:
  sha256: "{HASHES["alice"]}"
  weight: 2
  max-concurrent: 2
bob: {{sha256: "{HASHES["bob"].upper()}"}}
"""


def write(tmp_path: Path, content: str = FILE) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    return path


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}
