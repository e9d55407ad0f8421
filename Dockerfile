# HetSync with its own MPI.
#
#   docker build -t hetsync .                                    CUDA: the build of torch on the package index
#   docker build -t hetsync:cpu --build-arg DEVICE=cpu \
#       --build-arg PIP_EXTRA_INDEX_URL=URL .                    CPU: URL is PyTorch's own index of CPU builds
#   --build-arg HOROVOD=no                                       without Horovod, which takes minutes to build
#
# One rank (add --gpus all for CUDA):
#   docker run --rm -v "$PWD/runs:/work/runs" hetsync --run.dir runs/one
# Eight ranks in one container, which share the host's memory segment:
#   docker run --rm --ipc=host -v "$PWD/runs:/work/runs" --entrypoint mpirun hetsync -n 8 --oversubscribe \
#       --bind-to none --mca mpi_yield_when_idle 1 hetsync-train --emulate quickstart --run.dir runs/eight
# One rank a container, started by the site's launcher (PMIx; the folder must be writable for user 1000):
#   srun --mpi=pmix apptainer exec hetsync.sif hetsync-train --run.dir runs/site
#
# CUDA needs nothing from the base image: torch brings its libraries, the container runtime the driver.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG DEVICE=cuda
ARG TORCH=2.13.0
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hetsync
COPY launch/constraints.txt /src/launch/constraints.txt
# torch has a layer of its own: it is by far the largest part, and changes least.
RUN case "$DEVICE" in cpu) torch="torch==$TORCH+cpu" ;; cuda) torch="torch==$TORCH" ;; \
        *) echo "DEVICE is '$DEVICE'; it can be cpu or cuda" >&2; exit 1 ;; esac \
    && /opt/hetsync/bin/pip install --no-cache-dir --constraint /src/launch/constraints.txt "$torch"
COPY . /src
RUN /opt/hetsync/bin/pip install --no-cache-dir --constraint /src/launch/constraints.txt "/src[mpi,digits]"
ARG HOROVOD=yes
# hadolint ignore=DL3008
RUN case "$HOROVOD" in no) exit 0 ;; yes) ;; *) echo "HOROVOD is '$HOROVOD'; it can be yes or no" >&2; exit 1 ;; esac \
    && apt-get update && apt-get install -y --no-install-recommends cmake g++ make python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && VIRTUAL_ENV=/opt/hetsync /src/launch/horovod

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 hetsync \
    && install -d -o hetsync /work
COPY --from=build /opt/hetsync /opt/hetsync
ENV PATH=/opt/hetsync/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
ENTRYPOINT ["hetsync-train"]
