"""EleutherAI's lm-eval, `local-completions`: a task of its own, scored by log-probabilities and by generation."""

import json
import os
import subprocess
from pathlib import Path

QUESTIONS = [
    {"question": "for item in", "choices": [" items", " the"], "answer": 0},
    {"question": "import", "choices": [" os", " banana"], "answer": 0},
    {"question": "A list is a", "choices": [" sequence", " purple"], "answer": 0},
]
Path("questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
DATA = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(Path("questions.jsonl").absolute())}}}
SCORED = {
    "task": "twostep_choice",
    **DATA,
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
WRITTEN = {
    "task": "twostep_write",
    **DATA,
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
Path("tasks").mkdir()
for task in (SCORED, WRITTEN):
    Path("tasks", f"{task['task']}.yaml").write_text(json.dumps(task))  # JSON is YAML

url = f"{os.environ['TWOSTEP_URL']}/v1/completions"
arguments = f"model={os.environ['TWOSTEP_MODEL']},base_url={url},tokenizer={os.environ['TWOSTEP_TOKENIZER']}"
subprocess.run(
    [
        "lm_eval", "run",
        "--model", "local-completions",
        "--model_args", f"{arguments},num_concurrent=2,max_length=2048",
        "--include_path", "tasks",
        "--tasks", "twostep_choice,twostep_write",
        "--output_path", "results",
    ],
    check=True,
)  # fmt: skip
[result] = Path("results").rglob("results_*.json")
results = json.loads(result.read_text())["results"]
assert 0.0 <= results["twostep_choice"]["acc,none"] <= 1.0
assert "exact_match,none" in results["twostep_write"]
