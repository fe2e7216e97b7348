# syntax=docker/dockerfile:1
#
#   docker build -t twostep .
#   docker run --rm -p 127.0.0.1:8000:8000 twostep
#
# pip takes the default torch build, which on x86-64 Linux brings CUDA: several GB, and needed for --gpus only. For an
# image of a few hundred MB:  --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_EXTRA_INDEX_URL=""

# Dependencies first: these layers stay cached while the source changes.
WORKDIR /build
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt torch
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*project['dependencies'], *project['optional-dependencies']['otel'], sep='\n')" \
        > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt

COPY . ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps .

# The kernels for every kind of CPU that this image may meet, so that it needs no compiler and no writable cache.
WORKDIR /
RUN case "$(uname -m)" in \
        x86_64) set -- amx avx512_bf16 avx512 avx2 generic ;; \
        aarch64) set -- neon_i8mm neon_dot generic ;; \
        *) set -- generic ;; \
    esac \
    && python -m engine.kernels --out /opt/kernels --isa "$@"


FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="twostep" \
      org.opencontainers.image.description="OpenAI-compatible inference server with two-phase scheduling" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

RUN useradd --uid 10001 --no-create-home --home-dir /cache twostep \
    && install --directory --owner twostep --group twostep /cache
COPY --from=builder /opt/kernels /opt/kernels
COPY --from=builder /opt/venv /opt/venv

# Builds of torch with CUDA bring Triton, which compiles what launches its kernels at the first start on a GPU.
# hadolint ignore=DL3008
RUN if [ -d /opt/venv/lib/python3*/site-packages/triton ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi

# What is downloaded from the hub goes to /cache, temporary files to /tmp: the rest may be read-only.
ENV PATH=/opt/venv/bin:$PATH \
    HF_HOME=/cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TWOSTEP_KERNEL_PATH=/opt/kernels
USER 10001
WORKDIR /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# Another port is to be given as TWOSTEP_PORT, so that this asks there, too.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ.get('TWOSTEP_PORT', 8000)}/health\", timeout=4)"]
ENTRYPOINT ["twostep", "serve", "--host", "0.0.0.0"]
