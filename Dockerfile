# Images of Ramstream: for the CPU by `--target cpu`, for NVIDIA GPUs by `--target cuda`.
# docs/containers.md tells how to start them. Their Python is that of the base image.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/ramstream/bin:$PATH

# ---------------------------------------------------------------------- what is installed

FROM base AS pip
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && python3 -m venv /opt/ramstream \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
# Modules that are used are compiled by a run, below; compiling all would take 300 MB.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml .
RUN python -c 'import tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], sep="\n")' > requirements.txt

FROM pip AS pip-cpu
# Of two builds of one version, pip takes that with `+cpu`, which has no libraries of CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-compile --extra-index-url ${TORCH_INDEX} --requirement requirements.txt
COPY . .
RUN pip install --no-compile --no-deps .
# What it imports is compiled, and an image that cannot train is not made.
RUN ramstream train presets/starter.yaml --set train.steps=2 --runs-dir /tmp/runs \
    && python -c 'import ramstream.launch, app.main'

FROM pip AS pip-cuda
RUN pip install --no-compile --requirement requirements.txt
COPY . .
RUN pip install --no-compile --no-deps .
RUN ramstream train presets/starter.yaml --set train.steps=2 --runs-dir /tmp/runs \
    && python -c 'import ramstream.launch, app.main'

# ---------------------------------------------------------------------- what is started

FROM base AS app
# Nobody's files but those of the two volumes can be changed: runs and exports are in the first, and
# what can be made or downloaded again in the second.
RUN useradd --uid 1000 --home-dir /ramstream --create-home ramstream \
    && install --directory --owner=ramstream --group=ramstream /cache \
    && install --directory /data
ENV HF_HOME=/cache/huggingface NUMBA_CACHE_DIR=/cache/numba XDG_CACHE_HOME=/cache
USER ramstream
WORKDIR /ramstream
VOLUME ["/ramstream", "/cache"]
EXPOSE 7860
# At SIGTERM the run saves its last step; the program is the first process, so it gets the signal.
STOPSIGNAL SIGTERM
ENTRYPOINT ["ramstream"]
CMD ["--host", "0.0.0.0", "--no-browser", "--data-folder", "/data"]

FROM app AS cuda
USER root
# Triton compiles a small program in C for each kernel that it launches.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
USER ramstream
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=pip-cuda /opt/ramstream /opt/ramstream

FROM app AS cpu
COPY --from=pip-cpu /opt/ramstream /opt/ramstream
