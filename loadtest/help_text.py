"""The scenarios, examples and exit codes at the end of `--help`."""

PROGRAM = "python -m loadtest"

EPILOG = """\
scenarios (prompt/output tokens, requests); any flag given beside --scenario wins over it:
  S1  1 stream,   128/128,  8       S2  8 streams, 256/128, 32       S3  32 streams, 256/128, 96
  S4  4 streams, 2048/64,   8       S5  8 streams, 32/256, while a 2048/16 request arrives every 2 s

files of --dataset, which are known by their first record:
  a JSON array (or a line each) in ShareGPT's form: the first question of each conversation is asked
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}
  a line each, as Mooncake's traces: lengths, milliseconds, and ids of blocks of 512 tokens that prompts share
    {"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}
  a line each: a prompt, or messages with tools or without, and seconds
    {"prompt": "Why?", "max_tokens": 100, "arrival_s": 1.5}

examples:
  a server that is still starting, eight streams
    python -m loadtest http://127.0.0.1:8000 --wait 120 --concurrency 8 --requests 32
  Poisson arrivals for a minute, and how many requests keep to the targets
    python -m loadtest http://127.0.0.1:8000 --rate 4 --duration 60 --goodput ttft:500 itl:50
  two servers side by side, A B A B, in ten rounds: how B's figures compare to A's, with confidence intervals
    python -m loadtest http://127.0.0.1:8000 --compare http://127.0.0.1:8001 --scenario S2 --rounds 10
  what a prefix cache brings
    python -m loadtest http://127.0.0.1:8000 --workload shared-prefix --prefix-len 1024 --prompt-len 1100
  what long prompts do to the streams of others
    python -m loadtest http://127.0.0.1:8000 --scenario S5 --vocab-size 32000
  chats instead of completions
    python -m loadtest http://127.0.0.1:8000 --endpoint chat --concurrency 8
  conversations of a file, as many as there are
    python -m loadtest http://127.0.0.1:8000 --endpoint chat --dataset sharegpt.json --requests 500 --concurrency 16
  a trace at its arrival times, ten times as fast
    python -m loadtest http://127.0.0.1:8000 --dataset trace.jsonl --speedup 10
  eight agents that share a system prompt and tools, ten turns each, and what a turn costs
    python -m loadtest http://127.0.0.1:8000 --workload agent-sessions --concurrency 8 --turns 10 --max-tokens 64
  latencies and throughput against the load, as a table and a picture; concurrencies, then request rates
    python -m loadtest http://127.0.0.1:8000 --sweep 1,2,4,8,16 --plot sweep.svg
    python -m loadtest http://127.0.0.1:8000 --sweep rate:1,2,4 --duration 60 --goodput ttft:500 itl:50
  only the JSON document
    python -m loadtest http://127.0.0.1:8000 --quiet --json - | tail -n 1

exit codes: 0 measured, 1 nothing succeeded (or --strict and a warning), 2 usage, no server or no file, 130 interrupted
"""
