# docker build -t gcfed .                                             torch with CUDA's libraries, which runs on a CPU too
# docker build -t gcfed --build-arg TORCH=cpu --build-arg TORCH_INDEX=<address> .      without them, from an index that has it
# mkdir -p data && docker run --rm --user "$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD/logs:/gcfed/logs" -v "$PWD/data:/gcfed/data" \
#     gcfed gcfed-train gc=none rounds=20                 (--gpus all; gcfed-eval, gcfed-report and python are there, too)
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
ARG TORCH=locked
ARG TORCH_INDEX
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home gcfed && install -d -o gcfed /gcfed
WORKDIR /gcfed
USER gcfed
COPY --chown=gcfed Makefile requirements.lock ./
RUN make .venv/.locked TORCH="$TORCH" TORCH_INDEX="$TORCH_INDEX"
COPY --chown=gcfed . .
RUN make .venv/.installed
ENV PATH=/gcfed/.venv/bin:$PATH
CMD ["gcfed-train"]
