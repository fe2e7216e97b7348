"""GuideLLM's benchmark: eight requests, one after the other, none of which may fail."""

import json
import os
import subprocess
from pathlib import Path

backend = f"kind=openai_http,target={os.environ['TWOSTEP_URL']},model={os.environ['TWOSTEP_MODEL']}"
subprocess.run(
    [
        "guidellm", "run",
        "--backend", backend,
        "--tokenizer", f"kind=hf_auto,model={os.environ['TWOSTEP_TOKENIZER']}",
        "--profile", "kind=synchronous",
        "--constraint", "kind=max_requests,count=8",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", "kind=json,path=result.json",
        "--disable-console",
    ],
    check=True,
)  # fmt: skip
[benchmark] = json.loads(Path("result.json").read_text())["benchmarks"]
requests = benchmark["requests"]
assert len(requests["successful"]) == 8 and not requests["errored"], requests["errored"][:1]
assert all(request["output_tokens"] == 16 for request in requests["successful"])
