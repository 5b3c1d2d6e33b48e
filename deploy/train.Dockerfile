# An image of `train`, with the CUDA libraries of torch's wheels; the driver is the node's. In the checkout:
#
#     docker build --file deploy/train.Dockerfile --tag clipmill-train .
#     docker run --rm --gpus all --shm-size 8g --volume "$PWD:/data" clipmill-train dual-encoder --shards data --out run
#     docker run --rm --gpus all --shm-size 8g --volume "$PWD:/data" --entrypoint torchrun clipmill-train \
#         --no-python --nproc-per-node 8 train dual-encoder --shards data --out run
#
# Nothing is compiled: all packages are wheels with the hashes of the lock. --compile needs a C compiler, which this image
# lacks: install gcc in an image based on it. BASE may be another Debian with Python 3.11 to 3.13 as `python`.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
WORKDIR /clipmill
COPY requirements-uv.lock requirements-train.lock ./
RUN python -m venv uv
RUN uv/bin/python -m pip install --quiet --require-hashes --requirement requirements-uv.lock
RUN python -m venv --without-pip venv
RUN uv/bin/uv pip sync --quiet --python venv/bin/python --require-hashes --only-binary :all: --compile-bytecode requirements-train.lock
COPY . source
RUN uv/bin/uv pip install --quiet --python venv/bin/python --no-deps --no-build-isolation --compile-bytecode ./source

FROM ${BASE}
RUN useradd --create-home --uid 1000 clipmill && install --directory --owner clipmill /data
COPY --from=build /clipmill/venv /clipmill/venv
ENV PATH=/clipmill/venv/bin:${PATH}
# By these, NVIDIA's runtime mounts the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /data
# The log of the build has the versions.
RUN python --version && train --version
RUN python -c "from importlib.metadata import distributions; print(*sorted(f'{d.name}=={d.version}' for d in distributions()), sep='\n')"
ENTRYPOINT ["train"]
CMD ["--help"]
