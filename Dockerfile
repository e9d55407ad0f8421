# HetSync with its own MPI.
#
#   docker build -t hetsync .                                    CUDA: the build of torch on the package index
#   docker build -t hetsync:cpu --build-arg DEVICE=cpu .         CPU: from PyTorch's own index, or a mirror of it that
#                                                                --build-arg CPU_INDEX names
#   --build-arg EXTRAS=mpi,digits,text,tensorboard               what is installed beside (the extras of setup.cfg)
#   --build-arg HOROVOD=no                                       without Horovod, which takes minutes to build
#
# One rank (add --gpus all for CUDA):
#   docker run --rm -v runs:/work/runs hetsync --run.dir runs/one
# Runs in a folder of the host (mkdir runs before), written as its owner; a recipe that comes along, by its name:
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" hetsync digits --run.dir runs/two
# What may keep it from training:
#   docker run --rm --entrypoint hetsync hetsync doctor
# Eight ranks in one container, which share the host's memory segment:
#   docker run --rm --ipc=host -v runs:/work/runs --entrypoint mpirun hetsync -n 8 --oversubscribe \
#       --bind-to none --mca mpi_yield_when_idle 1 hetsync-train --emulate quickstart --run.dir runs/eight
# One rank a container, started by the site's launcher (PMIx; Apptainer runs it as whoever starts it):
#   srun --mpi=pmix apptainer exec hetsync.sif hetsync-train --run.dir runs/site
#
# CUDA needs nothing from the base image: torch brings its libraries, the container runtime the driver.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG DEVICE=cuda
ARG TORCH=2.13.0
ARG PIP_INDEX_URL
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=mpi,digits
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hetsync
COPY launch/constraints.txt /src/launch/constraints.txt
# torch has a layer of its own: it is by far the largest part, and changes least.
RUN case "$DEVICE" in cpu) set -- --extra-index-url "$CPU_INDEX" "torch==$TORCH+cpu" ;; cuda) set -- "torch==$TORCH" ;; \
        *) echo "DEVICE is '$DEVICE'; it can be cpu or cuda" >&2; exit 1 ;; esac \
    && /opt/hetsync/bin/pip install --no-cache-dir --constraint /src/launch/constraints.txt "$@"
COPY . /src
RUN /opt/hetsync/bin/pip install --no-cache-dir --constraint /src/launch/constraints.txt "/src[$EXTRAS]"
ARG HOROVOD=yes
# hadolint ignore=DL3008
RUN case "$HOROVOD" in no) exit 0 ;; yes) ;; *) echo "HOROVOD is '$HOROVOD'; it can be yes or no" >&2; exit 1 ;; esac \
    && apt-get update && apt-get install -y --no-install-recommends cmake g++ make python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && VIRTUAL_ENV=/opt/hetsync /src/launch/horovod

FROM ${BASE}
LABEL org.opencontainers.image.title="HetSync" \
      org.opencontainers.image.description="Delay-synchronised training of PyTorch models on clusters whose devices differ" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# mpirun reaches other containers by ssh (launch/kubernetes, launch/docker); host keys in an image would be everybody's.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 1000 hetsync \
    && install -d -o hetsync -m 1777 /work /work/runs \
    && install -d -o hetsync -m 700 /home/hetsync/.ssh
COPY --from=build /opt/hetsync /opt/hetsync
# Caches where any user may write: --user leaves one without a home.
ENV PATH=/opt/hetsync/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/work/.cache
USER 1000
WORKDIR /work
# Seldom: it takes seconds of a core.
HEALTHCHECK --interval=15m --timeout=5m --start-period=15m CMD ["hetsync", "doctor", "--run.dir", "/work/runs"]
ENTRYPOINT ["hetsync-train"]
