"""Child processes that do one job of untrusted content, with hard limits on their time and memory."""

import asyncio
import math
import os
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence

__all__ = ["limit_this_process", "run_bounded"]


async def run_bounded(command: Sequence[str], job: bytes, timeout_s: float) -> bytes | None:
    """Returns what the command writes when it is given the job on standard input; None if it fails, as it does where
    `limit_this_process` ends it. Raises TimeoutError. The process does not outlive this call, cancelled or not."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C is for this process to answer
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate(job)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output if process.returncode == 0 else None


def limit_this_process(max_bytes: int, max_cpu_s: int) -> None:
    """Bounds the address space, and the CPU time from now on: beyond either this process fails or is killed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime) + max_cpu_s
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
