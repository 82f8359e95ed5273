# evenpack with the versions of constraints.txt. torch's wheels bring CUDA, so the host needs its driver alone:
#   docker build -t evenpack .
#   docker run --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD:/work" evenpack train RUN.yaml
FROM python:3.11.14-slim-bookworm

# A compiler for torch.compile and Triton; pdsh and ssh for runs over several machines.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/evenpack
COPY constraints.txt ./
# torch first, as in scripts/install: DeepSpeed's build looks for it. A layer of its own, which changes of the code keep.
RUN pip install --no-cache-dir --constraint constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY evenpack evenpack
RUN pip install --no-cache-dir --constraint constraints.txt '.[mpi,plots,train]' \
    && useradd --create-home --uid 1000 evenpack

USER 1000
WORKDIR /work
ENTRYPOINT ["evenpack"]
CMD ["--help"]
