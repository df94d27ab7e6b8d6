# Slipway in a container.
#
#   docker build -t slipway .
#   docker run --rm -p 8000:8000 slipway                                      the demo
#   docker run --rm -p 8000:8000 -v $PWD/m.yaml:/manifest.yaml:ro slipway     any manifest
#
# BASE         an image with Python 3.11 or newer, its venv module and a POSIX shell
# BUILD_BASE   like BASE, with a C++ compiler for the CPU kernels and its binutils. Without a compiler the build prints a
#              warning and the image serves with torch alone, several times slower
# TORCH_INDEX  index with torch's wheels for CPUs (an image of about 0.7 GB) or for ROCm, from PyTorch's installation
#              page. By default pip installs the build of the default index, for CUDA, which also runs on CPUs
# TORCH_HASH   SHA-256 of further permitted builds of torch, as sha256:…, separated by spaces
# PACKAGES     Debian packages of BASE that the image keeps, besides those that serving uses (docker/trim.py). Files of
#              BASE are kept, but not its ENV, LABEL and VOLUME: set what you need of them in an image FROM slipway
# KERNELS      GPU architectures for which kernels are compiled with the image: no request then waits for a compiler, and
#              the image needs none. By default "sm_90 sm_100" for CUDA, "gfx942" for ROCm; "none" for no kernels.
#              Requires Python's headers in BUILD_BASE, its Python in BASE; for ROCm also PACKAGES="gcc libc6-dev"
# SHAPES       models for these kernels, by the names of benchmarks/shapes.py. Others: engine.worker.precompile
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=python:3.11-bookworm

FROM ${BUILD_BASE} AS build
ARG TORCH_INDEX=
# Package index settings of pip, visible in this stage only.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN ["python3", "-m", "venv", "/opt/slipway/venv"]
ARG TORCH_HASH=
COPY requirements /source/requirements
# --no-compile: docker/verify.py writes bytecode only for the modules that serving imports.
# triton is not listed: builds of torch that use it require it; for others it would add an unused GB.
RUN /opt/slipway/venv/bin/python /source/requirements/install.py runtime --no-compile --torch-index "$TORCH_INDEX" \
        --torch-hash "$TORCH_HASH"
COPY . /source/
# The build tools come from the pinned requirements; nothing is downloaded here.
RUN /opt/slipway/venv/bin/pip install --no-compile --no-deps --no-build-isolation /source
WORKDIR /
# The demo is in the package; a link to it saves 6 MB.
RUN SITE=$(/opt/slipway/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
    /opt/slipway/venv/bin/python -B /source/docker/prune.py "$SITE" && \
    cp -r /source/manifests /opt/slipway/manifests && rm -r /opt/slipway/manifests/demo && \
    ln -s "$SITE/appliance/demo/demo" /opt/slipway/manifests/demo && \
    /opt/slipway/venv/bin/python -P /source/docker/verify.py /opt/slipway/manifests/demo \
        $(command -v c++ >/dev/null && echo --compiled)
# Triton's cache key includes the path and the source of the kernels: the package in the venv.
ARG KERNELS=auto
ARG SHAPES="qwen3-0.6b qwen3-1.7b llama-3.1-8b"
RUN mkdir -p /opt/slipway/compiled /build && cp -r /source/benchmarks /build/ && \
    if [ "$KERNELS" = auto ]; then \
        /opt/slipway/venv/bin/python -c 'import triton' 2>/dev/null && KERNELS="sm_90 sm_100" || KERNELS=none; \
        if /opt/slipway/venv/bin/python -c 'import torch; assert torch.version.hip' 2>/dev/null; then KERNELS=gfx942; fi; \
    fi && \
    case "$KERNELS" in *gfx*) \
        /opt/slipway/venv/bin/python -c 'import torch; assert torch.version.hip, "set TORCH_INDEX: torch lacks ROCm"' ;; \
    esac && \
    if [ -n "$KERNELS" ] && [ "$KERNELS" != none ]; then \
        for shape in $SHAPES; do \
            PYTHONPATH=/build /opt/slipway/venv/bin/python -m benchmarks.shapes "$shape" --config-only \
                --out "/tmp/shapes/$shape" || exit 1; \
        done && \
        /opt/slipway/venv/bin/python -m engine.worker.precompile /tmp/shapes/* --target $KERNELS --kv-dtype auto fp8 \
            --cache /opt/slipway/compiled; \
    fi

FROM ${BASE} AS system
ARG PACKAGES=
COPY docker/trim.py /tmp/trim.py
RUN python3 -B /tmp/trim.py $PACKAGES && rm /tmp/trim.py

FROM scratch
COPY --from=system / /
LABEL org.opencontainers.image.title="Slipway" \
      org.opencontainers.image.description="A declarative LLM serving appliance: a YAML manifest in, a streaming LLM service out" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming=true
COPY --from=build /opt/slipway/venv /opt/slipway/venv
COPY --from=build /opt/slipway/compiled /opt/slipway/compiled
COPY --from=build /opt/slipway/manifests /opt/slipway/manifests
COPY entrypoint.sh /opt/slipway/entrypoint.sh
# Distributions of the image and packages of its system, as SPDX: `slipway sbom` prints the same.
RUN ["/opt/slipway/venv/bin/slipway", "sbom", "-o", "/opt/slipway/sbom.spdx.json"]
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      io.slipway.sbom="/opt/slipway/sbom.spdx.json"
# New volumes at these paths get the same permissions: `slipway render compose` uses them.
RUN ["python3", "-c", "import os; [(os.makedirs(p), os.chmod(p, 0o770), os.chown(p, 10001, 0)) for p in ('/var/lib/slipway', '/var/cache/slipway')]"]
# Any user id works, with or without an entry in /etc/passwd: nothing below /opt is written, and all files of libraries go
# below /tmp, the only path that must be writable (docker run --read-only --tmpfs /tmp).
ENV PATH=/opt/slipway/venv/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    USER=slipway \
    LOGNAME=slipway \
    XDG_CACHE_HOME=/tmp/cache \
    HF_HOME=/tmp/cache/huggingface \
    TRITON_CACHE_DIR=/tmp/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LANG=C.UTF-8 \
    SLIPWAY__ENDPOINTS__HOST=0.0.0.0
WORKDIR /opt/slipway
USER 10001:0
EXPOSE 8000
STOPSIGNAL SIGTERM
# Plain Docker does not restart unhealthy containers. start-period covers the loading of a large model.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m --retries=3 \
    CMD ["/opt/slipway/venv/bin/slipway", "healthcheck"]
ENTRYPOINT ["/opt/slipway/entrypoint.sh"]
