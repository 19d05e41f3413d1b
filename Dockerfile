# docker build -t gcfed .                                             torch with CUDA's libraries, which runs on a CPU too
# docker build -t gcfed --build-arg TORCH=cpu --build-arg TORCH_INDEX=<address> .      without them, from an index that has it
# mkdir -p data && docker run --rm --user "$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD/logs:/gcfed/logs" -v "$PWD/data:/gcfed/data" \
#     gcfed gc=none rounds=20                                        (--gpus all)
FROM python:3.12-slim
ARG TORCH=locked
ARG TORCH_INDEX
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /gcfed
RUN useradd --create-home gcfed && chown gcfed /gcfed
USER gcfed
COPY --chown=gcfed . .
RUN make .venv/.installed TORCH="$TORCH" TORCH_INDEX="$TORCH_INDEX"
ENTRYPOINT [".venv/bin/gcfed-train"]
